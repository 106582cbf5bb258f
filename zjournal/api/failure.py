"""How a fault looks to a client: the error body in each protocol's shape, and what a recorded failure stands for.

Two shapes: that of both OpenAI protocols, and Anthropic's, which has no field for the path at fault (so the message
begins with it) and a `type` for each status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from litestar.types import Scope

from zjournal import errors
from zjournal.ask import Broke
from zjournal.errors import Fault

REQUEST_ID = "zj_request_id"  # key of the ASGI scope
_ANTHROPIC_PATHS = ("/v1/messages", "/api/hello")
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
_THREAD = "thread_"  # what the codes begin with that a client of threads acts upon

_BY_CODE: dict[str, type[Fault]] = {
    fault.code: fault
    for fault in (
        errors.BadRequest,
        errors.ContextTooLong,
        errors.PreviousResponseNotFound,
        errors.NotFound,
        errors.ModelNotFound,
        errors.Overloaded,
        errors.Unavailable,
        errors.JournalUnavailable,
        errors.EngineFailed,
    )
}


def error(fault: Fault) -> dict[str, str | None]:
    """The `error` object of both OpenAI protocols."""
    return {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}


def body(fault: Fault) -> bytes:
    """The JSON body of an error answer."""
    return msgspec.json.encode({"error": error(fault)})


def fault_of(broke: Broke) -> Fault:
    """The fault whose code a failed response carries; a code that nobody knows is the server's own fault."""
    return _BY_CODE.get(broke.code, errors.EngineFailed)(broke.message)


def body_for(fault: Fault, scope: Scope) -> bytes:
    """The JSON body of an error answer, in the shape that the client of this request reads."""
    if anthropic(scope):
        return msgspec.json.encode(anthropic_error(fault, request_id(scope)))
    return body(fault)


def anthropic(scope: Scope) -> bool:
    """Whether a request is one of an Anthropic client: by its path, or by the header that only those send."""
    path = scope["path"]
    if any(path == known or path.startswith(f"{known}/") for known in _ANTHROPIC_PATHS):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def request_id(scope: Scope) -> str:
    """The id that this request was given."""
    return str(scope.get(REQUEST_ID, ""))


def anthropic_error(fault: Fault, request: str) -> dict[str, Any]:
    """The whole body of an Anthropic error; in a stream it is the data of the event `error`."""
    told: dict[str, Any] = {
        "type": _ANTHROPIC_TYPES.get(fault.status, "invalid_request_error"),
        "message": _said(fault),
    }
    if fault.code.startswith(_THREAD):
        told["details"] = {"error_code": fault.code}
    return {"type": "error", "error": told, "request_id": request}


def _said(fault: Fault) -> str:
    """The message in Anthropic's words: its clients look for these when a conversation is too long."""
    if isinstance(fault, errors.ContextTooLong):
        if fault.asked and fault.prompt < fault.limit:
            return (
                f"input length and `max_tokens` exceed context limit: {fault.prompt} + {fault.asked} > {fault.limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        if fault.prompt:
            return f"prompt is too long: {fault.prompt} tokens > {fault.limit} maximum"
        if fault.limit:
            least = max(fault.least, fault.limit + 1)
            return f"prompt is too long: at least {least} tokens > {fault.limit} maximum"
        return f"prompt is too long: {fault.message}"
    return f"{_dotted(fault.param)}: {fault.message}" if fault.param else fault.message


def _dotted(path: str) -> str:
    """A JSON path as Anthropic spells it: `messages.0.content.1.text`."""
    return re.sub(r"\[(\d+)\]", r".\1", path)
