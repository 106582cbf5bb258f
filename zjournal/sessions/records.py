"""Records as the journal has them: the body and the prompt of any turn, read back.

Needs the journal and nothing else: neither the model nor a running server. Outputs that a record refers to are
remembered while a `Records` lives, so that reading two turns of one session reads their common past once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zjournal.dialects.prompt import Span
from zjournal.errors import JournalFault
from zjournal.journal.events import RequestAccepted
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions import follow
from zjournal.sessions.makers import Makers
from zjournal.sessions.memory import Memory
from zjournal.sessions.record import Record
from zjournal.sessions.vocabulary import Vocabulary

OUTPUTS_BYTES_MAX = 8 << 20
OUTPUTS_MAX = 1_024
OUTPUT_BYTES = 200  # of a remembered output beside its ids, about


class Records:
    """Reads the records of one journal. For one thread at a time."""

    def __init__(self, journal: Reader, makers: Makers) -> None:
        self._journal = journal
        self._makers = makers
        self._outputs: Memory[array[int]] = Memory(OUTPUTS_BYTES_MAX, OUTPUTS_MAX)

    def accepted(self, turn: Turn) -> RequestAccepted:
        """The fact that accepted a turn's request."""
        (fact,) = self._journal.read(after=turn.accepted_seq - 1, limit=1)
        assert isinstance(fact.event, RequestAccepted), fact
        return fact.event

    def body(self, turn: Turn) -> bytes:
        """The request's body as it was received. Raises JournalFault: erased, or damaged."""
        record = self._record(turn)
        vocabulary = self.vocabulary(turn)
        try:
            return record.body(None if vocabulary is None else vocabulary.decode)
        except ValueError as error:
            raise self._damaged(turn, error) from None

    def outline(self, turn: Turn, mark: str) -> bytes:
        """The body with marks for the texts that the prompt says: Record.outline. Raises JournalFault as `body`."""
        try:
            return self._record(turn).outline(mark)
        except ValueError as error:
            raise self._damaged(turn, error) from None

    def beginning(self, turn: Turn, number: int, tokens: int) -> str:
        """The beginning of a text of the outline: Record.beginning. Raises JournalFault as `body`."""
        vocabulary = self.vocabulary(turn)
        try:
            text = self._record(turn).beginning(number, None if vocabulary is None else vocabulary.decode, tokens)
        except ValueError as error:
            raise self._damaged(turn, error) from None
        return text.decode("utf-8", "ignore")  # it may end within a character

    def prompt(self, turn: Turn) -> tuple[array[int], tuple[Span, ...]]:
        """The prompt's token ids, and the spans that cover them. Raises JournalFault: erased, or damaged."""
        record = self._record(turn)
        try:
            return record.ids(), record.spans
        except ValueError as error:
            raise self._damaged(turn, error) from None

    def vocabulary(self, turn: Turn) -> Vocabulary | None:
        """What the token ids of a turn stand for; None if the journal does not say so for sure."""
        return self._makers.vocabulary(self._makers.of(turn))

    def forget(self, response: str) -> None:
        """Drops what is remembered of a response that was deleted."""
        self._outputs.forget(response)

    def _record(self, turn: Turn) -> Record:
        data = self._journal.content(turn.tenant, self.accepted(turn).record)
        try:
            return Record(data, self._output)
        except ValueError as error:
            raise self._damaged(turn, error) from None

    def _damaged(self, turn: Turn, error: ValueError) -> JournalFault:
        return JournalFault(f"{self._journal.path}: the record of {turn.response} is damaged: {error}")

    def _output(self, response: str) -> Sequence[int]:
        """The ids that were sampled for a response; none if there is no such response."""
        known = self._outputs.get(response)
        if known is None:
            known = array("I", follow.recorded_tail(self._journal.read_response(response)).ids)
            self._outputs.put(response, known, 4 * len(known) + OUTPUT_BYTES)
        return known
