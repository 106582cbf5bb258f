"""The scheduler: who runs in the next step, and with how many tokens.

Every running request decodes one token per step; what is left of the step's token budget goes to prompts, in equal
shares for the sessions that have some, so that a short one never stands behind a long one. Who is admitted next is
the waiting room's business. A request whose next block a running one is about to compute waits for it, so that
nothing is computed twice at once. The head is never passed for its size.

Memory is over-committed: a request is admitted with its prompt and some growth. When there is no room for the next
token, the request admitted last gives back what it holds (background ones before others), stays at the head of the
queue, and later goes on where it was. The one admitted first is never preempted, so something always comes to an
end. Nobody sees a preemption: tokens are a function of position, and what is computed again is told only as such.

Where there are snapshots, an admitted request whose KV lies on disk is restored first: it holds its place and blocks
and computes nothing, while the others go on. A step may have nothing to compute then; the disk's end is waited for.

Pure: no I/O, no tensors, no clock. Its answers are the messages of the link.
"""

from __future__ import annotations

import collections.abc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zjournal.engine import prompts
from zjournal.engine.cache.blocks import BLOCK_TOKENS, blocks_for
from zjournal.engine.cache.residency import Copy, Residency
from zjournal.engine.sequence import Drafter, Sampled, Sequence, Slice, Steer
from zjournal.engine.tiers import Tiers
from zjournal.engine.waiting import WaitingRoom
from zjournal.errors import ContextTooLong, Fault, Overloaded
from zjournal.link import wire

if TYPE_CHECKING:  # numpy, which an engine without snapshots does not need for this
    from zjournal.engine.cache.snapshots import Snapshots

QUEUE_MAX = 1024  # requests that wait; one more is refused
GROWTH_BLOCKS = 4  # reserved for the output when a request is admitted, and when it goes on after a preemption
PREFILLS_MAX = 8  # prompts that are read side by side where a step cannot finish them
BACKGROUND_PASSES_MAX = 32  # times that a background request yields; then it counts like any other
HEADS_MAX = 8  # requests looked at in one step for one that need not wait for another's blocks


@dataclass(frozen=True)
class Limits:
    """`context`: tokens of one request, prompt and output. `prefill_tokens`: tokens computed in one step.

    A step must hold a decode of every running request and a block of a prompt beside them. `drafts_max`: guesses
    of one step where one request decodes; each one more that does takes the place of one.
    """

    context: int
    max_running: int
    prefill_tokens: int
    queue_max: int = QUEUE_MAX
    drafts_max: int = 0

    def __post_init__(self) -> None:
        assert self.context > 0
        assert self.max_running > 0
        assert self.queue_max > 0
        assert self.drafts_max >= 0
        assert self.prefill_tokens >= self.max_running + BLOCK_TOKENS


@dataclass
class Plan:
    """One step: requests that begin, block copies to make in this order before it, slices, and what to tell."""

    begun: list[tuple[str, list[int]]] = field(default_factory=list)  # request, prompt
    copies: list[Copy] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    events: list[wire.FromEngine] = field(default_factory=list)


