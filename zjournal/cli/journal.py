"""`zj journal`: proves, measures, copies, shrinks, folds anew and salvages the journal, beside a server or without."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zjournal.cli import options
from zjournal.config import Config

SALVAGE_STEP = "restore it from a backup, or copy what can be proved with `zj journal salvage OUT`"

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zjournal.journal.salvage import Salvaged
    from zjournal.journal.verify import Break
    from zjournal.sessions.snapshots import Checked


@options.with_config("data_dir")
def verify(
    config: Config,
    quick: Annotated[bool, typer.Option("--quick", help="Only the end, as a server does at its start.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also all bytes of the snapshots' files, not only headers.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check the whole journal, and the files of the snapshots against it; exit 1 and name the first break.

    Where the folder of the snapshots is not there at all, as in a copy, only the journal is checked.
    """
    if quick:
        _verify_quick(config, as_json)
        return
    import msgspec

    from zjournal.journal import verify as prover

    report = prover.verify(config.data_dir, None if as_json or not sys.stderr.isatty() else _draw_progress)
    checked = _verify_files(config, deep) if report.clean else None
    clean = report.clean and (checked is None or checked.clean)
    if as_json:
        import json

        told = {**msgspec.to_builtins(report), "files": checked and msgspec.to_builtins(checked)}
        typer.echo(json.dumps({"clean": clean, **told}, indent=2))
    elif report.fault is None:
        typer.echo(f"{report.path}: clean")
        typer.echo(
            f"{report.facts} facts, {report.contents} contents, {report.sessions} sessions, {report.turns} turns "
            f"({report.erased} erased); head {report.head} {report.link}"
        )
    else:
        typer.echo(f"{report.path}: BROKEN at {describe(report.fault)}")
        typer.echo(f"proved up to fact {report.head}; {SALVAGE_STEP}")
    if checked is not None and not as_json:
        from zjournal.cli.snapshots import tell_checked

        tell_checked(checked)
    raise typer.Exit(0 if clean else 1)


