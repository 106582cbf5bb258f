"""Facts to deltas: the one read behind streaming, non-streaming, GET and every later look at a response.

A `Tail` holds what is known of one response: all of it once recorded, and a growing part while it runs.
Deltas are made token by token, so they do not depend on how the tokens were batched; and they may run at
most AHEAD_TOKENS past what is durable, so a client is never told what a crash could take back. The end
is in the tail only once it is committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from zjournal import ask
from zjournal.checkpoint.stops import StopMatcher
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect, Parser
from zjournal.journal import events
from zjournal.link import wire
from zjournal.sessions.vocabulary import Vocabulary

AHEAD_TOKENS = 64  # promise 3


class Tail:
    """What is known of one response. One writer; any number of followers wait on it."""

    def __init__(self) -> None:
        self.progress: ask.Progress | None = None
        self.ids: list[int] = []
        self.logprobs: list[bytes] = []  # of each id, as in wire.Tokens, or empty if they were not asked for
        self.durable = 0  # tokens
        self.end: ask.Ended | ask.Broke | None = None
        self._changed: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Tells the followers that something changed."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def wait(self) -> None:
        """Returns at the next wake()."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)


class Reader:
    """Token ids of one response to deltas: end tokens dropped, stop strings cut, dialect parsed.

    Logprobs come with the delta that the first byte of their token leads to, or with the next one behind that; so those
    of end tokens and of what stands in a stop string are not told, as their text is not.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], parser: Parser, end_tokens: frozenset[int], stop: Sequence[str]
    ) -> None:
        self._token_bytes = token_bytes
        self._end_tokens = end_tokens
        self._stops = StopMatcher(tuple(text.encode() for text in stop))
        self._parser = parser
        self._told = _Told()

    def feed(self, token: int, logprobs: bytes = b"") -> list[ask.Delta]:
        """The deltas that one more token completes; often none or one. `logprobs` of the token, as in wire.Tokens."""
        if token in self._end_tokens:
            return []
        data = self._token_bytes(token)
        if logprobs:
            self._told.add(len(data), self._named(data, logprobs))
        seen = self._stops.feed(data)
        return self._told.join(len(seen), self._parser.feed(seen) if seen else [])

    def end(self) -> list[ask.Delta]:
        """The deltas that were held back for what might have followed."""
        seen = self._stops.end()
        return self._told.join(len(seen), (self._parser.feed(seen) if seen else []) + self._parser.end(), last=True)

    def _named(self, data: bytes, logprobs: bytes) -> ask.Logprob:
        own, others = wire.unpack_logprobs(logprobs)
        return ask.Logprob(data, own, tuple((self._token_bytes(other), value) for other, value in others))


class _Told:
    """Logprobs that wait for the text of their tokens."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, ask.Logprob]] = deque()  # with the place of the first byte
        self._fed = 0  # bytes
        self._seen = 0  # of them, known to stand before any stop string

    def add(self, size: int, logprob: ask.Logprob) -> None:
        """The next token has `size` bytes."""
        self._waiting.append((self._fed, logprob))
        self._fed += size

    def join(self, seen: int, deltas: list[ask.Delta], last: bool = False) -> list[ask.Delta]:
        """`seen` bytes more may be told, and these deltas tell of them; the first takes what has waited for it."""
        self._seen += seen
        if not self._waiting or not (deltas or last):
            return deltas
        ready: list[ask.Logprob] = []
        while self._waiting and self._waiting[0][0] < self._seen:
            ready.append(self._waiting.popleft()[1])
        if not ready:
            return deltas
        if deltas and isinstance(deltas[0], ask.TextDelta):
            return [ask.TextDelta(deltas[0].text, (*deltas[0].logprobs, *ready)), *deltas[1:]]
        return [ask.TextDelta("", tuple(ready)), *deltas]  # the parser kept the text to itself, or it is no text


def reader(tokenizer: Tokenizer, dialect: Dialect, end_tokens: frozenset[int], stop: Sequence[str]) -> Reader:
    """A reader for one response."""
    return Reader(tokenizer.token_bytes, dialect.parser(), end_tokens, stop)


def foreign_reader(vocabulary: Vocabulary, dialect: Dialect, stop: Sequence[str]) -> Reader:
    """A reader for a response of an earlier model, from whose ids the end token was taken off."""
    return Reader(vocabulary.token, dialect.parser(), frozenset(), stop)


async def follow(tail: Tail, reader: Reader) -> AsyncIterator[ask.Step]:
    """Yields the response's steps from its beginning, waiting for those to come."""
    at = 0
    told_progress = False
    while True:
        if tail.progress is not None and not told_progress:
            told_progress = True
            yield tail.progress
        visible = min(len(tail.ids), tail.durable + AHEAD_TOKENS)
        if at < visible:
            logprobs = tail.logprobs[at] if tail.logprobs else b""
            deltas = reader.feed(tail.ids[at], logprobs)
            at += 1
            for delta in deltas:
                yield delta
        elif tail.end is not None:
            for delta in reader.end():
                yield delta
            yield tail.end
            return
        else:
            await tail.wait()


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
            case events.TokensSampled():
                if record.payload is not None:
                    ids, logprobs = wire.unpack_sampled(record.payload, record.event.count)
                    tail.ids.extend(ids)
                    tail.logprobs.extend(logprobs)
                output += record.event.count
            case events.ResponseFinished(reason=reason):
                assert reason in ("stop", "stop_string", "length", "cancelled"), reason
                at = ended_at(accepted, record.event) if accepted else None
                tail.end = ask.Ended(reason, ask.Usage(prompt, cached, output), at)  # type: ignore[arg-type]
            case events.ResponseFailed(code=code, message=message):
                tail.end = ask.Broke(code, message, ask.Usage(prompt, cached, output))
    tail.durable = len(tail.ids)
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


def read_text(ids: Sequence[int], reader: Reader, logprobs: Sequence[bytes] = ()) -> str:
    """The visible text of a whole output; with `logprobs` of each token these are read as well, and must be sound."""
    told = logprobs or [b""] * len(ids)
    deltas = [delta for token, known in zip(ids, told, strict=True) for delta in reader.feed(token, known)]
    deltas += reader.end()
    return "".join(delta.text for delta in deltas if isinstance(delta, ask.TextDelta))
