"""Facts to deltas: the one read behind streaming, non-streaming, GET and every later look at a response.

A `Tail` holds what is known of one response: all of it once recorded, and a growing part while it runs.
Deltas are made token by token, so they do not depend on how the tokens were batched; and they may run at
most AHEAD_TOKENS past what is durable, so a client is never told what a crash could take back. The end
is in the tail only once it is committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import get_args

import msgspec

from zjournal import ask
from zjournal.checkpoint.stops import StopMatcher
from zjournal.dialects.base import Parser
from zjournal.journal import events
from zjournal.link import wire

AHEAD_TOKENS = 64  # promise 3
PAUSE_TOKENS = 64  # told in one go


class Tail:
    """What is known of one response. One writer; any number of followers wait on it."""

    def __init__(self) -> None:
        self.progress: ask.Progress | None = None
        self.ids: list[int] = []
        self.logprobs: list[bytes] = []  # of each id, as in wire.Tokens, or empty if they were not asked for
        self.durable = 0  # tokens
        self.calls = 0  # whole calls that are facts
        self.waits: list[ask.Waiting] = []  # in order
        self.waited = 0  # of them, those that are durable
        self.admitted = 0  # of them, those before `progress`
        self.end: ask.Ended | ask.Broke | None = None
        self._waiters: list[asyncio.Future[None]] = []  # one for each follower: to share one costs three more for each

    def wake(self) -> None:
        """Tells the followers that something changed."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():  # else its follower has been cancelled, and does not know yet
                    waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next wake()."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:  # a follower that leaves leaves nothing behind
                self._waiters.remove(waiter)
            raise


