"""Part c: the first byte of a turn whose 100,000 earlier tokens are resident, in each protocol.

The conversation grows turn by turn, as an agent's does: pages of this repository, each answered. Then short turns are
asked, and it is taken how long the first byte takes, from the last byte of the request on; what is parsed, placed,
rendered, tokenised, packed and made durable is in it. The peer is the same with a conversation of a hundredth, so what
is left of the ratio is what depends on the length. Last an agent's work: many calls with short results, 20 tools; in
each protocol with the whole history resent, and by the id of the response that it goes on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from collections.abc import Callable, Coroutine, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from parts.table import Line
from parts.wires import (
    API_CORE,
    CHAT,
    MESSAGES,
    OTHER_CORE,
    RESPONSES,
    Spoken,
    asked,
    events,
    pin,
    pinned,
    processor_s,
    stream,
)
from tests.serving import Server, scripted

ROOT = Path(__file__).resolve().parent.parent.parent
MUST_MS = 15.0
PAGE_CHARACTERS = 16_000  # of a turn, about 5,000 tokens
PAGES, QUICK_PAGES = 20, 4
SHORT_PAGE_CHARACTERS = 160
ASKED, QUICK_ASKED = 15, 3  # short turns that are measured
ANSWER = "Noted; what is the next page about?"
RESULT_CHARACTERS = 2_400  # of a call, about 800 tokens
CALLS, QUICK_CALLS = 120, 18
TOOL, SAID = "tool_3", "I look into it."
CALL = f'{SAID}\n<tool_call>\n{{"name": "{TOOL}", "arguments": {{"path": "/src/file.py", "limit": 100}}}}\n</tool_call>'
_PARAMETERS = {"path": {"type": "string", "description": "Where the file lies."}, "limit": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a file and says what is in it. " * 10,
            "parameters": {"type": "object", "properties": _PARAMETERS, "required": ["path"]},
        },
    }
    for number in range(20)
]


class Found(NamedTuple):
    """Of the turns that were measured: milliseconds to the first byte and the first token, tokens and bytes asked.

    `processor_ms`: of the API in all, for each turn and its answer.
    """

    first_ms: list[float]
    token_ms: list[float]
    prompt: int
    body: int
    processor_ms: float


def lines(folder: Path, quick: bool) -> list[Line]:
    """Measures each way to continue a conversation."""
    ways = [(RESPONSES, True), (CHAT, False), (MESSAGES, False)]
    found: list[Line] = []
    with _served(folder / "pages", ANSWER) as (port, pid):
        for spoken, chained in ways:
            long = _measure(_converse(port, pid, spoken, chained, PAGE_CHARACTERS, quick))
            short = _measure(_converse(port, pid, spoken, chained, SHORT_PAGE_CHARACTERS, quick))
            way = "by its id" if chained else f"{long.body / 1000:,.0f} kB"
            found += _lines(f"{spoken.name}, {way}", long, short)
    with _served(folder / "calls", CALL) as (port, pid):
        calls = QUICK_CALLS if quick else CALLS
        for spoken, chained in ((CHAT, False), (RESPONSES, False), (RESPONSES, True), (MESSAGES, False)):
            long = _measure(_work(port, pid, spoken, chained, calls, RESULT_CHARACTERS))
            short = _measure(_work(port, pid, spoken, chained, QUICK_CALLS, SHORT_PAGE_CHARACTERS))
            found += _lines(f"{spoken.name}, {calls} calls{' by id' if chained else ''}", long, short)
    return found


@contextlib.contextmanager
def _served(folder: Path, text: str) -> Iterator[tuple[int, int]]:
    """A server that says `text`, its API and engine on a processor each; its port and the API's pid."""
    folder.mkdir()
    flags = ("--speculation", "0", "--guard", "off", "--log-level", "warning")
    with Server(folder / "data", *flags, model=scripted(folder, {"text": text}, context=1_000_000)) as server:
        assert server.process is not None
        pin(server.process.pid, API_CORE)
        for child in server.children():
            pin(child, OTHER_CORE)
        yield server.port, server.process.pid


def _lines(way: str, long: Found, short: Found) -> list[Line]:
    first, peer = statistics.median(long.first_ms), statistics.median(short.first_ms)
    token, peer_token = statistics.median(long.token_ms), statistics.median(short.token_ms)
    what = f"{way}, {long.prompt:,} tokens, first byte ms"
    told = f"{short.prompt:,} tokens: {peer:.1f}"
    worst = f"{max(long.first_ms):.1f}"
    return [
        Line(what, f"{first:.1f}", told, first / peer, f"under {MUST_MS:g} ms", first < MUST_MS),
        Line("the same, the slowest", worst, f"{max(short.first_ms):.1f}"),
        Line("the same, first token ms", f"{token:.1f}", f"{peer_token:.1f}", token / peer_token),
        Line(
            "the same, ms of the API's processor, answer included",
            f"{long.processor_ms:.1f}",
            f"{short.processor_ms:.1f}",
        ),
    ]


