"""Credentials in a request's body: taken out before anything is decoded, journaled or told.

A body is kept byte for byte, so what must not be kept has to leave it here: fields that carry keys by their name, such
as `api_key` or the headers of a remote tool, user and password in a URL, and the key that the request itself came with.
What the model is shown (messages, input, instructions) is content, and stays as it is; so do schemas of tools, in which
such a name is that of a parameter.

Bodies without any, that is nearly all, come out unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

REMOVED = "[removed]"  # stands in the place of a credential
KEY_CHARS_MIN = 8  # a shorter key would be found in words
_SHOWN = frozenset({"messages", "input", "instructions", "system", "prompt"})  # at the top of a body
_SCHEMAS = frozenset({"parameters", "schema", "json_schema", "input_schema"})
_KEYS = frozenset({"api_key", "apikey", "x_api_key", "x_goog_api_key", "secret_key", "client_secret"})
_TOKENS = frozenset({"access_token", "auth_token", "bearer_token", "refresh_token", "authorization_token"})
_SECRET = _KEYS | _TOKENS | {"authorization", "proxy_authorization", "cookie", "set_cookie", "password", "passwd"}
_HEADERS = frozenset({"headers", "extra_headers", "default_headers"})  # any header may be one
_USER = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")

_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def own_keys(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that a request came with. Lower-case names."""
    _, _, bearer = headers.get("authorization", "").partition(" ")
    keys = (bearer.strip(), headers.get("x-api-key", "").strip())
    return tuple(key for key in keys if len(key) >= KEY_CHARS_MIN)


def without(body: bytes, keys: Sequence[str]) -> bytes:
    """The body with REMOVED in the place of each credential; the same bytes where there is none.

    What is no JSON object comes out as it is, for the protocol to refuse it.
    """
    try:
        parts = _parts(body)
        changed = {}
        for name, part in parts.items():
            if name in _SHOWN:
                continue
            value = _decode(part)
            clean = _clean({name: value}, keys)[name]
            if clean != value:
                changed[name] = _encode(clean)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    if not changed:
        return body
    return b"{%s}" % b",".join(b"%s:%s" % (_encode(name), changed.get(name, part)) for name, part in parts.items())


def _clean(value: Any, keys: Sequence[str], header: bool = False) -> Any:
    if isinstance(value, str):
        return REMOVED if header else _clean_text(value, keys)
    if isinstance(value, list):
        return [_clean(inner, keys, header) for inner in value]
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for name, inner in value.items():
        known = name.lower().replace("-", "_")
        if name in _SCHEMAS:
            cleaned[name] = inner
        else:
            cleaned[name] = _clean(inner, keys, header or known in _SECRET or known in _HEADERS)
    return cleaned


def _clean_text(text: str, keys: Sequence[str]) -> str:
    for key in keys:
        text = text.replace(key, REMOVED)
    return _USER.sub(REMOVED, text)
