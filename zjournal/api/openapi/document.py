"""The document: every route with its parameters, its body, its answers and its errors. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zjournal.api import fields, models, responses_list
from zjournal.api.openapi import answers, bodies
from zjournal.api.openapi.shapes import BOOLEAN, STRING, Schema, either, obj

PATH = "/schema/openapi.json"
VERSION = "3.1.0"  # of OpenAPI

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
# Statuses of errors, by what can go wrong with a route.
_READING = (400, 401, 403, 404, 429, 500, 503)
_WRITING = (*_READING, 413, 415)
_SAID: Mapping[int, str] = {
    400: "The request is malformed, or asks for what cannot be. The path of the field is told.",
    401: "No key, or a wrong one.",
    403: "The Host is not this server's, or the Origin is foreign.",
    404: "There is no such thing, or this key does not see it.",
    405: "There is no such method here.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests, or more than this key may have. `Retry-After` says when.",
    500: "The server failed.",
    503: "The server is loading, draining, or cannot write its journal. `Retry-After` says when.",
}


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    said: str  # what it is for
    answer: Schema | None = None  # of a whole one; None: a text
    body: Schema | None = None
    query: Mapping[str, Schema] = {}
    events: bool = False  # it may be answered with server-sent events
    errors: Sequence[int] = _READING
    open: bool = False  # without a key
    anthropic: bool = False  # errors are told in Anthropic's shape
    optional: bool = False  # the body may be empty
    more: Mapping[int, Schema] = {}  # answers of other statuses
    tagged: bool = False  # it has an ETag, and `If-None-Match` is honoured
    leads: Mapping[str, str] = {}  # what of its answer names a resource: parameters of other paths, and where they are


_FLAG = either(BOOLEAN, {"enum": ["0", "1"]})
_PAGE: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": responses_list.LIMIT_MAX},
    "order": {"enum": ["asc", "desc"]},
    "after": STRING,
    "before": STRING,
    "include[]": {"type": "array", "items": STRING},
}
_AFTER: Schema = {"type": "integer", "minimum": 0, "maximum": fields.TOKENS_MAX}
_MODELS: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": models.PAGE_MAX},
    "after_id": STRING,
    "before_id": STRING,
}
_COMPACTED = ("model",)
_ID = "$response.body#/id"
_RESPONSE, _CONVERSATION = {"response_id": _ID}, {"conversation_id": _ID}
_ITEM = {"conversation_id": "$request.path.conversation_id", "item_id": "$response.body#/data/0/id"}


def routes() -> list[Route]:
    """All of them."""
    return [*_chat(), *_responses(), *_conversations(), *_messages(), *_watching()]


def _chat() -> list[Route]:
    said = "A chat completion, whole or as chunks."
    return [Route("post", "/v1/chat/completions", said, answers.CHAT, bodies.chat_body(), events=True, errors=_WRITING)]


def _responses() -> list[Route]:
    whole, one = "/v1/responses", "/v1/responses/{response_id}"
    again: dict[str, Schema] = {
        "stream": _FLAG,
        "starting_after": _AFTER,
        "include_obfuscation": _FLAG,
        "include[]": {"type": "array", "items": STRING},
    }
    part, compacted = bodies.responses_body(()), bodies.responses_body(_COMPACTED)
    return [
        Route(
            "post",
            whole,
            "A response.",
            answers.RESPONSE,
            bodies.responses_body(),
            events=True,
            errors=_WRITING,
            leads=_RESPONSE,
        ),
        Route("get", one, "A stored response, or its events again.", answers.RESPONSE, query=again, events=True),
        Route("delete", one, "Deletes a response.", answers.deleted("response")),
        Route("post", f"{one}/cancel", "Ends a response in the background.", answers.RESPONSE),
        Route("get", f"{one}/input_items", "What a response answers.", answers.page(), query=_PAGE),
        Route("post", f"{whole}/input_tokens", "Counts a prompt.", answers.INPUT_TOKENS, part, errors=_WRITING),
        Route("post", f"{whole}/compact", "A shorter input.", answers.COMPACTION, compacted, errors=_WRITING),
    ]


def _conversations() -> list[Route]:
    whole, one = "/v1/conversations", "/v1/conversations/{conversation_id}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    made, changed, added = (bodies.conversation_body(which) for which in ("create", "update", "add"))
    gone = answers.deleted("conversation.deleted")
    return [
        Route(
            "post",
            whole,
            "A conversation.",
            answers.CONVERSATION,
            made,
            errors=_WRITING,
            optional=True,
            leads=_CONVERSATION,
        ),
        Route("get", one, "What is known of it.", answers.CONVERSATION),
        Route("post", one, "Changes its metadata.", answers.CONVERSATION, changed, errors=_WRITING),
        Route("delete", one, "Deletes it.", gone),
        Route("get", items, "Its items.", answers.page(), query=_PAGE),
        Route("post", items, "Adds items.", answers.page(), added, errors=_WRITING, leads=_ITEM),
        Route("get", item, "One item.", answers.ITEM),
        Route("delete", item, "Removes an item.", answers.CONVERSATION),
    ]


def _messages() -> list[Route]:
    path, count = "/v1/messages", bodies.messages_body(counted=True)
    body = bodies.messages_body()
    beta: dict[str, Schema] = {"beta": STRING}
    return [
        Route("post", path, "A message.", answers.MESSAGE, body, beta, True, _WRITING, anthropic=True),
        Route(
            "post",
            f"{path}/count_tokens",
            "Counts a prompt.",
            answers.COUNTED,
            count,
            beta,
            False,
            _WRITING,
            anthropic=True,
        ),
        Route("get", "/api/hello", "Whether anyone is at home.", answers.HELLO, open=True, anthropic=True),
    ]


def _watching() -> list[Route]:
    ready = {503: answers.READY}
    return [
        Route("get", "/v1/models", "What is served.", answers.MODELS, query=_MODELS, tagged=True),
        Route("get", "/v1/models/{name}", "One model, by id or alias.", answers.MODEL, tagged=True),
        Route("get", "/", "Whether anyone is at home.", open=True),
        Route("get", "/livez", "Whether the port is open.", answers.LIVE, open=True),
        Route("get", "/readyz", "Whether a token can be made.", answers.READY, open=True, more=ready),
        Route("get", "/health", "The same.", answers.READY, open=True, more=ready),
        Route("get", "/metrics", "Figures for Prometheus."),
        Route("get", PATH, "This document.", obj({"openapi": {"const": VERSION}})),
    ]


def document(version: str) -> dict[str, Any]:
    """The whole document, of the server's `version`."""
    paths: dict[str, dict[str, Any]] = {}
    known = routes()
    for route in known:
        told = _operation(route)
        if route.leads:
            told["responses"]["200"]["links"] = _links(route.leads, known)
        paths.setdefault(route.path, {})[route.method] = told
    return {
        "openapi": VERSION,
        "info": {
            "title": "zjournal",
            "version": version,
            "description": "HEAD works wherever GET does. Fields that are not listed are tolerated.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": answers.ERROR, "AnthropicError": answers.ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": _name(route),
        "summary": route.said,
        "parameters": _parameters(route),
        "responses": _answers(route),
        "security": [{}] if route.open else [{"bearer": []}, {"x-api-key": []}, {}],
    }
    if route.body is not None:
        told["requestBody"] = {"required": not route.optional, "content": {_JSON: {"schema": route.body}}}
    return told


def _links(leads: Mapping[str, str], known: Sequence[Route]) -> dict[str, Any]:
    """The routes that an answer leads to: those whose path takes what it names."""
    return {
        _name(route): {"operationId": _name(route), "parameters": dict(leads)}
        for route in known
        if set(_named(route)) == set(leads)
    }


def _name(route: Route) -> str:
    """Of the operation, of letters, digits and underscores."""
    return re.sub(r"[^0-9A-Za-z]+", "_", f"{route.method} {route.path}").strip("_")


def _named(route: Route) -> list[str]:
    """The parameters of its path."""
    return [part[1:-1] for part in route.path.split("/") if part.startswith("{")]


def _parameters(route: Route) -> list[dict[str, Any]]:
    schema = {**STRING, "minLength": 1}
    path = [{"name": name, "in": "path", "required": True, "schema": schema} for name in _named(route)]
    query = [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    tag = {"name": "If-None-Match", "in": "header", "schema": STRING}
    return [*path, *query, *([tag] if route.tagged else [])]


def _answers(route: Route) -> dict[str, Any]:
    """By status. An error has the shape that the client reads: who sends `anthropic-version` gets Anthropic's."""
    whole: dict[str, Any] = {_TEXT: {"schema": STRING}} if route.answer is None else {_JSON: {"schema": route.answer}}
    if route.events:
        whole[_EVENTS] = {"schema": answers.EVENT}
    told: dict[str, Any] = {"200": {"description": "Done.", "content": whole}}
    if route.tagged:
        told["304"] = {"description": "The client has it."}
    shape = "AnthropicError" if route.anthropic else "Error"
    error: dict[str, Any] = {"$ref": f"#/components/schemas/{shape}"}
    for status in sorted({*((403,) if route.open else route.errors), 405}):
        other = route.more.get(status)
        schema = error if other is None else either(error, other)
        told[str(status)] = {"description": _SAID[status], "content": {_JSON: {"schema": schema}}}
    for status, schema in route.more.items():
        if str(status) not in told:
            told[str(status)] = {"description": _SAID[status], "content": {_JSON: {"schema": schema}}}
    return told
