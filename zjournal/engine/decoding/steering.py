"""What may come next in a request's answer: its fence and its guard, composed; and the fences that are compiled.

The fence goes before: where it leaves one token, that one comes, whatever the guard says. Where both together leave
none, the request ends with a reason, and never with a token that is not legal.

Fences are compiled in a thread of their own, once for each digest, and kept while they are used; who wants one that
is not there yet waits without holding up others. A request without a fence and a guard has none of this.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from zjournal.engine.decoding.guard import Guard
from zjournal.errors import Fault, FenceFailed
from zjournal.link import wire

if TYPE_CHECKING:  # the grammar library, which a process without fences does not need
    from zjournal.engine.decoding.fence import Compiled, State
    from zjournal.engine.decoding.vocabulary import Vocabulary

COMPILED_MAX = 32  # fences that are kept, beside those of running requests


class Choice(NamedTuple):
    """What one row of logits may become: the tokens of a mask, uint32 [words], or all but `banned`; or `forced` alone.

    `complete`: the answer is, and nothing but an end token may come, whatever min_tokens says.
    """

    allowed: np.ndarray | None = None
    banned: Collection[int] = ()
    forced: int = -1
    complete: bool = False

    def allows(self, token: int) -> bool:
        """Whether this token may come."""
        if self.forced >= 0:
            return token == self.forced
        if self.allowed is None:
            return token not in self.banned
        return bool(int(self.allowed[token >> 5]) >> (token & 31) & 1) and token not in self.banned


@dataclass
class Counts:
    """Since the start of the engine."""

    requests: int = 0  # with a fence
    compiled: int = 0
    compile_us: int = 0
    masks: int = 0
    mask_us: int = 0


class Steer:
    """One request's fence and guard. It goes on by `advance`; between two of them `choices` may be asked beside."""

    def __init__(
        self,
        ask: wire.Generate,
        compiled: Future[Compiled] | None,
        counts: Counts,
    ) -> None:
        self._request = ask.request
        self._ends = ask.end_tokens
        self._compiled = compiled
        self._state: State | None = None
        self._counts = counts
        thoughts = ask.fence.thoughts if ask.fence is not None else None
        closing = thoughts[1].token if thoughts is not None else -1
        self._guard = Guard(ask.guard, closing) if ask.guard is not None else None

    @property
    def ready(self) -> bool:
        """Whether its fence is compiled, or never will be."""
        return self._compiled is None or self._compiled.done()

    @property
    def fault(self) -> Fault | None:
        """Why there is no fence; only of one that is ready."""
        error = self._compiled.exception() if self._compiled is not None else None
        if error is None or isinstance(error, Fault):
            return error
        return FenceFailed(f"The grammar of what may be answered cannot be compiled: {type(error).__name__}.")

    @property
    def reason(self) -> str:
        """Why the answer has to end with the last token; "" while it may go on."""
        return "loop" if self._guard is not None and self._guard.over is not None else ""

    def advance(self, tokens: Sequence[int]) -> list[wire.Looped]:
        """Takes tokens that were chosen; returns what the guard did about them. Raises FenceFailed."""
        state, guard = self._begun(), self._guard
        for token in tokens:
            assert state is None or not state.ended, "a token behind the end"
            if guard is None or guard.over is not None:
                if state is not None:
                    state.feed(token)
            else:
                _push(state, guard, token)
        return [act.told(self._request) for act in guard.take()] if guard is not None else []

    @property
    def computes(self) -> bool:
        """Whether `choices` takes longer than to hand it to another thread."""
        state = self._begun()
        return state is not None and state.computes

    def choices(self, drafts: Sequence[int]) -> list[Choice] | Fault | None:
        """What the next row of logits may become, and the one behind each draft; shorter where a draft is not legal.

        None: anything may come. In any thread, while no other one calls.
        """
        guard = self._guard
        if self._compiled is None and not drafts and (guard is None or (not guard.banned() and guard.forced() is None)):
            return None
        begun = time.perf_counter_ns()
        try:
            return self._rows(drafts)
        except Fault as fault:
            return fault
        finally:
            if self._compiled is not None:
                self._counts.masks += 1
                self._counts.mask_us += (time.perf_counter_ns() - begun) // 1000

    def _rows(self, drafts: Sequence[int]) -> list[Choice]:
        """Raises a Fault where the next token cannot be told; behind a draft there is no row then."""
        state, guard = self._begun(), self._guard
        found = [_choice(state, guard)]
        if drafts:
            state = state.copy() if state is not None else None
            guard = guard.copy() if guard is not None else None
        for draft in drafts:
            if not found[-1].allows(draft):
                break
            try:
                _push(state, guard, draft)
                if (state is not None and state.ended) or (guard is not None and guard.over is not None):
                    break
                found.append(_choice(state, guard))
            except Fault:  # nobody may ever say this
                break
        return found

    def _begun(self) -> State | None:
        """Where the answer stands; None without a fence."""
        if self._state is None and self._compiled is not None:
            from zjournal.engine.decoding.fence import State

            self._state = State(self._compiled.result(timeout=0), self._ends)
        return self._state


