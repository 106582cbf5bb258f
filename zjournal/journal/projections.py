"""The projections: a pure fold of facts into SQL effects, applied in the facts' own transaction.

The rows can be dropped and refolded at any time and come out the same, however the facts were grouped. Sampled
tokens, by far the most frequent fact, are summed per response first, so that a group costs one UPDATE per response.

`turn` and `session` are made here, what is on disk of the KV in `kept`.

A turn that was deleted has a row for as long as its content is needed, and none once that is erased: what stays of it
are its facts. A deleted session goes with the last of its turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, assert_never

import msgspec

from zjournal.journal import kept
from zjournal.journal.events import (
    AdminActed,
    CacheAdmitted,
    CacheBackedUp,
    CacheEvicted,
    CacheMatched,
    CacheNearlyMet,
    CachePurged,
    CacheQuarantined,
    CacheReconciled,
    CacheRestored,
    CacheResumed,
    CacheStopped,
    ConversationChanged,
    EngineCrashed,
    EngineImported,
    EngineStarted,
    EngineStopped,
    LoopMet,
    PayloadErased,
    PromptRendered,
    ReaderCut,
    Recorded,
    ReplayCompared,
    RequestAccepted,
    ResponseDeleted,
    ResponseFailed,
    ResponseFinished,
    ResponseWaited,
    ServerCrashed,
    ServerStarted,
    ServerStopped,
    SessionDeleted,
    SessionImported,
    SessionOpened,
    SessionPinned,
    SessionReplayed,
    SessionUnpinned,
    SnapshotPinned,
    SnapshotUnpinned,
    TokensSampled,
    ToolCalled,
    ToolResultSeen,
)

Effect = tuple[str, tuple[Any, ...]]

RUNNING, COMPLETED, INCOMPLETE = "running", "completed", "incomplete"
CANCELLED, FAILED, DELETED = "cancelled", "failed", "deleted"
_STATUS_OF_REASON = {
    "stop": COMPLETED,
    "stop_string": COMPLETED,
    "length": INCOMPLETE,
    "loop": INCOMPLETE,
    "fence": INCOMPLETE,
    "cancelled": CANCELLED,
}


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `turn`: one request and its response. Times in microseconds, `created` in seconds (Unix)."""

    accepted_seq: int
    response: str
    session: str
    parent: str  # response id, "" for a root
    tenant: str
    protocol: str
    model: str
    stored: bool
    created: int
    accepted_us: int
    finished_us: int | None  # None while it runs
    status: str  # running, completed, incomplete, cancelled, failed, deleted
    reason: str  # as ResponseFinished.reason, "" before
    last_seq: int  # the last fact of its generation
    prompt: int  # tokens
    cached: int
    restored: int  # tokens of these that were read back from disk or host memory
    restored_host: int  # tokens of these that came from host memory
    cache_reason: str  # as CacheMatched.reason, "" before
    output: int
    queue_us: int
    prefill_us: int
    decode_us: int
    ttft_us: int | None  # acceptance to first durable token; once finished, as the engine measured it
    history: bytes  # rolling digest after the output, b"" before
    asked: bytes  # rolling digest after the request
    erased: bool
    code: str
    message: str


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `session`. `turns` counts those that have a row; `last_seq` orders by activity."""

    opened_seq: int
    session: str
    tenant: str
    key: bytes
    opened_us: int
    turns: int
    last_seq: int
    last_us: int
    pinned: bool
    deleted: bool  # its turns are hidden; what of them is not erased yet is needed by turns of other sessions


# Indexes hold the beginning or the end of a name or digest: whole ones would cost more than the rows. So a statement
# asks for both, the part and the whole, and each of these wants its value twice. The plus keeps SQLite from putting
# the value into the part as well, which would leave nothing that the index could answer.
BY_RESPONSE = "substr(response, 1, 25) = substr(?, 1, 25) AND +response = ?"
BY_PARENT = "parent != '' AND substr(parent, -8) = substr(?, -8) AND +parent = ?"
BY_SESSION = "substr(session, 1, 10) = substr(?, 1, 10) AND +session = ?"
INDEXES = (
    "CREATE UNIQUE INDEX turn_response ON turn (substr(response, 1, 25))",
    "CREATE INDEX turn_session ON turn (substr(session, 1, 10))",
    "CREATE INDEX turn_parent ON turn (substr(parent, -8)) WHERE parent != ''",
)

TURN_COLUMNS = ", ".join(Turn.__struct_fields__)
SESSION_COLUMNS = ", ".join(Session.__struct_fields__)
# A turn, its parent, and so on; the walk itself carries no more than it needs.
LINE = (
    "WITH RECURSIVE line(seq, parent) AS ("
    f"SELECT * FROM (SELECT accepted_seq, parent FROM turn WHERE {BY_RESPONSE} LIMIT 1)"
    " UNION ALL SELECT turn.accepted_seq, turn.parent FROM line JOIN turn"
    " ON substr(turn.response, 1, 25) = substr(line.parent, 1, 25) AND +turn.response = line.parent"
    f" WHERE line.parent != '' LIMIT ?) SELECT {', '.join(f'turn.{name}' for name in Turn.__struct_fields__)}"
    " FROM line CROSS JOIN turn ON turn.accepted_seq = line.seq"
)

_OPEN_SESSION = f"INSERT INTO session ({SESSION_COLUMNS}) VALUES (?, ?, ?, ?, ?, 0, ?, ?, 0, 0)"
_COUNT_TURN = "UPDATE session SET turns = turns + 1, last_seq = ?, last_us = ? WHERE session = ?"
_TOUCH_SESSION = (
    f"UPDATE session SET last_seq = ?, last_us = ? WHERE session = (SELECT session FROM turn WHERE {BY_RESPONSE})"
)
_PIN_SESSION = "UPDATE session SET pinned = ? WHERE session = ?"
_DELETE_SESSION = "UPDATE session SET deleted = 1 WHERE session = ?"
_DROP_EMPTY = "DELETE FROM session WHERE session = ? AND deleted = 1 AND turns = 0"
_ACCEPT = (
    "INSERT INTO turn (accepted_seq, response, session, parent, tenant, protocol, model, stored, created,"
    " accepted_us, finished_us, status, reason, last_seq, prompt, cached, restored, restored_host, cache_reason,"
    " output, queue_us, prefill_us, decode_us, ttft_us, history, asked, erased, code, message)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 'running', '', ?, 0, 0, 0, 0, '',"
    " 0, 0, 0, 0, NULL, x'', ?, 0, '', '')"
)
_RENDER = f"UPDATE turn SET prompt = ?, last_seq = ? WHERE {BY_RESPONSE}"
_MATCH = (
    f"UPDATE turn SET cached = ?, restored = ?, restored_host = ?, cache_reason = ?, last_seq = ? WHERE {BY_RESPONSE}"
)
_SAMPLE = (
    "UPDATE turn SET output = output + ?, last_seq = ?, ttft_us = coalesce(ttft_us, ? - accepted_us)"
    f" WHERE {BY_RESPONSE}"
)
# A deleted turn may still be running: it ends, but stays deleted. The first end counts.
_KEEP_DELETED = "status = CASE status WHEN 'deleted' THEN status ELSE ? END"
_FINISH = (
    f"UPDATE turn SET {_KEEP_DELETED}, finished_us = ?, last_seq = ?, reason = ?, output = ?, queue_us = ?,"
    " prefill_us = ?, decode_us = ?, ttft_us = CASE WHEN ? > 0 THEN ? ELSE ttft_us END, history = ?"
    f" WHERE {BY_RESPONSE} AND finished_us IS NULL"
)
_FAIL = (
    f"UPDATE turn SET {_KEEP_DELETED}, finished_us = ?, last_seq = ?, code = ?, message = ?"
    f" WHERE {BY_RESPONSE} AND finished_us IS NULL"
)
_DELETE = f"UPDATE turn SET status = 'deleted' WHERE {BY_RESPONSE}"
_ERASE = f"UPDATE turn SET erased = 1 WHERE {BY_RESPONSE}"
_GONE = f"{BY_RESPONSE} AND status = '{DELETED}' AND erased = 1"
_ITS_SESSION = f"(SELECT session FROM turn WHERE {_GONE})"
_DROP = (  # in this order: the row of the turn tells the session
    f"UPDATE session SET turns = turns - 1 WHERE session = {_ITS_SESSION}",
    f"DELETE FROM session WHERE session = {_ITS_SESSION} AND deleted = 1 AND turns = 0",
    f"DELETE FROM turn WHERE {_GONE}",
)


def effects(facts: Iterable[Recorded]) -> Iterator[Effect]:
    """The SQL statements that carry `facts`, in journal order, into the projections. Pure."""
    sampled: dict[str, tuple[int, int, int]] = {}  # response -> tokens, last seq, time of the first
    for fact in facts:
        event = fact.event
        if isinstance(event, TokensSampled):
            count, _, first = sampled.get(event.response, (0, 0, fact.time))
            sampled[event.response] = count + event.count, fact.seq, first
            continue
        response = getattr(event, "response", None)
        if response in sampled:
            yield _sample(response, sampled.pop(response))
        yield from _effects_of(fact)
    for response, sums in sampled.items():
        yield _sample(response, sums)


def _sample(response: str, sums: tuple[int, int, int]) -> Effect:
    return _SAMPLE, (*sums, response, response)


def _drop(response: str) -> Iterator[Effect]:
    """A turn that is both deleted and erased goes, in whichever order that came."""
    for sql in _DROP:
        yield sql, (response, response)


def _effects_of(fact: Recorded) -> Iterator[Effect]:
    seq, time, event = fact.seq, fact.time, fact.event
    match event:
        case TokensSampled():
            yield _sample(event.response, (event.count, seq, time))
        case SessionOpened():
            yield _OPEN_SESSION, (seq, event.session, event.tenant, event.key, time, seq, time)
        case SessionPinned():
            yield _PIN_SESSION, (1, event.session)
        case SessionUnpinned():
            yield _PIN_SESSION, (0, event.session)
        case SessionDeleted():
            yield _DELETE_SESSION, (event.session,)
            yield _DROP_EMPTY, (event.session,)
        case RequestAccepted():
            names = (event.response, event.session, event.parent, event.tenant, event.protocol, event.model)
            yield _ACCEPT, (seq, *names, event.stored, event.created, time, seq, event.history)
            yield _COUNT_TURN, (seq, time, event.session)
        case PromptRendered():
            yield _RENDER, (event.count, seq, event.response, event.response)
        case CacheMatched():
            told = (event.cached, event.restored, event.restored_host, event.reason)
            yield _MATCH, (*told, seq, event.response, event.response)
            yield from kept.effects(seq, time, event, None)
        case ResponseFinished():
            status = _STATUS_OF_REASON[event.reason]
            times = (event.queue_us, event.prefill_us, event.decode_us)
            ttft = event.queue_us + event.prefill_us
            end = (status, time, seq, event.reason, event.output, *times, ttft, ttft, event.history)
            yield _FINISH, (*end, event.response, event.response)
            yield _TOUCH_SESSION, (seq, time, event.response, event.response)
        case ResponseFailed():
            yield _FAIL, (FAILED, time, seq, event.code, event.message, event.response, event.response)
            yield _TOUCH_SESSION, (seq, time, event.response, event.response)
        case ResponseDeleted():
            yield _DELETE, (event.response, event.response)
            yield from _drop(event.response)
        case PayloadErased():
            yield _ERASE, (event.response, event.response)
            yield from kept.erased(event.response)
            yield from _drop(event.response)
        case CacheBackedUp() | CachePurged() | CacheQuarantined() | CacheReconciled() | CacheRestored():
            yield from kept.effects(seq, time, event, fact.payload)
        case SnapshotPinned() | SnapshotUnpinned():
            yield from kept.effects(seq, time, event, None)
        case CacheAdmitted() | CacheEvicted() | CacheNearlyMet() | CacheStopped() | CacheResumed():
            pass  # the engine's residency is not a state of a turn
        case ServerStarted() | ServerStopped() | ServerCrashed() | AdminActed():
            pass
        case EngineImported() | SessionImported() | SessionReplayed() | ReplayCompared():
            pass  # what they brought tells itself
        case EngineStarted() | EngineStopped() | EngineCrashed() | ToolCalled() | ToolResultSeen() | LoopMet():
            pass
        case ResponseWaited() | ReaderCut():
            pass  # they say nothing of the answer
        case ConversationChanged():
            pass  # whoever reads one reads its facts
        case _:
            assert_never(event)


def turn_of(row: tuple[Any, ...]) -> Turn:
    """A row of TURN_COLUMNS as a Turn."""
    fields = dict(zip(Turn.__struct_fields__, row, strict=True))
    fields["stored"], fields["erased"] = bool(fields["stored"]), bool(fields["erased"])
    return Turn(**fields)


def session_of(row: tuple[Any, ...]) -> Session:
    """A row of SESSION_COLUMNS as a Session."""
    fields = dict(zip(Session.__struct_fields__, row, strict=True))
    return Session(**{**fields, "pinned": bool(fields["pinned"]), "deleted": bool(fields["deleted"])})
