"""The waiting room: in which order requests are admitted, fair between sessions.

Start-time fair queueing. Each admission charges its session for the prompt tokens it costs to compute, and for the
place it takes. A session's next request starts where its last charge ended, or at the room's own time if that is
later, and the earliest start goes first. So fifty requests of one session let one of another pass after the first
of them, requests of equal sessions go first come first served, and those of one session always do.

Requests that were preempted come before all others, the one that was admitted first at the head.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from zjournal.engine.sequence import Sequence

ADMISSION_TOKENS = 512  # what an admission is charged beside its prompt: a place in the batch is worth about a step


@dataclass(eq=False, slots=True)
class _Session:
    start: int = 0  # of its head
    finish: int = 0  # where its last charge ended
    queue: dict[str, Sequence] = field(default_factory=dict)  # first come first served
    admitted: int = 0  # requests that left the room and have not ended: they remember the charge


class WaitingRoom:
    """The requests of one class that wait. Costs O(log waiting) a request, and memory for sessions that are here."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._heads: list[tuple[int, int, str]] = []  # start, arrival and session of each head, sorted
        self._preempted: list[tuple[int, Sequence]] = []  # by rank
        self._time = 0  # the start of the last admission
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting + len(self._preempted)

    @property
    def new(self) -> int:
        """Requests that were never admitted."""
        return self._waiting

    def push(self, one: Sequence) -> None:
        """Queues a new request."""
        session = self._sessions.setdefault(one.session, _Session())
        assert one.request not in session.queue and one.ticket is None and one.rank < 0
        session.queue[one.request] = one
        self._waiting += 1
        if len(session.queue) == 1:
            self._expose(one.session, session)

    def push_back(self, one: Sequence) -> None:
        """Queues a request that was preempted. Its session stays as it was charged."""
        assert one.ticket is None and one.rank >= 0
        insort(self._preempted, (one.rank, one), key=lambda entry: entry[0])

    def heads(self) -> Iterator[Sequence]:
        """Those that may be admitted next, best first. Take none while iterating."""
        for _, one in self._preempted:
            yield one
        for _, _, key in self._heads:
            yield next(iter(self._sessions[key].queue.values()))

    def take(self, one: Sequence, tokens: int) -> None:
        """Admits a head; `tokens` of its prompt are to be computed."""
        if one.rank >= 0:
            self._drop_preempted(one)
            return
        session = self._sessions[one.session]
        assert next(iter(session.queue)) == one.request, "not the head of its session"
        self._hide(one.session, session)
        del session.queue[one.request]
        self._waiting -= 1
        session.admitted += 1
        self._time = max(self._time, session.start)
        session.finish = max(session.start, session.finish) + ADMISSION_TOKENS + tokens
        if session.queue:
            self._expose(one.session, session)

    def remove(self, one: Sequence) -> None:
        """Gives up a request that waits here."""
        if one.rank >= 0:
            self._drop_preempted(one)
            self.ended(one)
            return
        session = self._sessions[one.session]
        head = next(iter(session.queue)) == one.request
        if head:
            self._hide(one.session, session)
        del session.queue[one.request]
        self._waiting -= 1
        if head and session.queue:
            self._expose(one.session, session)
        self._forget(one.session, session)

    def ended(self, one: Sequence) -> None:
        """A request that was admitted from here is over."""
        session = self._sessions[one.session]
        session.admitted -= 1
        self._forget(one.session, session)

    def move(self, one: Sequence, other: WaitingRoom) -> None:
        """Hands a request over to another class, whether it waits or was admitted."""
        if one.ticket is None:
            self.remove(one)
            if one.rank < 0:
                other.push(one)
                return
            other.push_back(one)
        else:
            self.ended(one)
        other._sessions.setdefault(one.session, _Session()).admitted += 1

    def check(self) -> None:
        """Asserts every invariant."""
        assert self._heads == sorted(self._heads)
        assert {key for _, _, key in self._heads} == {key for key, one in self._sessions.items() if one.queue}
        assert self._waiting == sum(len(session.queue) for session in self._sessions.values())
        assert [rank for rank, _ in self._preempted] == sorted({rank for rank, _ in self._preempted})
        for start, arrival, key in self._heads:
            session = self._sessions[key]
            assert (session.start, next(iter(session.queue.values())).arrival) == (start, arrival)
        for session in self._sessions.values():
            assert session.queue or session.admitted > 0, "a session that nothing needs"
            assert all(one.ticket is None and one.rank < 0 for one in session.queue.values())
        assert all(one.ticket is None and one.rank == rank for rank, one in self._preempted)

    def _expose(self, key: str, session: _Session) -> None:
        session.start = max(self._time, session.finish)
        insort(self._heads, (session.start, next(iter(session.queue.values())).arrival, key))

    def _hide(self, key: str, session: _Session) -> None:
        entry = (session.start, next(iter(session.queue.values())).arrival, key)
        at = bisect_left(self._heads, entry)
        assert self._heads[at] == entry
        del self._heads[at]

    def _drop_preempted(self, one: Sequence) -> None:
        at = bisect_left(self._preempted, one.rank, key=lambda entry: entry[0])
        assert self._preempted[at][1] is one
        del self._preempted[at]

    def _forget(self, key: str, session: _Session) -> None:
        if not session.queue and not session.admitted:
            del self._sessions[key]
