"""Names that must come out the same when derived again: item ids, rolling history digests, namespaces.

Response and session ids are random. Everything below them is an HMAC under the journal's secret, so a
restarted server tells the same ids, and nobody can guess one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from zjournal import ask

ITEM_ID_HEX = 40
NAMESPACE_HEX = 32
HISTORY_BYTES = 16  # two are in the facts of each turn; keyed, so that nobody can look for two that are equal
CALL_KEY_BYTES = 16


def response_id(protocol: str, entropy: bytes) -> str:
    """The id of a new response, in its protocol's form."""
    assert len(entropy) == 16
    prefix = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}[protocol]
    return prefix + entropy.hex()


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

    An earlier output counts as the items a client sees of it, so that a resent history meets it again.
    """
    if isinstance(item, ask.Output):
        return history(digest, item.items)
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
            return ("call", item.call_id, item.name, item.arguments)
        case ask.Result():
            return ("result", item.call_id, item.text)
