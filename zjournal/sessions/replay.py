"""Replays: what of a session can be asked again, how it is written down, and where two answers part.

A turn is asked again with what the journal has of it: the very token ids of its prompt (tool results are in them), its
sampling settings, its seed, its stop strings. Each turn gets its recorded prompt, whatever the turns before it answer
this time, so a turn that diverges does not spoil those after it. Nothing here talks to an engine: that is api.replays.
docs/replay.md says it for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zjournal.ask import Ask
from zjournal.dialects.prompt import OUTPUT_PATH
from zjournal.errors import BadRequest, JournalFault, NotFound
from zjournal.journal import events
from zjournal.journal.projections import BY_RESPONSE, DELETED, Turn
from zjournal.journal.reader import Reader
from zjournal.journal.transaction import ParentErased, Transaction
from zjournal.link import wire
from zjournal.sessions import follow, sampling
from zjournal.sessions.makers import Maker, Makers
from zjournal.sessions.reading import Decoders
from zjournal.sessions.record import pack
from zjournal.sessions.records import Records
from zjournal.sessions.vocabulary import Vocabulary

CONTEXT_TOKENS = 12  # shown before the first difference
PART_HEX = 16  # of the digests of tokenizer and template, as parts of a fingerprint
UNKNOWN = "unknown"  # a part that was not recorded

EQUAL, DIVERGED, FAILED, SKIPPED = "equal", "diverged", "failed", "skipped"  # what became of a turn


# --- the operation ------------------------------------------------------------------------------------


class Replay(msgspec.Struct, frozen=True):
    """Arguments: a session by its whole id, or one response of it.

    `model`: the path that must be served, "" for whatever is. `settings`: flags that ask for an engine of their own,
    as no engine that runs already can follow them.
    """

    session: str
    response: str = ""
    model: str = ""
    settings: tuple[str, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """A part of the fingerprint: as it was when the turn was recorded, and as it is now."""

    name: str
    recorded: str
    now: str


class Said(msgspec.Struct, frozen=True):
    """One side at the first difference. `token` None: this answer had ended. `text` are the token's bytes."""

    token: int | None
    text: bytes | None = None  # None: the journal has no vocabulary for it
    logprob: float | None = None  # of the model that replayed, before bias, penalties and temperature


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two answers part: output token `position`, the first being 0. `distance`: recorded minus replayed logit."""

    position: int
    before: bytes | None  # what both say just before it
    recorded: Said
    replayed: Said
    distance: float | None = None


class TurnReplayed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one turn. `response` is the recorded one, `replay` the new one, "" where none was asked for."""

    response: str
    replay: str = ""
    status: str  # equal, diverged, failed, skipped
    reason: str = ""  # of the last two, as half a sentence
    recorded: int = 0  # tokens
    equal: int = 0  # tokens from the beginning that are the same
    differs: tuple[str, ...] = ()  # parts of the fingerprint, and `fence` if it is derived otherwise today


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found. `first` and `parts` tell of the first turn that diverged; `parts` else of the first turn."""

    session: str
    replay: str  # the new session; "" if nothing was asked
    model: str
    turns: tuple[TurnReplayed, ...]
    first: Difference | None = None
    parts: tuple[Part, ...] = ()

    def of(self, status: str) -> list[TurnReplayed]:
        """The turns that came out so."""
        return [turn for turn in self.turns if turn.status == status]


# --- what is recorded ---------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded turn, ready to be asked again."""

    turn: Turn
    accepted: events.RequestAccepted
    ids: Sequence[int]  # the prompt
    dropped: int  # as PromptRendered.dropped
    output: Sequence[int]  # what was sampled
    stop: tuple[str, ...]
    logit_bias: tuple[tuple[int, float], ...]
    ask: Ask  # as its protocol reads its body
    maker: Maker | None
    record: bytes  # its record for today's vocabulary; b"" where the recorded one serves


def chosen(reader: Reader, session: str, response: str = "") -> list[tuple[Turn, str]]:
    """The turns of a session, oldest first, or the one of this response; each with why it is not asked again, or "".

    Raises NotFound: unknown, or the content of a turn is gone; BadRequest where none is left to ask.
    """
    if reader.session(session) is None:
        raise NotFound(f"there is no session {session}")
    turns = [turn for turn in reader.turns(session) if response in ("", turn.response)]
    if not turns:
        raise NotFound(f"there is no response {response} in session {session}")
    for turn in turns:
        if turn.erased or turn.status == DELETED:
            done = "was erased" if turn.erased else "was deleted"
            others = "" if response else "; name one of the others with --turn"
            raise NotFound(f"the content of {turn.response} {done}, so it cannot be asked again{others}")
    found = [(turn, _why_not(turn)) for turn in turns]
    if all(reason for _, reason in found):
        raise BadRequest(f"nothing can be asked again in {response or session}: no turn has an answer to compare with")
    return found


