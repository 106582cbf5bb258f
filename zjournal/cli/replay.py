"""`zj replay`: asks the requests of a session again, and tells where the answers part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import options
from zjournal.cli.diff import visible
from zjournal.cli.sessions import _count, _find, _find_turn, _print_json
from zjournal.config import SETTINGS, Config
from zjournal.errors import Fault, NotFound

if TYPE_CHECKING:
    from zjournal.journal.reader import Reader
    from zjournal.sessions.replay import Difference, Replay, Replayed, Said, TurnReplayed

DIVERGED, REPLAY_FAILED = 1, 2
# What an engine starts with.
ENGINE = ("weights", "device", "fast", "threads", "context", "rope", "kv_dtype", "kv_memory", "speculation")


@options.with_config("data_dir", "cache_dir", "model", *ENGINE, "log_level")
def replay_session(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="SESSION", help="Id of a session or a response, or its beginning.")],
    turn: Annotated[str | None, typer.Option("--turn", metavar="ID", help="Ask this response's request alone.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask the requests of a session again; exit 0 if all tokens are the same, 1 if an answer differs, 2 on an error."""
    from zjournal.cli import admin
    from zjournal.journal.reader import Reader

    try:
        with Reader.open(config.data_dir) as reader:
            arguments = _arguments(config, reader, name, turn)
        found = admin.replay(config, arguments)
    except Fault as fault:
        typer.echo("zj: " + " ".join(fault.message.split()), err=True)
        raise typer.Exit(REPLAY_FAILED) from None
    if as_json:
        _print_json(as_dict(found))
    else:
        typer.echo("\n".join(lines(found)))
    raise typer.Exit(exit_code(found))


def _arguments(config: Config, reader: Reader, name: str, turn: str | None) -> Replay:
    """What to ask for. Raises NotFound, also for what was deleted, and ModelFault."""
    from zjournal.journal.events import SessionDeleted
    from zjournal.sessions.replay import Replay
    from zjournal.sessions.served import choose

    try:
        session = _find(reader, name).session
    except NotFound:
        for fact in reader.before(reader.head + 1, SessionDeleted):
            if isinstance(fact.event, SessionDeleted) and fact.event.session == name:
                raise NotFound(f"session {name} was deleted and erased, so it cannot be asked again") from None
        raise
    response = _find_turn(reader, turn).response if turn else ""
    # Without a model of the caller's own, whatever the server serves is meant.
    named = config.origins["model"] != "default"
    model = str(choose(config.model, config.cache_dir, config.rope).path) if named else ""
    flags = {f"flag {setting.flag}": setting.flag for setting in SETTINGS if setting.name in ENGINE}
    given = tuple(flags[origin] for name in ENGINE if (origin := config.origins[name]) in flags)
    return Replay(session, response, model, given)


def exit_code(found: Replayed) -> int:
    """0: equal; 1: an answer differs; 2: a turn could not be asked."""
    if found.of("failed"):
        return REPLAY_FAILED
    return DIVERGED if found.of("diverged") else 0


def as_dict(found: Replayed) -> dict[str, Any]:
    """The keys that docs/replay.md promises; all of them are always there."""
    return {
        "verdict": _verdict(found),
        "session": found.session,
        "replay": found.replay or None,
        "model": found.model,
        "turns": [_turn_dict(turn) for turn in found.turns],
        "first": None if found.first is None else _first_dict(found, found.first),
        "fingerprint": [{"part": part.name, "recorded": part.recorded, "now": part.now} for part in found.parts],
    }


def _verdict(found: Replayed) -> str:
    return ("equal", "diverged", "failed")[exit_code(found)]


def _turn_dict(turn: TurnReplayed) -> dict[str, Any]:
    return {
        "response": turn.response,
        "replay": turn.replay or None,
        "status": turn.status,
        "reason": turn.reason or None,
        "recorded_tokens": turn.recorded,
        "equal_tokens": turn.equal,
        "differs": list(turn.differs),
    }


def _first_dict(found: Replayed, first: Difference) -> dict[str, Any]:
    def side(said: Said) -> dict[str, Any]:
        text = None if said.text is None else visible(said.text)
        return {"token": said.token, "text": text, "logprob": said.logprob}

    return {
        "response": found.of("diverged")[0].response,
        "token": first.position,
        "before": None if first.before is None else visible(first.before),
        "recorded": side(first.recorded),
        "replayed": side(first.replayed),
        "logit_distance": first.distance,
    }


def lines(found: Replayed) -> list[str]:
    """A replay for people, one finding a line."""
    told = [f"verdict   {_verdict(found)}: {_summary(found)}"]
    told.append(f"replay    {found.replay or 'nothing was asked'} of {found.session}, on {found.model}")
    told += [f"{turn.status:8}  {_turn_line(turn)}" for turn in found.turns]
    if found.first is not None:
        first = found.first
        told.append(f"first     {found.of('diverged')[0].response}, output token {first.position:,}")
        told.append(f"  both:     {_quoted(first.before)}")
        told.append(f"  recorded: {_said_line(first.recorded)}")
        told.append(f"  replayed: {_said_line(first.replayed)}")
        told.append(f"distance  {_distance(first)}")
    for part in found.parts:
        told.append(f"differs   {part.name}: {part.recorded} when it was recorded, {part.now} now")
    if found.first is not None and not found.parts:
        told.append("differs   no part of the fingerprint: the same model on the same kernels gave other tokens")
    return told


def _summary(found: Replayed) -> str:
    counts = [(len(found.of(status)), status) for status in ("equal", "diverged", "failed", "skipped")]
    return ", ".join(f"{_count(count, 'turn')} {status}" for count, status in counts if count)


def _turn_line(turn: TurnReplayed) -> str:
    if turn.status in ("failed", "skipped"):
        return f"{turn.response}  {turn.reason}"
    share = f"{turn.equal:,} of {turn.recorded:,} tokens the same"
    differs = f"  (other {', '.join(turn.differs)})" if turn.differs else ""
    return f"{turn.response}  {_count(turn.recorded, 'token') if turn.status == 'equal' else share}{differs}"


def _quoted(text: bytes | None) -> str:
    return "unknown" if text is None else '"' + visible(text).replace('"', '\\"') + '"'


def _said_line(said: Said) -> str:
    if said.token is None:
        return "the end"
    logprob = "" if said.logprob is None else f"  logprob {said.logprob:.4f}"
    return f"token {said.token} {_quoted(said.text)}{logprob}"


def _distance(first: Difference) -> str:
    if first.distance is None:
        return "unknown: one of the two had ended, or the engine tells no logprobs"
    return f"{first.distance:+.4f} between the logits of the two, recorded minus replayed, as the model has them now"
