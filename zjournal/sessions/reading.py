"""How an answer is read: with which tokens, in which dialect, and on which terms of its request.

Whoever reads an answer again (GET, chains, imports, pages for people) gets its reader here, so that all of them see
what its client was told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from zjournal import ask
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects import choose
from zjournal.dialects.base import Dialect, prime
from zjournal.journal import events
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader as Journal
from zjournal.sessions import follow
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records
from zjournal.sessions.vocabulary import Tokens, Vocabulary

Decoders = Mapping[str, Callable[[bytes], ask.Ask]]  # protocol to what reads a body of it


class Terms(msgspec.Struct, frozen=True):
    """What of a request decides how its answer is read.

    `tools`: those whose calls are looked for. `begun`: what the prompt has already said of the answer. `tagged`: a call
    needs the dialect's tags, for the answer may be JSON that was asked for.
    """

    tools: tuple[ask.ToolSpec, ...] = ()
    stop: tuple[str, ...] = ()
    begun: str = ""
    tagged: bool = False

    @classmethod
    def of(cls, request: ask.Ask, begun: str) -> Terms:
        """The terms of a request. One that forbids all tools looks for no call."""
        tools = () if request.choice.mode == "none" else request.tools
        tagged = bool(tools) and request.format is not None and request.choice.mode == "auto"
        return cls(tools, request.stop, begun, tagged)

    @classmethod
    def recorded(cls, accepted: events.RequestAccepted, body: Callable[[], bytes], decoders: Decoders) -> Terms:
        """Those of a recorded request; its body is read only if it matters."""
        if not (accepted.stop or accepted.tools):
            return cls(begun=accepted.begun)
        return cls.of(decoders[accepted.protocol](body()), accepted.begun)


class Model(msgspec.Struct, frozen=True):
    """What turns one model's token ids into what it said.

    `foreign`: the ids mean nothing to the model that is served; then end tokens are known only by standing last.
    """

    token: Callable[[int], bytes]
    control: frozenset[int]
    dialect: Dialect
    end_tokens: frozenset[int] = frozenset()
    foreign: bool = False

    @classmethod
    def today(cls, tokenizer: Tokenizer, dialect: Dialect, end_tokens: frozenset[int]) -> Model:
        """The model that is served."""
        return cls(tokenizer.token_bytes, frozenset(tokenizer.control.values()), dialect, end_tokens)

    def reader(self, terms: Terms) -> follow.Reader:
        """A reader for one answer, from its first token on."""
        parser = self.dialect.parser(terms.tools, in_tags=terms.tagged)
        prime(parser, _parts(self.dialect, begun(self.dialect, terms.begun)))  # a file may say anything was begun
        return follow.Reader(self.token, self.control, parser, self.end_tokens, terms.stop)


class Answer(msgspec.Struct, frozen=True):
    """A recorded answer: its request's acceptance, its tail without end tokens, and all its deltas.

    `foreign` as in Model.
    """

    accepted: events.RequestAccepted
    tail: follow.Tail
    deltas: tuple[ask.Delta, ...]
    foreign: bool


class Models:
    """The model that made a turn, as one that can read it. For one thread at a time."""

    def __init__(self, makers: Makers, today: Model | None = None, vocabulary: bytes = b"") -> None:
        """`today` is the model that is served, if one is, `vocabulary` the digest of its vocabulary."""
        self._makers = makers
        self._today = today
        self._vocabulary = vocabulary
        self._models: dict[tuple[bytes, str], Model] = {}

    def of(self, turn: Turn, accepted: events.RequestAccepted) -> Model | None:
        """The model; None if the journal does not say what the tokens stand for. Raises JournalFault."""
        maker = self._makers.of(turn)
        vocabulary = maker.vocabulary if maker is not None else b""
        if self._today is not None and vocabulary in (b"", self._vocabulary):
            return self._spoken(self._today, accepted.dialect)
        words = self._makers.vocabulary(maker)
        if words is None:
            return None
        key = vocabulary, accepted.dialect
        if key not in self._models:
            self._models[key] = recorded_model(words, accepted.dialect)
        return self._models[key]

    def _spoken(self, today: Model, dialect: str) -> Model:
        """Today's model with the dialect that it was read in then."""
        if dialect == choose.told(today.dialect):
            return today
        key = self._vocabulary, dialect
        if key not in self._models:
            literals = {today.token(token).decode("utf-8", "replace"): token for token in today.control}
            self._models[key] = msgspec.structs.replace(today, dialect=choose.named(dialect, Tokens(literals)))
        return self._models[key]


def recorded_model(words: Vocabulary, dialect: str) -> Model:
    """What reads the answers of a model that only its vocabulary is left of. Raises JournalFault, ModelFault."""
    return Model(words.token, words.control, choose.named(dialect, words.tokens()), foreign=True)


class Answers:
    """Reads answers of one journal. For one thread at a time."""

    def __init__(
        self,
        journal: Journal,
        records: Records,
        models: Models,
        decoders: Decoders,
        known: Callable[[str], Terms | None] = lambda response: None,
    ) -> None:
        """`known` tells the terms of a response's request, if they are known without its body."""
        self._journal = journal
        self._records = records
        self._models = models
        self._decoders = decoders
        self._terms = known

    def of(self, turn: Turn) -> Answer | None:
        """The answer of a turn that has ended; None if the journal does not say what its tokens stand for.

        Raises JournalFault: erased, or damaged.
        """
        facts = self._journal.read_response(turn.response)
        accepted = facts[0].event
        assert isinstance(accepted, events.RequestAccepted), accepted
        model = self._models.of(turn, accepted)
        if model is None:
            return None
        tail = follow.recorded_tail(facts)
        terms = self._terms(turn.response)
        if terms is None:
            terms = Terms.recorded(accepted, lambda: self._records.body(turn), self._decoders)
        return Answer(accepted, tail, read(model, terms, tail), model.foreign)


def read(model: Model, terms: Terms, tail: follow.Tail) -> tuple[ask.Delta, ...]:
    """All deltas of an answer that has ended. Takes the end tokens off its tail."""
    if model.foreign:
        follow.without_end(tail)
    while tail.ids and tail.ids[-1] in model.end_tokens:  # cut by a limit at an end token that might not come yet
        tail.ids.pop()
        del tail.logprobs[len(tail.ids) :]
    return tuple(follow.deltas_of(tail, model.reader(terms)))


def begun(dialect: Dialect, prompt: str) -> str:
    """What the end of a prompt has already said of the answer: tags of thoughts and white space, or "".

    What else stands there is a client's, or another message.
    """
    reasoning = dialect.reasoning
    if reasoning is None:
        return ""
    found = reasoning.begun(prompt)
    return "" if found.replace(reasoning.opening, "").replace(reasoning.closing, "").strip() else found


def _parts(dialect: Dialect, text: str) -> list[tuple[bytes, bool]]:
    """A text of tags and layout as a parser takes it; a tag is a control token where the dialect knows it as one."""
    if not text or dialect.reasoning is None:
        return []
    tags = re.compile(f"({re.escape(dialect.reasoning.opening)}|{re.escape(dialect.reasoning.closing)})")
    return [(part.encode(), at % 2 == 1) for at, part in enumerate(tags.split(text)) if part]
