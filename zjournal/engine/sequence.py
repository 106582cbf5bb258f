"""A request in flight: its tokens, how far their KV is computed, what it holds, and when it ends.

`Slice` is the part of a sequence that one step computes; it is all that the runner gets to see.
"""

from __future__ import annotations

import collections.abc
from array import array
from collections.abc import Callable

import msgspec

from zjournal.checkpoint.stops import StopMatcher
from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.cache.residency import Ticket
from zjournal.link import wire

__all__ = ["BLOCK_TOKENS", "Sampled", "Sequence", "Slice"]


class Slice(msgspec.Struct, frozen=True):
    """`tokens` of `request` stand at positions `start`, `start` + 1, … and are computed in one step.

    Position p is token p % 16 of block table[p // 16]. With `sampling`, the logits after the last token give
    output token `index` (0 is the first); without, only KV is wanted. The last `drafts` tokens are guesses: what the
    logits before each of them give is compared with it, and the first that differs ends the slice. `ids` are all
    tokens of the request up to here, guesses excluded, the first `prompt` of them its prompt. The runner keeps no list.
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


class Sampled(msgspec.Struct, frozen=True):
    """What a slice brought: the drafts that proved right, then one token more. `logprobs` as in wire.Tokens."""

    tokens: tuple[int, ...]
    logprobs: bytes = b""


class Sequence:
    """One Generate from arrival to end. Times are microseconds of the caller's clock."""

    def __init__(self, ask: wire.Generate, token_bytes: Callable[[int], bytes], now_us: int) -> None:
        self.request = ask.request
        self.namespace = ask.namespace
        self.sampling = ask.sampling
        self.max_tokens = ask.max_tokens
        self.ids = array("I", wire.unpack_ids(ask.tokens))  # prompt, then output
        self.prompt = len(self.ids)
        self.computed = 0  # tokens whose KV is in the table
        self.ticket: Ticket | None = None  # None while it waits
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

    def admitted(self, ticket: Ticket, now_us: int) -> None:
        self.ticket = ticket
        self.computed = ticket.cached
        self._admitted_us = now_us

    def slice(self, tokens: int) -> Slice:
        """Returns the next `tokens` pending tokens as a slice; it samples if it takes all of them."""
        assert self.ticket is not None and 0 < tokens <= self.pending
        end = self.computed + tokens
        return Slice(
            request=self.request,
            tokens=self.ids[self.computed : end].tolist(),
            start=self.computed,
            table=self.ticket.table,
            sampling=self.sampling if end == len(self.ids) else None,
            index=self.output,
            ids=self.ids,
            prompt=self.prompt,
        )

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
