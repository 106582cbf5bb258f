"""Bad input over all three protocols, streamed or not: told in the client's own shape, by its path; the next one works.

What schemathesis cannot make is here: bytes that are no text, numbers beyond floats, bodies that are compressed or cut,
ids of calls that nobody made.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_hostile import talk
from tests.server.test_restart import verify
from tests.serving import Server, scripted

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
CONTEXT = 2000
WORDS = "HERE"  # in a body, where bytes are put

each = pytest.mark.parametrize("path", PATHS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bad_input")
    model = scripted(folder, {"text": "one two three"}, context=CONTEXT)
    with Server(folder / "data", model=model) as running:
        yield running
        assert "Traceback" not in running.log.read_text()
        running.kill()
        verify(folder / "data")


def body(path: str, text: Any = WORDS, **more: Any) -> dict[str, Any]:
    """What asks one question."""
    question = [{"role": "user", "content": text}]
    if path == RESPONSES:
        return {"model": "default", "input": question, **more}
    return {"model": "default", "messages": question, **({"max_tokens": 9} if path == MESSAGES else {}), **more}


def send(server: Server, path: str, content: bytes, **headers: str) -> httpx.Response:
    return server.http.post(path, content=content, headers={"content-type": "application/json", **headers})


def refused(server: Server, path: str, reply: httpx.Response, status: int = 400) -> tuple[str, str]:
    """The message of an error in the protocol's own shape, and the path in it; the next request works."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    told = reply.json()
    if path.startswith(MESSAGES):
        assert set(told) == {"type", "error", "request_id"}
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        at, _, _ = told["error"]["message"].partition(": ")
    else:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        at = told["error"]["param"] or ""
    works(server, path)
    return told["error"]["message"], at


def works(server: Server, path: str) -> None:
    """A sound request is answered."""
    reply = server.post(path, body(path, "hello"))
    assert reply.status_code == 200, reply.text


NO_JSON = {
    "a high surrogate alone": rb'"\ud800"',
    "a low surrogate alone": rb'"\udc00"',
    "half a pair": rb'"\ud83dx"',
    "a raw NUL": b'"\0"',
    "no UTF-8": b'"\xff\xfe"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "an overlong slash": b'"\xc0\xaf"',
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "minus Infinity": b"-Infinity",
    "hexadecimal": b"0x10",
    "a leading zero": b"01",
}


@each
@streamed_or_not
@pytest.mark.parametrize("bad", NO_JSON.values(), ids=NO_JSON)
@pytest.mark.parametrize("unknown", [False, True], ids=["content", "unknown field"])
def test_what_is_no_json(server: Server, path: str, stream: bool, bad: bytes, unknown: bool) -> None:
    """Also where nobody reads it: the body is kept byte for byte, and must be readable ever after."""
    asked = body(path, "x", future=WORDS, stream=stream) if unknown else body(path, stream=stream)
    message, _ = refused(server, path, send(server, path, json.dumps(asked).encode().replace(b'"HERE"', bad)))
    assert "JSON" in message or (bad == b"0x10" and "got `int`" in message)  # read up to the 0


@each
@streamed_or_not
def test_half_of_a_surrogate_pair_is_told_with_its_path_and_byte(server: Server, path: str, stream: bool) -> None:
    sound = json.dumps(body(path, stream=stream)).encode()
    message, at = refused(server, path, send(server, path, sound.replace(WORDS.encode(), rb"\ud83d on")))
    place = "[0].content" if path != MESSAGES else ".0.content"
    assert at == ("input" if path == RESPONSES else "messages") + place
    assert f"at byte {sound.index(WORDS.encode())} is half of a surrogate pair" in message


@each
@streamed_or_not
def test_values_in_maps_are_named_by_their_keys(server: Server, path: str, stream: bool) -> None:
    asked: dict[str, Any] = {"logit_bias": {"5": 1, "17": "x"}}
    _, at = refused(server, path, server.post(path, body(path, "x", stream=stream, **asked)))
    assert at == "logit_bias.17"
    _, at = refused(server, path, server.post(path, body(path, "x", stream=stream, logit_bias={"5": 1, "17": 101})))
    assert at == "logit_bias.17"
    if path != MESSAGES:
        _, at = refused(server, path, server.post(path, body(path, "x", stream=stream, metadata={"b": "c", "a": 1})))
        assert at == "metadata.a"


