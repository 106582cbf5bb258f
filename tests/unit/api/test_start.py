"""The start of an engine is a fact before a request may come, and it names what prompts can be read with."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.api.test_running import Engine, until
from tests.unit.journal.facts import open_journal
from tests.unit.journal.test_dependent import FILLING, freed, full
from zjournal.api import running_record
from zjournal.api.metrics import Metrics
from zjournal.api.running import Runs
from zjournal.api.snapshots import Snapshots
from zjournal.journal.events import EngineStarted
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.journal.verify import verify
from zjournal.link import wire

READY = wire.Ready(fingerprint="f", kernels="k", context=1000, kv_tokens=1000)
WORDS = random.Random(1).randbytes(FILLING)  # cannot be compressed: a full disk has no room for it
SERVED: Any = SimpleNamespace(
    id="m", vocabulary=WORDS, unstable=("text: x",), template=SimpleNamespace(source="{{ messages }}")
)


def runs_of(journal: Journal) -> Runs:
    return Runs(journal, metrics := Metrics(), 60, Snapshots(journal, metrics, journal.path.parent, on=False))


def starts(journal: Journal) -> list[EngineStarted]:
    return [fact.event for fact in journal.read() if isinstance(fact.event, EngineStarted)]


@pytest.mark.parametrize("engine_first", [True, False])
def test_ready_is_who_has_engine_and_tokenizer_and_a_durable_start(tmp_path: Path, engine_first: bool) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal)
        steps = [lambda: runs.engine_ready(READY, 7), lambda: runs.serve(SERVED, Engine())]  # type: ignore[arg-type]
        for step in steps if engine_first else reversed(steps):
            assert runs.ready is None and not starts(journal)
            step()
        await until(lambda: runs.ready is not None)
        (start,) = starts(journal)
        assert (start.pid, start.model, start.fingerprint) == (7, "m", "f")
        assert journal.content(SERVER_TENANT, start.vocabulary) == WORDS
        assert journal.content(SERVER_TENANT, start.template) == b"{{ messages }}"

        runs.engine_crashed(7, -9, ())
        assert runs.ready is None
        runs.engine_ready(READY, 8)
        await until(lambda: runs.ready is not None)
        assert [(s.pid, s.vocabulary) for s in starts(journal)] == [(7, start.vocabulary), (8, start.vocabulary)]
        with journal.transaction() as db:
            assert db.execute("SELECT refs FROM content").fetchall() == [(2,), (2,)]

    with open_journal(tmp_path) as journal:
        asyncio.run(main(journal))
    assert verify(tmp_path).fault is None


def test_on_a_full_disk_no_engine_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_record, "OWED_RETRY_S", 0.02)
    offered = []

    async def main(journal: Journal) -> None:
        runs = runs_of(journal)
        runs.serve(SERVED, Engine())  # type: ignore[arg-type]
        append = journal.append_soon
        monkeypatch.setattr(journal, "append_soon", lambda *a, **k: offered.append(a) or append(*a, **k))
        full(journal)
        runs.engine_ready(READY, 7)
        await until(lambda: len(offered) > 2)
        assert runs.ready is None
        runs.engine_crashed(7, -9, ())  # before its start could be written
        runs.engine_ready(READY, 8)
        freed(journal)
        await until(lambda: runs.ready is not None)
        assert [start.pid for start in starts(journal)] == [8]

    with open_journal(tmp_path) as journal:
        asyncio.run(main(journal))
    assert verify(tmp_path).fault is None
