"""The model: what the journal must tell, in plain Python, worked out without any of its code.

It knows the facts that were acknowledged and folds them in the plainest way. `apply` says what a command adds; what
erasure may take is written down here once more, as docs/journal.md has it.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.sim.kept import Kept, Mismatch
from zjournal.journal import events
from zjournal.journal.events import AnyEvent, Fact, Recorded
from zjournal.journal.reader import Reader, Tenant
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

_STATUS = {"stop": "completed", "stop_string": "completed", "length": "incomplete", "cancelled": "cancelled"}


class Request(NamedTuple):
    """What a turn's record must give back."""

    response: str
    body: bytes
    ids: tuple[int, ...]


class Append(NamedTuple):
    """`wrong`: the facts name a content that is nowhere, which is a caller's bug and must harm nobody else."""

    facts: tuple[Fact, ...]
    wrong: bool = False
    request: Request | None = None


class Delete(NamedTuple):
    tenant: str
    response: str


class Erase(NamedTuple):
    response: str
    cause: str


class Sweep(NamedTuple):
    retention_s: int


class Recover(NamedTuple):
    pass


class Rebuild(NamedTuple):
    pass


class TenantNamed(NamedTuple):
    name: str


class Seal(NamedTuple):
    """Packs the oldest facts, at most `limit`."""

    limit: int


class Compact(NamedTuple):
    pass


class Prune(NamedTuple):
    """Removes a session that looked as if `last_seq` was its last fact: hidden in one commit, erased in others."""

    session: str
    last_seq: int


class EraseHidden(NamedTuple):
    """The second half of a prune: what of the session can go."""

    session: str


class Export(NamedTuple):
    """Reads a session's file. Changes nothing."""

    session: str


class Pin(NamedTuple):
    """Pins a snapshot that is there, or takes the pin back."""

    response: str
    pinned: bool


class Collect(NamedTuple):
    """Gives chunks up by hand."""

    space: bytes
    hashes: tuple[bytes, ...]


Command = (
    Append | Delete | Erase | Sweep | Recover | Rebuild | TenantNamed | Seal | Compact | Prune | Export | Pin | Collect
)


@dataclass
class SessionState:
    """One session as the facts say."""

    tenant: str
    last_seq: int
    turns: int = 0  # that are not gone
    deleted: bool = False

    @property
    def gone(self) -> bool:
        """Deleted, and all that was in it erased: but for its facts it is as if it had never been."""
        return self.deleted and not self.turns


@dataclass
class TurnState:
    """One turn as the facts say."""

    accepted: events.RequestAccepted
    prompt: int = 0
    cached: int = 0
    output: int = 0
    status: str = "running"
    reason: str = ""
    finished_us: int | None = None
    sampled: tuple[int, ...] = ()  # token ids
    erased: bool = False
    held: list[bytes] = field(default_factory=list)  # digests

    @property
    def gone(self) -> bool:
        """Deleted and erased: but for its facts it is as if it had never been."""
        return self.status == "deleted" and self.erased


