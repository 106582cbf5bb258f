"""Bodies that the journal recorded, read again: which protocol's decoder gives their items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zjournal.api import chat, responses
from zjournal.ask import Item
from zjournal.sessions.chain import Decoders


def _chat(body: bytes) -> Sequence[Item]:
    return chat.decode(body, _NO_HEADERS).items


def _responses(body: bytes) -> Sequence[Item]:
    return responses.decode(body, _NO_HEADERS).items


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})  # they name sessions; items do not depend on them

DECODERS: Decoders = MappingProxyType({"chat": _chat, "responses": _responses})