def _why_not(turn: Turn) -> str:
    if turn.finished_us is None:
        return "it is still running"
    return "" if turn.output else "nothing was sampled for it"


class Recordings:
    """Reads turns of one journal as they are to be asked again. For one thread at a time."""

    def __init__(self, reader: Reader, vocabulary: bytes, words: Vocabulary, decoders: Decoders) -> None:
        """`vocabulary` is the digest of today's, `words` what it holds."""
        self._decoders = decoders
        self._reader = reader
        self._makers = Makers(reader)
        self._records = Records(reader, self._makers)
        self._vocabulary = vocabulary
        self._words = words

    def asked(self, turn: Turn) -> Asked:
        """A turn with its prompt and answer. Raises JournalFault: erased meanwhile, or damaged; BadRequest."""
        accepted = self._records.accepted(turn)
        ids, spans = self._records.prompt(turn)
        highest = max(ids)
        if highest >= len(self._words):
            known = len(self._words)
            raise BadRequest(f"its prompt holds token {highest}, and the model that is served has {known} tokens")
        facts = self._reader.read_response(turn.response)
        output = follow.recorded_tail(facts).ids
        if len(output) != turn.output:
            raise JournalFault(f"{self._reader.path}: {turn.response} has {len(output)} tokens of {turn.output}")
        body = self._records.body(turn)
        request = self._decoders[accepted.protocol](body)
        stop = request.stop
        bias = sampling.logit_bias(body) if accepted.logit_bias else ()
        if (len(stop), len(bias)) != (accepted.stop, accepted.logit_bias):
            raise JournalFault(
                f"{self._reader.path}: the body of {turn.response} has not the settings it was asked with"
            )
        maker = self._makers.of(turn)
        record = b""
        if maker is None or maker.vocabulary != self._vocabulary:  # a record is read with its turn's own vocabulary
            named = {span.path.removeprefix(OUTPUT_PATH) for span in spans if span.path.startswith(OUTPUT_PATH)}
            outputs = {name: follow.recorded_tail(self._reader.read_response(name)).ids for name in named}
            record = pack(body, ids, spans, self._words.decode, lambda name: outputs.get(name, ()))
        rendered = [fact.event for fact in facts if isinstance(fact.event, events.PromptRendered)]
        return Asked(
            turn=turn,
            accepted=accepted,
            ids=ids,
            dropped=rendered[0].dropped if rendered else 0,
            output=output,
            stop=stop,
            logit_bias=bias,
            ask=request,
            maker=maker,
            record=record,
        )

    def words_of(self, turn: Turn) -> Vocabulary | None:
        """What the tokens of a recorded turn stand for, if the journal says so."""
        return self._records.vocabulary(turn)


# --- how it is written down ---------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one turn of a replay goes. `opening`: it is the first one, and opens the new session."""

    response: str
    session: str
    namespace: str
    salt: str  # of the replay, which narrows the namespace
    created: int  # Unix seconds
    opening: bool
    only: str = ""


def accepted_again(asked: Asked, place: Place, record: bytes, fence: bytes) -> events.RequestAccepted:
    """The acceptance of a turn of a replay. `record` names its record, `fence` is the digest of its fence.

    It continues what the recorded turn continued, whose answers are in its prompt: so these stay as long as it does. It
    has no history digest: no client's conversation shall be taken for a continuation of a replay. The salt keeps it
    from the KV of what it is compared with.
    """
    return msgspec.structs.replace(
        asked.accepted,
        response=place.response,
        session=place.session,
        namespace=place.namespace,
        salt=place.salt,
        stream=False,
        created=place.created,
        record=record,
        history=b"",
        item_secret=b"",
        choice=0,
        first="",
        fence=fence,
        max_tokens=len(asked.output),
    )


