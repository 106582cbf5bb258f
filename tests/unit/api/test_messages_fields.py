"""The table of fields in docs/messages.md is what Messages does: this walks over it, and knows of no other field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from tests.unit.api import field_table
from tests.unit.api.field_table import Row
from zjournal.api.messages import request
from zjournal.ask import Ask
from zjournal.errors import BadRequest

BASE: dict[str, Any] = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}

# A value of each field that asks for something, and what it needs beside it.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    **field_table.SAMPLING,
    **field_table.FOREIGN,
    "model": ("other", {}),
    "max_tokens": (5, {}),
    "messages": ([{"role": "user", "content": "ho"}], {}),
    "system": ("Be brief.", {}),
    "stream": (True, {}),
    "tools": ([TOOL], {}),
    "mcp_servers": ([{"type": "url", "name": "x", "url": "https://example.com"}], {}),
    "container": ({"skills": [{"type": "custom", "skill_id": "x"}]}, {}),
    "tool_choice": ({"type": "none"}, {"tools": [TOOL]}),
    "stop_sequences": (["x"], {}),
    "output_config.format": (FORM, {}),
    "output_format": (FORM, {}),
    "output_config.effort": ("high", {}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, {}),
    "thread": ({"type": "continue", "previous_message_id": "msg_1"}, {}),
    "diagnostics.previous_message_id": ("msg_1", {}),
    "metadata.user_id": ('{"session_id":"s"}', {}),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {}),
    "cache_control": ({"type": "ephemeral"}, {}),
    "cache_salt": ("salt", {}),
    "service_tier": ("flex", {}),
    "speed": ("fast", {}),
    "inference_geo": ("eu", {}),
    "fallbacks": ([{"model": "x"}], {}),
    "fallback_credit_token": ("x", {}),
    "billing_policy": ({"type": "billing_policy", "bill_to": "user_profile"}, {}),
    "user_profile_id": ("x", {}),
    "workspace_id": ("x", {}),
    "betas": (["x"], {}),
    "compaction": ({}, {}),
    "stop": ("x", {}),
    "top_logprobs": (3, {}),
}
IN_THE_ANSWER = {"thinking"}  # whether thoughts are told: test_messages_answer
READ_BY_ROUTE = "diagnostics.previous_message_id"  # an id of any form may be asked for
ROWS = field_table.rows("messages.md", 0)


def ask(body: dict[str, Any]) -> Ask:
    return request.decode(json.dumps(body).encode(), {})


@pytest.mark.parametrize(
    "params",
    [
        message_create_params.MessageCreateParamsBase,
        beta_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ],
)
def test_the_table_has_every_field_of_the_published_api(params: type) -> None:
    published = set(params.__annotations__)
    assert len(published) >= 10 and field_table.top(ROWS) >= published


def test_the_table_has_every_field_that_is_read() -> None:
    assert field_table.top(ROWS) >= set(request._Body.__struct_fields__)
    assert {row.field for row in ROWS} == set(ASKED)


@pytest.mark.parametrize("row", [row for row in ROWS if row.field != READ_BY_ROUTE], ids=lambda row: row.field)
def test_a_field_is_what_the_table_says(row: Row) -> None:
    value, beside = ASKED[row.field]
    if row.field == "max_tokens":  # null is as if it were left out, and it may not be left out
        for missing in ({"max_tokens": None}, {}):
            rest = {name: value for name, value in BASE.items() if name != "max_tokens"}
            with pytest.raises(BadRequest) as caught:
                ask({**rest, **missing})
            assert caught.value.param == "max_tokens"
    asked = field_table.check(row, ask, BASE, value, beside, seen=row.field not in IN_THE_ANSWER)
    if "skipped" in row.said:
        assert [name.partition(".")[0] for name in asked.skipped] == [row.field]


def test_the_diagnostics_are_read_by_the_route() -> None:
    body = field_table.with_field(BASE, READ_BY_ROUTE, "msg_1", {})
    wanted = request.diagnostics(json.dumps(body).encode())
    assert wanted is not None and wanted.previous_message_id == "msg_1"
    assert request.diagnostics(json.dumps(BASE).encode()) is None
    with pytest.raises(BadRequest) as caught:
        request.diagnostics(json.dumps({**BASE, "diagnostics": 7}).encode())
    assert caught.value.param == "diagnostics"


def test_a_container_alone_says_nothing() -> None:
    for container in ("container_1", {"id": "container_1"}, {"skills": []}):
        assert ask({**BASE, "container": container}) == ask(BASE)
