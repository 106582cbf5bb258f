"""Prompts read back from a journal: whose texts are in them, and what is refused. A token is a byte here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.journal.facts import open_journal, session
from zjournal.dialects.prompt import Span
from zjournal.errors import JournalFault, NotFound
from zjournal.journal import retention
from zjournal.journal.events import EngineStarted, Fact, PromptRendered, RequestAccepted, ResponseFinished
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.link import wire
from zjournal.sessions import identity, vocabulary
from zjournal.sessions.diff import Rendered, Source
from zjournal.sessions.prompts import Prompts, role_at, value_at
from zjournal.sessions.record import pack

WORDS = vocabulary.pack(bytes([byte]) for byte in range(256))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        yield journal


def start(journal: Journal, fingerprint: str = "f", words: bytes = WORDS, template: bytes = b"{{ messages }}") -> None:
    journal.tenant(SERVER_TENANT)
    event = EngineStarted(
        tenant=SERVER_TENANT,
        pid=1,
        model="m",
        fingerprint=fingerprint,
        kernels="k",
        context=100,
        kv_tokens=100,
        vocabulary=journal.digest(SERVER_TENANT, words),
        template=journal.digest(SERVER_TENANT, template),
    )
    journal.append([Fact(event, contents=(words, template))]).result()


def turn(
    journal: Journal,
    response: str,
    body: Any,
    *parts: tuple[str, str],
    previous: str = "",
    fingerprint: str = "f",
    record: bytes | None = None,
    early: tuple[Fact, ...] = (),
) -> None:
    """A turn that ended, whose prompt is made of (path, text). `early`: what else is told of it at its begin."""
    raw = json.dumps(body).encode()
    at, marked = 0, []
    for path, text in parts:
        marked.append([at, at := at + len(text.encode()), path])
    tokens = wire.pack_ids(list("".join(text for _, text in parts).encode()))
    if record is None:
        record = pack(raw, wire.unpack_ids(tokens), [Span(*mark) for mark in marked], None, lambda response: ())
    accepted = RequestAccepted(
        tenant="local",
        response=response,
        session="s1",
        parent=previous,
        previous=previous,
        protocol="responses",
        model="m",
        namespace=identity.namespace(fingerprint, "local"),
        stored=True,
        stream=False,
        created=1,
        record=journal.digest("local", record),
        dialect="chatml",
        encoder=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        max_tokens=8,
    )
    rendered = PromptRendered(tenant="local", response=response, count=at)
    ended = ResponseFinished(
        tenant="local", response=response, reason="stop", output=2, queue_us=0, prefill_us=0, decode_us=0
    )
    facts = [Fact(accepted, contents=(record,)), Fact(rendered), *early, Fact(ended)]
    journal.append(facts).result()


def read(journal: Journal, response: str) -> Rendered:
    found = journal.turn(response)
    assert found is not None
    return Prompts(journal).of(found)


def texts(rendered: Rendered) -> list[tuple[str, str, str, Any]]:
    return [(s.path, s.turn, s.role, s.value) for s in rendered.sources if s.path]


def test_texts_of_a_chain_belong_to_their_requests(journal: Journal) -> None:
    """Each request of the chain has an `input` of its own; tools and instructions are the newest one's."""
    start(journal)
    turn(journal, "r1", {"input": "one", "instructions": "old"}, ("input", "one"))
    turn(journal, "r2", {"input": "two"}, ("input", "one"), ("response:r1", "yes"), ("input", "two"), previous="r1")
    parts = [
        ("", "<s>"),
        ("instructions", "new"),
        ("input", "one"),
        ("response:r1", "yes"),
        ("", "<u>"),
        ("input", "two"),
        ("response[r2]", "well"),
        ("input[0].content", "three"),
    ]
    turn(
        journal,
        "r3",
        {"input": [{"role": "user", "content": "three"}], "instructions": "new"},
        *parts,
        previous="r2",
    )
    rendered = read(journal, "r3")
    assert texts(rendered) == [
        ("instructions", "r3", "system", "new"),
        ("input", "r1", "user", "one"),
        ("response:r1", "r1", "assistant", "yes"),
        ("input", "r2", "user", "two"),
        ("response[r2]", "r2", "assistant", "well"),
        ("input[0].content", "r3", "user", "three"),
    ]
    assert rendered.sources[0] == Source(0, 3, "")
    assert rendered.vocabulary is not None
    assert rendered.template_name == journal.digest(SERVER_TENANT, b"{{ messages }}")


