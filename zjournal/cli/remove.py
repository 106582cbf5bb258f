"""`zj sessions delete`, `prune`, `pin` and `unpin`: shows what would go, and removes it only with --yes."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import admin, options
from zjournal.cli.sessions import NAMED_MAX, _count, _find, _moment, _print_json
from zjournal.config import Config, Reject, parse_duration, parse_size
from zjournal.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zjournal.journal.projections import Session, Turn
    from zjournal.journal.reader import Reader
    from zjournal.sessions.linked import Ties
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
        session, response, note, ties = _subject(reader, name, cascade)
    deleted = None
    if yes and response:
        deleted = admin.perform(config, "sessions.delete_turn", DeleteTurn(response, cascade), Deleted)
    elif yes:
        deleted = admin.perform(config, "sessions.delete", DeleteSession(session, cascade), Deleted)
    if as_json:
        told = {"session": session, "response": response or None, **_ties_json(ties)}
        _print_json({**told, "deleted": _deleted_json(deleted)})
    elif deleted is None:
        typer.echo(f"would delete {note}")
        if ties.kept:
            typer.echo(f"{_count(ties.kept, 'turn')} would be hidden whose text stays: {_built(ties)}")
        _tell_replays(ties)
        typer.echo("nothing was deleted; add --yes to do it")
    else:
        typer.echo(f"deleted {note}")
        _tell_deleted(deleted, _built(ties) if ties.continued else "")
        _tell_replays(ties)


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


def _subject(reader: Reader, name: str, cascade: bool) -> tuple[str, str, str, Ties]:
    """The session that an id means, the response if it means one turn of it, both in words, and what is tied to them.

    Raises NotFound, also for what was deleted before, unless `cascade` can take what is still there of it.
    """
    from zjournal.sessions import linked

    session = _find(reader, name)
    turns = reader.turns(session.session)
    whole = session.session.startswith(name)
    named = turns if whole else _named(turns, name)
    ties = linked.ties(reader, named, cascade)
    hidden = _hidden(session, named, whole)
    if hidden and not cascade:
        stays = f"; its text stays, hidden: {_built(ties)}" if ties.kept else ""
        raise NotFound(f"{session.session if whole else named[0].response} was deleted before{stays}")
    count = f"{_count(len(named), 'turn')} that {'is' if len(named) == 1 else 'are'} hidden" if hidden else ""
    note = f"session {session.session} with {count or _count(len(named), 'turn')}"
    if not whole:
        note = f"turn {named[0].response} of session {session.session}{', which is hidden' * hidden}"
    if cascade and ties.continued:
        note += f", and what continues {'it' if len(named) == 1 else 'them'}: {_by_session(ties)}"
    return session.session, "" if whole else named[0].response, note, ties


def _named(turns: Sequence[Turn], name: str) -> list[Turn]:
    """The one turn of a session that an id, or its beginning, means. Raises NotFound if it means several."""
    named = [turn for turn in turns if turn.response == name]
    named = named or [turn for turn in turns if turn.response.startswith(name)]
    if len(named) > 1:
        found = ", ".join(turn.response for turn in named[:NAMED_MAX])
        raise NotFound(f"{name!r} is the beginning of several ids: {found}")
    return named


def _hidden(session: Session, named: Sequence[Turn], whole: bool) -> bool:
    """Whether it was deleted before, and only is there for what is built on it."""
    from zjournal.journal.projections import DELETED

    return session.deleted if whole else named[0].status == DELETED


def _by_session(ties: Ties) -> str:
    """How many turns of which sessions continue it, the first NAMED_MAX sessions by name."""
    first = list(ties.continued.items())[:NAMED_MAX]
    told = [f"{_count(count, 'turn')} of {session}" for session, count in first]
    if rest := len(ties.continued) - len(first):
        turns = sum(ties.continued.values()) - sum(count for _, count in first)
        told.append(f"{_count(turns, 'turn')} of {_count(rest, 'more session')}")
    return ", ".join(told)


def _built(ties: Ties) -> str:
    """Why text stays, and what takes it as well."""
    one = sum(ties.continued.values()) == 1
    return (
        f"{_by_session(ties)} {'is' if one else 'are'} built on it (--cascade deletes {'that' if one else 'those'} too)"
    )


def _tell_replays(ties: Ties) -> None:
    first = ties.replays[:NAMED_MAX]
    for session in first:
        typer.echo(
            f"replay {session} is a session of its own and keeps what its prompts hold; "
            f"`zj sessions delete {session}` deletes it too"
        )
    if len(ties.replays) > len(first):
        typer.echo(f"and {_count(len(ties.replays) - len(first), 'more replay')}; `zj sessions list` names them")
    if ties.fault:
        typer.echo(f"zj: not every replay of it could be looked for: {ties.fault}", err=True)


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


def _tell_deleted(deleted: Deleted, built: str = "") -> None:
    """`built`: what the turns that stay are kept for, where that was looked for."""
    typer.echo(f"{deleted.bytes:,} bytes freed; `zj journal compact` gives them back to the disk")
    if deleted.kept:
        why = built or "other turns are built on it (--cascade)"
        typer.echo(f"{_count(deleted.kept, 'turn')} hidden whose text stays: {why}")
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


def _ties_json(ties: Ties) -> dict[str, Any]:
    continued = [{"session": session, "turn_count": count} for session, count in ties.continued.items()]
    return {"kept": ties.kept, "continued_by": continued, "replays": list(ties.replays)}


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
