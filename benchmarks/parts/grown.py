"""Parts b and d: what an agent's session of 150,000 tokens costs, and how fast two turns of it are compared.

The session is that of `benchmarks/growth.py`. A naive journal keeps each turn's whole body and prompt; to compare two
of its prompts is to read both and walk along them, in a process of its own as `zj` is one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import growth

from parts.table import Line
from zjournal.journal.reader import Reader

QUICK_TURNS = 20
RATIO_MUST = 2.0
DIFF_MUST_S = 1.0
TRIES = 5
_NAIVE_DIFF = """
import sqlite3, sys
from array import array
a, b = (array("I", row[0]) for row in sqlite3.connect(sys.argv[1]).execute(
    "SELECT prompt FROM turn ORDER BY number DESC LIMIT 2"))
print(next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))))
"""


def lines(folder: Path, quick: bool, parts: frozenset[str]) -> list[Line]:
    """Plays the session in `folder`, then compares its last two turns, as far as each is asked for."""
    grown = growth.measure(folder, QUICK_TURNS if quick else growth.TURNS)
    return (_growth_lines(grown) if "b" in parts else []) + (_diff_lines(folder, grown, quick) if "d" in parts else [])


def _growth_lines(grown: growth.Growth) -> list[Line]:
    what = f"{grown.turns} turns up to {grown.prompt:,} tokens"
    ratio = grown.added / grown.unique
    return [
        Line(
            f"{what}, bytes",
            f"{grown.added:,}",
            f"zstd of the unique content: {grown.unique:,}",
            ratio,
            f"at most {RATIO_MUST:g}",
            ratio <= RATIO_MUST,
        ),
        Line("the same", f"{grown.added:,}", f"whole bodies and prompts: {grown.naive:,}", grown.added / grown.naive),
    ]


def _diff_lines(folder: Path, grown: growth.Growth, quick: bool) -> list[Line]:
    with Reader.open(folder / "data") as journal:
        (session,) = journal.sessions()
        before, last = (turn.response for turn in journal.turns(session.session)[-2:])
    program = [sys.executable, "-m", "zjournal", "sessions", "diff", before, last, "--data-dir", str(folder / "data")]
    naive = [sys.executable, "-c", _NAIVE_DIFF, str(folder / "naive.db")]
    tries = 1 if quick else TRIES
    ours = statistics.median(_seconds(program) for _ in range(tries))
    peer = statistics.median(_seconds(naive) for _ in range(tries))
    what = f"zj sessions diff at {grown.prompt:,} tokens, whole process, s"
    target = f"below {DIFF_MUST_S:g}"
    return [Line(what, f"{ours:.2f}", f"naive storage: {peer:.2f}", ours / peer, target, ours < DIFF_MUST_S)]


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    took = time.perf_counter() - started
    assert done.returncode == 0, (done.stdout, done.stderr)
    return took
