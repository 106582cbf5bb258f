"""Prompts as the journal has them: a turn's tokens, where each came from, and what the client wrote there.

Needs the journal and nothing else: neither the model nor a running server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from zjournal.dialects.prompt import OUTPUT_PATH, Span
from zjournal.errors import JournalFault, NotFound
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.link import wire
from zjournal.sessions.chain import CHAIN_TURNS_MAX
from zjournal.sessions.diff import Rendered, Source
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records
from zjournal.sessions.vocabulary import Vocabulary

_ANSWER = re.compile(rf"{OUTPUT_PATH}(.+)|response\[(.+)\]")  # spliced as tokens, or replayed as text
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_ELEMENT = re.compile(r"[^.\[\]]+\[\d+\]")  # such as messages[3]
_ROLE_OF_TYPE = {
    **dict.fromkeys(("function_call", "custom_tool_call", "reasoning"), "assistant"),
    "compaction": "user",
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "tool"),
}
_ROLE_OF_PATH = {"instructions": "system", "input": "user"}
_SYSTEM = "system"  # of a Messages body: the first message of a thread, wherever the thread is continued


class Prompts:
    """Reads prompts of one journal."""

    def __init__(self, journal: Reader) -> None:
        self._journal = journal
        self._makers = Makers(journal)
        self._records = Records(journal, self._makers)

    def of(self, turn: Turn) -> Rendered:
        """The prompt of a turn. Raises NotFound if it was erased, JournalFault if it is damaged."""
        if turn.erased:
            raise NotFound(f"the content of {turn.response} was erased")
        ids, spans = self._records.prompt(turn)
        if len(ids) != turn.prompt:
            raise JournalFault(f"{self._journal.path}: the record of {turn.response} is not that of its prompt")
        engine = self._makers.of(turn)
        vocabulary = self._makers.vocabulary(engine)
        return Rendered(
            ids=wire.pack_ids(ids),
            sources=_Tracer(self._records, self._chain(turn), ids, vocabulary).sources(spans),
            vocabulary=vocabulary,
            vocabulary_name=engine.vocabulary if engine else b"",
            template_name=engine.template if engine else b"",
            changed=dict(self._records.accepted(turn).forks),
        )

    def _chain(self, turn: Turn) -> list[Turn]:
        """The turns whose texts are in the prompt, oldest first: by `previous_response_id`, and the turn itself."""
        chain = [turn]
        while (previous := self._records.accepted(chain[-1]).previous) and len(chain) <= CHAIN_TURNS_MAX:
            before = self._journal.turn(previous)
            if before is None:
                raise JournalFault(f"{self._journal.path}: {previous} is not there, and a chain names it")
            chain.append(before)
        return chain[::-1]


class _Tracer:
    """Follows the spans of one prompt back to what the clients wrote, request by request."""

    def __init__(
        self, records: Records, chain: Sequence[Turn], ids: Sequence[int], vocabulary: Vocabulary | None
    ) -> None:
        self._records = records
        self._chain = chain
        self._place = {turn.response: index for index, turn in enumerate(chain)}
        self._ids = ids
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
            elif span.path.startswith(("input", "messages", _SYSTEM)):
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
        return self._vocabulary.decode(self._ids[span.start : span.end]).decode("utf-8", "replace")

    def _client(self, span: Span, owner: Turn) -> Source:
        body = self._bodies.get(owner.response)
        if body is None:
            body = self._bodies[owner.response] = self._body(owner)
        return Source(
            span.start, span.end, span.path, owner.response, role_at(body, span.path), value_at(body, span.path)
        )

    def _body(self, owner: Turn) -> Any:
        body = self._records.body(owner)
        try:
            return json.loads(body)
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
    if path.startswith(_SYSTEM):
        return "system"
    found = _ELEMENT.match(path)
    element = value_at(body, found.group()) if found else None
    if not isinstance(element, dict):
        return _ROLE_OF_PATH.get(path, "")
    role = element.get("role") or _ROLE_OF_TYPE.get(str(element.get("type")))
    return role if isinstance(role, str) else ""
