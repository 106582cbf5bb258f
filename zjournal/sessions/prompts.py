"""Prompts as the journal has them: a turn's tokens, where each came from, and what the client wrote there.

Needs the journal and nothing else: neither the model nor a running server.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from zjournal.dialects.prompt import OUTPUT_PATH, Span
from zjournal.errors import JournalFault, NotFound
from zjournal.journal.events import PromptRendered, RequestAccepted
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.link import wire
from zjournal.sessions.chain import CHAIN_TURNS_MAX
from zjournal.sessions.diff import TOKEN_BYTES, Rendered, Source
from zjournal.sessions.makers import Makers
from zjournal.sessions.vocabulary import Vocabulary

_ANSWER = re.compile(rf"{OUTPUT_PATH}(.+)|response\[(.+)\]")  # spliced as tokens, or replayed as text
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_ELEMENT = re.compile(r"[^.\[\]]+\[\d+\]")  # such as messages[3]
_ROLE_OF_TYPE = {"function_call": "assistant", "function_call_output": "tool"}
_ROLE_OF_PATH = {"instructions": "system", "input": "user"}

_decode_spans = msgspec.msgpack.Decoder(tuple[Span, ...]).decode


class Prompts:
    """Reads prompts of one journal."""

    def __init__(self, journal: Reader) -> None:
        self._journal = journal
        self._makers = Makers(journal)

    def of(self, turn: Turn) -> Rendered:
        """The prompt of a turn. Raises NotFound if it was erased, JournalFault if it is damaged."""
        if turn.erased:
            raise NotFound(f"the content of {turn.response} was erased")
        accepted, rendered = self._facts(turn)
        tokens = self._journal.content(turn.tenant, rendered.tokens)
        spans = self._spans(turn, rendered)
        ends = [0, *(span.end for span in spans)]
        fits = all(span.start == end < span.end for span, end in zip(spans, ends, strict=False))
        if not fits or ends[-1] != rendered.count or len(tokens) != rendered.count * TOKEN_BYTES:
            raise JournalFault(f"{self._journal.path}: the spans of {turn.response} do not cover its prompt")
        engine = self._makers.of(turn)
        vocabulary = self._makers.vocabulary(engine)
        return Rendered(
            ids=tokens,
            sources=_Tracer(self._journal, self._chain(accepted), tokens, vocabulary).sources(spans),
            vocabulary=vocabulary,
            vocabulary_name=engine.vocabulary if engine else b"",
            template_name=engine.template if engine else b"",
        )

    def _facts(self, turn: Turn) -> tuple[RequestAccepted, PromptRendered]:
        """They stand together, for they were appended together; tool results may be told of in between."""
        facts = [fact.event for fact in self._journal.read(after=turn.accepted_seq - 1, limit=3)]
        match facts:
            case [RequestAccepted() as accepted, *others]:
                for event in others:
                    if isinstance(event, PromptRendered) and event.response == turn.response:
                        return accepted, event
        raise JournalFault(f"{self._journal.path}: {turn.response} has no rendered prompt")

    def _spans(self, turn: Turn, rendered: PromptRendered) -> tuple[Span, ...]:
        try:
            return _decode_spans(self._journal.content(turn.tenant, rendered.spans))
        except msgspec.MsgspecError as error:
            raise JournalFault(f"{self._journal.path}: the spans of {turn.response} cannot be read: {error}") from None

    def _chain(self, accepted: RequestAccepted) -> list[RequestAccepted]:
        """The requests whose texts are in the prompt, oldest first: by `previous_response_id`, and the turn's own."""
        chain = [accepted]
        while chain[-1].previous and len(chain) <= CHAIN_TURNS_MAX:
            turn = self._journal.turn(chain[-1].previous)
            if turn is None:
                raise JournalFault(f"{self._journal.path}: {chain[-1].previous} is not there, and a chain names it")
            chain.append(self._facts(turn)[0])
        return chain[::-1]


class _Tracer:
    """Follows the spans of one prompt back to what the clients wrote, request by request."""

    def __init__(
        self, journal: Reader, chain: list[RequestAccepted], tokens: bytes, vocabulary: Vocabulary | None
    ) -> None:
        self._journal = journal
        self._chain = chain
        self._place = {accepted.response: index for index, accepted in enumerate(chain)}
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._bodies: dict[str, Any] = {}

    def sources(self, spans: tuple[Span, ...]) -> tuple[Source, ...]:
        """The spans with their owners and values. An answer in the prompt ends its request's items."""
        answers = {match[1] or match[2] for span in spans if (match := _ANSWER.fullmatch(span.path))}
        index = 0
        seen: set[str] = set()
        found = []
        for span in spans:
            answer = _ANSWER.fullmatch(span.path)
            if answer is not None:
                response = answer[1] or answer[2]
                if response in self._place:
                    index = self._place[response] + 1
                    seen.clear()
                value = self._text(span)
                found.append(Source(span.start, span.end, span.path, response, "assistant", value))
            elif not span.path:
                found.append(Source(span.start, span.end, ""))
            elif span.path.startswith(("input", "messages")):
                if span.path in seen and index + 1 < len(self._chain) and self._chain[index].response not in answers:
                    index += 1  # an answer without a token leaves no span
                    seen.clear()
                seen.add(span.path)
                found.append(self._client(span, self._chain[min(index, len(self._chain) - 1)]))
            else:  # tools and instructions are always those of the turn itself
                found.append(self._client(span, self._chain[-1]))
        return tuple(found)

    def _text(self, span: Span) -> str | None:
        if self._vocabulary is None:
            return None
        ids = wire.unpack_ids(self._tokens[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES])
        return self._vocabulary.decode(ids).decode("utf-8", "replace")

    def _client(self, span: Span, owner: RequestAccepted) -> Source:
        body = self._bodies.get(owner.response)
        if body is None:
            body = self._bodies[owner.response] = self._body(owner)
        return Source(
            span.start, span.end, span.path, owner.response, role_at(body, span.path), value_at(body, span.path)
        )

    def _body(self, owner: RequestAccepted) -> Any:
        raw = self._journal.content(owner.tenant, owner.raw)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return {}  # nested too deep for this reader: then nothing is known of what the client wrote


def value_at(body: Any, path: str) -> Any:
    """The value at a JSON path such as `messages[3].content[0].text`; None if there is none."""
    for key, index in _STEP.findall(path):
        if key and isinstance(body, dict):
            body = body.get(key)
        elif index and isinstance(body, list) and int(index) < len(body):
            body = body[int(index)]
        else:
            return None
    return body


def role_at(body: Any, path: str) -> str:
    """Who says the text at a JSON path; "" where nobody does, as in a tool."""
    found = _ELEMENT.match(path)
    element = value_at(body, found.group()) if found else None
    if not isinstance(element, dict):
        return _ROLE_OF_PATH.get(path, "")
    role = element.get("role") or _ROLE_OF_TYPE.get(str(element.get("type")))
    return role if isinstance(role, str) else ""
