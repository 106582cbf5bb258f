"""Part e: what a million facts cost a start and a rebuild.

The facts are those of short responses. /readyz is looked at from the spawn of `zj serve` on, with an empty journal and
with the full one by turns. A rebuild reads all facts and folds them anew, on the open journal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from parts.table import Line
from tests.serving import Server, scripted
from tests.unit.journal import facts
from zjournal.journal.events import Fact
from zjournal.journal.log import Journal

FACTS, QUICK_FACTS = 1_000_000, 20_000
SAMPLED = 21  # facts of tokens in a response
PER_RESPONSE = SAMPLED + 4
RESPONSES_PER_SESSION = 50
AT_ONCE = 40  # responses in one append
PAIRS, QUICK_PAIRS = 5, 1
DELAY_MUST_S = 1.0
REBUILD_MUST = 100_000  # facts per second
READY_S_MAX = 60.0
LOOK_S = 0.005


def lines(folder: Path, quick: bool) -> list[Line]:
    """Makes the journal in `folder`, starts servers on it, then rebuilds it."""
    count = _fill(folder / "full", QUICK_FACTS if quick else FACTS)
    model = scripted(folder, {"text": "Yes."})
    full: list[float] = []
    empty: list[float] = []
    for pair in range(QUICK_PAIRS if quick else PAIRS):
        empty.append(_ready_s(folder / f"empty{pair}", model))
        full.append(_ready_s(folder / "full", model))
    with Journal.open(folder / "full") as journal:
        started = time.perf_counter()
        rebuilt = journal.rebuild()
        rate = rebuilt / (time.perf_counter() - started)
    with_facts, without = statistics.median(full), statistics.median(empty)
    delay = with_facts - without
    return [
        Line(
            f"/readyz after the start with {count:,} facts, s",
            f"{with_facts:.2f}",
            f"empty journal: {without:.2f}",
            with_facts / without,
            f"at most {DELAY_MUST_S:g} later",
            delay <= DELAY_MUST_S,
        ),
        Line(f"rebuild of {rebuilt:,} facts, facts/s", f"{rate:,.0f}", "", None, f"at least {REBUILD_MUST:,}")._replace(
            reached=rate >= REBUILD_MUST
        ),
    ]


def _ready_s(data_dir: Path, model: str) -> float:
    """Seconds from the spawn to the first 200 of /readyz."""
    server = Server(data_dir, model=model)
    started = time.perf_counter()
    server.spawn()
    try:
        while time.perf_counter() - started < READY_S_MAX:
            try:
                if server.http.get("/readyz").status_code == 200:
                    return time.perf_counter() - started
            except httpx.TransportError:
                pass
            time.sleep(LOOK_S)
        raise AssertionError("not ready: " + server.log.read_text())
    finally:
        server.terminate()
        server.http.close()


def _fill(data_dir: Path, count: int) -> int:
    """A journal of `count` facts, about; returns how many."""
    responses = count // PER_RESPONSE
    with Journal.open(data_dir) as journal:
        journal.tenant("local")
        last = None
        for first in range(0, responses, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, responses))
            last = journal.append([fact for number in numbers for fact in _response(journal, number)])
            if (first // AT_ONCE) % 16 == 0:
                last.result()  # so that the queue has an end
        assert last is not None
        return last.result()


def _response(journal: Journal, number: int) -> Iterator[Fact]:
    response, session = f"resp_{number:08x}{0:024x}", f"s_{number // RESPONSES_PER_SESSION:016x}"
    if number % RESPONSES_PER_SESSION == 0:
        yield facts.session(session)
    yield from facts.accepted(journal, response, session=session)
    yield facts.matched(response, cached=0)
    for at in range(SAMPLED):
        yield facts.sampled(response, at)
    yield facts.finished(response, output=SAMPLED)
