"""The facts. Each is frozen, in the past tense, with a stable tag and a version; this file is the whole vocabulary.

A fact has a body (numbers, ids, digests: kept for ever) and may have a payload (content: erasable). The
body is the msgpack of the Struct below. The payload travels beside it in a `Fact` and is stored salted,
so that its digest stays in the hash chain after the bytes are gone and cannot be guessed back.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of all facts. `tenant` owns the fact; "" is the server itself."""

    tenant: str = ""


class ServerStarted(Event, frozen=True, kw_only=True, tag="server_started.1"):
    """By the API process, once the data directory is locked."""

    version: str
    pid: int


class ServerStopped(Event, frozen=True, kw_only=True, tag="server_stopped.1"):
    """By the API process after the drain: an orderly end. Its absence before a start means a crash."""


class EngineStarted(Event, frozen=True, kw_only=True, tag="engine_started.1"):
    """By the API process when engine and tokenizer are ready, before any request. `fingerprint`: as in the namespace.

    `vocabulary` and `template` are digests of content of the tenant `server`: with them a journal alone can be read.
    """

    pid: int
    model: str  # display name
    fingerprint: str
    kernels: str
    context: int
    kv_tokens: int
    vocabulary: bytes = b""  # the bytes of each token id, packed (docs/journal.md)
    template: bytes = b""  # the chat template, UTF-8


class EngineCrashed(Event, frozen=True, kw_only=True, tag="engine_crashed.1"):
    """By the API process when the engine process ended unasked. Its device state is gone."""

    pid: int
    status: int  # as of wait: negative is a signal
    running: tuple[str, ...]  # responses that fail with it


class SessionOpened(Event, frozen=True, kw_only=True, tag="session_opened.1"):
    """By submit, with the session's first turn. `key` is the digest of the client's own name for it, if it gave one."""

    session: str
    key: bytes = b""


class RequestAccepted(Event, frozen=True, kw_only=True, tag="request_accepted.1"):
    """By submit, committed before the engine hears of it. `record` is the digest of content: body, prompt and spans."""

    response: str
    session: str
    parent: str = ""  # the turn this one continues
    previous: str = ""  # previous_response_id as the client gave it
    protocol: str
    model: str  # the name the client used
    namespace: str
    stored: bool
    stream: bool
    created: int  # Unix seconds, as told to the client
    record: bytes  # the body as received, the prompt's tokens and where they came from, packed (docs/journal.md)
    history: bytes = b""  # rolling digest of all items up to here, to find a parent by content
    dialect: str
    encoder: int  # version of the protocol encoder that tells this response
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop: int = 0  # number of stop strings; the strings are in the raw body


class PromptRendered(Event, frozen=True, kw_only=True, tag="prompt_rendered.1"):
    """By submit, in the same transaction. The tokens themselves are in the record of the request."""

    response: str
    count: int


class CacheMatched(Event, frozen=True, kw_only=True, tag="cache_matched.1"):
    """By the engine at admission: `cached` of `prompt` tokens were reused from `tier`."""

    response: str
    tier: str
    cached: int
    prompt: int


class TokensSampled(Event, frozen=True, kw_only=True, tag="tokens_sampled.1"):
    """By the engine, in batches. The payload is the packed ids; `position` is the index of the first."""

    response: str
    position: int
    count: int


class ResponseFinished(Event, frozen=True, kw_only=True, tag="response_finished.1"):
    """By the engine. `history` is the rolling digest after the output, by which a resent history finds this turn."""

    response: str
    reason: str  # stop, stop_string, length, cancelled
    output: int
    history: bytes = b""
    queue_us: int
    prefill_us: int
    decode_us: int


class ResponseFailed(Event, frozen=True, kw_only=True, tag="response_failed.1"):
    """By the API process: the engine refused or died, or the server was killed under the response."""

    response: str
    code: str
    message: str


class ResponseDeleted(Event, frozen=True, kw_only=True, tag="response_deleted.1"):
    """By the API on a client's DELETE. From here on the id behaves as one that never existed."""

    response: str


class PayloadErased(Event, frozen=True, kw_only=True, tag="payload_erased.1"):
    """By retention: payloads and contents of this turn were removed; the chain still verifies."""

    response: str
    cause: str  # deleted, unstored


class CacheAdmitted(Event, frozen=True, kw_only=True, tag="cache_admitted.1"):
    """By the engine: a terminal state became resident."""

    response: str
    namespace: str
    tokens: int
    blocks: int


class CacheEvicted(Event, frozen=True, kw_only=True, tag="cache_evicted.1"):
    """By the engine: a terminal state was given up for room."""

    response: str
    namespace: str
    tokens: int
    blocks: int


AnyEvent = (
    ServerStarted
    | ServerStopped
    | EngineStarted
    | EngineCrashed
    | SessionOpened
    | RequestAccepted
    | PromptRendered
    | CacheMatched
    | TokensSampled
    | ResponseFinished
    | ResponseFailed
    | ResponseDeleted
    | PayloadErased
    | CacheAdmitted
    | CacheEvicted
)


class Fact(msgspec.Struct, frozen=True):
    """What is appended: an event, its erasable payload, and the contents it refers to (stored once by digest).

    `base` is the digest of a content that these repeat most of: a hint for storing them.
    """

    event: AnyEvent
    payload: bytes = b""
    contents: tuple[bytes, ...] = ()
    base: bytes = b""


class Recorded(msgspec.Struct, frozen=True):
    """What is read: a fact with its place and time (microseconds, Unix). `payload` is None once erased."""

    seq: int
    time: int
    event: AnyEvent
    payload: bytes | None = b""


encode_body = msgspec.msgpack.Encoder().encode
decode_body = msgspec.msgpack.Decoder(AnyEvent).decode
