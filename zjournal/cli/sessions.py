"""`zj sessions`: what is in the journal, read beside a running server or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zjournal.journal.projections import Session, Turn
    from zjournal.journal.reader import Reader

PAGE = 500
NAMED_MAX = 10  # as many ids as an error for an ambiguous beginning lists


@options.with_config("data_dir")
def list_sessions(config: Config, as_json: options.AsJson = False) -> None:
    """List all sessions, the most recently used first."""
    from zjournal.journal.reader import Reader

    with Reader.open(config.data_dir) as reader:
        sessions = list(_all_sessions(reader))
    if as_json:
        _print_json([_session_json(session) for session in sessions])
        return
    from zjournal.cli import view

    rows = [(s.session, s.turns, _moment(s.opened_us), _moment(s.last_us), s.tenant) for s in sessions]
    view.table(("session", "turns", "opened", "last used", "tenant"), rows, numbers=("turns",))


@options.with_config("data_dir")
def show_session(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a session or a response, or its beginning.")],
    as_json: options.AsJson = False,
) -> None:
    """Show a session as the tree of its turns."""
    from zjournal.journal.reader import Reader

    with Reader.open(config.data_dir) as reader:
        session = _find(reader, name)
        turns = reader.turns(session.session)
    if as_json:
        _print_json({**_session_json(session), "turns": [_turn_json(turn) for turn in turns]})
        return
    from zjournal.cli import view

    title = f"{session.session}  {_count(len(turns), 'turn')}  opened {_moment(session.opened_us)}  {session.tenant}"
    view.tree(title, [(turn.response, turn.parent or None, _label(turn)) for turn in turns])


def _all_sessions(reader: Reader) -> Iterator[Session]:
    before = None
    while page := reader.sessions(PAGE, before):
        yield from page
        before = page[-1].last_seq


def _find(reader: Reader, name: str) -> Session:
    """The session of this id or of this response; the beginning of an id is enough where only one has it.

    Raises NotFound, which lists the candidates of an ambiguous beginning.
    """
    exact = reader.session(name)
    if exact is not None:
        return exact
    turn = reader.turn(name)
    sessions = [] if turn else reader.sessions_named(name, NAMED_MAX)
    turns = [turn] if turn else reader.turns_named(name, NAMED_MAX)
    ids = {session.session for session in sessions} | {turn.session for turn in turns}
    if not name or not ids:
        raise NotFound(f"no session or response in {reader.path} has the id {name!r}")
    if len(ids) > 1:
        found = [session.session for session in sessions] + [turn.response for turn in turns]
        raise NotFound(f"{name!r} is the beginning of several ids: {', '.join(found[:NAMED_MAX])}")
    session = reader.session(ids.pop())
    assert session is not None, "a turn without its session"
    return session


def _label(turn: Turn) -> str:
    ttft = "-" if turn.ttft_us is None else f"{turn.ttft_us / 1000:.0f} ms"
    numbers = f"prompt {turn.prompt}  cached {turn.cached}  output {turn.output}  TTFT {ttft}"
    marks = [_end(turn)] + ["unstored"] * (not turn.stored) + ["erased"] * turn.erased
    return f"{turn.response}  {numbers}  {', '.join(marks)}"


def _end(turn: Turn) -> str:
    """Why the turn ended, in one word or the words of its error."""
    if turn.code:
        return f"{turn.status}: {turn.message}"
    return turn.reason if turn.reason and turn.status != "deleted" else turn.status


def _session_json(session: Session) -> dict[str, Any]:
    return {
        "session": session.session,
        "tenant": session.tenant,
        "turn_count": session.turns,
        "opened": _moment(session.opened_us),
        "last_used": _moment(session.last_us),
    }


def _turn_json(turn: Turn) -> dict[str, Any]:
    return {
        "response": turn.response,
        "parent": turn.parent or None,
        "protocol": turn.protocol,
        "model": turn.model,
        "created": turn.created,
        "status": turn.status,
        "stop_reason": turn.reason or None,
        "prompt_tokens": turn.prompt,
        "cached_tokens": turn.cached,
        "output_tokens": turn.output,
        "ttft_ms": None if turn.ttft_us is None else turn.ttft_us / 1000,
        "queue_ms": turn.queue_us / 1000,
        "prefill_ms": turn.prefill_us / 1000,
        "decode_ms": turn.decode_us / 1000,
        "stored": turn.stored,
        "erased": turn.erased,
        "error": {"code": turn.code, "message": turn.message} if turn.code else None,
    }


def _moment(micros: int) -> str:
    """A time as UTC in ISO 8601, to the second."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(micros // 1_000_000, UTC).isoformat().replace("+00:00", "Z")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
