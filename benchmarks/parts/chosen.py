"""The command line of a benchmark in parts: which of them, where, and whether for a moment only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path


def arguments(description: str | None, parts: Iterable[str]) -> argparse.Namespace:
    """`quick`, `only` (letters of parts, in the order given) and `dir`."""
    known = "".join(parts)

    def chosen(text: str) -> str:
        letters = text.replace(",", "")
        unknown = sorted(set(letters) - set(known))
        if unknown or not letters:
            raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown) or text!r}; there are {known}")
        return letters

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a moment for each part")
    parser.add_argument("--only", type=chosen, default=known, help="letters of parts, such as a,c")
    parser.add_argument("--dir", type=Path, help="where journals are made")
    return parser.parse_args()