def test_an_answer_without_a_token_ends_its_request_as_well(journal: Journal) -> None:
    start(journal)
    turn(journal, "r1", {"input": "one"}, ("input", "one"))
    turn(journal, "r2", {"input": "two"}, ("input", "one"), ("", "<u>"), ("input", "two"), previous="r1")
    assert [(owner, value) for _, owner, _, value in texts(read(journal, "r2"))] == [("r1", "one"), ("r2", "two")]


def test_a_resent_history_is_the_requests_own(journal: Journal) -> None:
    """An answer that was recognised in it is followed by this request's next message."""
    start(journal)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    parts = [("messages[0].content", "a"), ("response:r0", "b"), ("messages[2].content", "c")]
    turn(journal, "r1", {"messages": messages}, *parts)
    assert [owner for _, owner, _, _ in texts(read(journal, "r1"))] == ["r1", "r0", "r1"]


def test_a_path_that_leads_nowhere_has_no_value(journal: Journal) -> None:
    start(journal)
    turn(journal, "r1", {"input": "one"}, ("input[3].content", "one"))
    assert texts(read(journal, "r1")) == [("input[3].content", "r1", "", None)]


def test_the_engine_before_a_turn_tells_its_vocabulary(journal: Journal) -> None:
    start(journal)
    turn(journal, "r1", {"input": "one"}, ("input", "one"))
    start(journal, "g", words=vocabulary.pack([b"x"]))
    turn(journal, "r2", {"input": "one"}, ("input", "one"), fingerprint="g")
    first, second = read(journal, "r1"), read(journal, "r2")
    assert first.vocabulary is not None and len(first.vocabulary) == 256
    assert second.vocabulary is not None and len(second.vocabulary) == 1
    assert first.vocabulary_name != second.vocabulary_name


def test_a_start_that_was_not_journaled_gives_no_wrong_vocabulary(journal: Journal) -> None:
    turn(journal, "r0", {"input": "one"}, ("input", "one"))
    start(journal, "another model")
    turn(journal, "r1", {"input": "one"}, ("response:r0", "one"))
    for response in ("r0", "r1"):
        rendered = read(journal, response)
        assert (rendered.vocabulary, rendered.vocabulary_name) == (None, b"")
    assert texts(rendered) == [("response:r0", "r0", "assistant", None)]


def test_the_engine_is_found_however_far_back(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zjournal.journal.reader.SCAN_FACTS", 2)
    assert journal.engine_before(journal.head + 1) is None
    start(journal)
    for number in range(3):
        turn(journal, f"r{number}", {"input": "one"}, ("input", "one"))
    found = journal.engine_before(journal.head + 1)
    assert found is not None and found.fingerprint == "f"
    assert journal.engine_before(2) is None


def test_an_erased_turn_says_so(journal: Journal) -> None:
    start(journal)
    turn(journal, "r1", {"input": "one"}, ("input", "one"))
    assert retention.erase(journal, "r1", retention.CAUSE_UNSTORED).result()
    with pytest.raises(NotFound, match="the content of r1 was erased"):
        read(journal, "r1")


def _record(lengths: list[int], ids: int = 3) -> bytes:
    """A record of so many tokens, whose spans have these lengths."""
    return msgspec.msgpack.encode([1, bytes(2 * ids), b"", lengths, [""] * len(lengths), [], b"{}", b""])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (_record([2]), "do not cover"),
        (_record([2, 2]), "do not cover"),
        (_record([0, 3]), "do not fit together"),
        (_record([2], ids=2), "is not that of its prompt"),
        (b"\xc1", "cannot be read"),
    ],
)
def test_a_record_that_does_not_fit_is_a_fault(journal: Journal, record: bytes, said: str) -> None:
    turn(journal, "r1", {"input": "one"}, ("input", "one"), record=record)
    with pytest.raises(JournalFault, match=said):
        read(journal, "r1")


def test_values_and_roles_by_path() -> None:
    body = {
        "instructions": "be brief",
        "input": [{"type": "function_call_output", "output": [{"text": "x"}]}, {"role": "developer", "content": "y"}],
        "tools": [{"name": "t"}],
    }
    assert value_at(body, "input[0].output[0].text") == "x"
    assert value_at(body, "tools[0]") == {"name": "t"}
    assert [value_at(body, path) for path in ("input[2]", "tools.name", "instructions[0]", "none")] == [None] * 4
    assert [role_at(body, path) for path in ("input[0].output[0].text", "input[1].content")] == ["tool", "developer"]
    assert [role_at(body, path) for path in ("instructions", "tools[0]")] == ["system", ""]
    assert role_at({"input": "hi"}, "input") == "user"