class Reader:
    """Token ids of one response to deltas: end tokens dropped, stop strings cut, dialect parsed.

    Logprobs come with the text that their token begins; those of end tokens, of what stands in a stop string, of
    thoughts and of calls are not told.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        control: Collection[int],
        parser: Parser,
        end_tokens: Collection[int],
        stop: Sequence[str],
    ) -> None:
        """`control` are the ids of control tokens; the parser is a fresh one, perhaps primed."""
        self._token_bytes = token_bytes
        self._control = control
        self._end_tokens = end_tokens
        self._stops = StopMatcher(tuple(text.encode() for text in stop)) if stop else None
        self._parser = parser
        # Bytes of each token that the stop matcher holds; if control. An empty deque takes 760 bytes, and most answers
        # need none.
        self._held: deque[tuple[int, bool]] | None = deque() if stop else None
        self._begun = b""  # of a control token that is not whole yet
        self._told: _Told | None = None
        self._pending = 0  # tokens since the last delta
        self.reasoning = 0  # tokens of thoughts so far, the tags before them included

    def feed(self, token: int, logprobs: bytes = b"") -> list[ask.Delta]:
        """The deltas that one more token completes; often none or one. `logprobs` of the token, as in wire.Tokens."""
        if token in self._end_tokens:
            return []
        data = self._token_bytes(token)
        if logprobs:
            self._told = self._told or _Told()
            self._told.add(data, self._named(data, logprobs))
        self._pending += 1
        if self._stops is None or self._held is None:
            return self._counted(self._parser.feed(data, token in self._control))
        self._held.append((len(data), token in self._control))
        return self._counted(self._parse(self._stops.feed(data)))

    def end(self) -> list[ask.Delta]:
        """The deltas that were held back for what might have followed."""
        held = self._parse(self._stops.end()) if self._stops is not None else []
        if self._begun:
            held += self._parser.feed(self._begun)  # a stop string stands in it, so it is text
        return self._counted(held + self._parser.end())

    @property
    def stopped(self) -> str:
        """The stop string that was met, or ""."""
        return (self._stops.hit or b"").decode() if self._stops is not None else ""

    def _parse(self, seen: bytes) -> list[ask.Delta]:
        """Feeds what stands before any stop string, token by token. A control token waits until it is whole."""
        deltas: list[ask.Delta] = []
        assert self._held is not None
        while seen:
            size, control = self._held.popleft()
            part, seen = seen[:size], seen[size:]
            if len(part) < size:
                self._held.appendleft((size - len(part), control))
            if control:
                self._begun += part
                part, self._begun = (b"", self._begun) if len(part) < size else (self._begun, b"")
            deltas += self._parser.feed(part, control) if part else []
        return deltas

    def _counted(self, deltas: list[ask.Delta]) -> list[ask.Delta]:
        if not deltas:
            return deltas
        if isinstance(deltas[0], ask.ReasoningDelta):
            self.reasoning += self._pending
        self._pending = 0
        return deltas if self._told is None else self._told.join(deltas, sum(size for size, _ in self._held or ()))

    def _named(self, data: bytes, logprobs: bytes) -> ask.Logprob:
        own, others = wire.unpack_logprobs(logprobs)
        return ask.Logprob(data, own, tuple((self._token_bytes(other), value) for other, value in others))


class _Told:
    """Logprobs that wait for the text of their tokens."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, ask.Logprob | None]] = deque()  # None: told with the token's first bytes

    def add(self, data: bytes, logprob: ask.Logprob) -> None:
        """The next token has these bytes."""
        self._waiting.append((data, logprob))

    def join(self, deltas: list[ask.Delta], unseen: int) -> list[ask.Delta]:
        """Each text with the logprobs of the tokens that begin in it. The last `unseen` bytes are in no delta yet."""
        if not self._waiting:
            return deltas
        joined: list[ask.Delta] = []
        for delta in deltas:
            if isinstance(delta, ask.TextDelta):
                delta = ask.TextDelta(delta.text, self._of(delta.text.encode(), unseen))
            joined.append(delta)
        if not isinstance(deltas[-1], ask.TextDelta):
            self._drop(unseen)
        return joined

    def _of(self, text: bytes, unseen: int) -> tuple[ask.Logprob, ...]:
        """Tags and layout before the text are passed over. What is no UTF-8 is told as another text: all is taken."""
        waiting = b"".join(data for data, _ in self._waiting)
        waiting = waiting[: len(waiting) - unseen]
        start = 0 if waiting.startswith(text) else waiting.rfind(text)
        end = start + len(text) if start >= 0 else len(waiting)
        found: list[ask.Logprob] = []
        at = 0
        while self._waiting and at < end:
            data, logprob = self._waiting.popleft()
            if logprob is not None and at + len(data) > start:
                found.append(logprob)
            at += len(data)
            if at > end:
                self._waiting.appendleft((data[end - at :], None))
        return tuple(found)

    def _drop(self, unseen: int) -> None:
        """What was seen by now led to thoughts or calls, or was layout."""
        waiting = sum(len(data) for data, _ in self._waiting)
        while self._waiting and waiting > unseen:
            data, _ = self._waiting.popleft()
            if waiting - len(data) < unseen:
                self._waiting.appendleft((data[len(data) - (unseen - waiting + len(data)) :], None))
                break
            waiting -= len(data)


