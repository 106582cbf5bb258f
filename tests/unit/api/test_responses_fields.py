"""The table of fields in docs/api.md is what Responses does: this walks over it, and knows of no field not in it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import response_create_params, responses_client_event_param

from tests.api.desk import CREATED, Turn, item_id
from tests.unit.api import field_table
from tests.unit.api.field_table import Row
from zjournal.api import responses, responses_cache, responses_echo
from zjournal.ask import Ask
from zjournal.errors import BadRequest
from zjournal.sessions.reading import Terms

BASE: dict[str, Any] = {"model": "m", "input": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FORM = {"type": "json_object"}

# A value of each field that asks for something, and what it needs beside it.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    **field_table.SAMPLING,
    **field_table.FOREIGN,
    **field_table.OF_OPENAI,
    "model": ("other", {}),
    "input": ("ho", {}),
    "instructions": ("Be brief.", {}),
    "previous_response_id": ("resp_1", {}),
    "max_output_tokens": (5, {}),
    "top_logprobs": (3, {}),
    "include": (["message.output_text.logprobs"], {}),
    "stop": ("x", {}),
    "tools": ([TOOL], {}),
    "tools[].strict": (True, {"tools": [TOOL]}),
    "tool_choice": ("none", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {}),
    "max_tool_calls": (2, {}),
    "reasoning": ({"effort": "high"}, {}),
    "text.verbosity": ("low", {}),
    "text.format": (FORM, {}),
    "client_metadata": ({"a": "b"}, {}),
    "truncation": ("auto", {}),
    "image.context_compression": ("enabled", {}),
    "access_programs.cyber": ("daybreak_red", {}),
    "background_options.completion_window": ("2h", {"background": True}),
    "background_options.continuation_id": ("x", {"background": True}),
    "moderation": ({"model": "x"}, {}),
    "background": (True, {}),
    "conversation": ("conv_1", {}),
    "prompt": ({"id": "x"}, {}),
    "context_management": ([{"type": "compaction"}], {}),
}
# Honoured, and seen in the answer or by its route in place of the Ask.
ELSEWHERE = {"conversation", "prompt_cache_options.comparison_response_id"}
# Of the transport; refused with 400 over WebSocket, where alone it is one (tests/server/test_websocket.py).
OF_SOCKETS = {"type", "stream_id"}
ROWS = field_table.rows("api.md", 1, others=("messages", "response_format"))


def ask(body: dict[str, Any]) -> Ask:
    return responses.decode(json.dumps(body).encode(), {}, merged=True)


def told(body: dict[str, Any]) -> dict[str, Any]:
    """The response object that answers a body."""
    asked, raw = ask(body), json.dumps(body).encode()
    turn = Turn("resp_0", CREATED, "m", raw, asked.store, "local", terms=Terms.of(asked, ""))
    diagnostics = responses_cache.NOT_FOUND if responses_echo.decoder.decode(raw).compared_with else None
    object_: dict[str, Any] = msgspec.json.decode(responses.Answer(turn, item_id, None, diagnostics).body())
    return object_


def at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[part]
    return value


def test_the_table_has_every_field_that_is_read_and_every_one_of_the_published_api() -> None:
    listed = field_table.top(ROWS)
    assert listed >= set(responses._Body.__struct_fields__) | set(responses_echo.Echo.__struct_fields__)
    published = set(response_create_params.ResponseCreateParamsBase.__annotations__)
    over_sockets = set(responses_client_event_param.ResponseCreate.__annotations__)
    assert len(published) > 30 and listed >= published
    assert len(over_sockets) > 30 and listed >= over_sockets - OF_SOCKETS
    assert {row.field for row in ROWS} == set(ASKED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_a_field_is_what_the_table_says(row: Row) -> None:
    value, beside = ASKED[row.field]
    if row.field == "tools[].strict":  # it stands in a list, which the walk does not enter
        true, null, wrong = ({**BASE, "tools": [{**TOOL, "strict": one}]} for one in (value, None, {"bad": 1}))
        assert row.said == ("honoured", "echoed")
        assert ask(true) != ask(null) == ask({**BASE, **beside})
        assert told(true)["tools"][0]["strict"] is True
        with pytest.raises(BadRequest) as caught:
            ask(wrong)
        assert caught.value.param == "tools[0].strict"
        return
    field_table.check(row, ask, BASE, value, beside, seen=row.field not in ELSEWHERE)
    body = field_table.with_field(BASE, row.field, value, beside)
    if "echoed" in row.said:
        answer, plain = told(body), told({**BASE, **beside})
        wanted = {"id": value} if row.field == "conversation" else value
        found = at(answer, row.field)
        assert (found if not isinstance(wanted, dict) else {key: found[key] for key in wanted}) == (
            wanted if row.field != "tools" else [{**TOOL, "description": None, "strict": None}]
        )
        assert answer != plain
    elif row.said == ("accepted",):
        assert told(body) == told({**BASE, **beside})


@pytest.mark.parametrize("bad", [5, "zz", "auto", True, [], {}])
def test_truncation_is_off_or_refused_by_name(bad: Any) -> None:
    """A prompt that is too long is never cut, so `auto` would be a promise that nobody keeps."""
    with pytest.raises(BadRequest) as caught:
        ask({**BASE, "truncation": bad})
    assert caught.value.param == "truncation"
    assert told({**BASE, "truncation": "disabled"})["truncation"] == "disabled"


@pytest.mark.parametrize("field", ["image", "access_programs", "background_options", "stream_options"])
def test_options_are_objects(field: str) -> None:
    for bad in (5, "x", [], True):
        with pytest.raises(BadRequest) as caught:
            ask({**BASE, field: bad})
        assert caught.value.param == field
    assert ask({**BASE, field: {"unheard_of": 1}}) == ask(BASE)
