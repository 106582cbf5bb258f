"""The scheduler: who runs in the next step, and with how many tokens.

Every running request decodes one token per step; what is left of the step's token budget goes to prompts, first
come first served, in chunks. A request is admitted only when a step has budget for it, so that of two requests
with the same beginning that arrive together the second finds what the first has computed. The queue is first in,
first out: a large request at its head is not passed by small ones for ever.

Pure: no I/O, no tensors, no clock. Its answers are the messages of the link.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from dataclasses import dataclass, field

from zjournal.engine.cache.blocks import BLOCK_TOKENS, blocks_for
from zjournal.engine.cache.residency import Copy, Residency
from zjournal.engine.sequence import Sampled, Sequence, Slice
from zjournal.errors import ContextTooLong, Fault, Overloaded
from zjournal.link import wire

QUEUE_MAX = 1024  # requests that wait; one more is refused


@dataclass(frozen=True)
class Limits:
    """`context`: tokens of one request, prompt and output. `prefill_tokens`: tokens computed in one step.

    A step must hold a decode of every running request and a block of a prompt beside them.
    """

    context: int
    max_running: int
    prefill_tokens: int
    queue_max: int = QUEUE_MAX

    def __post_init__(self) -> None:
        assert self.context > 0
        assert self.max_running > 0
        assert self.prefill_tokens >= self.max_running + BLOCK_TOKENS


@dataclass
class Plan:
    """One step: requests that begin, block copies to make in this order before it, slices, and what to tell."""

    begun: list[tuple[str, list[int]]] = field(default_factory=list)  # request, prompt
    copies: list[Copy] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    events: list[wire.FromEngine] = field(default_factory=list)


class Scheduler:
    """All requests between Generate and Finished or Failed. `token_bytes` gives a token's bytes, for stop strings."""

    def __init__(self, limits: Limits, block_count: int, token_bytes: Callable[[int], bytes]) -> None:
        self._limits = limits
        self._residency = Residency(block_count)
        self._token_bytes = token_bytes
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._blocked: tuple[str, int] | None = None  # the head of the queue, and `releases` when it found no room

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    # --- messages ----------------------------------------------------------------------------------------

    def submit(self, ask: wire.Generate, now_us: int) -> list[wire.FromEngine]:
        """Queues a request, or refuses at once one that can never run or finds the queue full."""
        assert ask.request not in self._waiting and ask.request not in self._running, ask.request
        one = Sequence(ask, self._token_bytes, now_us)
        fault: Fault | None = None
        asked = f"{one.prompt} prompt tokens and up to {one.max_tokens} output tokens"
        if one.prompt + one.max_tokens > self._limits.context:
            fault = ContextTooLong(f"{asked} do not fit the context of {self._limits.context} tokens.")
        elif one.tokens_max > self._residency.capacity:
            fault = ContextTooLong(f"{asked} do not fit the KV memory of {self._residency.capacity} tokens.")
        elif len(self._waiting) >= self._limits.queue_max:
            fault = Overloaded(f"{len(self._waiting)} requests are waiting, and more are not queued.")
        if fault is not None:
            return [_failed(ask.request, fault)]
        self._waiting[one.request] = one
        return []

    def cancel(self, request: str, now_us: int) -> list[wire.FromEngine]:
        """Ends a request in whatever phase it is; nothing happens if it has ended already."""
        one = self._waiting.pop(request, None) or self._running.get(request)
        return self._end(one, "cancelled", now_us) if one is not None else []

    def forget(self, requests: collections.abc.Collection[str]) -> list[wire.FromEngine]:
        """Gives up what is kept of requests that have ended, as far as no other one needs it."""
        self._residency.forget(requests)
        return [*self._residency.take_changes()]

    # --- steps -------------------------------------------------------------------------------------------

    def plan(self, now_us: int) -> Plan:
        """Decides the next step and takes the blocks it writes to. `apply` must follow before anything else."""
        plan = Plan()
        budget = self._limits.prefill_tokens
        decoding = [one for one in self._running.values() if one.pending == 1]
        for one in decoding:
            budget -= self._slice(plan, one, 1)
        for one in self._running.values():
            if one.pending > 1 and budget > 0:
                budget -= self._slice(plan, one, budget)
        while budget > 0 and self._waiting and len(self._running) < self._limits.max_running:
            admitted = self._admit(plan, now_us)
            if admitted is None:
                break
            budget -= self._slice(plan, admitted, budget)
        plan.events += self._residency.take_changes()
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
            assert one.ticket is not None
            result = next(left) if part.sampling is not None else None
            if isinstance(result, Fault):
                events += self._fail(one, result)
                continue
            one.computed += len(part.tokens)
            self._residency.file(one.ticket, one.ids, one.computed)
            if result is None:
                continue
            (token,) = result.tokens
            reason = one.append(token, now_us)
            events.append(wire.Tokens(one.request, one.output - 1, wire.pack_ids(result.tokens), result.logprobs))
            if reason is not None:
                events += self._end(one, reason, now_us)
        return events

    def _slice(self, plan: Plan, one: Sequence, budget: int) -> int:
        assert one.ticket is not None
        tokens = min(one.pending, budget)
        self._residency.extend(one.ticket, one.computed + tokens)
        plan.slices.append(one.slice(tokens))
        return tokens

    def _admit(self, plan: Plan, now_us: int) -> Sequence | None:
        one = next(iter(self._waiting.values()))
        if self._blocked == (one.request, self._residency.releases):
            return None  # nothing was given back since
        ticket = self._residency.admit(one.request, one.namespace, one.ids.tobytes(), one.tokens_max)
        if ticket is None:
            assert self._running, "a request that fits found no room in an idle engine"
            self._blocked = (one.request, self._residency.releases)
            return None
        del self._waiting[one.request]
        self._running[one.request] = one
        one.admitted(ticket, now_us)
        plan.begun.append((one.request, one.ids.tolist()))
        if ticket.copy is not None:
            plan.copies.append(ticket.copy)
        plan.events.append(
            wire.Matched(one.request, ticket.cached, one.prompt, reason=ticket.reason, nearest=ticket.nearest)
        )
        return one

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, one: Sequence, reason: str, now_us: int) -> list[wire.FromEngine]:
        """What was computed stays. Only a turn that a client can build upon becomes a terminal state."""
        if one.ticket is not None:
            del self._running[one.request]
            self._residency.release(one.ticket, one.ids, one.computed, terminal=reason != "cancelled")
        return [*self._residency.take_changes(), one.finished(reason, now_us)]

    def _fail(self, one: Sequence, fault: Fault) -> list[wire.FromEngine]:
        """What earlier steps computed stays: they brought what they should. The step that failed does not count."""
        assert one.ticket is not None
        del self._running[one.request]
        self._residency.release(one.ticket, one.ids, one.computed, terminal=False)
        return [*self._residency.take_changes(), _failed(one.request, fault)]

    # --- looking -----------------------------------------------------------------------------------------

    def gauges(self) -> wire.Gauges:
        """Returns the counts of this moment."""
        return wire.Gauges(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks=self._residency.blocks,
            kv_blocks_free=self._residency.free,
            states=self._residency.states,
        )

    def check(self) -> None:
        """Asserts every invariant of requests, graph and pool."""
        assert len(self._running) <= self._limits.max_running
        assert len(self._waiting) <= self._limits.queue_max
        assert all(one.ticket is None for one in self._waiting.values())
        tickets = [one.ticket for one in self._running.values() if one.ticket is not None]
        assert len(tickets) == len(self._running)
        for one in self._running.values():
            assert one.ticket is not None and one.computed < len(one.ids)
            assert one.ticket.growth + len(one.ticket.table) == blocks_for(one.tokens_max)
        self._residency.check(tickets)
        if self.idle:
            assert self._residency.free + self._residency.kept == self._residency.blocks


def _failed(request: str, fault: Fault) -> wire.Failed:
    return wire.Failed(request, fault.code, fault.message)
