"""Bodies that are nested deeply, wherever that may be: an answer or a 400, never a 5xx, and the next request works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving import Server, scripted
from zjournal.api import nesting

DEPTHS = (50, 150, 300, 600, 900, 990, 5000, 200_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("depth")
    with Server(folder / "data", model=scripted(folder, {"text": "Ok."})) as served:
        yield served


def lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def schema(depth: int) -> bytes:
    return b'{"type":"object","properties":{"a":' * depth + b'{"type":"string"}' + b"}}" * depth


RESPONSES = {
    "input": lambda d: b'"input":[{"role":"user","content":%b}]' % lists(d),
    "unknown": lambda d: b'"input":"x","unknown":%b' % lists(d),
    "metadata": lambda d: b'"input":"x","metadata":%b' % schema(d),
    "tools": lambda d: b'"input":"x","tools":[{"type":"function","name":"f","parameters":%b}]' % schema(d),
    "strict": lambda d: (
        b'"input":"x","tools":[{"type":"function","name":"f","strict":true,"parameters":%b}]' % schema(d)
    ),
    "format": lambda d: b'"input":"x","text":{"format":{"type":"json_schema","name":"n","schema":%b}}' % schema(d),
    "choice": lambda d: b'"input":"x","tool_choice":%b' % lists(d),
    "arguments": lambda d: (
        b'"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"%b"},'
        b'{"type":"function_call_output","call_id":"c","output":"x"}]' % lists(d)
    ),
}
CHAT = {
    "content": lambda d: b'"messages":[{"role":"user","content":%b}]' % lists(d),
    "tools": lambda d: (
        b'"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":%b}}]'
        % schema(d)
    ),
    "arguments": lambda d: (
        b'"messages":[{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f",'
        b'"arguments":"%b"}}]},{"role":"tool","tool_call_id":"c","content":"x"}]' % lists(d)
    ),
}
MESSAGES = {
    "input": lambda d: (
        b'"max_tokens":4,"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"tool_use",'
        b'"id":"c","name":"f","input":{"a":%b}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"c",'
        b'"content":"x"}]}]' % lists(d)
    ),
    "tools": lambda d: (
        b'"max_tokens":4,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":%b}]'
        % schema(d)
    ),
    "metadata": lambda d: b'"max_tokens":4,"messages":[{"role":"user","content":"x"}],"metadata":{"a":%b}' % lists(d),
}
CASES = [
    pytest.param(path, made, id=f"{path.rsplit('/', 1)[-1]}-{name}")
    for path, cases in (("/v1/responses", RESPONSES), ("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES))
    for name, made in cases.items()
]


@pytest.mark.parametrize(("path", "made"), CASES)
def test_depth_is_never_a_failure_of_the_server(server: Server, path: str, made: Any) -> None:
    for depth in DEPTHS:
        body = b'{"model":"default",%b}' % made(depth)
        answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (depth, answer.text[:300])
        if answer.status_code == 400:
            assert answer.json()["error"]["message"], depth
        if path == "/v1/messages":
            counted = server.http.post(f"{path}/count_tokens", content=body)
            assert counted.status_code in (200, 400), (depth, counted.text[:300])
    assert server.respond(input="x")["status"] == "completed"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_the_limit_is_ours_and_named_and_strings_do_not_count(server: Server, path: str) -> None:
    message = b'"messages":[{"role":"user","content":"%b"}],"input":"%b","max_tokens":4' % (lists(900), lists(900))
    inside = b'{"model":"default",%b,"metadata":null}' % message
    assert server.http.post(path, content=inside).status_code == 200
    limit = nesting.JSON_DEPTH_MAX
    for depth in (limit - 1, limit):
        body = b'{"model":"default",%b,"unknown":%b}' % (message, lists(depth))
        answer = server.http.post(path, content=body)
        assert answer.status_code == (200 if depth < limit else 400), answer.text
    assert f"deeper than {limit}" in answer.json()["error"]["message"]
