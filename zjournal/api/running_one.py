"""One running response: what is known of it between its acceptance and its end."""

from __future__ import annotations

import asyncio
import time

from zjournal import ask
from zjournal.journal import events
from zjournal.journal.written import Written
from zjournal.link import wire
from zjournal.sessions.fences import Check
from zjournal.sessions.follow import Reader, Tail
from zjournal.sessions.items import call_ids

ANSWER = -1  # in place of a call's index: the text of the answer


class Running:
    """One response between its acceptance and its end; owned by `Runs`, and no more than its state."""

    def __init__(
        self, accepted: events.RequestAccepted, prompt: int, reader: Reader, secret: bytes, check: Check | None = None
    ) -> None:
        """`secret` is the response's own, which ids of its calls are made of."""
        self.accepted = accepted
        self.check = check
        self.tail = Tail()
        self.reader = reader
        self.secret = secret
        self.deltas: list[ask.Delta] = []  # what it has said by now
        self.whole: list[ask.CallEnded] = []  # the calls in it that are whole
        self.calls = 0  # of them, those whose facts were handed to the journal
        self.looked = 0  # of them, those that `check` has or needs not
        self.looking: set[int] = set()  # the calls, or ANSWER, that a thread looks at
        self.wrong: dict[int, str] = {}  # what was found wrong with them
        self.finished: wire.Finished | None = None  # it ends once nothing is looked at any more
        self.started = time.monotonic()
        self.heard = self.started  # when there was something to tell of it last
        self.read = 0  # prompt tokens that have KV
        self.first_token: float | None = None
        self.prompt = prompt
        self.cached = 0
        self.flushed = 0  # tokens handed to the journal
        self.timer: asyncio.TimerHandle | None = None
        self.ending = False
        self.lost = False  # a fact of it could not be written
        self.matched: events.CacheMatched | None = None  # while it is not durable
        self.last: Written | None = None  # the append before the next one

    @property
    def usage(self) -> ask.Usage:
        return ask.Usage(self.prompt, self.cached, len(self.tail.ids))

    @property
    def warms(self) -> bool:
        """Whether it only reads its prompt, for a request to come."""
        return self.accepted.max_tokens == 0

    def hear(self, deltas: list[ask.Delta]) -> None:
        """What it says next."""
        if not deltas:
            return
        self.deltas += deltas
        self.heard = time.monotonic()
        self.whole += [delta for delta in deltas if isinstance(delta, ask.CallEnded) and not delta.truncated]

    @property
    def told(self) -> int:
        """How many of its whole calls can become facts: not those that are still looked at, nor any behind."""
        if not self.looking:
            return len(self.whole)
        return next((n for n, one in enumerate(self.whole) if one.index in self.looking), len(self.whole))

    def call_id(self, index: int) -> str:
        """The id of one of its calls."""
        accepted = self.accepted
        return call_ids(self.secret, accepted.response, self.deltas, accepted.nameless)(index)
