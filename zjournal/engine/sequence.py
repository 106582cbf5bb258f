"""A request in flight: its tokens, how far their KV is computed, what it holds, and when it ends.

`Slice` is the part of a sequence that one step computes; it is all that the runner gets to see.
"""

from __future__ import annotations

import collections.abc
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from zjournal.checkpoint.stops import StopMatcher
from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.cache.residency import Ticket
from zjournal.link import wire

if TYPE_CHECKING:  # numpy, which an engine without snapshots does not need for this
    import numpy as np

    from zjournal.engine.cache.restore import Restore
    from zjournal.errors import Fault

__all__ = ["BLOCK_TOKENS", "Choice", "Drafter", "Sampled", "Sequence", "Slice", "Steer"]


class Slice(msgspec.Struct, frozen=True):
    """`tokens` of `request` stand at positions `start`, `start` + 1, … and are computed in one step.

    Position p is token p % 16 of block table[p // 16]. With `sampling`, the logits after the last token give
    output token `index` (0 is the first); without, only KV is wanted. The last `drafts` tokens are guesses: what the
    logits before each of them give is compared with it, and the first that differs ends the slice. `ids` are all
    tokens of the request up to here, guesses excluded, the first `prompt` of them its prompt. The runner keeps no list.
    `end_tokens` are those that `sampling.min_tokens` holds back. `steer` says what each row of logits may become.
    """

    request: str
    tokens: collections.abc.Sequence[int]
    start: int
    table: collections.abc.Sequence[int]
    sampling: wire.Sampling | None
    index: int
    drafts: int = 0
    ids: collections.abc.Sequence[int] = ()
    prompt: int = 0
    end_tokens: frozenset[int] = frozenset()
    steer: Steer | None = None


class Sampled(msgspec.Struct, frozen=True):
    """What a slice brought: the drafts that proved right, then one token more. `logprobs` as in wire.Tokens.

    `end`: no token may come any more, so the request ends, and there are none; the reason of wire.Finished.
    """

    tokens: tuple[int, ...]
    logprobs: bytes = b""
    end: str = ""


class Choice(Protocol):
    """What one row of logits may become (see decoding.steering)."""

    @property
    def allowed(self) -> np.ndarray | None:
        """The tokens that may come, a bit for each, uint32; None: all."""
        ...

    @property
    def banned(self) -> collections.abc.Collection[int]:
        """Of these, the tokens that may not."""
        ...

    @property
    def forced(self) -> int:
        """The one that comes, whatever the logits say; -1: none is."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token may come, so that min_tokens no longer counts."""
        ...


class Steer(Protocol):
    """What may come next in one answer (see decoding.steering). Rebuilt by `advance` alone."""

    @property
    def ready(self) -> bool:
        """Whether it can say so already; until then the request waits."""
        ...

    @property
    def fault(self) -> Fault | None:
        """Why it never will, if it is ready."""
        ...

    @property
    def reason(self) -> str:
        """Why the answer has to end with the last token; "" while it may go on."""
        ...

    def advance(self, tokens: collections.abc.Sequence[int]) -> list[wire.Looped]:
        """Takes tokens that were chosen. Raises a Fault."""
        ...

    @property
    def computes(self) -> bool:
        """Whether `choices` takes longer than to hand it to another thread."""
        ...

    def choices(self, drafts: collections.abc.Sequence[int]) -> collections.abc.Sequence[Choice] | Fault | None:
        """What the next row of logits may become, and the one behind each draft that may come; None: anything."""
        ...


class Drafter(Protocol):
    """Guesses what a request will say next. A guess changes nothing but the time it takes."""

    def propose(
        self, request: str, ids: collections.abc.Sequence[int], prompt: int, most: int
    ) -> collections.abc.Sequence[int]:
        """At most `most` tokens that may follow `ids`, which begin with `prompt` prompt tokens; `ids` is not kept."""
        ...

    def verified(self, request: str, drafted: int, accepted: int) -> None:
        """So many of the guesses of the last step proved right."""
        ...

    def end(self, request: str) -> None:
        """The request is over; one that never guessed may be named too."""
        ...


