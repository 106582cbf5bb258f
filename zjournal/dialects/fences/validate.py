"""What came out against the client's whole schema, where the fence could keep only a part of it.

A client's schema must cost no more than its use: there is a limit of steps, nothing is fetched, and regular
expressions, which can take for ever, are not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zjournal import ask
from zjournal.dialects.fences import custom
from zjournal.dialects.fences.arguments import INPUT
from zjournal.dialects.values import NOTHING, loads

STEPS_MAX = 5_000  # keywords looked at
FAULT_CHARACTERS_MAX = 300


class _Exhausted(Exception):
    pass


def arguments(tool: ask.ToolSpec, text: str) -> str:
    """What is wrong with the arguments of a call; "" if nothing is found."""
    if tool.grammar is not None:
        value = loads(text)
        told = value.get(INPUT) if isinstance(value, dict) else None
        if not isinstance(told, str):
            return f"{INPUT!r} is no text"
        return "" if matches(tool.grammar, told) else f"{INPUT!r} is not of its grammar"
    return fault(tool.parameters, text)


def matches(grammar: ask.Grammar, text: str) -> bool:
    """Whether a text is of a client's grammar."""
    matcher = custom.matcher(custom.source(grammar))
    data = [byte + 1 for byte in text.encode("utf-8", "surrogatepass")]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def fault(told: bytes, text: str) -> str:
    """What is wrong with a JSON text by a schema; "" if nothing is found, as by a schema that is none."""
    import jsonschema
    from referencing import Registry

    schema, value = loads(told.decode("utf-8", "replace")), loads(text)
    if value is NOTHING:
        return "it is no JSON"
    base = jsonschema.Draft202012Validator
    limited = jsonschema.validators.extend(base, _limited(base.VALIDATORS))
    try:
        for error in limited(schema, registry=Registry()).iter_errors(value):
            where = "".join(f"[{step!r}]" for step in error.absolute_path)
            return f"{where or 'it'}: {error.message}"[:FAULT_CHARACTERS_MAX]
    except _Exhausted:
        return "it is too long to be checked"
    except Exception:  # the schema itself is malformed, in one of the library's many ways to say so
        return ""
    return ""


def _limited(keywords: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The keywords with one limit of steps for all of them; those with regular expressions find nothing wrong."""
    left = [STEPS_MAX]

    def limit(check: Callable[..., Any], cost: Callable[[Any, Any], int] = _free) -> Callable[..., Iterator[Any]]:
        def checked(validator: Any, told: Any, value: Any, schema: Any) -> Iterator[Any]:
            left[0] -= 1 + cost(told, value)
            if left[0] < 0:
                raise _Exhausted
            yield from check(validator, told, value, schema) or ()

        return checked

    def additional(validator: Any, told: Any, value: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:  # else a pattern may name them
            yield from keywords["additionalProperties"](validator, told, value, schema) or ()

    found = {name: limit(check, _COSTS.get(name, _free)) for name, check in keywords.items()}
    return {**found, "pattern": _nothing, "patternProperties": _nothing, "additionalProperties": limit(additional)}


def _free(told: Any, value: Any) -> int:
    return 0


# Steps of keywords that compare values with each other, some microseconds each.
_COMPARED = 10  # in one step
_COSTS: Mapping[str, Callable[[Any, Any], int]] = {
    "uniqueItems": lambda told, value: len(value) ** 2 // _COMPARED if isinstance(value, list) else 0,
    "enum": lambda told, value: len(told) // _COMPARED if isinstance(told, list) else 0,
}


def _nothing(*arguments: Any) -> Iterator[Any]:
    return iter(())
