"""The API's handle on the engine, at the moments when the engine is between life and death."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from zjournal.link import client, wire
from zjournal.link.client import EngineClient


class Deaf:
    """A listener that only keeps what it hears of crashes."""

    def engine_loading(self, progress: float) -> None: ...

    def engine_ready(self, ready: wire.Ready, pid: int) -> None: ...

    def engine_broken(self, broken: wire.Broken) -> None: ...

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None: ...

    def engine_stopped(self, pid: int, status: int) -> None: ...

    def engine_said(self, message: wire.FromEngine) -> None: ...


def test_a_request_in_the_moment_after_the_engine_hung_up_goes_down_with_it() -> None:
    engine = EngineClient(wire.Start(model="m"), Deaf())
    sampling = wire.Sampling(0.0, 1.0, 0, 7)
    engine.generate(
        wire.Generate(request="r1", tokens=b"", namespace="n", sampling=sampling, max_tokens=1),
    )
    assert engine.running == ("r1",), "its crash must name it, or it would run for ever"


def test_a_child_that_hung_up_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STOP_GRACE_S", 0.05)

    async def main() -> int:
        engine = EngineClient(wire.Start(model="m"), Deaf())
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
        return await asyncio.wait_for(engine._ended(child), 60)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_what_goes_wrong_while_listening_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: EngineClient) -> tuple[int, None]:
        raise AssertionError("a message that cannot be")

    monkeypatch.setattr(EngineClient, "_one_life", broken)

    async def main() -> None:
        engine = EngineClient(wire.Start(model="m"), Deaf())
        engine.start()
        await asyncio.wait_for(engine.watch(), 60)

    with pytest.raises(AssertionError, match="cannot be"):
        asyncio.run(main())


def test_the_engine_is_ours_wherever_the_server_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the user's with a `zjournal` or a `msgspec.py` in it is no part of the program."""
    (tmp_path / "zjournal").mkdir()
    (tmp_path / "zjournal" / "__init__.py").write_text("raise SystemExit(99)")
    (tmp_path / "msgspec.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    told: list[wire.Broken] = []

    class Listener(Deaf):
        def engine_broken(self, broken: wire.Broken) -> None:
            told.append(broken)

    async def main() -> None:
        engine = EngineClient(wire.Start(model=str(tmp_path / "none.json"), scripted=True), Listener())
        engine.start()
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.02)
        await engine.stop()

    asyncio.run(main())
    assert "none.json" in told[0].message, "it got as far as looking for the model"


class Paper:
    """The writing end of a socket that keeps what is written."""

    def __init__(self) -> None:
        self.said: list[wire.ToEngine] = []

    def write(self, data: bytes) -> None:
        self.said += wire.Deframer(wire.ToEngine).feed(data)

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None: ...


def test_an_engine_hears_what_is_on_disk_before_what_became_of_it() -> None:
    pages = [
        wire.Known(space=b"s" * 32, chunks=(wire.Chunk(b"h" * 32, b"p" * 32, 256, 9, b""),)),
        wire.Known(space=b"", last=True),
    ]
    purge, pin = wire.Purge(b"s" * 32, (b"h" * 32,), (), "gc"), wire.Pin("r1", True)

    async def main() -> None:
        async def known() -> AsyncIterator[wire.Known]:
            engine.tell(purge)  # while it is being read
            for page in pages:
                yield page

        engine = EngineClient(wire.Start(model="m", snapshots="folder"), Deaf(), known)
        engine.tell(pin)  # there is no engine: the next one reads it
        engine._writer = paper = Paper()  # type: ignore[assignment]
        await engine._tell_known()
        engine.tell(pin)
        assert paper.said == [*pages, purge, pin]

    asyncio.run(main())


def test_an_engine_without_the_disk_is_told_nothing_of_it() -> None:
    async def main() -> None:
        engine = EngineClient(wire.Start(model="m"), Deaf())
        engine._writer = paper = Paper()  # type: ignore[assignment]
        await engine._tell_known()
        assert paper.said == []

    asyncio.run(main())
