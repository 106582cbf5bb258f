"""What people see: tables and trees on a terminal. The only importer of rich.

Commands give plain rows; nothing here knows a journal or a setting. Text from models and clients is escaped, so that
it can neither carry markup nor steer the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

GAP = 2  # between two columns
CUT_MIN = 20  # characters that a column keeps that is cut
PIPE_COLUMNS = 1000  # where no terminal sets a width, lines should rather be long than cut


def console() -> Console:
    """A console on stdout, wide enough not to cut lines when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = (), cut: bool = False
) -> None:
    """Prints rows below column heads; the columns named in `numbers` stand to the right. None shows as a dash.

    With `cut` the texts of the last column are cut to what the others leave of the line.
    """
    drawn = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for column in columns:
        drawn.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    cells = [[plain("-" if cell is None else str(cell)) for cell in row] for row in rows]
    screen = console()
    if cut:
        widths = [max(cell_len(head), *(row[at].cell_len for row in cells), 0) for at, head in enumerate(columns[:-1])]
        left = max(screen.width - sum(widths) - GAP * len(columns), CUT_MIN)
        for row in cells:
            row[-1].truncate(left, overflow="ellipsis")
    for row in cells:
        assert len(row) == len(columns), row
        drawn.add_row(*row)
    screen.print(drawn)


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