def _verify_files(config: Config, deep: bool) -> Checked | None:
    """Compares the snapshots' files with the journal; None where there is no folder of them."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    if not snapshots.folder_of(config.data_dir).is_dir():
        return None
    with Reader.open(config.data_dir) as reader:
        return snapshots.verify(reader, config.data_dir, deep)


def _verify_quick(config: Config, as_json: bool) -> None:
    from zjournal.errors import JournalFault
    from zjournal.journal import quick

    try:
        head = quick.prove(config.data_dir)
    except JournalFault as fault:
        if not as_json:
            raise
        import json

        typer.echo(json.dumps({"clean": False, "fault": fault.message}, indent=2))
        raise typer.Exit(fault.exit_code) from None
    if as_json:
        import json

        typer.echo(json.dumps({"clean": True, "head": head.seq, "link": head.link.hex()}, indent=2))
    else:
        typer.echo(f"{config.data_dir}: its end is clean; head {head.seq} {head.link.hex()}")


@options.with_config("data_dir")
def rebuild(config: Config, as_json: options.AsJson = False) -> None:
    """Fold sessions and turns again from the facts; requests wait meanwhile."""
    from zjournal.cli import admin
    from zjournal.sessions.operations import Nothing, Rebuilt

    done = admin.perform(config, "journal.rebuild", Nothing(), Rebuilt)
    if as_json:
        import json

        typer.echo(json.dumps({"facts": done.facts}, indent=2))
    else:
        typer.echo(f"{done.facts} facts folded")


@options.with_config("data_dir")
def salvage(
    config: Config,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New data directory to make.")],
    as_json: options.AsJson = False,
) -> None:
    """Copy what can be proved of a damaged journal into a new data directory; exit 1 if anything was lost."""
    import msgspec

    from zjournal.journal.salvage import salvage as rescue

    done = rescue(config.data_dir, out)
    if as_json:
        import json

        typer.echo(json.dumps({"whole": done.whole, **msgspec.to_builtins(done)}, indent=2))
    else:
        typer.echo(f"{done.path}: {done.facts} facts, {done.turns} turns, {done.contents} contents copied; it verifies")
        for line in _losses(done):
            typer.echo(line)
    raise typer.Exit(0 if done.whole else 1)


def _losses(done: Salvaged) -> Iterator[str]:
    """What was lost, line by line."""
    if done.reason:
        yield f"the proved part ends there: {done.reason}"
    for lost in done.lost_facts:
        state = "follow from each other, but not from what is proved" if lost.intact else "are damaged or missing"
        yield f"lost: facts {lost.first} to {lost.last} ({state})"
    for response in done.lost_turns:
        yield f"lost: turn {response}"
    if done.lost_contents:
        yield f"lost: {done.lost_contents} contents"
    for response in done.erased:
        yield f"erased: turn {response}, of which content was lost" if response else "erased: all vocabularies"


@options.with_config("data_dir")
def compact(config: Config, as_json: options.AsJson = False) -> None:
    """Give the room of what was deleted back to the disk; requests wait meanwhile."""
    from zjournal.cli import admin
    from zjournal.journal.compact import Compacted
    from zjournal.sessions.operations import Nothing

    done = admin.perform(config, "journal.compact", Nothing(), Compacted)
    if as_json:
        import json

        told = {"before": done.before, "after": done.after, "freed": done.freed, "scrubbed": done.scrubbed}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(f"{done.freed:,} bytes given back to the disk: {done.before:,} before, {done.after:,} after")
    if not done.scrubbed:
        typer.echo("the log shrinks as soon as the reader that holds it lets go")


@options.with_config("data_dir")
def backup(
    config: Config,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to make; it must not exist.")],
    as_json: options.AsJson = False,
) -> None:
    """Copy the whole journal to a file, mode 0600, beside a running server too; it can be used as a journal.db."""
    from zjournal.cli import admin
    from zjournal.journal.backup import Copied
    from zjournal.sessions.operations import Backup

    path = Path.cwd() / os.path.expanduser(file)
    done = admin.perform(config, "journal.backup", Backup(str(path)), Copied)
    if as_json:
        import json

        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(done), indent=2))
        return
    typer.echo(f"{done.path}: {done.bytes:,} bytes, {done.facts} facts; head {done.head} {done.link}")


@options.with_config("data_dir")
def stats(config: Config, as_json: options.AsJson = False) -> None:
    """Show what takes the journal's room: rows, bytes by kind, the largest sessions, the log, free pages."""
    import msgspec

    from zjournal.journal import stats as counting
    from zjournal.journal.reader import Reader

    with Reader.open(config.data_dir) as reader:
        found = counting.stats(reader)
    if as_json:
        import json

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    from zjournal.cli import view

    typer.echo(f"{found.path}: {found.file_bytes:,} bytes, and {found.wal_bytes:,} in its log")
    typer.echo(
        f"{found.free_bytes:,} bytes are free pages, {found.rest_bytes:,} indexes, projections and ends of pages\n"
    )
    view.table(("table", "rows"), found.rows.items(), numbers=("rows",))
    typer.echo(f"\n{found.snapshot_bytes:,} bytes of KV are on disk beside it")
    typer.echo()
    kinds: list[tuple[object, ...]]
    kinds = [("fact", name, kind.rows, f"{kind.bytes:,}", None) for name, kind in found.facts.items()]
    kinds += [
        ("content", name, kind.rows, f"{kind.bytes:,}", f"{kind.plain:,}") for name, kind in found.contents.items()
    ]
    view.table(("", "kind", "rows", "bytes", "uncompressed"), kinds, numbers=("rows", "bytes", "uncompressed"))
    typer.echo()
    largest = [(size.session, size.turns, f"{size.bytes:,}") for size in found.largest]
    view.table(("largest sessions", "turns", "bytes"), largest, numbers=("turns", "bytes"))


def describe(fault: Break) -> str:
    """A break in words: its place and its reason."""
    place = fault.where if fault.seq is None else f"{fault.where} {fault.seq}"
    return f"{place}: {fault.reason}"


def _draw_progress(done: int, total: int) -> None:
    """One line on stderr that is written over."""
    print(f"\r{done} of {total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