def _push(state: State | None, guard: Guard | None, token: int) -> None:
    """One more token for both. Where it stood, for the guard: a tag around thoughts is none of them."""
    if state is None:
        if guard is not None:
            guard.push(token)
        return
    before = state.where
    state.feed(token)
    if guard is not None:
        guard.push(token, before == "thoughts" and state.where == "thoughts", before == "call")


def _choice(state: State | None, guard: Guard | None) -> Choice:
    allowed, banned, complete = state.legal() if state is not None else (None, (), False)
    choice = Choice(allowed, banned, complete=complete)
    if guard is None:
        return choice
    forced = guard.forced()
    if forced is not None:
        return Choice(forced=forced) if choice.allows(forced) else choice
    wished = [token for token in guard.banned() if choice.allows(token)]
    if not wished:
        return choice
    if allowed is not None and int(np.unpackbits(allowed.view(np.uint8)).sum()) == 1:
        return choice
    return Choice(allowed, (*banned, *wished), complete=complete)


class Fences:
    """The compiled fences of one engine. All its methods are for the thread that serves."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None) -> None:
        """`vocabulary` makes what fences need of the model, in the thread that compiles; None: fences are ignored."""
        self._vocabulary = vocabulary
        self._words: Vocabulary | None = None  # the compiling thread's
        self._compiled: OrderedDict[bytes, Future[Compiled]] = OrderedDict()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._beside = ThreadPoolExecutor(1, "zj-fences")
        self.counts = Counts()

    def fileno(self) -> int:
        """Readable when something has been compiled; see settle."""
        return self._event

    def warm(self) -> None:
        """Makes what all fences need, before the first one."""
        if self._vocabulary is not None:
            self._beside.submit(self._made)

    def open(self, ask: wire.Generate) -> Steer | None:
        """What steers a request; None if nothing does."""
        fenced = ask.fence is not None and self._vocabulary is not None
        if not fenced and ask.guard is None:
            return None
        self.counts.requests += fenced
        return Steer(ask, self._of(ask.fence) if fenced and ask.fence is not None else None, self.counts)

    def settle(self) -> bool:
        """Whether something was compiled since the last time."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return False
        return True

    def gauges(self) -> dict[str, int]:
        """What wire.Gauges tells of fences."""
        return {
            "fenced": self.counts.requests,
            "fences_compiled": self.counts.compiled,
            "fence_compile_us": self.counts.compile_us,
            "fence_masks": self.counts.masks,
            "fence_mask_us": self.counts.mask_us,
        }

    def close(self) -> None:
        """Compiles no more. What runs is waited for."""
        self._beside.shutdown(cancel_futures=True)
        os.close(self._event)

    def _of(self, fence: wire.Fence) -> Future[Compiled]:
        digest = hashlib.sha256(msgspec.msgpack.encode(fence)).digest()
        known = self._compiled.get(digest)
        if known is not None and not (known.done() and known.exception() is not None):
            self._compiled.move_to_end(digest)
            return known
        future = self._compiled[digest] = self._beside.submit(self._compile, fence)
        future.add_done_callback(lambda _: os.eventfd_write(self._event, 1))
        while len(self._compiled) > COMPILED_MAX:
            self._compiled.popitem(last=False)
        return future

    def _made(self) -> Vocabulary:
        """In the compiling thread."""
        if self._words is None:
            assert self._vocabulary is not None
            self._words = self._vocabulary()
        return self._words

    def _compile(self, fence: wire.Fence) -> Compiled:
        """In the compiling thread."""
        from zjournal.engine.decoding.fence import Compiled

        words = self._made()
        begun = time.perf_counter_ns()
        compiled = Compiled(words, fence)
        self.counts.compiled += 1
        self.counts.compile_us += (time.perf_counter_ns() - begun) // 1000
        return compiled
