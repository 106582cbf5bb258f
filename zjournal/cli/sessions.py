"""`zj sessions`: what is in the journal, read beside a running server or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import Fault, JournalFault, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zjournal.journal.events import CacheNearlyMet
    from zjournal.journal.projections import Session, Turn
    from zjournal.journal.reader import Reader
    from zjournal.sessions.calls import Called
    from zjournal.sessions.choices import Choice

PAGE = 500
NAMED_MAX = 10  # as many ids as an error for an ambiguous beginning lists
CONTEXT_TOKENS = 12  # of `zj sessions diff`
CONTEXT_MAX = 10_000
DIFF_FAILED = 2  # 1 says that the prompts fork


@options.with_config("data_dir")
def list_sessions(config: Config, as_json: options.AsJson = False) -> None:
    """List all sessions, the most recently used first, with the first words of each."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions import linked
    from zjournal.sessions.first_words import FirstWords

    with Reader.open(config.data_dir) as reader:
        sessions = list(_all_sessions(reader))
        owners = {tenant: _owner(reader, tenant) for tenant in {session.tenant for session in sessions}}
        replays = linked.replays_among(reader, sessions)
        words = FirstWords(reader)
        first = {session.session: words.of(session.session) for session in sessions}
    if words.damaged:
        said = f"the first words of {_count(words.damaged, 'session')} cannot be read; run `zj journal verify`"
        typer.echo(f"zj: {said}", err=True)
    if replays.fault:
        typer.echo(f"zj: not every replay could be told from other sessions: {replays.fault}", err=True)
    if as_json:
        told = [{"replay_of": replays.sources.get(one.session), "first_words": first[one.session]} for one in sessions]
        _print_json([_session_json(one, owners[one.tenant]) | more for one, more in zip(sessions, told, strict=True)])
        return
    from zjournal.cli import view

    rows = [
        (
            *(s.session, s.turns, _moment(s.opened_us), _moment(s.last_us), owners[s.tenant]),
            _notes(s, replays.sources.get(s.session)),
            first[s.session],
        )
        for s in sessions
    ]
    columns = ("session", "turns", "opened", "last used", "owner", "", "first words")
    view.table(columns, rows, numbers=("turns",), cut=True)


@options.with_config("data_dir")
def show_session(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a session or a response, or its beginning.")],
    as_json: options.AsJson = False,
) -> None:
    """Show a session as the tree of its turns, with the tool calls for which no result has come."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions import linked
    from zjournal.sessions.calls import calls_of
    from zjournal.sessions.choices import choices_of
    from zjournal.sessions.nearly import near_miss

    with Reader.open(config.data_dir) as reader:
        session = _find(reader, name)
        owner = _owner(reader, session.tenant)
        turns = [(turn, near_miss(reader, turn)) for turn in reader.turns(session.session)]
        source = linked.source_of(reader, session)
        calls = calls_of(reader, [turn for turn, _ in turns])
        choices = choices_of(reader, [turn for turn, _ in turns])
    if as_json:
        told = [
            _turn_json(turn, near, calls.get(turn.response, []), choices.get(turn.response)) for turn, near in turns
        ]
        _print_json({**_session_json(session, owner), "replay_of": source or None, "turns": told})
        return
    from zjournal.cli import view

    title = f"{session.session}  {_count(len(turns), 'turn')}  opened {_moment(session.opened_us)}  {owner}"
    title += f"  replay of {source}" if source else ""
    title += "  pinned" * session.pinned + "  deleted" * session.deleted
    view.tree(
        title,
        [
            (
                turn.response,
                turn.parent or None,
                _label(turn, near, calls.get(turn.response, []), choices.get(turn.response)),
            )
            for turn, near in turns
        ],
    )


@options.with_config("data_dir")
def diff_sessions(
    config: Config,
    a: Annotated[str, typer.Argument(help="Id of a session (its newest turn) or of a response, or its beginning.")],
    b: Annotated[
        str | None, typer.Argument(help="The one to compare with; without it, A is compared with its parent.")
    ] = None,
    turn: Annotated[
        str | None, typer.Option("--turn", metavar="N[:M]", help="The Nth turn of A's session, the Mth of B's.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=0, max=CONTEXT_MAX, metavar="N", help="Tokens shown beside the fork.")
    ] = CONTEXT_TOKENS,
    redact: Annotated[bool, typer.Option("--redact", help="Print digests in place of texts.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show where two prompts part and why; exit 0 if B only appends to A, 1 if they fork, 2 on an error."""
    from zjournal.cli import diff as telling
    from zjournal.journal.reader import Reader
    from zjournal.sessions.diff import compare
    from zjournal.sessions.nearly import near_miss
    from zjournal.sessions.prompts import Prompts

    try:
        with Reader.open(config.data_dir) as reader:
            turns = _pair(reader, a, b, turn)
            prompts = Prompts(reader)
            found = compare(prompts.of(turns[0]), prompts.of(turns[1]), context)
            near = near_miss(reader, turns[1])
            secret = telling.Secret(reader.secret)
    except Fault as fault:
        typer.echo("zj: " + " ".join(fault.message.split()), err=True)
        raise typer.Exit(DIFF_FAILED) from None
    if as_json:
        _print_json(telling.as_json(found, turns, near, secret, redact))
    else:
        typer.echo("\n".join(telling.lines(found, turns, near, secret, redact)))
    raise typer.Exit(int(found.forked))


def _pair(reader: Reader, a: str, b: str | None, numbers: str | None) -> tuple[Turn, Turn]:
    """The two turns to compare, the earlier one first where only one was named. Raises NotFound or BadRequest."""
    if b is None and numbers is None:
        newer = _find_turn(reader, a)
        return _before(reader, newer), newer
    if numbers is None:
        assert b is not None
        return _find_turn(reader, a), _find_turn(reader, b)
    first, _, second = numbers.partition(":")
    old = _numbered(reader, a, first)
    return old, _numbered(reader, b or a, second or first)