class Model:
    """What was acknowledged. `contents` and `tenants` may know more than the journal holds."""

    def __init__(self) -> None:
        self.facts: list[Recorded] = []
        self.turns: dict[str, TurnState] = {}
        self.sessions: dict[str, SessionState] = {}
        self.tenants: dict[str, Tenant] = {}  # by name
        self.contents: dict[bytes, bytes] = {}
        self.requests: dict[str, Request] = {}
        self.kept = Kept()
        self.states: dict[str, tuple[int, ...]] = {}  # tokens of what the engine was asked, by response

    def copy(self) -> Model:
        other = Model()
        other.facts = list(self.facts)
        other.turns = {name: copy.copy(turn) for name, turn in self.turns.items()}
        other.sessions = {name: copy.copy(session) for name, session in self.sessions.items()}
        other.tenants = dict(self.tenants)
        other.contents = self.contents  # a growing dictionary by digest: shared
        other.requests = self.requests  # likewise
        other.states = self.states
        other.kept = self.kept.copy()
        return other

    # --- what commands add ----------------------------------------------------------------------------

    def apply(self, command: Command | EraseHidden, now: int) -> object:
        """Does what the journal must do; returns what it must return. `Sweep` and `TenantNamed` have no prediction."""
        match command:
            case Append(facts, wrong, request):
                if wrong or self.orphaned(command):
                    return None
                if request is not None:
                    self.requests[request.response] = request
                for fact in facts:
                    self.contents.update(_named(fact))
                    self._add(fact.event, now, fact.payload)
                return len(self.facts)
            case Delete(tenant, response):
                turn = self.turns.get(response)
                if turn is None or turn.accepted.tenant != tenant or turn.status == "deleted":
                    return False
                if not turn.accepted.stored:
                    return False
                self._add(events.ResponseDeleted(tenant=tenant, response=response), now)
                self._erase_upwards(response, "deleted", now)
                return True
            case Erase(response, cause):
                return tuple(self._erase_upwards(response, cause, now))
            case Recover():
                return self._recover(now)
            case Prune(session):
                return None if self.refuses(command) else self._hide(session, now)
            case EraseHidden(session):
                return self._erase_hidden(session, now)
            case Pin(response, pinned):
                if self.kept.snapshots[response].pinned != pinned:
                    kind = events.SnapshotPinned if pinned else events.SnapshotUnpinned
                    tenant = self.turns[response].accepted.tenant
                    self._add(kind(tenant=tenant, response=response), now)
                return None
            case Collect(space, hashes):
                gone = self.kept.collected(space, hashes)
                self._give_up(space, gone, "gc", now)
                return len(gone)
            case _:
                return None

    def orphaned(self, command: Append) -> bool:
        """Whether what it continues is not there, such as when the disk refused that: then it is refused as well."""
        requests = [fact.event for fact in command.facts if isinstance(fact.event, events.RequestAccepted)]
        return any(event.parent and event.parent not in self.turns for event in requests)

    def take_erasures(self, found: Sequence[Recorded], now: int, retention_s: int) -> None:
        """Takes what a sweep added, in whatever order it chose. Raises Mismatch when it was not allowed to."""
        due = _bounds(now, retention_s)
        at = 0
        while at < len(found):
            event = found[at].event
            if not isinstance(event, events.PayloadErased):
                raise Mismatch(f"a sweep appended {event}")
            if not self._may_go(event.response) or not self._is_due(event.response, due):
                raise Mismatch(f"a sweep erased {event.response}, which was not due")
            before = len(self.facts)
            self._erase(event.response, event.cause, now)
            at = self._taken("a sweep", before, found, at)

    def take_tier(self, found: Sequence[Recorded], now: int, damaged: Collection[bytes]) -> None:
        """Takes what the engine told the journal. Raises Mismatch when it was not allowed to.

        `damaged`: chunks whose files were tampered with.
        """
        at = 0
        while at < len(found):
            event, before = found[at].event, len(self.facts)
            if isinstance(event, events.CacheBackedUp):
                self._back_up(event, found[at].payload, now)
            else:
                self.kept.allow(event, damaged)
                self._add(event, now)
            at = self._taken("the engine", before, found, at)

    def _taken(self, who: str, before: int, found: Sequence[Recorded], at: int) -> int:
        """Compares what was added from `before` on with what was found from `at` on; returns where that ends."""
        for mine in self.facts[before:]:
            if at >= len(found) or found[at] != mine:
                raise Mismatch(f"{who} appended {found[at : at + 1]}, not {mine}")
            at += 1
        return at

    def due(self, now: int, retention_s: int) -> list[str]:
        """What a sweep must not leave."""
        at = _bounds(now, retention_s)
        return [response for response in self.turns if self._may_go(response) and self._is_due(response, at)]

    def refuses(self, command: Prune) -> bool:
        """Whether the session cannot be removed: it is gone, was used since, or has a turn that runs."""
        session = self.sessions.get(command.session)
        if session is None or session.deleted or session.last_seq != command.last_seq:
            return True
        return any(turn.finished_us is None for turn in self._of(command.session).values())

    def exported(self, session: str) -> list[Recorded]:
        """The facts that an export of a session holds: of its turns that have ended, and of what these build on."""
        chosen: set[str] = set()
        wanted = [name for name, turn in self._of(session).items() if turn.finished_us is not None]
        while wanted:
            response = wanted.pop()
            turn = self.turns.get(response)
            if turn is None or turn.gone or response in chosen:
                continue
            chosen.add(response)
            if not turn.erased:
                wanted.append(turn.accepted.parent)
        sessions = {self.turns[response].accepted.session for response in chosen} | {session}
        return [
            fact
            for fact in self.facts
            if (fact.event.response in chosen if hasattr(fact.event, "response") else _session_of(fact) in sessions)
        ]

    def _of(self, session: str) -> dict[str, TurnState]:
        return {name: turn for name, turn in self.turns.items() if turn.accepted.session == session}

    def _hide(self, session: str, now: int) -> list[str]:
        for response, turn in self._of(session).items():
            if turn.status != "deleted":
                self._add(events.ResponseDeleted(tenant=turn.accepted.tenant, response=response), now)
        tenant = self.sessions[session].tenant
        self._add(events.SessionDeleted(tenant=tenant, session=session, cause="pruned"), now)
        return [response for response, turn in self._of(session).items() if not turn.erased]

    def _erase_hidden(self, session: str, now: int) -> None:
        """The session's turns and the deleted ones above them, the newest first, as far as nothing is built on them."""
        if session not in self.sessions or not self.sessions[session].deleted:
            return
        wanted = {response for response, turn in self._of(session).items() if not turn.erased}
        for response in list(wanted):
            above = self.turns.get(self.turns[response].accepted.parent)
            while above is not None and not above.erased and above.status == "deleted":
                wanted.add(above.accepted.response)
                above = self.turns.get(above.accepted.parent)
        for response in [name for name in reversed(self.turns) if name in wanted]:
            if self._may_go(response):
                self._erase(response, "deleted", now)

    def _is_due(self, response: str, due: tuple[int, int]) -> bool:
        turn = self.turns[response]
        if turn.finished_us is None:
            return False
        return turn.status == "deleted" or (not turn.accepted.stored and not due[0] < turn.finished_us <= due[1])

    def _recover(self, now: int) -> list[str]:
        left = [name for name, turn in self.turns.items() if turn.finished_us is None]
        for name in left:
            tenant = self.turns[name].accepted.tenant
            message = "The server was stopped while this response was running."
            failed = events.ResponseFailed(tenant=tenant, response=name, code="server_error", message=message)
            self._add(failed, now)
        return left

    def _may_go(self, response: str) -> bool:
        turn = self.turns.get(response)
        if turn is None or turn.erased or turn.finished_us is None:
            return False
        return not any(child.accepted.parent == response and not child.erased for child in self.turns.values())

    def _erase_upwards(self, response: str, cause: str, now: int) -> list[str]:
        erased = []
        while self._may_go(response):
            turn = self.turns[response]
            erased.append(response)
            self._erase(response, cause, now)
            response, cause = turn.accepted.parent, "deleted"
            if response not in self.turns or self.turns[response].status != "deleted":
                break
        return erased

    def _erase(self, response: str, cause: str, now: int) -> None:
        snapshot = self.kept.snapshots.get(response)
        tenant = self.turns[response].accepted.tenant
        self._add(events.PayloadErased(tenant=tenant, response=response, cause=cause), now)
        if snapshot is not None:
            self._give_up(snapshot.space, self.kept.released(snapshot.end), "deleted", now)

    # --- what is on disk ------------------------------------------------------------------------------

    def _back_up(self, event: events.CacheBackedUp, payload: bytes | None, now: int) -> None:
        turn = self.turns.get(event.response)
        if turn is None or turn.erased:
            raise Mismatch(f"{event.response} was backed up, and it is not there any more")
        self.kept.check_backed_up(event, self.states[event.response])
        before = self.kept.snapshots.get(event.response)
        self._add(event, now, payload or b"")
        if before is not None and before.end != event.end:
            self._give_up(before.space, self.kept.released(before.end), "replaced", now)

    def _give_up(self, space: bytes, gone: Sequence[bytes], cause: str, now: int) -> None:
        if gone:
            self._add(self.kept.purged(space, gone, cause), now)

    # --- the fold -------------------------------------------------------------------------------------

    def _add(self, event: AnyEvent, now: int, payload: bytes = b"") -> None:
        time = max(now, self.facts[-1].time) if self.facts else max(now, 0)
        self.facts.append(Recorded(len(self.facts) + 1, time, event, payload))
        self.kept.add(event)
        if isinstance(event, events.SessionOpened):
            self.sessions[event.session] = SessionState(event.tenant, len(self.facts))
        elif isinstance(event, events.SessionDeleted):
            self.sessions[event.session].deleted = True
        elif isinstance(event, events.RequestAccepted):
            self.turns[event.response] = TurnState(event, held=[event.record])
            if event.session in self.sessions:
                self.sessions[event.session].turns += 1
                self.sessions[event.session].last_seq = len(self.facts)
        elif (response := getattr(event, "response", None)) in self.turns:
            self._add_to_turn(self.turns[response], event, time, payload)

    def _add_to_turn(self, turn: TurnState, event: AnyEvent, time: int, payload: bytes) -> None:
        ended = isinstance(event, events.ResponseFinished | events.ResponseFailed)
        gone = turn.gone
        session = self.sessions[turn.accepted.session]
        if ended and not gone:
            session.last_seq = len(self.facts)
        match event:
            case events.PromptRendered():
                turn.prompt = event.count
            case events.CacheMatched():
                turn.cached = event.cached
            case events.TokensSampled():
                turn.output += event.count
                turn.sampled += tuple(array("I", payload))
            case events.ResponseFinished() if turn.finished_us is None:
                turn.finished_us, turn.reason, turn.output = time, event.reason, event.output
                turn.status = "deleted" if turn.status == "deleted" else _STATUS[event.reason]
            case events.ResponseFailed() if turn.finished_us is None:
                turn.finished_us = time
                turn.status = "deleted" if turn.status == "deleted" else "failed"
            case events.ResponseDeleted():
                turn.status = "deleted"
            case events.PayloadErased():
                turn.erased, turn.held = True, []
                for at, fact in enumerate(self.facts):
                    if fact.payload and getattr(fact.event, "response", None) == event.response:
                        self.facts[at] = Recorded(fact.seq, fact.time, fact.event, None)
        session.turns -= turn.gone and not gone

    # --- what the journal must tell -------------------------------------------------------------------

    def compare(self, reader: Reader) -> None:
        """Raises Mismatch at the first thing that the journal tells differently."""
        _same("facts", all_facts(reader), self.facts)
        records = Records(reader, Makers(reader))
        for name, turn in self.turns.items():
            row = reader.turn(name)
            if turn.gone and row is None:
                continue
            if row is None or turn.gone:
                raise Mismatch(f"turn {name} is {'missing' if row is None else 'still there'}")
            told = (row.session, row.parent, row.tenant, row.stored, row.prompt, row.cached, row.output)
            ended = (row.status, row.reason, row.finished_us, row.erased)
            event = turn.accepted
            right = (event.session, event.parent, event.tenant, event.stored, turn.prompt, turn.cached, turn.output)
            _same(f"turn {name}", told, right)
            _same(f"turn {name}", ended, (turn.status, turn.reason, turn.finished_us, turn.erased))
            for digest in turn.held:
                _same(f"content of {name}", reader.content(event.tenant, digest), self.contents[digest])
            if not turn.erased and row.prompt:
                request = self.requests[name]
                _same(f"body of {name}", records.body(row), request.body)
                _same(f"prompt of {name}", tuple(records.prompt(row)[0]), request.ids)
        for name, right_session in self.sessions.items():
            session = reader.session(name)
            found = session and SessionState(session.tenant, session.last_seq, session.turns, session.deleted)
            _same(f"session {name}", found, None if right_session.gone else right_session)
        self.kept.compare(reader)
        running = [name for name, turn in self.turns.items() if turn.status == "running"]
        _same("running turns", [turn.response for turn in reader.running()], running)


