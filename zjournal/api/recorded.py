"""Bodies that the journal recorded, read again: the decoder of each protocol."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zjournal.api import chat, responses
from zjournal.api.messages import request as messages
from zjournal.ask import Ask
from zjournal.sessions.reading import Decoders


def _chat(body: bytes) -> Ask:
    return chat.decode(body, _NO_HEADERS)


def _messages(body: bytes) -> Ask:
    return messages.decode(body, _NO_HEADERS)


def _responses(body: bytes) -> Ask:
    return responses.decode(body, _NO_HEADERS, merged=True)


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})  # they name sessions; nothing that is read again depends on them

DECODERS: Decoders = MappingProxyType({"chat": _chat, "responses": _responses, "messages": _messages})