class Sequence:
    """One Generate from arrival to end. Times are microseconds of the caller's clock."""

    def __init__(
        self, ask: wire.Generate, token_bytes: Callable[[int], bytes], now_us: int, steer: Steer | None = None
    ) -> None:
        self.request = ask.request
        self.session = ask.session or "\0" + ask.request
        self.background = ask.background  # it yields, until it has yielded too often
        self.namespace = ask.namespace
        self.sampling = ask.sampling
        self.max_tokens = ask.max_tokens
        self.ids = array("I", wire.unpack_ids(ask.tokens))  # prompt, then output
        self.prompt = len(self.ids)
        self.computed = 0  # tokens whose KV is in the table
        self.reached = 0  # the most that `computed` has ever been: what is computed below it is computed again
        self.ticket: Ticket | None = None  # None while it waits
        self.restore: Restore | None = None  # while KV is read back for it; until then it computes nothing
        self.begun = False  # its match was told
        self.backed = 0  # tokens that were handed over to be backed up
        self.arrival = 0  # its place among all that were queued
        self.rank = -1  # its place among all that were admitted, which it keeps when it is preempted; -1: not yet
        self.passes = 0  # times that it yielded, as a background request
        self.served_step = 0  # the last step that computed some of its prompt
        self.steer = steer
        self._end_tokens = frozenset(ask.end_tokens)
        self._token_bytes = token_bytes
        self._stop = StopMatcher(ask.stop) if ask.stop else None
        self._arrived_us = now_us
        self._admitted_us: int | None = None
        self._first_us: int | None = None
        assert self.prompt > 0 and self.max_tokens > 0, (self.prompt, self.max_tokens)

    @property
    def output(self) -> int:
        """Number of tokens sampled."""
        return len(self.ids) - self.prompt

    @property
    def pending(self) -> int:
        """Number of tokens whose KV is still to be computed; 1 while it decodes."""
        return len(self.ids) - self.computed

    @property
    def tokens_max(self) -> int:
        """The most tokens whose KV it can need: the last one sampled is never fed back."""
        return self.prompt + self.max_tokens - 1

    @property
    def drafts_max(self) -> int:
        """The most guesses that can be right: one token more comes with them."""
        return self.max_tokens - self.output - 1

    def admitted(self, ticket: Ticket, rank: int, now_us: int) -> None:
        """It runs, for the first time or again after it was preempted."""
        self.ticket = ticket
        self.computed = ticket.cached
        if self.rank < 0:
            self.rank = rank
            self.reached = ticket.cached
            self._admitted_us = now_us

    def restored(self, tokens: int) -> None:
        """So many tokens have KV now; it computes what is left."""
        self.restore = None
        self.computed = tokens
        self.reached = max(self.reached, tokens)

    def give_up_restore(self) -> None:
        """Nothing waits for what is being read; the blocks are lent until the reads end."""
        if self.restore is not None:
            self.restore.abandon()
            self.restore = None

    def preempted(self) -> None:
        """It gave back what it held; its tokens stay."""
        self.ticket = None
        self.computed = 0
        self.backed = 0

    def slice(self, tokens: int, drafts: collections.abc.Sequence[int] = ()) -> Slice:
        """Returns the next `tokens` pending tokens as a slice. It samples if that is all; then `drafts` may follow."""
        assert self.ticket is not None and 0 < tokens <= self.pending
        end = self.computed + tokens
        assert not drafts or end == len(self.ids)
        return Slice(
            request=self.request,
            tokens=[*self.ids[self.computed : end], *drafts],
            start=self.computed,
            table=self.ticket.table,
            sampling=self.sampling if end == len(self.ids) else None,
            index=self.output,
            drafts=len(drafts),
            ids=self.ids,
            prompt=self.prompt,
            end_tokens=self._end_tokens,
            steer=self.steer,
        )

    def advance(self, tokens: int) -> int:
        """So many more tokens have KV; returns how many of them had it before the request was preempted."""
        before, self.computed = self.computed, self.computed + tokens
        again = min(self.computed, self.reached) - before
        self.reached = max(self.reached, self.computed)
        return max(again, 0)

    def append(self, token: int, now_us: int) -> str | None:
        """Takes a sampled token; returns the reason if the request ends with it."""
        if self._first_us is None:
            self._first_us = now_us
        self.ids.append(token)
        if token in self._end_tokens:
            return "stop"
        if self._stop is not None:
            self._stop.feed(self._token_bytes(token))
            if self._stop.hit is not None:
                return "stop_string"
        return "length" if self.output == self.max_tokens else None

    def finished(self, reason: str, now_us: int) -> wire.Finished:
        """Returns what is told of the end. A phase that was never reached counts as nothing."""
        admitted = self._admitted_us if self._admitted_us is not None else now_us
        first = self._first_us if self._first_us is not None else now_us
        return wire.Finished(
            request=self.request,
            reason=reason,
            output=self.output,
            queue_us=admitted - self._arrived_us,
            prefill_us=first - admitted,
            decode_us=now_us - first,
        )