async def follow(tail: Tail, reader: Reader) -> AsyncIterator[ask.Step]:
    """Yields the response's steps from its beginning, waiting for those to come.

    That a call is whole is told once it is a fact. So is a Waiting: one that never becomes a fact is told to nobody.
    """
    at = waits = 0
    told_progress = False
    while True:
        if tail.progress is not None and not told_progress and waits >= tail.admitted:
            told_progress = True
            yield tail.progress
        if waits < len(tail.waits) and tail.waits[waits].position <= at:
            if waits < tail.waited:
                yield tail.waits[waits]
                waits += 1
            elif tail.end is not None:
                waits = len(tail.waits)
            else:
                await tail.wait()
            continue
        visible = min(len(tail.ids), tail.durable + AHEAD_TOKENS)
        if at < visible:
            logprobs = tail.logprobs[at] if tail.logprobs else b""
            deltas = reader.feed(tail.ids[at], logprobs)
            at += 1
            if at % PAUSE_TOKENS == 0:  # what is all there already must not keep the others waiting
                await asyncio.sleep(0)
            for delta in deltas:
                if isinstance(delta, ask.CallEnded):
                    while delta.index >= tail.calls and tail.end is None:
                        await tail.wait()
                yield _settled(delta, tail)
        elif tail.end is not None:
            for delta in reader.end():
                yield _settled(delta, tail)
            usage = msgspec.structs.replace(tail.end.usage, reasoning=reader.reasoning)
            if isinstance(tail.end, ask.Ended):
                yield msgspec.structs.replace(tail.end, usage=usage, stop=reader.stopped)
            else:
                yield msgspec.structs.replace(tail.end, usage=usage)
            return
        else:
            await tail.wait()


def deltas_of(tail: Tail, reader: Reader) -> list[ask.Delta]:
    """All deltas of a response that has ended, as `follow` tells them."""
    told = tail.logprobs or [b""] * len(tail.ids)
    deltas = [delta for token, known in zip(tail.ids, told, strict=True) for delta in reader.feed(token, known)]
    return [_settled(delta, tail) for delta in (*deltas, *reader.end())]


def _settled(delta: ask.Delta, tail: Tail) -> ask.Delta:
    """A call that is no fact was never told to be whole, and never will be."""
    if isinstance(delta, ask.CallEnded) and delta.index >= tail.calls:
        return msgspec.structs.replace(delta, truncated=True)
    return delta


def recorded_tail(records: Sequence[events.Recorded]) -> Tail:
    """The tail of a response that has ended, from its facts in order."""
    tail = Tail()
    prompt = cached = output = 0
    accepted: events.RequestAccepted | None = None
    for record in records:
        match record.event:
            case events.RequestAccepted():
                accepted = record.event
            case events.PromptRendered(count=count):
                prompt = count
            case events.CacheMatched(cached=matched, prompt=rendered):
                cached = matched
                tail.progress = ask.Progress(cached=matched, prompt=rendered)
                tail.admitted = len(tail.waits)
            case events.ResponseWaited(position=position, done=done, queued=queued):
                tail.waits.append(ask.Waiting(position, done, prompt, queued))
            case events.TokensSampled():
                if record.payload is not None:
                    ids, logprobs = wire.unpack_sampled(record.payload, record.event.count)
                    tail.ids.extend(ids)
                    tail.logprobs.extend(logprobs)
                output += record.event.count
            case events.ToolCalled():
                tail.calls += 1
            case events.ResponseFinished(reason=reason):
                assert reason in get_args(ask.EndReason), reason
                at = ended_at(accepted, record.event) if accepted else None
                tail.end = ask.Ended(reason, ask.Usage(prompt, cached, output), at)  # type: ignore[arg-type]
            case events.ResponseFailed(code=code, message=message):
                tail.end = ask.Broke(code, message, ask.Usage(prompt, cached, output))
    tail.durable = len(tail.ids)
    tail.waited = len(tail.waits)
    return tail


def without_end(tail: Tail) -> Tail:
    """Takes off the end token, by which a recorded response that ended with `stop` was ended."""
    if isinstance(tail.end, ask.Ended) and tail.end.reason == "stop" and tail.ids:
        tail.ids.pop()
        del tail.logprobs[len(tail.ids) :]
        tail.durable = len(tail.ids)
    return tail


def ended_at(accepted: events.RequestAccepted, finished: events.ResponseFinished) -> int:
    """When a response ended, in Unix seconds: by its own facts, so that every telling of it says the same."""
    return accepted.created + (finished.queue_us + finished.prefill_us + finished.decode_us) // 1_000_000


def text_of(deltas: Sequence[ask.Delta]) -> str:
    """The text of the message, whatever stands between its parts."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ask.TextDelta))
