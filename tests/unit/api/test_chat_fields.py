"""The table of fields in docs/api.md is what Chat does: this walks over it, and knows of no field that is not in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import completion_create_params

from tests.unit.api import field_table
from tests.unit.api.field_table import Row
from zjournal.api import chat, chat_answer
from zjournal.ask import Ask
from zjournal.errors import BadRequest

BASE: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}

# A value of each field that asks for something, and what it needs beside it.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    **field_table.SAMPLING,
    **field_table.FOREIGN,
    **field_table.OF_OPENAI,
    "model": ("other", {}),
    "messages": ([{"role": "user", "content": "ho"}], {}),
    "stream_options.include_usage": (True, {"stream": True}),
    "max_tokens": (5, {}),
    "max_completion_tokens": (5, {}),
    "logprobs": (True, {}),
    "top_logprobs": (3, {"logprobs": True}),
    "stop": ("x", {}),
    "tools": ([TOOL], {}),
    "tools[].strict": (True, {"tools": [TOOL]}),
    "tool_choice": ("none", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {}),
    "reasoning_effort": ("high", {}),
    "verbosity": ("low", {}),
    "prediction": ({"type": "content", "content": [{"type": "text", "text": "x"}]}, {}),
    "response_format": ({"type": "json_object"}, {}),
    "functions": ([FUNCTION], {}),
    "function_call": ({"name": "f"}, {"functions": [FUNCTION]}),
    "continue_final_message": (True, {}),
    "add_generation_prompt": (False, {"continue_final_message": True}),
    "modalities": (["text", "audio"], {}),
    "audio": ({"voice": "x", "format": "wav"}, {}),
    "web_search_options": ({}, {}),
    "moderation": ({}, {}),
}
# Honoured, and seen in the answer in place of the Ask; or honoured as one of two that say the same.
IN_THE_ANSWER = {"stream_options.include_usage"}
SAYS_THE_SAME = {"add_generation_prompt"}
OF_RESPONSES = ("input", "text.format")  # that stand beside their names in Chat


ROWS = field_table.rows("api.md", 0, others=OF_RESPONSES)


def ask(body: dict[str, Any]) -> Ask:
    return chat.decode(json.dumps(body).encode(), {})


def test_the_table_has_every_field_that_is_read_and_every_one_of_the_published_api() -> None:
    listed = field_table.top(ROWS)
    assert listed >= set(chat._Body.__struct_fields__)
    published = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert len(published) > 30 and listed >= published
    assert {row.field for row in ROWS} == set(ASKED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_a_field_is_what_the_table_says(row: Row) -> None:
    value, beside = ASKED[row.field]
    if row.field == "tools[].strict":  # it stands in a list, which the walk does not enter
        true, null, wrong = (
            {**BASE, "tools": [{**TOOL, "function": {**FUNCTION, "strict": one}}]} for one in (value, None, {"bad": 1})
        )
        assert row.said == ("honoured",)
        assert ask(true) != ask(null) == ask({**BASE, **beside})
        with pytest.raises(BadRequest) as caught:
            ask(wrong)
        assert caught.value.param == "tools[0].function.strict"
        return
    seen = row.field not in IN_THE_ANSWER | SAYS_THE_SAME
    field_table.check(row, ask, BASE, value, beside, seen)
    if row.field in IN_THE_ANSWER:
        body = field_table.with_field(BASE, row.field, value, beside)
        assert chat_answer._echo_decoder.decode(json.dumps(body).encode()).include_usage