def _numbered(reader: Reader, name: str, number: str) -> Turn:
    """The turn of this number, from 1, in order of acceptance."""
    turns = reader.turns(_find(reader, name).session)
    if not number.isdecimal() or not 1 <= int(number) <= len(turns):
        raise NotFound(f"there is no turn {number!r} in the session of {name!r}: it has {_count(len(turns), 'turn')}")
    return turns[int(number) - 1]


def _find_turn(reader: Reader, name: str) -> Turn:
    """The turn that a name means: a response's own, a session's newest that still has its content."""
    exact = reader.turn(name)
    session = _find(reader, name)
    turns = reader.turns(session.session)
    if exact is not None:
        return exact
    if not session.session.startswith(name):
        named = [turn for turn in turns if turn.response.startswith(name)]
        if len(named) > 1:
            found = ", ".join(turn.response for turn in named[:NAMED_MAX])
            raise NotFound(f"{name!r} is the beginning of several ids: {found}")
        return named[0]
    kept = [turn for turn in turns if not turn.erased]
    if not kept:
        raise NotFound(f"all turns of {session.session} were erased")
    return kept[-1]


def _before(reader: Reader, newer: Turn) -> Turn:
    """What a turn is to be compared with: its parent, else the turn before it in its session.

    Other choices of its own request are no earlier turns.
    """
    from zjournal.sessions.choices import choices_of

    parent = reader.turn(newer.parent) if newer.parent else None
    choice = choices_of(reader, [newer]).get(newer.response)
    asked = reader.turn(choice.first) if choice is not None else None
    before = min(newer.accepted_seq, asked.accepted_seq if asked is not None else newer.accepted_seq)
    earlier = [turn for turn in reader.turns(newer.session) if turn.accepted_seq < before]
    if parent is None and not earlier:
        raise NotFound(f"{newer.response} is the first turn of its session; name what to compare it with")
    return parent or earlier[-1]


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


def _notes(session: Session, source: str | None) -> str:
    """The marks of a session in a list; `source`: what it is a replay of."""
    notes = [f"replay of {source}"] if source else []
    return ", ".join(notes + ["pinned"] * session.pinned)


def _label(turn: Turn, near: CacheNearlyMet | None, calls: Sequence[Called], choice: Choice | None) -> str:
    ttft = "-" if turn.ttft_us is None else f"{turn.ttft_us / 1000:.0f} ms"
    told = (turn.cache_reason, _restored(turn))
    notes = ", ".join(note for note in told if note)
    cached = f"{turn.cached} ({notes})" if notes else f"{turn.cached}"
    numbers = f"prompt {turn.prompt}  cached {cached}  output {turn.output}  TTFT {ttft}"
    if calls:
        numbers += f"  {_called(calls)}"
    marks = [f"choice {choice.index} of {choice.first}"] if choice is not None else []
    marks += [_end(turn)] + ["unstored"] * (not turn.stored) + ["erased"] * turn.erased
    if near is not None:
        marks.append(f"left the snapshot of {near.nearest} at token {near.position} of {near.tokens}")
    return f"{turn.response}  {numbers}  {', '.join(marks)}"


def _called(calls: Sequence[Called]) -> str:
    """How many tool calls there were, and which have no result yet as far as the journal knows."""
    open_calls = [call.call_id for call in calls if not call.answered]
    said = _count(len(calls), "tool call")
    return f"{said} (no result seen: {', '.join(open_calls)})" if open_calls else said


def _restored(turn: Turn) -> str:
    """How many of the cached tokens were not in device memory, and where they were; "" if there were none."""
    tiers = (("ssd", turn.restored - turn.restored_host), ("host memory", turn.restored_host))
    return ", ".join(f"{tokens} from {tier}" for tier, tokens in tiers if tokens)


def _end(turn: Turn) -> str:
    """Why the turn ended, in one word or the words of its error."""
    if turn.code:
        return f"{turn.status}: {turn.message}"
    return turn.reason if turn.reason and turn.status != "deleted" else turn.status


def _owner(reader: Reader, tenant: str) -> str:
    """The name of the key that owns what this tenant has; the id of one that a damaged journal does not know."""
    try:
        return reader.tenant_name(tenant)
    except JournalFault:
        return tenant


def _session_json(session: Session, owner: str) -> dict[str, Any]:
    return {
        "session": session.session,
        "tenant": session.tenant,
        "owner_name": owner,
        "turn_count": session.turns,
        "opened": _moment(session.opened_us),
        "last_used": _moment(session.last_us),
        "pinned": session.pinned,
        "deleted": session.deleted,
    }


def _turn_json(
    turn: Turn, near: CacheNearlyMet | None, calls: Sequence[Called], choice: Choice | None
) -> dict[str, Any]:
    from zjournal.cli.diff import near_json

    return {
        "response": turn.response,
        "parent": turn.parent or None,
        "choice": 0 if choice is None else choice.index,
        "choice_of": None if choice is None else choice.first,
        "protocol": turn.protocol,
        "model": turn.model,
        "created": turn.created,
        "status": turn.status,
        "stop_reason": turn.reason or None,
        "prompt_tokens": turn.prompt,
        "cached_tokens": turn.cached,
        "cached_by_tier": {
            "device": turn.cached - turn.restored,
            "host": turn.restored_host,
            "ssd": turn.restored - turn.restored_host,
        },
        "cache_reason": turn.cache_reason or None,
        "near_miss": None if near is None else near_json(near),
        "output_tokens": turn.output,
        "tool_calls": [{"id": call.call_id, "result_seen": call.answered} for call in calls],
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
