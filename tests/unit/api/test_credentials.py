"""Credentials leave a body before anything else sees it, and nothing else of it is touched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zjournal.api.credentials import REMOVED, own_keys, without

KEY = "zj-the-key-of-this-request"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b'"api_key"',
        b"{",
        b'{"api_key": "x"',
        b'{ "model" : "m" , "input":"my api_key is zj-the-key-of-this-request"}',
        b'{"messages": [{"role": "user", "content": "x", "api_key": "an argument"}], "n": 1.0}',
        b'{"tools": [{"type": "function", "parameters": {"properties": {"api_key": {"default": "x"}}}}]}',
        b'{"tools": [{"description": "clones ssh://git@host/x.git"}], "api_key": null, "max_tokens": 3}',
        b'{"metadata": {"tokens": "12", "keys": "F5"}}',
        b'{"a": ' * 2_000 + b"1" + b"}" * 2_000,
    ],
)
def test_what_holds_none_is_the_same_bytes(body: bytes) -> None:
    assert without(body, (KEY,)) == body


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"api_key": "s3cret"}, {"api_key": REMOVED}),
        ({"API-Key": "s3cret"}, {"API-Key": REMOVED}),
        ({"extra_headers": {"x-anything": "s3cret"}}, {"extra_headers": {"x-anything": REMOVED}}),
        ({"tools": [{"headers": {"a": ["s3cret"]}}]}, {"tools": [{"headers": {"a": [REMOVED]}}]}),
        ({"tools": [{"url": "https://me:s3cret@h/p"}]}, {"tools": [{"url": f"https://{REMOVED}@h/p"}]}),
        ({"metadata": {"note": f"({KEY})"}}, {"metadata": {"note": f"({REMOVED})"}}),
        ({"user": KEY}, {"user": REMOVED}),
        ({"mcp_servers": [{"authorization_token": "s"}]}, {"mcp_servers": [{"authorization_token": REMOVED}]}),
        ({"authorization": {"token": "s3cret", "n": 1}}, {"authorization": {"token": REMOVED, "n": 1}}),
    ],
)
def test_only_the_credential_goes(given: dict[str, Any], left: dict[str, Any]) -> None:
    rest = {"input": "s3cret or not", "seed": 12345678901234567}
    assert json.loads(without(json.dumps({**rest, **given}).encode(), (KEY,))) == {**rest, **left}


def test_what_is_shown_to_the_model_keeps_its_bytes() -> None:
    body = b'{"messages" : [ {"role":"user", "content":"caf\\u00e9"} ], "api_key":"s3cret"}'
    assert b'"messages":[ {"role":"user", "content":"caf\\u00e9"} ]' in without(body, ())


def test_own_keys() -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": "another-key-of-mine"}
    assert own_keys(headers) == (KEY, "another-key-of-mine")
    assert own_keys({"authorization": "Bearer short"}) == ()
    assert own_keys({}) == ()
