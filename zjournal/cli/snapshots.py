"""`zj snapshots`: what of the KV is on disk, what would be given up at what cost, and whether the files are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import admin, options
from zjournal.cli.remove import Yes, _parsed
from zjournal.cli.sessions import NAMED_MAX, _count, _moment, _print_json
from zjournal.config import Config, about_size, parse_size, show_size
from zjournal.errors import NotFound

if TYPE_CHECKING:
    from zjournal.journal.kept import ChunkRow, SnapshotRow
    from zjournal.journal.reader import Reader
    from zjournal.sessions.snapshots import Checked, Collected
    from zjournal.snapshots.index import Index
    from zjournal.snapshots.plan import Deletion, Plan, Rates

Name = Annotated[
    str,
    typer.Argument(metavar="ID", help="Id of a response, or of a session for all of its snapshots; or its beginning."),
]
Deep = Annotated[bool, typer.Option("--deep", help="Read and check all bytes, not only headers and sizes.")]


@options.with_config("data_dir")
def list_snapshots(config: Config, as_json: options.AsJson = False) -> None:
    """List all states that can be restored from disk; what was used last comes first.

    `saves` is how long it would take to compute the state again: what the disk is there for.
    """
    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    with Reader.open(config.data_dir) as reader:
        index, rows = snapshots.load(reader)
        others = snapshots.foreign(reader, rows.values())
        rates = snapshots.rates(reader)
    ordered = sorted(rows.values(), key=lambda row: (_used_us(index, row), row.made_seq), reverse=True)
    told = [_snapshot_json(index, row, row.space in others, rates) for row in ordered]
    if as_json:
        _print_json({"bytes": index.file_bytes, "chunks": len(index.chunks), "snapshots": told})
        return
    from zjournal.cli import view

    columns = ("response", "session", "tokens", "size", "alone", "saves", "used", "notes")
    lines = [
        (
            one["response"],
            one["session"],
            one["tokens"],
            about_size(one["bytes"]),
            about_size(one["own_bytes"]),
            f"{one['recompute_s']:.1f} s",
            _since(one["used"]),
            _notes(one),
        )
        for one in told
    ]
    view.table(columns, lines, numbers=("tokens", "size", "alone", "saves", "used"))
    typer.echo(
        f"{_count(len(told), 'snapshot')}, {_count(len(index.chunks), 'chunk')}, {about_size(index.file_bytes)}; "
        "`alone` is what no other snapshot shares"
    )


@options.with_config("data_dir")
def show_snapshot(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Show a snapshot and the chunks that it needs; for a session, all of its snapshots."""
    from zjournal.journal import snapshots as journaled
    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    with Reader.open(config.data_dir) as reader:
        session, found = _find(reader, name)
        index, rows = snapshots.load(reader)
        others = snapshots.foreign(reader, rows.values())
        rates = snapshots.rates(reader)
        found = [rows[row.response] for row in found if row.response in rows]  # as they are now, beside a server
        paths = [journaled.path(reader, row.end) for row in found]
    if not found:
        raise NotFound(f"the snapshots of {name} have gone meanwhile")
    told = [
        {
            **_snapshot_json(index, row, row.space in others, rates),
            "namespace": row.namespace,
            "chunks": _chunks_json(path),
        }
        for row, path in zip(found, paths, strict=True)
    ]
    if as_json:
        _print_json({"session": session, "snapshots": told} if session else told[0])
        return
    for one in told:
        _tell_snapshot(one)


