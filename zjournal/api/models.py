"""The list of models: one JSON body for the list and one for each model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.errors import ModelNotFound

if TYPE_CHECKING:
    from zjournal.api.submit import ModelCard


def listing(cards: Sequence[ModelCard]) -> bytes:
    """The body of GET /v1/models."""
    return msgspec.json.encode({"object": "list", "data": [_model(card) for card in cards]})


def one(cards: Sequence[ModelCard], name: str) -> bytes:
    """The body of GET /v1/models/{name}, by id or alias. Raises ModelNotFound."""
    for card in cards:
        if name == card.id or name in card.aliases:
            return msgspec.json.encode(_model(card))
    raise ModelNotFound(f"The model {name!r} does not exist.", param="model")


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "zjournal",
        "max_input_tokens": card.context,
        "aliases": list(card.aliases),
    }
