"""`zj journal`: proves the journal, beside a running server or without one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from zjournal.cli import options
from zjournal.config import Config

if TYPE_CHECKING:
    from zjournal.journal.verify import Break


@options.with_config("data_dir")
def verify(config: Config, as_json: options.AsJson = False) -> None:
    """Check the whole journal; exit 1 and name the first break if it is not what was written."""
    import msgspec

    from zjournal.journal import verify as prover

    report = prover.verify(config.data_dir, None if as_json or not sys.stderr.isatty() else _draw_progress)
    if as_json:
        import json

        typer.echo(json.dumps({"clean": report.clean, **msgspec.to_builtins(report)}, indent=2))
    elif report.fault is None:
        typer.echo(f"{report.path}: clean")
        typer.echo(
            f"{report.facts} facts, {report.contents} contents, {report.sessions} sessions, {report.turns} turns "
            f"({report.erased} erased); head {report.head} {report.link}"
        )
    else:
        typer.echo(f"{report.path}: BROKEN at {describe(report.fault)}")
        typer.echo(f"proved up to fact {report.head}; restore it from a backup, or keep it and start a new --data-dir")
    raise typer.Exit(0 if report.clean else 1)


def describe(fault: Break) -> str:
    """A break in words: its place and its reason."""
    place = fault.where if fault.seq is None else f"{fault.where} {fault.seq}"
    return f"{place}: {fault.reason}"


def _draw_progress(done: int, total: int) -> None:
    """One line on stderr that is written over."""
    print(f"\r{done} of {total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
