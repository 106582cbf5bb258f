"""Tables: what is cut to the width of a terminal, and what is not."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.console import Console

from zjournal.cli import view

NAME = "s_0123456789abcdef"


@pytest.mark.parametrize("width", [30, 44, 60, 200])
def test_the_last_column_is_cut_to_what_the_others_leave(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(view, "console", lambda: Console(highlight=False, width=width))
    texts = ["short", "words " * 20, "漢字" * 40, "\x1b[31m" + "red " * 30, None]
    view.table(("session", "first words"), [(NAME, text) for text in texts], cut=True)
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    if width >= len(NAME) + view.GAP + view.CUT_MIN + view.GAP:
        assert len(lines) == 1 + len(texts), "a line each"
        assert [line.split()[0] for line in lines[1:]] == [NAME] * len(texts)
        assert lines[1].split()[1:] == ["short"] and lines[5].split()[1:] == ["-"]
        for line, text in zip(lines[2:4], texts[1:3], strict=True):
            assert text is not None
            whole = cell_len(NAME) + view.GAP + cell_len(text.rstrip()) <= width - view.GAP
            assert line.rstrip().endswith("…") != whole
