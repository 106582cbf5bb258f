"""Which engine made a turn: its model's name and its vocabulary, by the journal alone.

A data directory outlives a model. What an earlier model sampled is read with that model's vocabulary, and is
told under that model's name.
"""

from __future__ import annotations

from zjournal.journal.events import EngineImported, EngineStarted, RequestAccepted
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions import identity
from zjournal.sessions.vocabulary import Vocabulary

Maker = EngineStarted | EngineImported


class Makers:
    """Looks up each namespace and each vocabulary once; there are as many as there were models."""

    def __init__(self, journal: Reader) -> None:
        self._journal = journal
        self._makers: dict[str, Maker | None] = {}
        self._vocabularies: dict[bytes, Vocabulary] = {}

    def of(self, turn: Turn) -> Maker | None:
        """The start of the engine that made the turn; None if the journal does not say so for sure."""
        namespace = self.namespace(turn)
        if namespace not in self._makers:
            engine = self._journal.engine_before(turn.accepted_seq)
            sure = engine is not None and identity.namespace(engine.fingerprint, turn.tenant) == namespace
            self._makers[namespace] = engine if sure else self._elsewhere(turn, namespace)
        return self._makers[namespace]

    def namespace(self, turn: Turn) -> str:
        """The namespace that the turn was accepted in."""
        (fact,) = self._journal.read(after=turn.accepted_seq - 1, limit=1)
        assert isinstance(fact.event, RequestAccepted), fact
        return fact.event.namespace

    def _elsewhere(self, turn: Turn, namespace: str) -> EngineImported | None:
        """The engine of another journal that made the turn, if it was imported."""
        for fact in self._journal.before(turn.accepted_seq, EngineImported):
            if isinstance(fact.event, EngineImported) and fact.event.namespace == namespace:
                return fact.event
        return None

    def vocabulary(self, maker: Maker | None) -> Vocabulary | None:
        """What that engine's token ids stand for, if it was recorded. Raises JournalFault if it is damaged."""
        if maker is None or not maker.vocabulary:
            return None
        known = self._vocabularies.get(maker.vocabulary)
        if known is None:
            known = Vocabulary(self._journal.content(maker.tenant, maker.vocabulary))
            self._vocabularies[maker.vocabulary] = known
        return known
