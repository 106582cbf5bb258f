"""Chains: what is remembered of turns that have ended is bounded by its size, not by their number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zjournal import ask
from zjournal.sessions import chain
from zjournal.sessions.chain import Chains

MEGABYTE = 1 << 20


def test_long_turns_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ask.Message("user", (ask.Text("x" * MEGABYTE, "input"),))
    output = ask.Output("r", (message,), b"tokens")
    reads: list[str] = []

    def read(self: Chains, turn: SimpleNamespace) -> chain._Known:
        reads.append(turn.response)
        return chain._Known("", (output,))

    monkeypatch.setattr(Chains, "_read", read)
    chains = Chains(None, b"secret", None, b"", None, None, frozenset(), {})  # type: ignore[arg-type]
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