@dataclass
class Counts:
    """Since the start of the engine."""

    preemptions: int = 0
    recomputed: int = 0  # tokens that had KV before a preemption and were computed again
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """All requests between Generate and Finished or Failed. `token_bytes` gives a token's bytes, for stop strings."""

    def __init__(
        self,
        limits: Limits,
        block_count: int,
        token_bytes: Callable[[int], bytes],
        drafter: Drafter | None = None,
        snapshots: Callable[[Residency, Iterator[int]], Snapshots] | None = None,
    ) -> None:
        """`snapshots` makes the tiers behind the device's memory, over it, and with the same numbers for facts."""
        self._limits = limits
        facts = itertools.count(1)
        self._residency = Residency(block_count, facts)
        self.snapshots = snapshots(self._residency, facts) if snapshots is not None else None
        self._tiers = Tiers(self._residency, self.snapshots)
        self._token_bytes = token_bytes
        self._drafter = drafter
        self._rooms = {False: WaitingRoom(), True: WaitingRoom()}  # background?
        self._waiting: dict[str, Sequence] = {}
        self._compiling: dict[str, Sequence] = {}  # of those: whose fence is not there yet; they are in no room
        self._running: dict[str, Sequence] = {}
        self._blocked: tuple[str, int] | None = None  # who found no room, and `releases` then
        self._arrivals = itertools.count()
        self._ranks = itertools.count()
        self._step = 0
        self._counts = Counts()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def _restoring(self) -> list[Sequence]:
        return [one for one in self._running.values() if one.restore is not None]

    # --- messages ----------------------------------------------------------------------------------------

    def submit(self, ask: wire.Generate, now_us: int, steer: Steer | None = None) -> list[wire.FromEngine]:
        """Queues a request, or refuses at once one that can never run or finds the queue full."""
        assert ask.request not in self._waiting and ask.request not in self._running, ask.request
        one = Sequence(ask, self._token_bytes, now_us, steer)
        fault: Fault | None = None
        asked = f"{one.prompt} prompt tokens and up to {one.max_tokens} output tokens"
        queued = sum(room.new for room in self._rooms.values()) + len(self._compiling)
        if one.prompt + one.max_tokens > self._limits.context:
            fault = ContextTooLong(f"{asked} do not fit the context of {self._limits.context} tokens.")
        elif one.tokens_max > self._residency.capacity:
            fault = ContextTooLong(f"{asked} do not fit the KV memory of {self._residency.capacity} tokens.")
        elif queued >= self._limits.queue_max:
            fault = Overloaded(f"{queued} requests are waiting, and more are not queued.")
        if fault is not None:
            return [_failed(ask.request, fault)]
        one.arrival = next(self._arrivals)
        self._waiting[one.request] = one
        if steer is None or steer.ready:
            return self._queue(one)
        self._compiling[one.request] = one
        return []

    def _queue(self, one: Sequence) -> list[wire.FromEngine]:
        """A request that waits goes to its room, or fails if what should steer it cannot."""
        fault = one.steer.fault if one.steer is not None else None
        if fault is not None:
            del self._waiting[one.request]
            return [_failed(one.request, fault)]
        self._rooms[one.background].push(one)
        return []

    def cancel(self, request: str, now_us: int, keep: bool = False) -> list[wire.FromEngine]:
        """Ends a request in whatever phase it is; nothing happens if it has ended already. `keep`: see wire.Cancel."""
        one = self._waiting.get(request) or self._running.get(request)
        if one is None:
            return []
        kept = keep and one.ticket is not None and one.restore is None and one.computed > 0
        return self._end(one, "cancelled", now_us, kept=kept)

    def forget(self, requests: collections.abc.Collection[str]) -> list[wire.FromEngine]:
        """Gives up what is kept of requests that have ended, as far as no other one needs it."""
        self._residency.forget(requests)
        self._tiers.forget(requests)
        return [*self._residency.take_changes()]

    # --- steps -------------------------------------------------------------------------------------------

    def plan(self, now_us: int) -> Plan:
        """Decides the next step and takes the blocks it writes to. `apply` must follow before anything else."""
        plan = Plan()
        self._step += 1
        for one in [one for one in self._compiling.values() if one.steer is None or one.steer.ready]:
            del self._compiling[one.request]
            plan.events += self._queue(one)
        crowded = self._make_room()
        decoding = [one for one in self._running.values() if one.pending == 1 and self._has_room(one)]
        budget = self._limits.prefill_tokens - len(decoding)
        restoring = self._restoring
        for one in restoring:
            self._restore(plan, one)
        reading = [
            one for one in self._running.values() if one.restore is None and (one.pending > 1 or one in restoring)
        ]
        if not crowded:
            reading = self._admit(plan, reading, budget, now_us)
            decoding = [one for one in decoding if one.ticket is not None]  # the others have just been preempted
            budget = self._limits.prefill_tokens - len(decoding)
        chunks = prompts.share(reading, budget, self._step)
        budget -= sum(chunks.values())
        # Rows beyond a few cost as much as the tokens that they may save: the more decode, the fewer are guessed.
        guesses = min(budget, self._limits.drafts_max + 1 - len(decoding))
        for at, one in enumerate(decoding):
            guesses -= self._decode(plan, one, -(-guesses // (len(decoding) - at)))
        for one in reading:
            if tokens := chunks.get(one.request):
                self._read(plan, one, tokens)
        plan.events += self._residency.take_changes()
        excused = self.idle or self._residency.lent or self._restoring or self._compiling
        assert plan.slices or excused, "a step without work"
        return plan

    def apply(
        self, plan: Plan, results: collections.abc.Sequence[Sampled | Fault], now_us: int
    ) -> list[wire.FromEngine]:
        """Takes what the step brought: tokens, or the fault of that request alone, per slice that samples."""
        events: list[wire.FromEngine] = []
        assert len(results) == sum(part.sampling is not None for part in plan.slices)
        left = iter(results)
        for part in plan.slices:
            one = self._running[part.request]
            result = next(left) if part.sampling is not None else None
            if isinstance(result, Fault):
                events += self._fail(one, result)
            else:
                events += self._take(one, part, result, now_us)
        return events

    def _take(self, one: Sequence, part: Slice, result: Sampled | None, now_us: int) -> list[wire.FromEngine]:
        """What one slice brought. Tokens behind the end of the request are as if they had never been."""
        assert one.ticket is not None
        if result is None:
            self._counts.recomputed += one.advance(len(part.tokens))
            self._residency.file(one.ticket, one.ids, one.computed)
            self._tiers.back_up(one)
            return []
        if result.end:
            assert not result.tokens
            self._counts.recomputed += one.advance(len(one.ids) - 1 - one.computed)
            self._residency.file(one.ticket, one.ids, one.computed)
            return self._end(one, result.end, now_us)
        guesses = part.tokens[len(part.tokens) - part.drafts :]
        right = len(result.tokens) - 1
        assert 0 <= right <= part.drafts and tuple(guesses[:right]) == result.tokens[:-1], (
            "accepted what nobody guessed"
        )
        position = one.output
        reason: str | None = None
        for token in result.tokens:
            reason = one.append(token, now_us)
            if reason is not None:
                break
        told = one.output - position
        looped: list[wire.Looped] = []
        if one.steer is not None:
            try:
                looped = one.steer.advance(result.tokens[:told])
            except Fault as fault:
                return self._fail(one, fault)
            reason = reason or one.steer.reason or None
        self._counts.recomputed += one.advance(len(one.ids) - 1 - one.computed)  # the last one was never fed back
        if self._drafter is not None and part.drafts:
            self._counts.drafted += part.drafts
            self._counts.accepted += told - 1
            self._drafter.verified(one.request, part.drafts, right)
            self._residency.trim(one.ticket, len(one.ids))
        self._residency.file(one.ticket, one.ids, one.computed)
        self._tiers.back_up(one)
        logprobs = result.logprobs
        if logprobs and told < len(result.tokens):
            logprobs = b"".join(wire.cut_logprobs(logprobs, len(result.tokens))[:told])
        tokens = wire.Tokens(one.request, position, wire.pack_ids(result.tokens[:told]), logprobs)
        return [*looped, tokens, *(self._end(one, reason, now_us) if reason is not None else ())]

    # --- a step's slices ---------------------------------------------------------------------------------

    def _decode(self, plan: Plan, one: Sequence, spare: int) -> int:
        """Adds the decode of a request and as many guesses as `spare` tokens and free blocks allow; returns those."""
        assert one.ticket is not None
        drafts: collections.abc.Sequence[int] = ()
        if self._drafter is not None:
            room = self._residency.reach(one.ticket) - len(one.ids)
            most = min(self._limits.drafts_max, spare, room, one.drafts_max)
            if most > 0:
                drafts = self._drafter.propose(one.request, one.ids, one.prompt, most)
                assert len(drafts) <= most, (len(drafts), most)
        tokens = len(one.ids) + len(drafts)
        enough = self._residency.grow(one.ticket, tokens)
        assert enough, "room was made for the token, and what guesses take is free"
        self._residency.extend(one.ticket, tokens)
        plan.slices.append(one.slice(1, drafts))
        return len(drafts)

    def _read(self, plan: Plan, one: Sequence, tokens: int) -> None:
        """Adds a chunk of a prompt; its room was reserved when it was admitted."""
        assert one.ticket is not None
        self._residency.extend(one.ticket, one.computed + tokens)
        one.served_step = self._step
        plan.slices.append(one.slice(tokens))

    # --- admission ---------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, reading: list[Sequence], budget: int, now_us: int) -> list[Sequence]:
        """Admits whom the step has tokens for, and further ones so that they need not wait for long prompts.

        Returns all whose prompts are read, without those who had to leave for them.
        """
        admitted: set[str] = set()
        while self._waiting and (sum(one.pending for one in reading) < budget or len(reading) < PREFILLS_MAX):
            one = self._next(reading)
            if one is None:
                break
            entered = self._enter(plan, one, admitted, now_us)
            reading = [other for other in reading if other.ticket is not None]
            if not entered:
                break
            admitted.add(one.request)
            if one.restore is None:
                reading.append(one)
        return reading

    def _next(self, reading: list[Sequence]) -> Sequence | None:
        """The best head that need not wait for blocks that a running request is computing or restoring."""
        leaders = [*reading, *self._restoring]
        front, back = self._rooms[False], self._rooms[True]
        head = next(back.heads(), None)
        if head is not None and head.passes >= BACKGROUND_PASSES_MAX:
            self._promote(head)
        for one in itertools.islice(itertools.chain(front.heads(), back.heads()), HEADS_MAX):
            leader = next((leader for leader in leaders if prompts.follows(one, leader)), None)
            if leader is None:
                return one
            if leader.background and not one.background:
                self._promote(leader)  # or the one that waits for it would yield as well
        return None

    def _enter(self, plan: Plan, one: Sequence, admitted: set[str], now_us: int) -> bool:
        """Admits a head if there is a place and room for it, which background requests may have to leave."""
        while True:
            if len(self._running) < self._limits.max_running and self._blocked != (
                one.request,
                self._residency.releases,
            ):
                tokens = min(len(one.ids) + GROWTH_BLOCKS * BLOCK_TOKENS, one.tokens_max)
                ticket = self._residency.admit(one.request, one.namespace, one.ids.tobytes(), tokens)
                if ticket is not None:
                    break
                assert self._running or self._residency.lent, "a request that fits found no room in an idle engine"
                self._blocked = (one.request, self._residency.releases)
            yielding = [other for other in self._running.values() if other.background and other.request not in admitted]
            if one.background or not yielding:
                return False
            self._preempt(max(yielding, key=lambda other: other.rank))
        room = self._rooms[one.background]
        room.take(one, len(one.ids) - ticket.cached)
        del self._waiting[one.request]
        self._running[one.request] = one
        first = one.rank < 0
        one.admitted(ticket, next(self._ranks) if first else one.rank, now_us)
        head = next(self._rooms[True].heads(), None)
        if head is not None and not one.background:
            head.passes += 1
        self._tiers.begin(one)
        self._restore(plan, one)
        if ticket.copy is not None and one.computed == ticket.cached:  # else what it would hold is being read
            plan.copies.append(ticket.copy)
        return True

    def _restore(self, plan: Plan, one: Sequence) -> None:
        """Takes an admitted request as far as it can go without waiting: to the reading, or to its first step."""
        told = self._tiers.go_on(one)
        if told is None:
            return
        if not one.begun:
            one.begun = True
            plan.begun.append((one.request, one.ids.tolist()))
            plan.events += told

    def _promote(self, one: Sequence) -> None:
        """It has yielded often enough, or another one waits for it: from now on it counts like any other."""
        self._rooms[True].move(one, self._rooms[False])
        one.background = False

    # --- preemption --------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Sees to it that the decodes of this step have room; whether that was scarce.

        The first in rank goes first, so that those behind it give way to it. Where it is alone, a disk writes what
        could be given up for it, and it waits for that.
        """
        scarce = False
        for one in sorted(self._running.values(), key=lambda one: one.rank):
            while one.ticket is not None and one.pending == 1 and not self._has_room(one):
                scarce = True
                victim = self._victim()
                if victim is None:
                    break
                self._preempt(victim)
        return scarce

    def _has_room(self, one: Sequence) -> bool:
        """Whether a running request has, or now gets, room for its next token."""
        assert one.ticket is not None
        return self._residency.grow(one.ticket, len(one.ids))

    def _victim(self) -> Sequence | None:
        """Who gives way: the last background request, else the last one; never the first of all."""
        oldest = min(self._running.values(), key=lambda one: one.rank)
        others = [one for one in self._running.values() if one is not oldest]
        assert others or self._residency.lent, "the only running request fits"
        return max(others, key=lambda one: (one.background, one.rank), default=None)

    def _preempt(self, one: Sequence) -> None:
        """It gives back what it holds, which stays as long as nobody needs the room, and waits at the head."""
        assert one.ticket is not None
        one.give_up_restore()
        self._residency.release(one.ticket, one.ids, one.computed, terminal=False)
        one.preempted()
        one.passes += 1
        del self._running[one.request]
        self._waiting[one.request] = one
        self._rooms[one.background].push_back(one)
        self._counts.preemptions += 1

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, one: Sequence, reason: str, now_us: int, *, kept: bool = False) -> list[wire.FromEngine]:
        """What was computed stays. A terminal state is only that of a turn that is built upon, or asked again."""
        self._leave(one, terminal=kept or reason != "cancelled")
        return [*self._residency.take_changes(), one.finished(reason, now_us)]

    def _fail(self, one: Sequence, fault: Fault) -> list[wire.FromEngine]:
        """What earlier steps computed stays: they brought what they should. The step that failed does not count."""
        self._leave(one, terminal=False)
        return [*self._residency.take_changes(), _failed(one.request, fault)]

    def _leave(self, one: Sequence, *, terminal: bool) -> None:
        room = self._rooms[one.background]
        if self._compiling.pop(one.request, None) is not None:
            del self._waiting[one.request]
        elif one.ticket is None:
            del self._waiting[one.request]
            room.remove(one)
        else:
            del self._running[one.request]
            room.ended(one)
            one.give_up_restore()
            self._residency.release(one.ticket, one.ids, one.computed, terminal=terminal)
            one.ticket = None
        self._tiers.left(one, terminal=terminal)
        if self._drafter is not None:
            self._drafter.end(one.request)

    # --- looking -----------------------------------------------------------------------------------------

    def gauges(self) -> wire.Gauges:
        """Returns the counts of this moment, and those since the start."""
        return wire.Gauges(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks=self._residency.blocks,
            kv_blocks_free=self._residency.free,
            states=self._residency.states,
            preemptions=self._counts.preemptions,
            recomputed=self._counts.recomputed,
            drafted=self._counts.drafted,
            accepted=self._counts.accepted,
            **(self.snapshots.gauges() if self.snapshots is not None else {}),
        )

    def reading(self) -> tuple[tuple[str, int], ...]:
        """The requests whose prompts are being read, each with the number of tokens that have KV."""
        return tuple((one.request, one.computed) for one in self._running.values() if one.computed < one.prompt)

    def audit(self) -> Iterator[None]:
        """Asserts every invariant of requests, graph and pool; pauses now and then.

        In a pause nothing may change but what is lent to the disk.
        """
        assert len(self._running) <= self._limits.max_running
        assert sum(room.new for room in self._rooms.values()) + len(self._compiling) <= self._limits.queue_max
        assert self._compiling.keys() <= self._waiting.keys()
        assert sum(map(len, self._rooms.values())) == len(self._waiting) - len(self._compiling)
        assert self._waiting.keys().isdisjoint(self._running)
        for background, room in self._rooms.items():
            room.check()
            assert all(one.background == background for one in room.heads())
        assert all(one.ticket is None and one.computed == 0 for one in self._waiting.values())
        tickets = [one.ticket for one in self._running.values() if one.ticket is not None]
        assert len(tickets) == len(self._running)
        for one in self._running.values():
            assert one.ticket is not None and one.computed < len(one.ids)
            held = one.ticket.growth + len(one.ticket.table)
            assert blocks_for(one.computed) <= held <= blocks_for(one.tokens_max)
            assert held >= blocks_for(len(one.ids)) or one.pending == 1
        yield from self._residency.audit(tickets)
        if self.idle and not self._residency.lent:
            assert self._residency.free + self._residency.kept == self._residency.blocks
        if self.snapshots is not None:
            self.snapshots.audit()

    def check(self) -> None:
        """`audit` without pauses."""
        for _ in self.audit():
            pass
        if self.snapshots is not None:
            self.snapshots.check()


def _failed(request: str, fault: Fault) -> wire.Failed:
    return wire.Failed(request, fault.code, fault.message)
