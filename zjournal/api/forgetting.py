"""What was deleted from the journal is forgotten in memory, however its deletion came about."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from zjournal.api.acceptance import Opened
from zjournal.api.rendering import Rendering
from zjournal.api.running import Runs
from zjournal.journal import events

FORGET_TEXTS_S = 10.0  # at least between two times that the tokenizer forgets, for it must read all that goes on anew
_GONE = (events.ResponseDeleted, events.PayloadErased, events.SessionDeleted)


class Forgetting:
    """Tells who remembers: the runs, the sessions opened lately, the chains and the tokenizer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, opened: Opened, rendering: Rendering) -> None:
        self._loop = loop
        self._runs = runs
        self._opened = opened
        self._rendering = rendering
        self._texts_forgotten = -math.inf  # on the loop's clock
        self.forgetting_texts: asyncio.TimerHandle | None = None  # what waits for its time

    def hear(self, facts: Sequence[events.Recorded]) -> None:
        """A subscriber of the journal, called in its thread."""
        gone = [fact.event for fact in facts if isinstance(fact.event, _GONE)]
        responses = [event.response for event in gone if not isinstance(event, events.SessionDeleted)]
        sessions = [event.session for event in gone if isinstance(event, events.SessionDeleted)]
        erased = tuple(event.response for event in gone if isinstance(event, events.PayloadErased))
        if gone:
            self._loop.call_soon_threadsafe(self._forget, responses, erased, sessions)

    def _forget(self, responses: list[str], erased: tuple[str, ...], sessions: list[str]) -> None:
        self._runs.forget(erased)
        self._opened.forget(sessions)
        for response in responses:
            self._rendering.forget(response)
        if erased:
            self._forget_texts()

    def _forget_texts(self) -> None:
        """Has the tokenizer forget what it has encoded: now, or once FORGET_TEXTS_S have passed since the last time."""
        if self.forgetting_texts is not None:
            return

        def forget() -> None:
            self.forgetting_texts, self._texts_forgotten = None, self._loop.time()
            self._rendering.forget_texts()

        at = max(self._texts_forgotten + FORGET_TEXTS_S, self._loop.time())
        self.forgetting_texts = self._loop.call_at(at, forget)
