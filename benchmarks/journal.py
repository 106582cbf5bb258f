"""What the journal reaches, and what it must: one table, each line with a peer that was measured in the same run.

    python benchmarks/journal.py [--quick] [--only a,c] [--dir DIRECTORY]

a  token facts and content-bearing facts per second, and the wait until a fact is durable (plain SQLite)
b  bytes of a session of 200 turns that grows to 150,000 tokens (zstd of its unique content; naive storage)
c  serving 32 paced streams (the same journal in memory)
d  `zj sessions diff` of two turns of 150,000 tokens (naive storage)
e  start-up and rebuild with a million facts (an empty journal)
f  memory of the API process up to 100,000 stored responses

The file system is that of --dir, else of the system's temporary directory. About ten minutes in all; --quick runs
every part for a moment, to see that it works: its figures say nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts import chosen, grown, memory, paced, rates, starts, table

PARTS = "abcdef"


def main() -> None:
    """Runs the parts that are asked for, and prints each as it ends."""
    arguments = chosen.arguments(__doc__, PARTS)
    parts = frozenset(arguments.only)
    runs: list[tuple[str, Callable[[Path, bool], list[table.Line]]]] = [
        ("a", rates.lines),
        ("bd", lambda folder, quick: grown.lines(folder, quick, parts)),
        ("c", paced.lines),
        ("e", starts.lines),
        ("f", memory.lines),
    ]
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} processors")
    print(table.head())
    missed = 0
    for names, run in runs:
        if not parts & set(names):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            lines = run(Path(folder), arguments.quick)
        for line in lines:
            print(table.text(line), flush=True)
        missed += sum(line.reached is False for line in lines)
        took = time.perf_counter() - started
        print(f"  {took:.0f} s; load {os.getloadavg()[0]:.2f}", file=sys.stderr, flush=True)
    if missed and not arguments.quick:
        print(f"{missed} of the targets were missed")


if __name__ == "__main__":
    main()
