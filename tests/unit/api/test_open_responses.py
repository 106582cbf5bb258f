"""Our Responses goldens against the models that are generated from the published Open Responses specification.

Every file is read as it lies there. What the specification has no word for is listed, and nothing else is left out.
"""

from __future__ import annotations

import json
from typing import Any

import openresponses_types
import pytest
from openresponses_types import ResponseResource

from tests.unit.api.steps import GOLDEN

BODIES = sorted(GOLDEN.glob("responses_*.json"))
STREAMS = sorted(GOLDEN.glob("responses_*.sse"))

ITEMS = {"custom_tool_call"}  # and tools of that type: the specification has functions only
TOOLS = {"custom", "namespace", "web_search"}
EVENTS = {  # OpenAI's names, which the clients read; those of the specification are others, or none
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.compaction.compacting",
}


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = stream.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def published(response: dict[str, Any]) -> dict[str, Any]:
    """A response without the items and tools that the specification does not know.

    It takes no schema of a text but null, which is a fault of its own: ours is the one that was sent.
    """
    tools = [tool for tool in response["tools"] if tool["type"] == "function"]
    assert {tool["type"] for tool in response["tools"]} <= {"function", *TOOLS}
    items = [item for item in response["output"] if item["type"] not in ITEMS]
    known = {**response, "tools": tools, "output": items}
    form, choice = response["text"]["format"], response["tool_choice"]
    if form["type"] == "json_schema":
        assert form["schema"]
        known["text"] = {**response["text"], "format": {**form, "schema": None}}
    if isinstance(choice, dict) and choice["type"] == "custom":
        known["tool_choice"] = "auto"
    return known


def test_there_are_goldens() -> None:
    assert len(BODIES) == len(STREAMS) >= 20


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_each_body(path: Any) -> None:
    body = json.loads(path.read_bytes())
    assert set(ResponseResource.model_fields) <= set(body)
    ResponseResource.model_validate(published(body))


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_each_event(path: Any) -> None:
    told = events(path.read_bytes())
    assert told
    for event in told:
        if "response" in event:
            event["response"] = published(event["response"])
        if event["type"] in EVENTS or event.get("item", {}).get("type") in ITEMS:
            continue
        camel = "".join(word.capitalize() for word in event["type"].replace(".", "_").split("_"))
        getattr(openresponses_types, f"{camel}StreamingEvent").model_validate(event)
