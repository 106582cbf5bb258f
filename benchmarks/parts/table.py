"""The lines of a benchmark's table: ours, the peer measured in the same run, the ratio, and what must be reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_WIDTHS = (54, 14, 46, 9)


class Line(NamedTuple):
    """One line. `reached` is None where nothing is asked for."""

    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None
    target: str = ""
    reached: bool | None = None


def head() -> str:
    """The line over the others."""
    return _row("what", "ours", "peer in this run", "ratio", "must reach")


def text(line: Line) -> str:
    """A line as it is printed."""
    ratio = "" if line.ratio is None else f"{line.ratio:,.2f}"
    verdict = "" if line.reached is None else "reached" if line.reached else "MISSED"
    target = ": ".join(part for part in (line.target, verdict) if part)
    return _row(line.what, line.ours, line.peer, ratio, target)


def quantiles(values: Iterable[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]


def _row(what: str, ours: str, peer: str, ratio: str, target: str) -> str:
    first, second, third, fourth = _WIDTHS
    return f"{what:<{first}}{ours:>{second}}  {peer:<{third}}{ratio:>{fourth}}  {target}".rstrip()
