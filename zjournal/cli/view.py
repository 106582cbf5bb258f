"""What people see: tables and trees on a terminal. The only importer of rich.

Commands give plain rows; nothing here knows a journal or a setting. Text from models and clients is escaped, so that
it can neither carry markup nor steer the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

PIPE_COLUMNS = 1000  # where no terminal sets a width, lines should rather be long than cut


def console() -> Console:
    """A console on stdout, wide enough not to cut lines when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Prints rows below column heads; the columns named in `numbers` stand to the right. None shows as a dash."""
    drawn = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        drawn.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        assert len(row) == len(columns), row
        drawn.add_row(*(plain("-" if cell is None else str(cell)) for cell in row))
    console().print(drawn)


def tree(title: str, nodes: Iterable[tuple[str, str | None, str]]) -> None:
    """Prints a tree of (id, parent id, label), parents before children; a node with an unknown parent is a root."""
    root = Tree(plain(title))
    branches: dict[str, Tree] = {}
    for name, parent, label in nodes:
        above = branches.get(parent, root) if parent else root
        branches[name] = above.add(plain(label))
    console().print(root)


def plain(text: str) -> Text:
    """The text without markup, control characters made visible."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))
