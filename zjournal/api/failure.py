"""How a fault looks to an OpenAI client: the error body, and the fault that a recorded failure stands for."""

from __future__ import annotations

import msgspec

from zjournal import errors
from zjournal.ask import Broke
from zjournal.errors import Fault

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
