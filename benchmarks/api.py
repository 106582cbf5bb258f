"""What the API process reaches, and what it must: one table, each line with a peer that was measured in the same run.

    python benchmarks/api.py [--quick] [--only a,c] [--dir DIRECTORY]

a  token events per second of 64 streams, the API on one processor (bare Litestar and uvicorn with the same bytes)
b  time from the engine's send to the client's receive at half that load (one stream)
c  first byte of a turn whose 100,000 earlier tokens are resident (a short prompt)
d  memory of 2,000 streams that wait, and of 2,000 sockets (none)

The model is scripted. About six minutes in all; --quick runs every part for a moment, to see that it works: its
figures say nothing. The processors 0 and 1 of those that are allowed are used; other work on them is measured as well.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts import chosen, hits, idle, streams, table

PARTS: dict[str, Callable[[Path, bool], list[table.Line]]] = {
    "a": streams.rates,
    "b": streams.latencies,
    "c": hits.lines,
    "d": idle.lines,
}


def main() -> None:
    """Runs the parts that are asked for, and prints each as it ends."""
    arguments = chosen.arguments(__doc__, PARTS)
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} processors")
    print(table.head())
    missed = 0
    for name in arguments.only:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            lines = PARTS[name](Path(folder), arguments.quick)
        for line in lines:
            print(table.text(line), flush=True)
        missed += sum(line.reached is False for line in lines)
        took = time.perf_counter() - started
        print(f"  {took:.0f} s; load {os.getloadavg()[0]:.2f}", file=sys.stderr, flush=True)
    if missed and not arguments.quick:
        print(f"{missed} of the targets were missed")


if __name__ == "__main__":
    main()
