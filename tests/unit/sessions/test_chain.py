"""Chains: what is remembered of turns that have ended is bounded by its size, not by their number."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.journal.facts import accepted, open_journal, session, whole_turn
from zjournal import ask
from zjournal.api.recorded import DECODERS
from zjournal.journal import retention
from zjournal.journal.transaction import ParentErased
from zjournal.sessions import chain
from zjournal.sessions.chain import Chains
from zjournal.sessions.reading import Terms

MEGABYTE = 1 << 20


def test_long_turns_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ask.Message("user", (ask.Text("x" * MEGABYTE, "input"),))
    output = ask.Output("r", (message,), b"tokens")
    reads: list[str] = []

    def read(self: Chains, turn: SimpleNamespace) -> chain._Known:
        reads.append(turn.response)
        return chain._Known("", (output,))

    monkeypatch.setattr(Chains, "_read", read)
    chains = Chains(None, b"secret", None, b"", None, {})  # type: ignore[arg-type]
    for number in range(50):
        chains._turn(SimpleNamespace(response=f"r{number}"))  # type: ignore[arg-type]
    kept = len(chains._known)
    limit = chain.CACHED_BYTES_MAX // 2  # the other half is for the items of requests
    assert 0 < kept * MEGABYTE <= limit < (kept + 1) * MEGABYTE + 100_000
    chains._turn(SimpleNamespace(response="r49"))  # type: ignore[arg-type]
    assert len(reads) == 50, "the newest is remembered"
    for number in range(50):
        chains.forget(f"r{number}")
    assert (len(chains._known), chains._known._bytes) == (0, 0)


@pytest.mark.parametrize(
    ("protocol", "previous", "known"),
    [("responses", "r1", True), ("responses", None, False), ("messages", "r1", False)],
)
def test_what_a_chained_request_brought_is_known_from_its_acceptance(
    protocol: str, previous: str | None, known: bool
) -> None:
    """And what its answer is read by, until that was read: else the whole body would be read again for them."""
    body: dict[str, Any] = {"model": "m", "tools": [{"type": "function", "name": "f"}], "stop": ["x"]}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "It is."}]}
    if protocol == "responses":
        raw = json.dumps(body | {"input": [result], "previous_response_id": previous}).encode()
    else:
        thread = {"type": "continue", "previous_message_id": previous}
        said = [{"role": "user", "content": "And now?"}]
        raw = json.dumps({"model": "m", "max_tokens": 9, "messages": said, "thread": thread}).encode()
    request = DECODERS[protocol](raw)
    chains = Chains(None, b"secret", None, b"", None, {})  # type: ignore[arg-type]
    place, terms = SimpleNamespace(openings=()), Terms.of(request, "")
    chains.accepted(request, place, b"record", ("r2", "r3"), terms)  # type: ignore[arg-type]
    assert len(chains._items) == 2 * known
    for name in ("r2", "r3"):
        assert chains._terms.get(name) == Terms.of(DECODERS[protocol](raw), "")
        if known:
            assert chains._items_of(SimpleNamespace(response=name)) == request.items  # type: ignore[arg-type]
        chains.forget(name)
    assert len(chains._items) == len(chains._terms) == 0


def test_a_parent_that_goes_while_it_is_read_is_named_and_the_commit_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the turn would be accepted without its parent, and could never be continued."""
    with open_journal(tmp_path / "data") as journal:
        tenant = journal.tenant("local").id
        journal.append([session("s1", tenant=tenant), *whole_turn(journal, "r1", tenant=tenant)]).result()
        chains = Chains(journal, b"secret", None, b"", None, {})  # type: ignore[arg-type]

        def deleted_meanwhile(self: Chains, turn: SimpleNamespace) -> tuple[()]:
            assert retention.delete(journal, tenant, "r1").result()
            return ()

        monkeypatch.setattr(Chains, "_items_of", deleted_meanwhile)
        monkeypatch.setattr(Chains, "_turn", lambda self, turn: chain._Known("", ()))
        asked = ask.Ask(protocol="responses", model="m", items=(ask.Message("user"),), previous="r1")
        place = chains.place(asked, tenant)
        assert journal.turn("r1") is None
        assert place.parent == "r1"
        with pytest.raises(ParentErased):
            journal.append(accepted(journal, "r2", parent=place.parent, tenant=tenant)).result()
