"""The model: what the journal must tell, in plain Python, worked out without any of its code.

It knows the facts that were acknowledged and folds them in the plainest way. `apply` says what a command adds; what
erasure may take is written down here once more, as docs/journal.md has it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zjournal.journal import events
from zjournal.journal.events import AnyEvent, Fact, Recorded
from zjournal.journal.reader import Reader, Tenant

_STATUS = {"stop": "completed", "stop_string": "completed", "length": "incomplete", "cancelled": "cancelled"}


class Append(NamedTuple):
    """`wrong`: the facts name a content that is nowhere, which is a caller's bug and must harm nobody else."""

    facts: tuple[Fact, ...]
    wrong: bool = False


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


Command = Append | Delete | Erase | Sweep | Recover | Rebuild | TenantNamed


class Mismatch(Exception):
    """The journal tells something else than the model."""


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
    erased: bool = False
    held: list[bytes] = field(default_factory=list)  # digests


class Model:
    """What was acknowledged. `contents` and `tenants` may know more than the journal holds."""

    def __init__(self) -> None:
        self.facts: list[Recorded] = []
        self.turns: dict[str, TurnState] = {}
        self.sessions: dict[str, int] = {}  # turns
        self.tenants: dict[str, Tenant] = {}  # by name
        self.contents: dict[bytes, bytes] = {}

    def copy(self) -> Model:
        other = Model()
        other.facts = list(self.facts)
        other.turns = {name: copy.copy(turn) for name, turn in self.turns.items()}
        other.sessions = dict(self.sessions)
        other.tenants = dict(self.tenants)
        other.contents = self.contents  # a growing dictionary by digest: shared
        return other

    # --- what commands add ----------------------------------------------------------------------------

    def apply(self, command: Command, now: int) -> object:
        """Does what the journal must do; returns what it must return. `Sweep` and `TenantNamed` have no prediction."""
        match command:
            case Append(facts, wrong):
                if wrong:
                    return None
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
            case _:
                return None

    def take_erasures(self, found: Sequence[Recorded], now: int, retention_s: int) -> None:
        """Takes what a sweep added, in whatever order it chose. Raises Mismatch when it was not allowed to."""
        due = now - retention_s * 1_000_000
        for fact in found:
            event = fact.event
            if not isinstance(event, events.PayloadErased):
                raise Mismatch(f"a sweep appended {event}")
            if not self._may_go(event.response) or not self._is_due(event.response, due):
                raise Mismatch(f"a sweep erased {event.response}, which was not due")
            self._add(event, now)
            if self.facts[-1] != fact:
                raise Mismatch(f"a sweep appended {fact}, not {self.facts[-1]}")

    def due(self, now: int, retention_s: int) -> list[str]:
        """What a sweep must not leave."""
        at = now - retention_s * 1_000_000
        return [response for response in self.turns if self._may_go(response) and self._is_due(response, at)]

    def _is_due(self, response: str, due: int) -> bool:
        turn = self.turns[response]
        if turn.finished_us is None:
            return False
        return turn.status == "deleted" or (not turn.accepted.stored and turn.finished_us <= due)

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
            self._add(events.PayloadErased(tenant=turn.accepted.tenant, response=response, cause=cause), now)
            response, cause = turn.accepted.parent, "deleted"
            if response not in self.turns or self.turns[response].status != "deleted":
                break
        return erased

    # --- the fold -------------------------------------------------------------------------------------

    def _add(self, event: AnyEvent, now: int, payload: bytes = b"") -> None:
        time = max(now, self.facts[-1].time) if self.facts else max(now, 0)
        self.facts.append(Recorded(len(self.facts) + 1, time, event, payload))
        if isinstance(event, events.SessionOpened):
            self.sessions[event.session] = 0
        elif isinstance(event, events.RequestAccepted):
            self.turns[event.response] = TurnState(event, held=[event.record])
            if event.session in self.sessions:
                self.sessions[event.session] += 1
        elif (response := getattr(event, "response", None)) in self.turns:
            self._add_to_turn(self.turns[response], event, time)

    def _add_to_turn(self, turn: TurnState, event: AnyEvent, time: int) -> None:
        match event:
            case events.PromptRendered():
                turn.prompt = event.count
            case events.CacheMatched():
                turn.cached = event.cached
            case events.TokensSampled():
                turn.output += event.count
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

    # --- what the journal must tell -------------------------------------------------------------------

    def compare(self, reader: Reader) -> None:
        """Raises Mismatch at the first thing that the journal tells differently."""
        _same("facts", all_facts(reader), self.facts)
        for name, turn in self.turns.items():
            row = reader.turn(name)
            if row is None:
                raise Mismatch(f"turn {name} is missing")
            told = (row.session, row.parent, row.tenant, row.stored, row.prompt, row.cached, row.output)
            ended = (row.status, row.reason, row.finished_us, row.erased)
            event = turn.accepted
            right = (event.session, event.parent, event.tenant, event.stored, turn.prompt, turn.cached, turn.output)
            _same(f"turn {name}", told, right)
            _same(f"turn {name}", ended, (turn.status, turn.reason, turn.finished_us, turn.erased))
            for digest in turn.held:
                _same(f"content of {name}", reader.content(event.tenant, digest), self.contents[digest])
        for name, turns in self.sessions.items():
            session = reader.session(name)
            _same(f"session {name}", session and session.turns, turns)
        running = [name for name, turn in self.turns.items() if turn.status == "running"]
        _same("running turns", [turn.response for turn in reader.running()], running)


def all_facts(reader: Reader) -> list[Recorded]:
    """Every fact, page by page."""
    found: list[Recorded] = []
    while page := reader.read(len(found)):
        found += page
    return found


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
