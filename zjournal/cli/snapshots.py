"""`zj snapshots`: what of the KV is on disk, what would be given up at what cost, and whether the files are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import admin, options
from zjournal.cli.remove import Yes, _parsed
from zjournal.cli.sessions import NAMED_MAX, _count, _moment, _print_json
from zjournal.config import Config, parse_size, show_size
from zjournal.errors import NotFound

if TYPE_CHECKING:
    from zjournal.journal.kept import SnapshotRow
    from zjournal.journal.reader import Reader
    from zjournal.sessions.snapshots import Checked, Collected
    from zjournal.snapshots.index import Index
    from zjournal.snapshots.plan import Deletion, Plan

Name = Annotated[str, typer.Argument(metavar="ID", help="Id of the response whose snapshot it is, or its beginning.")]
Deep = Annotated[bool, typer.Option("--deep", help="Read and check all bytes, not only headers and sizes.")]


@options.with_config("data_dir")
def list_snapshots(config: Config, as_json: options.AsJson = False) -> None:
    """List all states that can be restored from disk, the latest first."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    with Reader.open(config.data_dir) as reader:
        index, rows = snapshots.load(reader)
        others = snapshots.foreign(reader, rows.values())
    told = [_snapshot_json(index, row, row.space in others) for row in reversed(rows.values())]
    if as_json:
        _print_json({"bytes": index.file_bytes, "chunks": len(index.chunks), "snapshots": told})
        return
    from zjournal.cli import view

    columns = ("response", "session", "tokens", "bytes", "alone", "written", "notes")
    lines = [
        (
            one["response"],
            one["session"],
            one["tokens"],
            f"{one['bytes']:,}",
            f"{one['own_bytes']:,}",
            one["written"],
            _notes(one),
        )
        for one in told
    ]
    view.table(columns, lines, numbers=("tokens", "bytes", "alone"))
    typer.echo(
        f"{_count(len(told), 'snapshot')}, {_count(len(index.chunks), 'chunk')}, {index.file_bytes:,} bytes; "
        "`alone` are those that no other snapshot shares"
    )