def _chunks_json(path: list[ChunkRow]) -> list[dict[str, Any]]:
    """The chunks of a snapshot, the first one first."""
    start = 0
    told: list[dict[str, Any]] = []
    for one in path:
        told.append(
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
    return told


def _tell_snapshot(told: dict[str, Any]) -> None:
    from zjournal.cli import view

    size = f"{about_size(told['bytes'])}, {told['recompute_s']:.1f} s to compute again"
    typer.echo(f"{told['response']} of session {told['session']}: {told['tokens']} tokens, {size}")
    notes = _notes(told)
    typer.echo(f"namespace {told['namespace']}; written {told['written']}" + (f"; {notes}" if notes else ""))
    lines = [
        (
            one["start"],
            one["tokens"],
            about_size(one["bytes"]),
            one["hash"][:16],
            one["used"],
            one["restores"],
            "bad" if one["bad"] else "",
        )
        for one in told["chunks"]
    ]
    columns = ("token", "tokens", "size", "hash", "last used", "restores", "")
    view.table(columns, lines, numbers=("token", "tokens", "size", "restores"))


@options.with_config("data_dir", "snapshot_limit")
def gc(
    config: Config,
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help="Give up all that this session or response alone needs.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="SIZE", help="Most bytes that stay; else the snapshot limit.")
    ] = None,
    yes: Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Give up KV on disk that is worth least, until the rest fits. Shows the plan and what each deletion costs first.

    What is worth nothing goes in any case; with an ID, what it alone needs, and nothing else. Pinned snapshots, and
    those of pinned sessions, stay.
    """
    import time

    from zjournal.journal.reader import Reader
    from zjournal.sessions import snapshots

    if name is not None and limit is not None:
        raise typer.BadParameter("give either an ID or --limit: all of what is named goes")
    most = config.snapshot_limit if limit is None else _parsed("--limit", parse_size, limit)
    aside = snapshots.aside_bytes(config.data_dir)
    with Reader.open(config.data_dir) as reader:
        if name is None:
            plan, index, _ = snapshots.plan_collection(reader, most, time.time_ns() // 1000, aside)
        else:
            responses = [row.response for row in _find(reader, name)[1]]
            plan, index = snapshots.plan_removal(reader, responses)
    if not as_json:
        _tell_plan(plan, index.file_bytes, aside, most, named=name is not None)
    done = _collect(config, plan) if yes else None
    if as_json:
        _print_json({**_plan_json(plan, index.file_bytes, aside, most), "collected": _collected_json(done)})
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
    """Pin a snapshot, or all that a session has: neither the limit nor gc takes it. It still goes with its turn."""
    _pin(config, name, True, as_json)


@options.with_config("data_dir")
def unpin(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Take the pin of a snapshot back, or those of a session's snapshots."""
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
        name, found = _find(reader, name)
        session = reader.session(name) if name else None
    for row in found:
        admin.perform(config, "snapshots.pin", PinSnapshot(row.response, pinned), Nothing)
    responses = [row.response for row in found]
    if as_json:
        _print_json({"session": name, "responses": responses, "pinned": pinned} if name else _pinned(found[0], pinned))
        return
    state = "pinned" if pinned else "not pinned"
    if session is None:
        typer.echo(f"the snapshot of {responses[0]} is {state}")
        return
    typer.echo(f"{_count(len(found), 'snapshot')} of session {name}: {state}")
    if session.pinned and not pinned:
        typer.echo(f"the session itself is pinned, which keeps them; `zj sessions unpin {name}` takes that back")


def _pinned(row: SnapshotRow, pinned: bool) -> dict[str, Any]:
    return {"response": row.response, "pinned": pinned}


def _find(reader: Reader, name: str) -> tuple[str, list[SnapshotRow]]:
    """The session that is meant and all of its snapshots, or "" and the snapshot of one response.

    The beginning of an id is enough where only one has it. Raises NotFound.
    """
    from zjournal.journal import snapshots

    exact = snapshots.snapshot(reader, name)
    if exact is not None:
        return "", [exact]
    session = reader.session(name)
    rows = [] if session or not name else snapshots.snapshots_named(reader, name, NAMED_MAX)
    sessions = [session] if session else reader.sessions_named(name, NAMED_MAX) if name else []
    ids = [*(row.response for row in rows), *(one.session for one in sessions)]
    if len(ids) > 1:
        raise NotFound(f"{name!r} is the beginning of several ids: {', '.join(ids[:NAMED_MAX])}")
    if rows:
        return "", rows
    found = snapshots.of_session(reader, sessions[0].session) if sessions else []
    if not found:
        raise NotFound(f"no session or response whose id is or begins with {name!r} has a snapshot in {reader.path}")
    return sessions[0].session, found


def _used_us(index: Index, row: SnapshotRow) -> int:
    """When it was written or read back last."""
    return max(row.made_us, index.snapshots[row.response].chunk.used_us)


def _since(used: str) -> str:
    """How long ago that moment was, in one unit."""
    from datetime import UTC, datetime

    seconds = max((datetime.now(UTC) - datetime.fromisoformat(used)).total_seconds(), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def _snapshot_json(index: Index, row: SnapshotRow, foreign: bool, rates: Rates) -> dict[str, Any]:
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
        "recompute_s": round(rates.recompute_s(0, row.tokens), 3),
        "written": _moment(row.made_us),
        "used": _moment(_used_us(index, row)),
        "restores": one.chunk.uses,
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
        Why.ASKED: "asked for",
    }[deletion.why]


def _tell_plan(plan: Plan, held: int, aside: int, limit: int, *, named: bool) -> None:
    from zjournal.cli import view

    if plan.deletions:
        rows = [
            (
                one.hash.hex()[:16],
                f"{one.start} to {one.start + one.tokens}",
                about_size(one.file_bytes),
                f"{one.recompute_s:.2f}",
                _why(one),
                ", ".join(one.snapshots),
            )
            for one in plan.deletions
        ]
        columns = ("chunk", "tokens", "size", "s to compute", "reason", "shortens")
        view.table(columns, rows, numbers=("size", "s to compute"))
    cost = sum(one.recompute_s for one in plan.deletions)
    typer.echo(
        f"{_count(len(plan.deletions), 'chunk')} to delete, {about_size(plan.freed)}, {cost:.1f} s to compute again; "
        f"{about_size(held)} stay"
        + (f", {about_size(aside)} are in quarantine" if aside else "")
        + ("" if named else f", the limit is {show_size(limit)}")
    )
    if not plan.fits and held:
        rest = "what else was asked for" if named else "the rest"
        typer.echo(f"{rest} is pinned and stays; `zj snapshots unpin` takes a pin back")


def _collect(config: Config, plan: Plan) -> Collected:
    from zjournal.sessions.snapshots import Collect, Collected, doomed

    chunks = left = size = 0
    for arguments in (*doomed(plan), *([] if plan.deletions else [Collect(())])):
        done = admin.perform(config, "snapshots.gc", arguments, Collected)
        chunks, left, size = chunks + done.chunks, left + done.left, size + done.file_bytes
    return Collected(chunks=chunks, left=left, file_bytes=size)


def _plan_json(plan: Plan, held: int, aside: int, limit: int) -> dict[str, Any]:
    return {
        "limit": limit,
        "bytes": plan.freed,
        "stays": held,
        "quarantine": aside,
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
