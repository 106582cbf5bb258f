"""Names that must come out the same when derived again: item ids, rolling history digests, namespaces.

Response and session ids are random. Everything below them is an HMAC under the journal's secret, so a
restarted server tells the same ids, and nobody can guess one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from zjournal import ask

ITEM_ID_HEX = 40
NAMESPACE_HEX = 32
HISTORY_BYTES = 16  # two are in the facts of each turn; keyed, so that nobody can look for two that are equal
CALL_KEY_BYTES = 16
CALL_ENTROPY_HEX = 21  # of the response id that stand in a call id: what the journal looks responses up by
CALL_PROOF_HEX = 24
RESPONSE_KEY_CHARACTERS = 25  # as in the journal's index of responses
JSON_DEPTH_MAX = 64  # of arguments that are compared as values; what is nested deeper is compared as text

_RESPONSE_PREFIXES = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}
_CALL_PREFIX = "call_"
_NAMED_PREFIX = "function_"
_quoted = json.encoder.encode_basestring_ascii  # half a surrogate pair, which a model may escape, is no UTF-8


def response_id(protocol: str, entropy: bytes) -> str:
    """The id of a new response, in its protocol's form."""
    assert len(entropy) == 16
    return _RESPONSE_PREFIXES[protocol] + entropy.hex()


def session_id(entropy: bytes) -> str:
    """The id of a new session."""
    assert len(entropy) == 8
    return "s_" + entropy.hex()


def item_secret(secret: bytes, response: str) -> bytes:
    """What the ids of one response's items are made of: HMAC(journal secret, response id); 32 bytes.

    It can be told to another journal with the response, and says nothing about any other response.
    """
    return hmac.digest(secret, f"item\0{response}".encode(), "sha256")


def item_id(secret: bytes, index: int, prefix: str) -> str:
    """The id of an output item, such as `msg_…`: HMAC(the response's `item_secret`, index)."""
    return prefix + "_" + hmac.new(secret, f"{index}\0{prefix}".encode(), hashlib.sha256).hexdigest()[:ITEM_ID_HEX]


def call_id(secret: bytes, response: str, index: int) -> str:
    """The id of a response's call `index`: where to look the response up, and an HMAC by its `item_secret`.

    So a call that a client sends back is found without an index of calls, and proved to be ours.
    """
    entropy = _entropy(response)[:CALL_ENTROPY_HEX].ljust(CALL_ENTROPY_HEX, "0")
    proof = hmac.new(secret, f"{index}\0call".encode(), hashlib.sha256).hexdigest()[:CALL_PROOF_HEX]
    return f"{_CALL_PREFIX}{entropy}{proof}"


def named_call(name: str) -> str:
    """What stands for the id of a call that has none: it is known by the name of its function alone."""
    return _NAMED_PREFIX + name


def responses_of_call(call_id: str) -> tuple[str, ...]:
    """How the id of the response that made a call may begin, RESPONSE_KEY_CHARACTERS of it; none if it is not ours."""
    size = len(_CALL_PREFIX) + CALL_ENTROPY_HEX + CALL_PROOF_HEX
    if len(call_id) != size or not call_id.startswith(_CALL_PREFIX):
        return ()
    entropy = call_id[len(_CALL_PREFIX) :]
    return tuple((prefix + entropy)[:RESPONSE_KEY_CHARACTERS] for prefix in _RESPONSE_PREFIXES.values())


def _entropy(response: str) -> str:
    """The part of a response id behind its protocol's prefix."""
    found = next((prefix for prefix in _RESPONSE_PREFIXES.values() if response.startswith(prefix)), "")
    return response[len(found) :]


def namespace(fingerprint: str, tenant: str) -> str:
    """The identity under which KV may be shared: the model and its numerics, and who owns it."""
    return hashlib.sha256(f"namespace\0{fingerprint}\0{tenant}".encode()).hexdigest()[:NAMESPACE_HEX]


