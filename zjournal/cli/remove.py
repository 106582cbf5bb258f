"""`zj sessions delete`, `prune`, `pin` and `unpin`: shows what would go, and removes it only with --yes."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import admin, options
from zjournal.cli.sessions import _count, _find, _moment, _print_json
from zjournal.config import Config, Reject, parse_duration, parse_size
from zjournal.errors import NotFound

if TYPE_CHECKING:
    from zjournal.journal.reader import Reader
    from zjournal.sessions.operations import Deleted
    from zjournal.sessions.prune import Filters, Plan

PRUNE_BATCH = 200  # sessions in one operation, so that others get their turn between two
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ].*)?")

Name = Annotated[str, typer.Argument(metavar="ID", help="Id of a session, or its beginning.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this, only show what would be done.")]


@options.with_config("data_dir")
def delete(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a session or a response, or its beginning.")],
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Also what continues it: later turns, and branches in other sessions.")
    ] = False,
    yes: Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Delete a session, or one turn of it, for good: its text is erased from all files of the journal."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions.operations import Deleted, DeleteSession, DeleteTurn

    with Reader.open(config.data_dir) as reader:
        session, response, note = _subject(reader, name, cascade)
    deleted = None
    if yes and response:
        deleted = admin.perform(config, "sessions.delete_turn", DeleteTurn(response, cascade), Deleted)
    elif yes:
        deleted = admin.perform(config, "sessions.delete", DeleteSession(session, cascade), Deleted)
    if as_json:
        _print_json({"session": session, "response": response or None, "deleted": _deleted_json(deleted)})
    elif deleted is None:
        typer.echo(f"would delete {note}\nnothing was deleted; add --yes to do it")
    else:
        typer.echo(f"deleted {note}")
        _tell_deleted(deleted)


@options.with_config("data_dir")
def prune(
    config: Config,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="DURATION", help="Last used so long ago, such as 30d.")
    ] = None,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="DATE", help="Last used before this day or moment (ISO 8601, UTC)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Every turn asked for the model by this name.")
    ] = None,
    empty: Annotated[bool, typer.Option("--empty", help="No turn has given a single token.")] = False,
    ids: Annotated[
        list[str] | None, typer.Option("--id", metavar="ID", help="This one; may be given several times.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="Of those, only until the journal holds this much or less."),
    ] = None,
    yes: Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Delete the sessions that all the given filters match, the least recently used first. Shows the plan first.

    Running and pinned sessions are never touched. Without a filter nothing is done.
    """
    import time

    import msgspec

    from zjournal.journal.reader import Reader
    from zjournal.sessions import prune as planner

    filters = planner.Filters(
        before_us=_before(older_than, before, time.time_ns() // 1000),
        model=model,
        empty=empty,
        ids=tuple(ids or ()),
        max_bytes=None if max_bytes is None else _parsed("--max-bytes", parse_size, max_bytes),
    )
    if not filters.any:
        raise typer.BadParameter(
            "prune needs a filter: --older-than, --before, --model, --empty, --id or --max-bytes; see --help"
        )
    with Reader.open(config.data_dir) as reader:
        named = tuple(_find(reader, name).session for name in filters.ids)
        plan = planner.plan(reader, msgspec.structs.replace(filters, ids=named))
    if not as_json:
        _tell_plan(plan, filters)
    deleted = _prune(config, plan) if yes and plan.chosen else None
    if as_json:
        _print_json({**_plan_json(plan), "deleted": _deleted_json(deleted)})
    elif deleted is not None:
        typer.echo(f"deleted {_count(deleted.sessions, 'session')}")
        _tell_deleted(deleted)
    elif plan.chosen:
        typer.echo("nothing was deleted; add --yes to do it")


@options.with_config("data_dir")
def pin(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Pin a session: no prune, cap or delete takes it."""
    _pin(config, name, True, as_json)


@options.with_config("data_dir")
def unpin(config: Config, name: Name, as_json: options.AsJson = False) -> None:
    """Take the pin of a session back."""
    _pin(config, name, False, as_json)


def _pin(config: Config, name: str, pinned: bool, as_json: bool) -> None:
    from zjournal.journal.reader import Reader
    from zjournal.sessions.operations import Nothing, Pin

    with Reader.open(config.data_dir) as reader:
        session = _find(reader, name).session
    admin.perform(config, "sessions.pin", Pin(session, pinned), Nothing)
    if as_json:
        _print_json({"session": session, "pinned": pinned})
    else:
        typer.echo(f"{session} is {'pinned' if pinned else 'not pinned'}")


def _subject(reader: Reader, name: str, cascade: bool) -> tuple[str, str, str]:
    """The session that an id means, the response if it means one turn of it, and both in words. Raises NotFound."""
    session = _find(reader, name)
    turns = reader.turns(session.session)
    if session.deleted:
        raise NotFound(f"{session.session} was deleted before")
    after = " and what continues it" if cascade else ""
    if session.session.startswith(name):
        return session.session, "", f"session {session.session} with {_count(len(turns), 'turn')}{after}"
    named = [turn.response for turn in turns if turn.response == name]
    named = named or [turn.response for turn in turns if turn.response.startswith(name)]
    if len(named) > 1:
        raise NotFound(f"{name!r} is the beginning of several ids: {', '.join(named)}")
    return session.session, named[0], f"turn {named[0]} of session {session.session}{after}"


def _before(older_than: str | None, before: str | None, now_us: int) -> int | None:
    """The earlier of the two moments, microseconds; None if neither is given."""
    moments = []
    if older_than is not None:
        moments.append(now_us - round(_parsed("--older-than", parse_duration, older_than) * 1e6))
    if before is not None:
        moments.append(_moment_us(before))
    return min(moments, default=None)


def _moment_us(text: str) -> int:
    try:
        if not _DATE.fullmatch(text.strip()):
            raise ValueError
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(f"--before: {text!r} is not a date such as 2026-01-31 or 2026-01-31T12:00") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1e6)


def _parsed(flag: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except Reject as reject:
        raise typer.BadParameter(f"{flag}: {text!r} {reject}") from None


def _prune(config: Config, plan: Plan) -> Deleted:
    from zjournal.sessions.operations import Chosen, Deleted, Prune

    done = []
    for at in range(0, len(plan.chosen), PRUNE_BATCH):
        chosen = tuple(Chosen(row.session, row.last_seq) for row in plan.chosen[at : at + PRUNE_BATCH])
        done.append(admin.perform(config, "sessions.prune", Prune(chosen), Deleted))
    return Deleted(
        sessions=sum(one.sessions for one in done),
        turns=sum(one.turns for one in done),
        kept=sum(one.kept for one in done),
        bytes=sum(one.bytes for one in done),
        scrubbed=done[-1].scrubbed,
        left=tuple(left for one in done for left in one.left),
    )


def _tell_plan(plan: Plan, filters: Filters) -> None:
    from zjournal.cli import view

    if not plan.rows:
        typer.echo("no session matches")
        return
    rows = [
        (row.session, row.turns, _moment(row.opened_us), _moment(row.last_us), f"{row.bytes:,}", _action(row))
        for row in plan.rows
    ]
    view.table(("session", "turns", "opened", "last used", "bytes", "action"), rows, numbers=("turns", "bytes"))
    chosen = plan.chosen
    if chosen:
        typer.echo(
            f"{_count(len(chosen), 'session')} to delete, {plan.bytes:,} bytes; "
            f"oldest {_moment(chosen[0].last_us)}, newest {_moment(chosen[-1].last_us)}"
        )
    else:
        typer.echo("no session to delete")
    if filters.max_bytes is not None and plan.held - plan.bytes > filters.max_bytes:
        typer.echo(
            f"the journal would still hold {plan.held - plan.bytes:,} bytes: numbers and digests of facts are kept"
        )


def _action(row: Any) -> str:
    return f"{row.action}: {row.reason}" if row.reason else row.action


def _tell_deleted(deleted: Deleted) -> None:
    typer.echo(f"{deleted.bytes:,} bytes freed; `zj journal compact` gives them back to the disk")
    if deleted.kept:
        typer.echo(f"{_count(deleted.kept, 'turn')} hidden whose text stays: other turns are built on it (--cascade)")
    for left in deleted.left:
        typer.echo(f"left: {left.reason}")
    if not deleted.scrubbed:
        typer.echo("the text goes from journal.db-wal as soon as the reader that holds it lets go")


def _plan_json(plan: Plan) -> dict[str, Any]:
    chosen = plan.chosen
    return {
        "count": len(chosen),
        "bytes": plan.bytes,
        "oldest": _moment(chosen[0].last_us) if chosen else None,
        "newest": _moment(chosen[-1].last_us) if chosen else None,
        "sessions": [
            {
                "session": row.session,
                "turn_count": row.turns,
                "opened": _moment(row.opened_us),
                "last_used": _moment(row.last_us),
                "bytes": row.bytes,
                "action": row.action,
                "reason": row.reason or None,
            }
            for row in plan.rows
        ],
    }


def _deleted_json(deleted: Deleted | None) -> dict[str, Any] | None:
    if deleted is None:
        return None
    return {
        "sessions": deleted.sessions,
        "turns": deleted.turns,
        "kept": deleted.kept,
        "bytes": deleted.bytes,
        "scrubbed": deleted.scrubbed,
        "left": [{"session": left.session, "reason": left.reason} for left in deleted.left],
    }