def test_a_conversation_that_nobody_knows_is_named_as_it_stands_in_the_body(server: Server) -> None:
    for given in ("conv_no", {"id": "conv_no"}):
        reply = server.post(RESPONSES, body(RESPONSES, "x", conversation=given))
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "conversation")
    reply = server.http.get("/v1/conversations/conv_no")
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "conversation_id")


@each
def test_nul_and_odd_characters_are_text(server: Server, path: str) -> None:
    for text in (rb"\u0000", rb"a\u0000b", "\u2028\x85\ufeff\ufffe\U0010ffff".encode(), rb"\ud83d\udea2"):
        reply = send(server, path, json.dumps(body(path)).encode().replace(b"HERE", text))
        assert reply.status_code == 200, reply.text


@each
@pytest.mark.parametrize("bad", [b"1e999", b"-1e999", b"9" * 400, b"1" * 309 + b".5", b'"1"', b"true", b"[]", b"{}"])
def test_numbers_that_are_none(server: Server, path: str, bad: bytes) -> None:
    for name in ("temperature", "top_p", "seed", "max_output_tokens" if path == RESPONSES else "max_tokens"):
        asked = json.dumps({**body(path, "x"), name: WORDS}).encode().replace(b'"HERE"', bad)
        _, at = refused(server, path, send(server, path, asked))
        assert at == name


@each
@pytest.mark.parametrize("number", [b"1e999", b"-1e-999", b"9" * 400, b"1.50", b"0.1000000000000000055511151231257827"])
def test_numbers_nobody_reads_are_kept_as_they_are(server: Server, path: str, number: bytes) -> None:
    """In fields and items of the future; such a response can be listed, told again and continued."""
    for asked in (body(path, "x", future=WORDS), body(path, "x", metadata=None, future=[{"deep": [WORDS]}])):
        reply = send(server, path, json.dumps(asked).encode().replace(b'"HERE"', number))
        assert reply.status_code == 200, reply.text
    if path != RESPONSES:
        return
    item = b'{"type":"future_item","value":%b}' % number
    raw = b'{"model":"default","input":[%b,{"role":"user","content":"x"}]}' % item
    made = send(server, path, raw)
    assert made.status_code == 200, made.text
    name = made.json()["id"]
    listed = server.http.get(f"{RESPONSES}/{name}/input_items", params={"order": "asc"})
    assert number in listed.content
    for more in ("", "?stream=true"):
        assert server.http.get(f"{RESPONSES}/{name}{more}").status_code == 200
    assert server.respond(input="on", previous_response_id=name)["status"] == "completed"
    assert send(server, f"{RESPONSES}/compact", raw).status_code == 200
    kept = send(server, "/v1/conversations", b'{"items":[%b]}' % item).json()["id"]
    assert number in server.http.get(f"/v1/conversations/{kept}/items").content
    assert server.respond(input="hello", conversation=kept)["status"] == "completed"


def test_calls_of_other_servers_keep_their_numbers(server: Server) -> None:
    items = (
        b'[{"role":"user","content":"x"},{"type":"web_search_call","action":{"n":1e999}},{"role":"user","content":"y"}]'
    )
    for path in (RESPONSES, f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"):
        assert send(server, path, b'{"model":"default","input":%b}' % items).status_code == 200


@each
@streamed_or_not
def test_nesting(server: Server, path: str, stream: bool) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for field in ("future", "tools", "metadata"):
        asked = json.dumps({**body(path, "x", stream=stream), field: WORDS}).encode().replace(b'"HERE"', deep)
        message, _ = refused(server, path, send(server, path, asked))
        assert "nested" in message
    refused(server, path, send(server, path, json.dumps(body(path, stream=stream)).encode().replace(b'"HERE"', deep)))


@each
def test_bodies_that_are_no_object(server: Server, path: str) -> None:
    for content in (b"", b"null", b"[]", b'"x"', b"1", b"{", b"{}{}", b"model=default", b"\xef\xbb\xbf{}"):
        refused(server, path, send(server, path, content))
    refused(server, path, send(server, path, json.dumps(body(path)).encode("utf-16")))


@each
@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""]
)
def test_a_body_is_json_whatever_it_is_called(server: Server, path: str, kind: str) -> None:
    sound = json.dumps(body(path, "x")).encode()
    assert send(server, path, sound, **{"content-type": kind}).status_code == 200
    refused(server, path, send(server, path, b"--x\r\nContent-Disposition: form-data\r\n", **{"content-type": kind}))