def snapshot_key(secret: bytes) -> bytes:
    """What goes into the hashes of chunks on disk: HMAC(journal secret); 32 bytes. So none can be guessed back."""
    return hmac.digest(secret, b"snapshots", "sha256")


def salt(secret: bytes, tenant: str, cache_salt: str | None) -> str:
    """What a fact has of a client's `cache_salt`; "" if it gave none."""
    if cache_salt is None:
        return ""
    named = f"salt\0{tenant}\0{cache_salt}".encode(errors="surrogatepass")
    return hmac.digest(secret, named, "sha256").hex()[:NAMESPACE_HEX]


def kv_namespace(namespace: str, salt: str) -> str:
    """The namespace for the engine: that of model and tenant, narrowed by the salt if there is one."""
    return f"{namespace}.{salt}" if salt else namespace


def call_key(secret: bytes, tenant: str, call_id: str) -> bytes:
    """What a fact names a tool call by, 16 bytes: the id is the client's word, and must not outlive its content."""
    return hmac.digest(secret, f"call\0{tenant}\0{call_id}".encode(errors="surrogatepass"), "sha256")[:CALL_KEY_BYTES]


def history_start(secret: bytes) -> bytes:
    """The rolling digest of an empty history. Keyed, so that a digest in the journal cannot be guessed back."""
    return hmac.new(secret, b"history", hashlib.sha256).digest()[:HISTORY_BYTES]


def history_step(digest: bytes, item: ask.Item) -> bytes:
    """The rolling digest after one more item. Where a text stood, and in how many parts, does not count.

    Nor does how the arguments of a call are spelled, if their JSON is equal; nor thoughts, which clients leave out. An
    earlier output counts as the items a client sees of it, so that a resent history meets it again.
    """
    if isinstance(item, ask.Output):
        return history(digest, item.items)
    if isinstance(item, ask.Thought):
        return digest
    return hashlib.sha256(digest + msgspec.msgpack.encode(_plain(item))).digest()[:HISTORY_BYTES]


def history(digest: bytes, items: Sequence[ask.Item]) -> bytes:
    """The rolling digest after several more items."""
    for item in items:
        digest = history_step(digest, item)
    return digest


def _plain(item: ask.Message | ask.Call | ask.Result) -> tuple[str, ...]:
    match item:
        case ask.Message():
            role = "system" if item.role == "developer" else item.role
            return ("message", role, item.text)
        case ask.Call():
            return ("call", item.call_id, item.name, canonical(item.arguments))
        case ask.Result():
            return ("result", item.call_id, item.text)


def canonical(arguments: str) -> str:
    """One spelling for all arguments that are equal as JSON. What is no JSON stays as it is.

    No arguments count as `{}`, as everywhere.
    """
    found = canonical_json(arguments if arguments.strip() else "{}")
    return arguments if found is None else found


def canonical_json(text: str) -> str | None:
    """One spelling for all equal JSON: keys sorted, numbers by their value, no white space. None for other text.

    Also for JSON in which a key stands twice: readers differ in what it means.
    """
    try:
        value = json.loads(
            text, parse_int=_Number, parse_float=_Number, parse_constant=_refuse, object_pairs_hook=_once
        )
        return _canonical(value, JSON_DEPTH_MAX)
    except (ValueError, ArithmeticError, RecursionError):  # an exponent may be too large for Decimal
        return None


class _Number(str):
    """A number as it is spelled."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a key stands twice")
    return found


def _canonical(value: Any, depth: int) -> str:
    if not depth:
        raise ValueError("nested too deep")
    if isinstance(value, _Number):
        sign, digits, exponent = Decimal(value).as_tuple()
        written = "".join(map(str, digits)).lstrip("0")
        core = written.rstrip("0")
        assert isinstance(exponent, int)
        return f"{'-' * sign}{core}e{exponent + len(written) - len(core)}" if core else "0"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        members = (f"{_quoted(key)}:{_canonical(value[key], depth - 1)}" for key in sorted(value))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_canonical(inner, depth - 1) for inner in value) + "]"
    return {None: "null", True: "true", False: "false"}[value]
