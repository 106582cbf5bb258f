"""The list of models: one JSON body that the clients of OpenAI, Anthropic and Codex all read."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.errors import BadRequest, ModelNotFound, NotFound

if TYPE_CHECKING:
    from zjournal.api.submit import ModelCard

PAGE_MAX = 1000
CLAUDE = "claude-"  # whatever begins so is meant for the model that is served
TRUNCATION_BYTES = 10_000  # of a tool's output, that Codex sends to a model; its own default
INSTRUCTIONS = (
    "You are a coding agent in a terminal. Work in the user's project with the tools that you are given: read before "
    "you write, make small changes, and check them. Say shortly what you did. Ask only where you cannot go on."
)


def listing(cards: Sequence[ModelCard], query: Mapping[str, str], anthropic: bool = False) -> bytes:
    """The body of GET /v1/models. `anthropic`: the client asks for its own names, and finds one it looks for.

    `query`: `limit`, `after_id` and `before_id`, as Anthropic pages. Raises BadRequest, NotFound.
    """
    models = [_model(card) for card in cards]
    if anthropic:
        models += [{**_model(card), "id": f"{CLAUDE}{card.id}"} for card in cards]
    page, more = _page(models, query)
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "has_more": more,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "models": [_codex(card, at) for at, card in enumerate(cards)],
        }
    )


def one(cards: Sequence[ModelCard], name: str) -> bytes:
    """The body of GET /v1/models/{name}, by id or alias. Raises ModelNotFound."""
    for card in cards:
        if name == card.id or name in card.aliases or name.startswith(CLAUDE):
            return msgspec.json.encode(_model(card))
    raise ModelNotFound(f"The model {name!r} does not exist.", param="model")


def etag(body: bytes) -> str:
    """What changes with the body."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _page(models: list[dict[str, Any]], query: Mapping[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """The part that was asked for, and whether there is more in that direction."""
    told = query.get("limit")
    digits = told is not None and told.isascii() and told.isdigit() and len(told) <= len(str(PAGE_MAX))
    if told is not None and not (digits and 1 <= int(told) <= PAGE_MAX):
        raise BadRequest(f"Invalid value for `limit`: expected a number from 1 to {PAGE_MAX}.", param="limit")
    limit = PAGE_MAX if told is None else int(told)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise BadRequest("`after_id` and `before_id` cannot be combined.", param="before_id")
    if before is not None:
        found = models[: _at(models, before, "before_id")]
        return found[max(len(found) - limit, 0) :], len(found) > limit
    found = models[_at(models, after, "after_id") + 1 :] if after is not None else models
    return found[:limit], len(found) > limit


def _at(models: list[dict[str, Any]], name: str, param: str) -> int:
    for at, model in enumerate(models):
        if model["id"] == name:
            return at
    raise NotFound(f"The model {name!r} does not exist.", param=param)


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(card.created, datetime.UTC)
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "zjournal",
        "type": "model",
        "display_name": card.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context,
        "max_tokens": card.context,
        "aliases": list(card.aliases),
    }


def _codex(card: ModelCard, priority: int) -> dict[str, Any]:
    """A model as Codex has them in its catalogue (`model_catalog_json`, or GET models)."""
    return {
        "slug": card.id,
        "display_name": card.id,
        "description": "Served by zjournal.",
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": TRUNCATION_BYTES},
        "supports_parallel_tool_calls": True,
        "context_window": card.context,
        "max_context_window": card.context,
        "auto_compact_token_limit": None,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
