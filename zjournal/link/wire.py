"""What crosses the socket between the API process and the engine process, and how it is framed.

A frame is a little-endian uint32 length and one msgpack map with its type in `t`. Token ids travel as
packed little-endian uint32. The engine names each cache fact with a number; the API answers
`Committed(fact)` once the fact is durable in the journal.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterable, Sequence

import msgspec

FRAME_BYTES_MAX = 64 << 20  # a 200,000-token prompt is 0.8 MB
ID_BYTES = 4
_LENGTH = struct.Struct("<I")
_OWN = struct.Struct("<fI")  # of a sampled id: its logprob, and how many alternatives follow
_ALTERNATIVE = struct.Struct("<If")


# --- API to engine ------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag_field="t", tag="start", kw_only=True):
    """The first message: which model to load and within which limits."""

    model: str  # path of a GGUF file or a Hugging Face folder, or of the JSON of a scripted model
    scripted: bool = False
    tokenizer: str = ""  # path of the model with the tokenizer; "": the model's own. A scripted model needs one
    weights: str = "file"  # file: as stored in the GGUF; fp32: expanded
    device: str = "cpu"
    threads: int = 0  # 0: all cores
    context: int = 0  # 0: the model's own
    kv_bytes: int = 1 << 30
    max_running: int = 8
    prefill_tokens: int = 512  # most tokens computed in one step
    queue_max: int = 1024  # requests that wait; one more is refused
    speculation: int = 0  # most tokens drafted for one step of a request; 0: none
    rope: str = ""  # RoPE scaling in place of the model's own, "": the model's own
    cache_dir: str = ""  # where checksums of weights are remembered; "": nowhere
    end_tokens: tuple[int, ...] = ()
    log_level: str = "info"
    log_format: str = "text"  # text or json


class Sampling(msgspec.Struct, frozen=True):
    """As ask.Sampling, with the seed settled. The defaults are what changes nothing."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output, as is the next
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # output tokens before an end token may come
    logprobs: int = -1  # alternatives told beside each token; -1: no logprobs at all


class Generate(msgspec.Struct, frozen=True, tag_field="t", tag="generate", kw_only=True):
    """Continue `tokens`. `namespace` partitions the cache; `stop` are stop strings as UTF-8 bytes.

    `session` is whose turn it is, for fairness; "" is a session of its own. `background` work yields to the rest.
    """

    request: str
    session: str = ""
    background: bool = False
    tokens: bytes
    namespace: str
    sampling: Sampling
    max_tokens: int
    end_tokens: tuple[int, ...] = ()
    stop: tuple[bytes, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag_field="t", tag="cancel"):
    """The client is gone. Answered by Finished(reason="cancelled"), unless the request has ended already."""

    request: str


class Committed(msgspec.Struct, frozen=True, tag_field="t", tag="committed"):
    """The cache fact with this number is durable in the journal."""

    fact: int


class Forget(msgspec.Struct, frozen=True, tag_field="t", tag="forget"):
    """The content of these requests, which have ended, was erased: the KV that only they need goes as well."""

    requests: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag_field="t", tag="stop"):
    """End now; nothing is running any more."""


# --- engine to API ------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag_field="t", tag="loading"):
    """Progress of the load, 0 to 1."""

    progress: float


class Ready(msgspec.Struct, frozen=True, tag_field="t", tag="ready", kw_only=True):
    """The model is loaded. `fingerprint` covers weights, RoPE, KV dtype, layout and the kernels' numerics.

    `parts` tells what it is made of, each part by a short digest or a name, so that of two fingerprints can be said
    in what they differ.
    """

    fingerprint: str
    kernels: str  # for people: "c avx512", "torch (no C compiler at install)"
    context: int
    kv_tokens: int  # capacity of the KV pool, in tokens
    parts: dict[str, str] = {}


class Broken(msgspec.Struct, frozen=True, tag_field="t", tag="broken"):
    """The model cannot be loaded; the process ends after this. `code` is a Fault's code."""

    code: str
    message: str


class Matched(msgspec.Struct, frozen=True, tag_field="t", tag="matched"):
    """The request was admitted: this many tokens of its prompt are reused from device memory.

    `reason` says why it was not one more, `nearest` whose state that is about (see the fact CacheMatched).
    """

    request: str
    cached: int
    prompt: int
    tier: str = "device"
    reason: str = ""
    nearest: str = ""  # a request, "" if unknown