def write(tx: Transaction, asked: Asked, place: Place, accepted: events.RequestAccepted) -> None:
    """For Journal.run: the facts that accept a turn of a replay. Raises NotFound if the recorded one went meanwhile."""
    source = asked.turn
    query = f"SELECT erased, status FROM turn WHERE {BY_RESPONSE}"
    row = tx.db.execute(query, (source.response, source.response)).fetchone()
    if row is None or row[0] or row[1] == DELETED:
        raise NotFound(f"{source.response} was deleted while it was replayed")
    facts = []
    if place.opening:
        tenant = accepted.tenant
        told = events.SessionReplayed(tenant=tenant, session=place.session, source=source.session, only=place.only)
        facts = [events.Fact(events.SessionOpened(tenant=tenant, session=place.session)), events.Fact(told)]
    rendered = events.PromptRendered(
        tenant=accepted.tenant, response=place.response, count=len(asked.ids), dropped=asked.dropped
    )
    base = asked.accepted.record if asked.record else b""
    facts.append(events.Fact(accepted, contents=(asked.record,) if asked.record else (), base=base))
    try:
        tx.append([*facts, events.Fact(rendered)])
    except ParentErased as gone:
        raise NotFound(f"{gone}, which it continues, was deleted while it was replayed") from None


# --- where two answers part ---------------------------------------------------------------------------


def equal_tokens(recorded: Sequence[int], replayed: Sequence[int]) -> int:
    """How many tokens are the same from the beginning on."""
    pairs = enumerate(zip(recorded, replayed, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(recorded), len(replayed)))


def difference(
    recorded: Sequence[int], replayed: Sequence[int], then: Vocabulary | None, now: Vocabulary
) -> Difference | None:
    """Where two answers part, without logprobs; None where they are the same. `then` and `now` spell their tokens."""
    at = equal_tokens(recorded, replayed)
    if at == len(recorded) == len(replayed):
        return None
    start = max(at - CONTEXT_TOKENS, 0)
    return Difference(
        position=at,
        before=None if then is None else then.decode(recorded[start:at]),
        recorded=_said(recorded, at, then),
        replayed=_said(replayed, at, now),
    )


def _said(ids: Sequence[int], at: int, words: Vocabulary | None) -> Said:
    if at >= len(ids):
        return Said(None)
    known = words is not None and ids[at] < len(words)
    return Said(ids[at], words.token(ids[at]) if known and words is not None else None)


def measured(found: Difference, logprobs: Mapping[int, float]) -> Difference:
    """A difference with the logprobs of its two tokens, as far as they are known."""

    def told(said: Said) -> Said:
        return said if said.token is None else msgspec.structs.replace(said, logprob=logprobs.get(said.token))

    recorded, replayed = told(found.recorded), told(found.replayed)
    distance = None
    if recorded.logprob is not None and replayed.logprob is not None:
        distance = recorded.logprob - replayed.logprob
    return msgspec.structs.replace(found, recorded=recorded, replayed=replayed, distance=distance)


# --- what it was made with ----------------------------------------------------------------------------


def parts_now(ready: wire.Ready, vocabulary: bytes, template: bytes) -> dict[str, str]:
    """The parts of today's fingerprint; `vocabulary` and `template` are digests."""
    return {**ready.parts, "tokenizer": _short(vocabulary), "template": _short(template)}


def parts_of(maker: Maker) -> dict[str, str]:
    """The parts of the fingerprint that an engine told at its start, tokenizer and template with them."""
    return {**dict(maker.parts), "tokenizer": _short(maker.vocabulary), "template": _short(maker.template)}


def parts_that_differ(maker: Maker | None, now: Mapping[str, str], fingerprint: str) -> tuple[Part, ...]:
    """The parts in which the engine that made a turn is another one than today's, whose `fingerprint` is given.

    A fingerprint can differ where no part does: then it is named itself.
    """
    if maker is None:
        return (Part("fingerprint", UNKNOWN, fingerprint[:PART_HEX]),)
    then = parts_of(maker)
    if not maker.parts:
        then |= dict.fromkeys(now.keys() - then.keys(), UNKNOWN)
    names = sorted(then.keys() | now.keys())
    known = [Part(name, then.get(name, UNKNOWN), now.get(name, UNKNOWN)) for name in names]
    found = tuple(part for part in known if part.recorded != part.now)
    if maker.fingerprint == fingerprint:  # then parts that were not recorded are the same
        return tuple(part for part in found if UNKNOWN not in (part.recorded, part.now))
    return found or (Part("fingerprint", maker.fingerprint[:PART_HEX], fingerprint[:PART_HEX]),)


def fence_part(recorded: bytes, now: bytes) -> tuple[Part, ...]:
    """The fence, if what is derived from the same body today is another one; both by the recorded turn's secret."""
    return () if recorded == now else (Part("fence", _short(recorded), _short(now)),)


def _short(digest: bytes) -> str:
    return digest.hex()[:PART_HEX] if digest else UNKNOWN
