"""Probes: what the engine says of them reaches who asked, and nobody else; whatever becomes of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from zjournal.api.replays import PROBE, Probes
from zjournal.errors import Unavailable
from zjournal.link import wire
from zjournal.link.client import EngineClient

NAME = PROBE + "1"
SAMPLING = wire.Sampling(0.0, 1.0, 0, 0, logprobs=20)
MESSAGE = wire.Generate(request=NAME, tokens=wire.pack_ids([1]), namespace="n", sampling=SAMPLING, max_tokens=1)
SAID = [wire.Tokens(NAME, 0, wire.pack_ids([5]), b"logprobs"), wire.Finished(request=NAME, reason="length", output=1)]


class Heard:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.crashes: list[tuple[int, int, tuple[str, ...]]] = []

    def engine_said(self, message: wire.FromEngine) -> None:
        self.said.append(message)

    def engine_crashed(self, *crash: object) -> None:
        self.crashes.append(crash)  # type: ignore[arg-type]


class Engine(EngineClient):
    """An engine that does what a test says when it is asked, and remembers what it was told."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.answer = answer
        self.told: list[tuple[str, object]] = []

    def generate(self, message: wire.Generate) -> None:
        asyncio.get_running_loop().call_soon(self.answer)

    def cancel(self, request: str) -> None:
        self.told.append(("cancel", request))

    def forget(self, requests: tuple[str, ...]) -> None:
        self.told.append(("forget", requests))


def ask(answer: Callable[[Probes], None]) -> tuple[object, Heard, Engine]:
    """What came of a probe (its answer or its fault), what the listener heard, and the engine."""
    heard = Heard()
    probes = Probes(heard)  # type: ignore[arg-type]
    engine = Engine(lambda: answer(probes))

    async def run() -> object:
        try:
            return await asyncio.wait_for(probes.ask(engine, MESSAGE), 5)
        except Unavailable as fault:
            return fault

    return asyncio.run(run()), heard, engine


def say(*messages: wire.FromEngine) -> Callable[[Probes], None]:
    return lambda probes: [probes.engine_said(message) for message in messages] and None


def test_a_probe_gets_its_token_and_leaves_nothing_behind() -> None:
    changed = wire.CacheChanged(1, "admit", "n", NAME, 2, 1)
    other = wire.Tokens("resp_1", 0, wire.pack_ids([7]))
    found, heard, engine = ask(say(wire.Matched(NAME, 0, 1), other, *SAID, changed))
    assert found == (5, b"logprobs")
    assert heard.said == [other, changed], "facts about the cache are facts, whoever caused them"
    assert engine.told == [("forget", (NAME,))]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (say(wire.Failed(NAME, "context_length_exceeded", "too long")), "too long"),
        (say(wire.Finished(request=NAME, reason="cancelled", output=0)), "gave it up"),
    ],
)
def test_a_probe_that_fails_says_why(answer: Callable[[Probes], None], reason: str) -> None:
    found, heard, _ = ask(answer)
    assert isinstance(found, Unavailable) and reason in found.message
    assert heard.said == []


def test_a_probe_ends_with_its_engine_and_is_no_response_that_crashed() -> None:
    found, heard, _ = ask(lambda probes: probes.engine_crashed(7, -9, ("resp_1", NAME)))
    assert isinstance(found, Unavailable) and "stopped" in found.message
    assert heard.crashes == [(7, -9, ("resp_1",))]


def test_a_probe_that_is_given_up_is_cancelled() -> None:
    heard = Heard()
    probes = Probes(heard)  # type: ignore[arg-type]

    async def run() -> Engine:
        asked = asyncio.Event()
        engine = Engine(asked.set)
        task = asyncio.ensure_future(probes.ask(engine, MESSAGE))
        await asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for message in SAID:
            probes.engine_said(message)  # what was on its way is nobody's any more
        return engine

    engine = asyncio.run(run())
    assert engine.told == [("cancel", NAME), ("forget", (NAME,))]
    assert heard.said == []
