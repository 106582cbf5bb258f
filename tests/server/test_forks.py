"""Prompts that part from what is kept of them are counted by cause, and the size of the journal is a number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.server.test_load import samples
from tests.serving import Server, happened, scripted, until
from zjournal.journal.events import CacheMatched

RULES = "You keep the log of a harbour and answer in few words. " * 8
FORKS = "zj_prefix_forks_total"


def forks(server: Server) -> dict[str, float]:
    return {labels[1]: value for labels, value in samples(server).items() if labels[0] == FORKS and value}


def chat(server: Server, name: str, *texts: str, system: str = RULES) -> str:
    """A turn of the client's session `name`: user and assistant by turns. Its answer."""
    said = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
    body = {"model": "default", "messages": [{"role": "system", "content": system}, *said]}
    answer = server.post("/v1/chat/completions", body, headers={"x-session-id": name})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_forks_are_counted_by_cause(tmp_path: Path) -> None:
    expected: Counter[str] = Counter()
    with Server(tmp_path / "data", model=scripted(tmp_path, *[{"text": "The tide is low."}] * 20)) as server:

        def counted(*causes: str) -> None:
            """The count is made beside the answer."""
            expected.update(causes)
            until(lambda: forks(server) == expected)

        first = chat(server, "one", "Is the tide high?")
        second = chat(server, "one", "Is the tide high?", first, "And now?")
        again = chat(server, "one", "Is the tide high?", first, "And now?", second, "And in an hour?")
        assert first == second == again
        counted()

        chat(server, "one", "Is the tide high?", first, "And now?", "It is so low.", "Since when?")
        counted("answer_changed")
        chat(server, "one", "Was the tide high?", first, "And now?", second, "And in an hour?")
        counted("input_changed")
        chat(server, "two", "Who comes in today?")
        counted("other_conversation")

        begun = server.respond(input="Who comes in today, and from where, and with what?", instructions=RULES)
        counted("other_conversation")
        for question in ("Which of them is the first?", "Where does the last of them lie?"):
            server.respond(input=question, instructions=RULES, previous_response_id=begun["id"])
        counted("branch")

        (held,) = [value for labels, value in samples(server).items() if labels == ("zj_journal_bytes",)]
        assert 4096 <= held == (server.data_dir / "journal.db").stat().st_size
    reasons = Counter(event.reason for event in happened(server.data_dir, CacheMatched))
    assert reasons["forked"] >= sum(expected.values()) - 1
