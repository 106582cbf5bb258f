"""Random tools: what their fences let through is parsed without a fault and is what the schemas allow."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.dialects.fencing import accepts, fence, tool, walk
from tests.unit.dialects.outputs import DIALECTS, calls_of, dialect, parse, text_of, write
from zjournal import ask

KEYS = st.sampled_from(["a", "b", "path", "old text", "é", "x.y", "null"])
WORDS = st.lists(
    st.sampled_from(["a", "null", "12", " b", "[1]", "</x>", "two words"]), min_size=1, max_size=3, unique=True
)
STRINGS = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda words: {"type": "string", "enum": words}, WORDS),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.just({"type": "string", "maxLength": 3}),
)
SCALARS = st.one_of(
    STRINGS,
    st.sampled_from(
        [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "number", "maximum": 9.5, "minimum": -1}]
    ),
    st.sampled_from([{"type": "boolean"}, {"const": 3}, {"enum": ["a", 1, None, True]}, {"type": ["string", "null"]}]),
    st.sampled_from(
        [{"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, {"type": ["integer", "string"]}]
    ),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner),
        st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner),
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)[:1]},
            st.dictionaries(KEYS, inner, max_size=2),
        ),
    )


SCHEMAS = st.recursive(SCALARS, _nested, max_leaves=4)
TOOLS = st.builds(
    lambda properties, required: tool(
        "f", {"type": "object", "properties": properties, "required": [key for key in properties if key in required]}
    ),
    st.dictionaries(KEYS, SCHEMAS, max_size=4),
    st.sets(KEYS),
)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=25, deadline=None)
@given(one=TOOLS, seed=st.integers(0, 1 << 20))
def test_what_is_let_through_is_right(name: str, one: ask.ToolSpec, seed: int) -> None:
    built = fence(name, [one])
    assert not built.warnings
    tokens = walk(name, built, seed)
    if tokens is None:
        return
    deltas = parse(dialect(name), [one], tokens)
    assert not text_of(deltas).strip()
    calls = calls_of(deltas)
    assert calls
    for called, arguments in calls:
        assert called == "f"
        jsonschema.validate(arguments, json.loads(one.parameters))
        said = dialect(name).calls([], [ask.Call("c", called, json.dumps(arguments, ensure_ascii=False))])
        assert accepts(name, built, write(dialect(name), said))  # as the dialect itself would write it


@pytest.mark.parametrize("name", ["chatml", "chatml-text", "qwen-xml-text"])
@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
def test_an_answer_in_a_format_is_right(name: str, schema: Any, seed: int) -> None:
    form = ask.Format("json_schema", "x", json.dumps(schema).encode(), True, "text.format")
    for tools in ([], [tool("f", {})]):
        tokens = walk(name, fence(name, tools, ask.ToolChoice("auto"), form), seed)
        deltas = parse(dialect(name), tools, tokens or [])
        if tokens is not None and not any(isinstance(delta, ask.CallStarted) for delta in deltas):
            jsonschema.validate(json.loads(text_of(deltas)), schema)
