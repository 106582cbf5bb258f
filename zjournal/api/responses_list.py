"""Input items as a client lists them: each with its type, an id and its content in parts, a page at a time. Pure.

What a query string asks for is read here too, for all routes of Responses and of conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from zjournal.api import fields
from zjournal.api.responses_echo import TRIGGER
from zjournal.errors import BadRequest

LIMIT_MAX, LIMIT = 100, 20
DIGITS_MAX = 12  # of a number in a query
QUERY = frozenset({"after", "before", "limit", "order", "include", "include[]"})

# What the ids of items begin with, by their type; of others: `item`.
_PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "message": "msg",
        "reasoning": "rs",
        "function_call": "fc",
        "function_call_output": "fco",
        "custom_tool_call": "ctc",
        "custom_tool_call_output": "ctco",
        "compaction": "cmp",
    }
)


class _Given(msgspec.Struct):
    input: str | list[dict[str, Any]] = ""


_decoder = msgspec.json.Decoder(_Given, float_hook=lambda digits: msgspec.Raw(digits.encode()))  # as they were sent


def items(raw: bytes, item_id: Callable[[int, str], str]) -> Iterator[dict[str, Any]]:
    """The input items of a recorded body. `item_id(index, prefix)` names those that have no id of their own."""
    given = _decoder.decode(raw).input
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for index, item in enumerate(listed):
        kind = item.get("type") or "message"
        if kind == TRIGGER:
            continue
        whole: dict[str, Any] = {"type": kind, **item}
        if not isinstance(item.get("id"), str) or not item["id"]:
            # Numbered from -1 down: output items of the same response count from 0 up.
            whole["id"] = item_id(-1 - index, _PREFIXES.get(kind, "item"))
        if kind == "message":
            whole |= {"status": item.get("status") or "completed", "content": _parts(item)}
        yield whole


def _parts(item: Mapping[str, Any]) -> Any:
    content = item.get("content")
    if not isinstance(content, str):
        return content
    if item.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


class Page(msgspec.Struct, frozen=True):
    """Which items of a list are asked for."""

    after: str = ""
    before: str = ""
    limit: int = LIMIT
    order: Literal["asc", "desc"] = "desc"

    @classmethod
    def asked(cls, query: Mapping[str, str]) -> Page:
        """Of a query string. Raises BadRequest."""
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("Invalid value for `order`: expected `asc` or `desc`.", param="order")
        limit = query.get("limit", str(LIMIT))
        if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= LIMIT_MAX:
            message = f"Invalid value for `limit`: expected a number from 1 to {LIMIT_MAX}."
            raise BadRequest(message, param="limit")
        return cls(query.get("after", ""), query.get("before", ""), int(limit), order)  # type: ignore[arg-type]

    def of(self, listed: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The page of a list whose first item is its oldest. Raises BadRequest for an id that is not in it."""
        ordered = list(listed) if self.order == "asc" else list(reversed(listed))
        start, end = 0, len(ordered)
        if self.after:
            start = self._place(ordered, "after") + 1
        if self.before:
            end = self._place(ordered, "before")
        found = ordered[start:end][: self.limit]
        return {
            "object": "list",
            "data": found,
            "first_id": found[0]["id"] if found else None,
            "last_id": found[-1]["id"] if found else None,
            "has_more": start + len(found) < end,
        }

    def _place(self, ordered: Sequence[dict[str, Any]], name: str) -> int:
        wanted = getattr(self, name)
        place = next((index for index, item in enumerate(ordered) if item["id"] == wanted), None)
        if place is None:
            raise BadRequest(f"`{name}` names no item of this list.", param=name)
        return place


def flag(query: Mapping[str, str], name: str) -> bool:
    """A boolean of a query string; false if it is not there. Raises BadRequest."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise BadRequest(f"Invalid value for `{name}`: expected `true` or `false`.", param=name)
    return value in ("true", "1")


def number(query: Mapping[str, str], name: str, absent: int) -> int:
    """A number of a query string that is not negative. Raises BadRequest."""
    value = query.get(name)
    if value is None:
        return absent
    if not (value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX and int(value) <= fields.TOKENS_MAX):
        raise BadRequest(f"Invalid value for `{name}`: expected a number that is not negative.", param=name)
    return int(value)