@each
def test_a_compressed_body_is_refused_by_its_header(server: Server, path: str) -> None:
    packed = gzip.compress(json.dumps(body(path, "x")).encode())
    for coding in ("gzip", "GZIP", "zstd", "deflate, gzip"):
        message, _ = refused(server, path, send(server, path, packed, **{"content-encoding": coding}), 415)
        assert "Content-Encoding" in message
    assert (
        send(server, path, json.dumps(body(path, "x")).encode(), **{"content-encoding": "identity"}).status_code == 200
    )


def chunked(path: str, *chunks: bytes) -> list[bytes]:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return [head, *chunks]


@each
def test_a_chunked_body(server: Server, path: str) -> None:
    sound = json.dumps(body(path, "x")).encode()
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (sound[:7], sound[7:])]
    closing = [
        piece.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost") for piece in chunked(path, *parts, b"0\r\n\r\n")
    ]
    assert talk(server.port, *closing).startswith(b"HTTP/1.1 200 ")
    for size in (b"zz\r\n{}\r\n", b"-1\r\n{}\r\n", b"ffffffffffffffffff\r\n{}\r\n"):
        assert talk(server.port, *chunked(path, size)).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:  # it leaves in the middle of a chunk
        for piece in chunked(path, b"40\r\n{"):
            connection.sendall(piece)
    works(server, path)


@each
def test_other_methods(server: Server, path: str) -> None:
    for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "TRACE"):
        reply = server.http.request(method, path, headers={"anthropic-version": "1"} if path == MESSAGES else {})
        assert reply.status_code == 405
        assert "POST" in reply.headers["allow"]
        assert (method == "HEAD") == (not reply.content)
    reply = server.http.options(path)
    assert (reply.status_code, reply.content) == (204, b"")
    works(server, path)


@each
@streamed_or_not
def test_a_context_that_overflows_is_told_in_the_clients_own_words(server: Server, path: str, stream: bool) -> None:
    """As a status, before a stream begins."""
    message, at = refused(server, path, server.post(path, body(path, "word " * 3000, stream=stream)))
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = server.post(path, {**body(path, "x", stream=stream), name: 5000})
    second, _ = refused(server, path, asked)
    if path == MESSAGES:
        assert message.startswith("prompt is too long: ")
        assert message.endswith(f" tokens > {CONTEXT} maximum")
        assert second.startswith("input length and `max_tokens` exceed context limit: ")
        assert f" + 5000 > {CONTEXT}, " in second
    else:
        assert at == ("input" if path == RESPONSES else "messages")
        assert asked.json()["error"]["code"] == "context_length_exceeded"
        assert str(CONTEXT) in message
        assert str(CONTEXT) in second


@each
@streamed_or_not
def test_what_is_far_too_long_to_be_counted_is_told_with_what_it_has_at_least(
    server: Server, path: str, stream: bool
) -> None:
    """The number is true: a prompt of all but the last words has no more tokens."""
    words, fewer = "tide " * 4_000_000, "tide " * 1_000
    message, _ = refused(server, path, server.post(path, body(path, words, stream=stream)))
    found = re.search(r"at least (\d+) tokens", message)
    assert found and str(CONTEXT) in message, message
    counted = server.post("/v1/responses/input_tokens", {"model": "default", "input": fewer}).json()["input_tokens"]
    assert CONTEXT < int(found[1]) <= counted * 4_000


# --- ids of calls -----------------------------------------------------------------------------------------