@options.with_config("data_dir")
def show_snapshot(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Show a snapshot and the chunks that it needs."""
    from zjournal.journal import snapshots as journaled
    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    with Reader.open(config.data_dir) as reader:
        row = _find(reader, name)
        index, rows = snapshots.load(reader)
        foreign = row.space in snapshots.foreign(reader, rows.values())
        path = journaled.path(reader, row.end)
    told = _snapshot_json(index, row, foreign)
    start = 0
    chunks: list[dict[str, Any]] = []
    for one in path:
        chunks.append(
            {
                "start": start,
                "tokens": one.tokens,
                "bytes": one.file_bytes,
                "hash": one.hash.hex(),
                "used": _moment(one.used_us),
                "restores": one.uses,
                "bad": one.bad,
            }
        )
        start += one.tokens
    if as_json:
        _print_json({**told, "namespace": row.namespace, "chunks": chunks})
        return
    from zjournal.cli import view

    typer.echo(f"{row.response} of session {row.session}: {row.tokens} tokens, {told['bytes']:,} bytes")
    notes = _notes(told)
    typer.echo(f"namespace {row.namespace}; written {told['written']}" + (f"; {notes}" if notes else ""))
    lines = [
        (
            one["start"],
            one["tokens"],
            f"{one['bytes']:,}",
            one["hash"][:16],
            one["used"],
            one["restores"],
            "bad" if one["bad"] else "",
        )
        for one in chunks
    ]
    view.table(
        ("token", "tokens", "bytes", "hash", "last used", "restores", ""),
        lines,
        numbers=("token", "tokens", "bytes", "restores"),
    )


@options.with_config("data_dir", "snapshot_limit")
def gc(
    config: Config,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="SIZE", help="Most bytes that stay; else the snapshot limit.")
    ] = None,
    yes: Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Give up KV on disk that is worth least, until the rest fits. Shows the plan and what each deletion costs first.

    What is worth nothing goes in any case. Pinned snapshots, and those of pinned sessions, stay.
    """
    import time

    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    most = config.snapshot_limit if limit is None else _parsed("--limit", parse_size, limit)
    with Reader.open(config.data_dir) as reader:
        plan, index, _ = snapshots.plan_collection(reader, most, time.time_ns() // 1000)
    if not as_json:
        _tell_plan(plan, index.file_bytes, most)
    done = _collect(config, plan) if yes else None
    if as_json:
        _print_json({**_plan_json(plan, index.file_bytes, most), "collected": _collected_json(done)})
    elif done is not None:
        typer.echo(f"gave up {_count(done.chunks, 'chunk')}, {done.file_bytes:,} bytes")
        if done.left:
            typer.echo(f"{_count(done.left, 'chunk')} stayed: pinned meanwhile, or needed by what is new")
    elif plan.deletions:
        typer.echo("nothing was deleted; add --yes to do it")


@options.with_config("data_dir")
def verify(config: Config, deep: Deep = False, as_json: options.AsJson = False) -> None:
    """Compare the files with the journal; exit 1 and name the first that is wrong. A server may run."""
    import msgspec

    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    with Reader.open(config.data_dir) as reader:
        checked = snapshots.verify(reader, config.data_dir, deep)
    if as_json:
        _print_json({"clean": checked.clean, **msgspec.to_builtins(checked)})
    else:
        tell_checked(checked)
    raise typer.Exit(0 if checked.clean else 1)


@options.with_config("data_dir")
def pin(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Pin a snapshot: neither the limit nor gc takes it. It still goes with its turn."""
    _pin(config, name, True, as_json)


@options.with_config("data_dir")
def unpin(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Take the pin of a snapshot back."""
    _pin(config, name, False, as_json)


def tell_checked(checked: Checked) -> None:
    """What was looked at, in lines."""
    if checked.fault is not None:
        typer.echo(f"{checked.fault.file}: {checked.fault.reason}")
        typer.echo(
            f"{_count(checked.chunks, 'chunk')} before it {'is' if checked.chunks == 1 else 'are'} right; "
            "the server puts a bad one aside when it meets it"
        )
        return
    how = "all bytes" if checked.deep else "headers and sizes"
    typer.echo(
        f"snapshots: {_count(checked.chunks, 'chunk')} of {_count(checked.snapshots, 'snapshot')} are right "
        f"({checked.file_bytes:,} bytes; {how})"
    )
    if checked.bad:
        typer.echo(f"{_count(checked.bad, 'chunk')} known to be bad or missing: computed again when needed")


def _pin(config: Config, name: str, pinned: bool, as_json: bool) -> None:
    from zjournal.journal.reader import Reader
    from zjournal.sessions.operations import Nothing
    from zjournal.sessions.snapshots import PinSnapshot

    with Reader.open(config.data_dir) as reader:
        response = _find(reader, name).response
    admin.perform(config, "snapshots.pin", PinSnapshot(response, pinned), Nothing)
    if as_json:
        _print_json({"response": response, "pinned": pinned})
    else:
        typer.echo(f"the snapshot of {response} is {'pinned' if pinned else 'not pinned'}")


def _find(reader: Reader, name: str) -> SnapshotRow:
    """The snapshot of this response; the beginning of its id is enough where only one has it. Raises NotFound."""
    from zjournal.journal import snapshots

    exact = snapshots.snapshot(reader, name)
    if exact is not None:
        return exact
    found = snapshots.snapshots_named(reader, name, NAMED_MAX) if name else []
    if not found:
        raise NotFound(f"no response whose id is or begins with {name!r} has a snapshot in {reader.path}")
    if len(found) > 1:
        raise NotFound(f"{name!r} is the beginning of several ids: {', '.join(row.response for row in found)}")
    return found[0]


def _snapshot_json(index: Index, row: SnapshotRow, foreign: bool) -> dict[str, Any]:
    one = index.snapshots[row.response]
    path = list(one.chunk.path())
    own = 0
    for at, chunk in enumerate(path):  # up to the first that something else needs
        alone = len(chunk.ends or ()) == (1 if at == 0 else 0) and len(chunk.children or ()) == (0 if at == 0 else 1)
        if not alone:
            break
        own += chunk.file_bytes
    return {
        "response": row.response,
        "session": row.session,
        "tokens": row.tokens,
        "chunk_count": len(path),
        "bytes": sum(chunk.file_bytes for chunk in path),
        "own_bytes": own,
        "written": _moment(row.made_us),
        "pinned": one.pinned,
        "kept_tokens": None if row.kept < 0 else row.kept,
        "foreign": foreign,
        "bad": any(chunk.bad for chunk in path),
    }


def _notes(told: dict[str, Any]) -> str:
    kept = told["kept_tokens"]
    notes = [
        "pinned" if told["pinned"] else "",
        "of other weights" if told["foreign"] else "",
        "has a bad chunk" if told["bad"] else "",
        f"next turn kept {kept}" if kept is not None and kept < told["tokens"] else "",
    ]
    return ", ".join(note for note in notes if note)


def _why(deletion: Deletion) -> str:
    from zjournal.snapshots.plan import Why

    return {
        Why.FOREIGN: "of other weights, template or kernels",
        Why.BAD: "its file, or one before it, is bad or missing",
        Why.ABANDONED: "the next turn did not keep it",
        Why.SUPERSEDED: "another chunk repeats it",
        Why.LEAST: "saves least for its bytes",
        Why.LIVE: "saves least; its session is live",
    }[deletion.why]


def _tell_plan(plan: Plan, held: int, limit: int) -> None:
    from zjournal.cli import view

    if plan.deletions:
        rows = [
            (
                one.hash.hex()[:16],
                f"{one.start} to {one.start + one.tokens}",
                f"{one.file_bytes:,}",
                f"{one.recompute_s:.2f}",
                _why(one),
                ", ".join(one.snapshots),
            )
            for one in plan.deletions
        ]
        columns = ("chunk", "tokens", "bytes", "s to compute", "reason", "shortens")
        view.table(columns, rows, numbers=("bytes", "s to compute"))
    cost = sum(one.recompute_s for one in plan.deletions)
    typer.echo(
        f"{_count(len(plan.deletions), 'chunk')} to delete, {plan.freed:,} bytes, {cost:.1f} s to compute again; "
        f"{held:,} bytes stay, the limit is {show_size(limit)}"
    )
    if not plan.fits:
        typer.echo("the rest is pinned and does not fit; `zj snapshots unpin` takes a pin back")


def _collect(config: Config, plan: Plan) -> Collected:
    from zjournal.sessions.snapshots import Collect, Collected, doomed

    chunks = left = size = 0
    for arguments in (*doomed(plan), *([] if plan.deletions else [Collect(())])):
        done = admin.perform(config, "snapshots.gc", arguments, Collected)
        chunks, left, size = chunks + done.chunks, left + done.left, size + done.file_bytes
    return Collected(chunks=chunks, left=left, file_bytes=size)


def _plan_json(plan: Plan, held: int, limit: int) -> dict[str, Any]:
    return {
        "limit": limit,
        "bytes": plan.freed,
        "stays": held,
        "fits": plan.fits,
        "recompute_s": round(sum(one.recompute_s for one in plan.deletions), 3),
        "deletions": [
            {
                "hash": one.hash.hex(),
                "start": one.start,
                "tokens": one.tokens,
                "bytes": one.file_bytes,
                "reason": one.why.name.lower(),
                "recompute_s": round(one.recompute_s, 3),
                "snapshots": list(one.snapshots),
            }
            for one in plan.deletions
        ],
    }


def _collected_json(done: Collected | None) -> dict[str, Any] | None:
    return None if done is None else {"chunks": done.chunks, "left": done.left, "bytes": done.file_bytes}