class Tokens(msgspec.Struct, frozen=True, tag_field="t", tag="tokens"):
    """Sampled ids; `position` is the index of the first among the response's output tokens.

    `logprobs`: for each id its own logprob and the number of alternatives (float32, uint32), then each of them (uint32
    id, float32 logprob), best first; all little-endian. Empty if they were not asked for.
    """

    request: str
    position: int
    ids: bytes
    logprobs: bytes = b""


class CacheChanged(msgspec.Struct, frozen=True, tag_field="t", tag="cache_changed"):
    """A terminal state became resident (`admit`) or was given up (`evict`). Wants Committed(fact)."""

    fact: int
    change: str
    namespace: str
    request: str  # whose terminal state, "" if unknown
    tokens: int
    blocks: int


class Finished(msgspec.Struct, frozen=True, tag_field="t", tag="finished", kw_only=True):
    """The request ended well. `reason`: stop (end token), stop_string, length, cancelled. Times in microseconds."""

    request: str
    reason: str
    output: int  # tokens sampled, the end token included
    queue_us: int = 0
    prefill_us: int = 0  # admission to first token
    decode_us: int = 0


class Failed(msgspec.Struct, frozen=True, tag_field="t", tag="failed"):
    """The request ended badly. `code` and `message` as of a Fault."""

    request: str
    code: str
    message: str


class Gauges(msgspec.Struct, frozen=True, tag_field="t", tag="gauges", kw_only=True):
    """State of the engine, at most twice a second while it works."""

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    states: int  # resident terminal states
    # Since the start of the engine:
    preemptions: int = 0
    recomputed: int = 0  # tokens that were computed again after a preemption
    drafted: int = 0  # tokens that were guessed, and of those the ones that proved right
    accepted: int = 0


ToEngine = Start | Generate | Cancel | Committed | Forget | Stop
FromEngine = Loading | Ready | Broken | Matched | Tokens | CacheChanged | Finished | Failed | Gauges

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """One message as bytes for the socket."""
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, len(body)
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Cuts a byte stream into messages; holds back what is incomplete."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list:
        """Returns the messages that `data` completes, in order."""
        self._buffer += data
        messages = []
        at = 0
        while len(self._buffer) - at >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            assert length <= FRAME_BYTES_MAX, length
            if len(self._buffer) - at - 4 < length:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[at + 4 : at + 4 + length])))
            at += 4 + length
        del self._buffer[:at]
        return messages


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as packed little-endian uint32."""
    packed = array.array("I", ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> Sequence[int]:
    """The inverse of pack_ids; a list of int."""
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def pack_logprobs(own: float, alternatives: Sequence[tuple[int, float]]) -> bytes:
    """What Tokens.logprobs holds for one id: its own logprob, and pairs of id and logprob."""
    flat = [value for pair in alternatives for value in pair]
    return struct.pack("<fI" + "If" * len(alternatives), own, len(alternatives), *flat)


def unpack_logprobs(one: bytes) -> tuple[float, list[tuple[int, float]]]:
    """The inverse of pack_logprobs."""
    own, _ = _OWN.unpack_from(one)
    return own, list(_ALTERNATIVE.iter_unpack(one[_OWN.size :]))


def cut_logprobs(data: bytes, count: int) -> list[bytes]:
    """The logprobs of `count` ids, each as pack_logprobs made them. Raises ValueError when `data` is not that."""
    found: list[bytes] = []
    at = 0
    for _ in range(count):
        if len(data) - at < _OWN.size:
            raise ValueError("the logprobs are cut off")
        end = at + _OWN.size + _OWN.unpack_from(data, at)[1] * _ALTERNATIVE.size
        if end > len(data):
            raise ValueError("the logprobs are cut off")
        found.append(data[at:end])
        at = end
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the logprobs")
    return found


def pack_sampled(ids: Sequence[int], logprobs: Sequence[bytes]) -> bytes:
    """Sampled ids as the journal keeps them; behind them their logprobs, where they were asked for."""
    assert len(logprobs) in (0, len(ids)), (len(ids), len(logprobs))
    return pack_ids(ids) + b"".join(logprobs)


def unpack_sampled(data: bytes, count: int) -> tuple[Sequence[int], list[bytes]]:
    """The inverse of pack_sampled for `count` ids. Raises ValueError when `data` does not hold them."""
    ids = data[: ID_BYTES * count]
    if len(ids) != ID_BYTES * count:
        raise ValueError("the token ids are cut off")
    return unpack_ids(ids), cut_logprobs(data[len(ids) :], count if len(data) > len(ids) else 0)
