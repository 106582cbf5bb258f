"""A server like any other whose engine notes when it sends each token: what a latency is measured from.

    python benchmarks/parts/stamped.py STAMPS serve …

The engine's end of the socket is wrapped, and nothing else; at its end it writes STAMPS: a line for each token, of
nanoseconds on the clock that all processes share, request and position.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from zjournal.link import client, wire

STAMPS = "BENCH_STAMPS"
ENGINE = f"""
import sys
home = sys.argv.pop(1)
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
sys.path.insert(0, home)
import stamped
sys.exit(stamped.engine())
"""


def engine() -> int:
    """The engine process."""
    from zjournal.engine import worker

    stamps: list[tuple[int, list[tuple[str, int]]]] = []

    class Stamped(worker.Link):
        """Notes when it sends; the list is written at the end, for that would be a part of what is measured."""

        def send(self, messages: Sequence[wire.FromEngine]) -> None:
            tokens = [(told.request, told.position) for told in messages if isinstance(told, wire.Tokens)]
            if tokens:
                stamps.append((time.monotonic_ns(), tokens))
            super().send(messages)

    worker.Link = Stamped  # type: ignore[misc]
    status = worker.main()
    lines = [f"{at} {request} {position}\n" for at, tokens in stamps for request, position in tokens]
    Path(os.environ[STAMPS]).write_text("".join(lines))
    return status


def read(path: Path) -> dict[str, list[int]]:
    """When each token of each request was sent, by its position; nanoseconds."""
    found: dict[str, list[int]] = {}
    for line in path.read_text().splitlines():
        at, request, position = line.split()
        sent = found.setdefault(request, [])
        assert int(position) == len(sent), line
        sent.append(int(at))
    return found


def main() -> int:
    """The server process."""
    os.environ[STAMPS] = sys.argv.pop(1)
    client._START_WORKER = ENGINE
    from zjournal.cli.main import main as zj

    return zj()


if __name__ == "__main__":
    sys.exit(main())