def history(path: str, calls: list[str], results: list[str]) -> dict[str, Any]:
    """A conversation with calls and results of these ids, the results last."""
    question: dict[str, Any] = {"role": "user", "content": "x"}
    if path == CHAT:
        made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in calls]
        said = [{"role": "assistant", "content": None, "tool_calls": made}] if made else []
        came = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in results]
        return {"model": "default", "messages": [question, *said, *came]}
    if path == RESPONSES:
        made = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in calls]
        came = [{"type": "function_call_output", "call_id": name, "output": "1"} for name in results]
        return {"model": "default", "input": [question, *made, *came]}
    made = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in calls]
    came = [{"type": "tool_result", "tool_use_id": name, "content": "1"} for name in results]
    said = [{"role": "assistant", "content": made}] if made else []
    return {"model": "default", "max_tokens": 9, "messages": [question, *said, {"role": "user", "content": came}]}


def field(path: str, index: int, result: bool) -> str:
    """Where the id of a call, or of a result, stands in such a conversation, in the protocol's spelling."""
    if path == CHAT:
        return f"messages[{index + 2}].tool_call_id" if result else f"messages[1].tool_calls[{index}].id"
    if path == RESPONSES:
        return f"input[{index + 1}].call_id"
    return f"messages.2.content.{index}.tool_use_id" if result else f"messages.1.content.{index}.id"


@each
@streamed_or_not
def test_two_calls_with_one_id(server: Server, path: str, stream: bool) -> None:
    message, at = refused(server, path, server.post(path, {**history(path, ["a", "a"], ["a"]), "stream": stream}))
    assert at == field(path, 1, result=False)
    assert "'a'" in message


@each
@streamed_or_not
@pytest.mark.parametrize("calls", [["a"], []], ids=["unknown", "orphan"])
def test_a_result_that_is_to_be_answered_must_have_its_call(
    server: Server, path: str, stream: bool, calls: list[str]
) -> None:
    asked = history(path, calls, ["b"])
    message, at = refused(server, path, server.post(path, {**asked, "stream": stream}))
    index = 1 if path == RESPONSES and calls else 0
    if not calls and path != RESPONSES:  # there is no assistant's message before it
        assert at == ("messages[1].tool_call_id" if path == CHAT else "messages.1.content.0.tool_use_id")
    else:
        assert at == field(path, index, result=True)
    assert re.search(r"\bb\b", message)


@each
def test_what_a_crash_leaves_behind_is_answered(server: Server, path: str) -> None:
    """A call without a result, two results of one call, results in another order, and an orphan long ago."""
    question: dict[str, Any] = {"role": "user", "content": "on"}
    name = "input" if path == RESPONSES else "messages"
    for calls, results in ((["a", "b"], ["a"]), (["a"], ["a", "a"]), (["a", "b"], ["b", "a"]), ([], ["b"])):
        asked = history(path, calls, results)
        asked[name] = [*asked[name], question]
        reply = server.post(path, asked)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("header", ["x-session-id", "user-agent", "authorization", "x-api-key", "anthropic-version"])
@each
def test_headers_that_are_no_text(server: Server, path: str, header: str) -> None:
    reply = server.http.post(path, json=body(path, "x"), headers={header: b"\xff\xfe"})  # type: ignore[dict-item]
    assert reply.status_code == 200, reply.text


@each
def test_what_asks_for_nothing_has_its_own_type(server: Server, path: str) -> None:
    """To Python 0 is false and true is 1; to a client they are not."""
    for name, wrong, neutral in (("echo", 0, False), ("ignore_eos", 0.0, False), ("best_of", True, 1)):
        _, at = refused(server, path, server.post(path, body(path, "x", **{name: wrong})))
        assert at == name
        assert server.post(path, body(path, "x", **{name: neutral})).status_code == 200


RESOURCES = ("/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/v1/conversations/conv_x/items", "/v1/models")


@pytest.mark.parametrize("resource", RESOURCES)
@pytest.mark.parametrize(
    "tail", ["%FF", "%00", "%ED%A0%80", "?limit=%00", "?order=%FF", "?after=%FF", "?starting_after=%FF&stream=true"]
)
def test_paths_and_queries_that_are_no_text(server: Server, resource: str, tail: str) -> None:
    reply = server.http.get(f"{resource}{tail}" if tail.startswith("?") else f"{resource}/{tail}")
    assert reply.status_code in ((200, 400, 404) if resource == "/v1/models" else (400, 404)), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
