"""The tables of fields in docs/api.md and docs/messages.md, read so that tests can walk over them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from zjournal.ask import Ask
from zjournal.errors import BadRequest

DOCS = Path(__file__).resolve().parents[3] / "docs"
WORDS = ("honoured", "echoed", "accepted", "refused", "skipped")

Decode = Callable[[dict[str, Any]], Ask]

# What clients of any protocol may ask for: how to sample.
SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "seed": (5, {}),
    "frequency_penalty": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "top_k": (5, {}),
    "min_p": (0.5, {}),
    "repetition_penalty": (1.5, {}),
    "min_tokens": (2, {}),
}
# What only other servers have.
FOREIGN: dict[str, tuple[Any, dict[str, Any]]] = {
    "ignore_eos": (True, {}),
    "echo": (True, {}),
    "stop_token_ids": ([1], {}),
    "bad_words": (["x"], {}),
    "best_of": (2, {}),
    "prompt_logprobs": (1, {}),
    "guided_json": ({}, {}),
    "guided_regex": ("x", {}),
    "guided_choice": (["x"], {}),
    "guided_grammar": ("x", {}),
    "structured_outputs": ({}, {}),
}
# What Chat and Responses call the same.
OF_OPENAI: dict[str, tuple[Any, dict[str, Any]]] = {
    "store": (False, {}),
    "stream": (True, {}),
    "stream_options.include_obfuscation": (True, {"stream": True}),
    "metadata": ({"a": "b"}, {}),
    "prompt_cache_key": ("key", {}),
    "cache_salt": ("salt", {}),
    "user": ("ann", {}),
    "safety_identifier": ("ann", {}),
    "service_tier": ("flex", {}),
    "prompt_cache_retention": ("24h", {}),
    "prompt_cache_options.mode": ("explicit", {}),
    "prompt_cache_options.ttl": ("30m", {}),
    "prompt_cache_options.prewarm": (True, {}),
    "prompt_cache_options.comparison_response_id": ("resp_1", {}),
    "generate": (False, {}),
    "n": (2, {}),
}


class Row(NamedTuple):
    field: str
    said: tuple[str, ...]  # of WORDS
    neutral: tuple[Any, ...]  # values of a refused field that ask for nothing


def rows(page: str, column: int, others: Collection[str] = ()) -> list[Row]:
    """What a page's table says in its column (counted from 0, behind the names).

    `others`: names that stand in the table for another column only.
    """
    table = (DOCS / page).read_text().split("\n## Fields\n")[1].split("\n### ")[0]
    found: list[Row] = []
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        said = cells[1 if cells[1 + column] == "the same" else 1 + column]
        if said == "–":
            continue
        words, _, inside = said.partition(" (")
        parts = tuple(word.split(" as ")[0] for word in words.split(", "))
        assert set(parts) <= set(WORDS), line
        given = json.loads(f"[{inside.removesuffix(')')}]") if inside else []
        fields = [name for name in re.findall(r"`([^`]+)`", cells[0]) if name not in others]
        for at, field in enumerate(fields):
            own = given[at : at + 1] if len(given) == len(fields) else given
            found.append(Row(field, parts, tuple(own)))
    return found


def top(table: list[Row]) -> set[str]:
    """The fields of the body itself that a table names."""
    return {row.field.split(".")[0].removesuffix("[]") for row in table}


def with_field(base: dict[str, Any], field: str, value: Any, beside: dict[str, Any]) -> dict[str, Any]:
    """A body with a value at the path of a field, which may go through objects."""
    body = json.loads(json.dumps({**base, **beside}))
    *above, name = field.split(".")
    inner = body
    for part in above:
        inner = inner.setdefault(part, {})
    inner[name] = value
    return body


def check(row: Row, decode: Decode, base: dict[str, Any], value: Any, beside: dict[str, Any], seen: bool = True) -> Ask:
    """Asserts what can be seen of a row in the Ask; gives that of the body with the field, or the plain one.

    `seen`: what is honoured changes the Ask.
    """
    plain = decode({**base, **beside})
    if row.field not in base:
        assert decode(with_field(base, row.field, None, beside)) == plain, "null is as if it were left out"
    body = with_field(base, row.field, value, beside)
    if "refused" in row.said:
        with pytest.raises(BadRequest) as caught:
            decode(body)
        assert caught.value.param == row.field
        assert row.field in caught.value.message
        for neutral in row.neutral:
            assert decode(with_field(base, row.field, neutral, beside)) == plain
        return plain
    asked = decode(body)
    if "honoured" in row.said or "skipped" in row.said:
        assert (asked != plain) == seen
    else:
        assert asked == plain
    with pytest.raises(BadRequest) as caught:
        decode(with_field(base, row.field, 7 if isinstance(value, dict | list | str) else {"bad": 1}, beside))
    assert (caught.value.param or "").startswith(row.field.partition("[")[0])
    return asked