def all_facts(reader: Reader) -> list[Recorded]:
    """Every fact, page by page."""
    found: list[Recorded] = []
    while page := reader.read(len(found)):
        found += page
    return found


def _session_of(fact: Recorded) -> str | None:
    return getattr(fact.event, "session", None)


def _named(fact: Fact) -> dict[bytes, bytes]:
    """The contents of a fact by the digests that it gives them: the names stand in its event in the same order."""
    event = fact.event
    if isinstance(event, events.RequestAccepted):
        return dict(zip((event.record,), fact.contents, strict=True))
    return {}


def _same(what: str, told: object, right: object) -> None:
    if told == right:
        return
    if isinstance(told, list) and isinstance(right, list):
        at = next((k for k, pair in enumerate(zip(told, right, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            raise Mismatch(
                f"{what}: {len(told)} of them, not {len(right)}; {(told + right)[min(len(told), len(right)) :][:1]}"
            )
        raise Mismatch(f"{what}: number {at} is {told[at]}, not {right[at]}")
    raise Mismatch(f"{what}: {told!r}, not {right!r}")


def _bounds(now: int, retention_s: int) -> tuple[int, int]:
    """Unstored turns that ended up to the first time are due, and those that ended after the second: a wrong clock."""
    return now - retention_s * 1_000_000, now + retention_s * 1_000_000