def _measure(work: Coroutine[Any, Any, Found]) -> Found:
    with pinned(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _converse(port: int, pid: int, spoken: Spoken, chained: bool, page: int, quick: bool) -> Found:
    """A conversation of pages, then the turns that are measured."""
    pages = _pages(page)
    history: list[dict[str, str]] = []
    previous = ""
    first: list[float] = []
    token: list[float] = []
    prompt = size = 0
    used = 0.0
    count = QUICK_PAGES if quick else PAGES
    for number in range(count + (QUICK_ASKED if quick else ASKED)):
        if number == count:
            used = processor_s(pid)
        text = next(pages) if number < count else f"And now, briefly, number {number}?"
        said = {"role": "user", "content": f"{spoken.name} {page}: {text}"}
        history = [said] if chained else [*history, said]
        body = asked(spoken, history, **({"previous_response_id": previous} if previous else {}))
        one = await stream(port, spoken.path, body, spoken.token)
        previous, prompt = _ended(spoken, events(one.told), chained)
        history = [] if chained else [*history, {"role": "assistant", "content": ANSWER}]
        if number >= count:
            first.append((one.first - one.sent) / 1e6)
            token.append((one.tokens[0] - one.sent) / 1e6)
            size = len(body)
    return Found(first, token, prompt, size, (processor_s(pid) - used) * 1_000 / len(first))


async def _work(port: int, pid: int, spoken: Spoken, chained: bool, calls: int, result: int) -> Found:
    """An agent that resends its history: call after call, each with its result; the last ones are measured.

    `chained`: it sends the new result only, and names the response.
    """
    results = _pages(result)
    way = f"{spoken.name} by id" if chained else spoken.name
    history: list[dict[str, Any]] = [{"role": "user", "content": f"{way}, {calls} calls: {next(results)}"}]
    previous = ""
    first: list[float] = []
    token: list[float] = []
    prompt = size = 0
    used = 0.0
    for number in range(calls):
        if number == calls - ASKED:
            used = processor_s(pid)
        more = {"previous_response_id": previous} if previous else {}
        body = asked(spoken, history, tools=_tools(spoken), **more)
        one = await stream(port, spoken.path, body, _BEGUN[spoken.name])
        values = [_data(frame) for frame in events(one.told).split(b"\n\n") if b"data: {" in frame]
        said, answered, prompt = _SAYS[spoken.name](values, next(results))
        history = answered if chained else [*history, *said, *answered]
        previous = values[-1]["response"]["id"] if chained else ""
        if number >= calls - ASKED:
            first.append((one.first - one.sent) / 1e6)
            token.append((one.tokens[0] - one.sent) / 1e6)
            size = len(body)
    return Found(first, token, prompt, size, (processor_s(pid) - used) * 1_000 / len(first))


# What stands first in the event by which a call is begun.
_BEGUN = {
    CHAT.name: b'"tool_calls":[{"index":0,"id"',
    RESPONSES.name: b'"type":"function_call"',
    MESSAGES.name: b'"type":"tool_use"',
}


def _tools(spoken: Spoken) -> list[dict[str, Any]]:
    functions: list[dict[str, Any]] = [tool["function"] for tool in TOOLS]
    if spoken is CHAT:
        return TOOLS
    if spoken is RESPONSES:
        return [{"type": "function", **function} for function in functions]
    names = ("name", "description")
    return [{**{name: one[name] for name in names}, "input_schema": one["parameters"]} for one in functions]


# An answer with a call in the client's history, its result, and the tokens of its prompt.
Says = tuple[list[dict[str, Any]], list[dict[str, Any]], int]


def _chat_says(values: list[Any], result: str) -> Says:
    told = [call for value in values for choice in value["choices"] for call in choice["delta"].get("tool_calls", ())]
    arguments = "".join(part["function"].get("arguments", "") for part in told)
    call = {"id": told[0]["id"], "type": "function", "function": {"name": TOOL, "arguments": arguments}}
    said = {"role": "assistant", "content": SAID, "tool_calls": [call]}
    prompt = next(value["usage"]["prompt_tokens"] for value in values if value.get("usage"))
    return [said], [{"role": "tool", "tool_call_id": call["id"], "content": result}], prompt


def _responses_say(values: list[Any], result: str) -> Says:
    response = values[-1]["response"]
    call = next(item for item in response["output"] if item["type"] == "function_call")
    answered = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
    return response["output"], [answered], response["usage"]["input_tokens"]


def _messages_say(values: list[Any], result: str) -> Says:
    call = next(
        value["content_block"]
        for value in values
        if value["type"] == "content_block_start" and value["content_block"]["type"] == "tool_use"
    )
    deltas = (value["delta"] for value in values if value["type"] == "content_block_delta")
    told = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    said = [{"type": "text", "text": SAID}, {**call, "input": json.loads(told)}]
    answered = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
    usage = values[0]["message"]["usage"]
    return (
        [{"role": "assistant", "content": said}],
        [{"role": "user", "content": [answered]}],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
    )


_SAYS: dict[str, Callable[[list[Any], str], Says]] = {
    CHAT.name: _chat_says,
    RESPONSES.name: _responses_say,
    MESSAGES.name: _messages_say,
}


def _ended(spoken: Spoken, told: bytes, chained: bool) -> tuple[str, int]:
    """The response's id where it is to be named, and its prompt tokens where the protocol tells them unasked."""
    values = [_data(frame) for frame in told.split(b"\n\n") if b"data: {" in frame]
    if spoken is RESPONSES:
        response = values[-1]["response"]
        return response["id"] if chained else "", response["usage"]["input_tokens"]
    if spoken is MESSAGES:
        usage = values[0]["message"]["usage"]
        return "", usage["input_tokens"] + usage["cache_read_input_tokens"]
    return "", next(value["usage"]["prompt_tokens"] for value in values if value.get("usage"))


def _data(frame: bytes) -> Any:
    return json.loads(frame.partition(b"data: ")[2])


def _pages(size: int) -> Iterator[str]:
    """Pages of this repository, over and over, each with its number."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    for number, start in enumerate(cycle(range(0, len(text) - size, size)), 1):
        yield f"page {number}\n{text[start : start + size]}"
