"""What crosses the socket between the API process and the engine process, and how it is framed.

A frame is a little-endian uint32 length and one msgpack map with its type in `t`. Token ids travel as
packed little-endian uint32. The engine names each cache fact with a number; the API answers
`Committed(fact)` once the fact is durable in the journal, and of snapshots `Refused(fact)` if it never will be.
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
    device: str = "cpu"  # auto, cpu or cuda
    fast: bool = False  # matrix products by the device's library, whose bits depend on the batch
    threads: int = 0  # 0: all cores
    context: int = 0  # 0: the model's own
    kv_dtype: str = "auto"  # bf16 or fp8, on a card alone; auto: bf16 there, fp32 on the CPU
    kv_bytes: int = 1 << 30  # 0: as much as the device leaves, on the CPU a fixed number
    max_running: int = 8
    prefill_tokens: int = 512  # most tokens computed in one step
    queue_max: int = 1024  # requests that wait; one more is refused
    speculation: int = 0  # most tokens drafted for one step of a request; 0: none
    rope: str = ""  # RoPE scaling in place of the model's own, "": the model's own
    cache_dir: str = ""  # where checksums of weights are remembered; "": nowhere
    end_tokens: tuple[int, ...] = ()
    log_level: str = "info"
    log_format: str = "text"  # text or json
    snapshots: str = ""  # folder of the chunk files; "": no KV is written to disk, and none read
    snapshot_key: bytes = b""  # 32 bytes, part of each digest of a namespace: so no hash of a chunk can be guessed
    snapshot_limit: int = 0  # bytes of all files in the folder
    snapshot_codec: str = "auto"  # raw, zstd, or whichever proves faster
    snapshot_restore: str = "measured"  # or always: read KV back, however long it takes
    host_cache: int = 0  # bytes of chunks kept in memory as well; 0: none


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


class Tag(msgspec.Struct, frozen=True, array_like=True):
    """A dialect's tag: its bytes, and the id of the token that it is; -1 where it is ordinary text."""

    text: bytes
    token: int = -1


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer may be.

    `grammar` is one of llguidance (Lark); a tag that is a token stands in it as `<[id]>`. `whole`: it binds all of the
    answer behind the thoughts. Else text is free until one of the `triggers` begins, and from its first byte on the
    grammar binds the rest of the answer. "" and no triggers: only `banned` is in force.
    `thoughts` are the tags that thoughts stand between, if the model has any; they are free of the grammar, and
    triggers that are tokens may not stand in them. `begun`: the prompt has opened them already. `banned` are control
    tokens that no text of the answer may hold.
    """

    grammar: str = ""
    whole: bool = False
    triggers: tuple[Tag, ...] = ()
    thoughts: tuple[Tag, Tag] | None = None
    begun: bool = False
    banned: tuple[int, ...] = ()


class Guard(msgspec.Struct, frozen=True, array_like=True):
    """When an answer counts as a loop, in tokens; see loops.LIMITS for the meaning and the defaults of each."""

    run: int
    period: int
    repeats: int
    tokens: int
    restarts: int
    exclusions: int
    values: int


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
    fence: Fence | None = None
    guard: Guard | None = None  # None: no loop is looked for


class Cancel(msgspec.Struct, frozen=True, tag_field="t", tag="cancel"):
    """The client is gone. Answered by Finished(reason="cancelled"), unless the request has ended already.

    `keep`: it will be asked again, so what it has computed is written to disk like that of one that ended well.
    """

    request: str
    keep: bool = False


class Committed(msgspec.Struct, frozen=True, tag_field="t", tag="committed"):
    """The cache fact with this number is durable in the journal."""

    fact: int


class Forget(msgspec.Struct, frozen=True, tag_field="t", tag="forget"):
    """The content of these requests, which have ended, was erased: the KV that only they need goes as well."""

    requests: tuple[str, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that is on disk, as zjournal.snapshots.index.Row has it; `file_bytes` is the size of its file.

    `marks` may be empty where the content of the turn that first wrote it was erased: they are not known then.
    """

    hash: bytes
    parent: bytes
    tokens: int
    file_bytes: int
    marks: bytes
    plain: bool = True
    # What the journal knows beside; of a chunk that is new they say nothing.
    bad: bool = False  # its file was refused or is missing, and it was not written again since
    used_us: int = 0  # written or restored last, of the wall clock
    uses: int = 0  # restores that ended with this chunk


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot: what restores the state of a request, up to the chunk `end`."""

    request: str
    session: str
    end: bytes
    tokens: int
    made_us: int
    pinned: bool
    kept: int = -1  # tokens that the session's next turn began with; -1: there is none yet


class Speed(msgspec.Struct, frozen=True, array_like=True):
    """What an engine of this fingerprint did in its last life: prompt tokens per second, at depth 0."""

    fingerprint: str
    prefill_tokens_s: float


class Known(msgspec.Struct, frozen=True, tag_field="t", tag="known", kw_only=True):
    """A page of what the journal has on disk in one namespace; right after Start, until one says `last`.

    `space` is the namespace's digest, 32 bytes. Over all pages of a space each chunk comes behind its parent; a
    snapshot may end with a chunk of any page. Before the last page nothing else is sent.
    """

    space: bytes
    chunks: tuple[Chunk, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    last: bool = False
    speeds: tuple[Speed, ...] = ()  # with the last page


class Refused(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """The snapshot of BackedUp(fact) will never be in the journal: what it stands on, or its turn, has gone meanwhile.

    Its new chunks are to be unlinked, as far as no other snapshot has them.
    """

    fact: int


class Stale(msgspec.Struct, frozen=True, array_like=True):
    """KV that would be met, had the model not changed: what is asked for in `namespace` today lies in `space`."""

    space: bytes
    namespace: str
    differs: str  # the parts of the fingerprint that changed


class Foreign(msgspec.Struct, frozen=True, tag_field="t", tag="foreign"):
    """Of the spaces that are known, these belong to other weights, templates or kernels. Once, after Ready.

    `stale` tells of the latest ones what has changed, so that a match that is missed for it can say so.
    """

    spaces: tuple[bytes, ...]
    stale: tuple[Stale, ...] = ()


class Pin(msgspec.Struct, frozen=True, tag_field="t", tag="pin"):
    """The snapshot of this request was pinned, or its session was; or neither is any more. Unknown ones are ignored."""

    request: str
    pinned: bool


class Purge(msgspec.Struct, frozen=True, tag_field="t", tag="purge"):
    """The journal has given these up, for a deletion or a `gc` by hand: they are not found any more from now on.

    `requests`: snapshots that are gone, of any space. `hashes`: chunks of `space` that go, each behind those that
    continue it; the files are to be unlinked, in the quarantine as well, and the host cache gives them up. What is
    unknown here may have a file all the same.
    """

    space: bytes
    hashes: tuple[bytes, ...]
    requests: tuple[str, ...]
    cause: str  # as of the fact CachePurged


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
    """The request was admitted: KV of this many tokens of its prompt is reused.

    `tier` is where the last of them lay: device, host or ssd. The first `cached` - `restored` were in device memory.
    Of a request whose KV was restored it comes after Restored. `reason` says why it was not one more, `nearest` whose
    state that is about (see the fact CacheMatched).
    """

    request: str
    cached: int
    prompt: int
    tier: str = "device"
    reason: str = ""
    nearest: str = ""  # a request, "" if unknown
    restored: int = 0  # tokens of these that were read back from disk or host memory
    restored_host: int = 0  # tokens of those that came from host memory
    estimate_us: int = 0  # where `reason` is recompute: what reading was expected to take
    recompute_us: int = 0  # and what computing the same tokens was


class Tokens(msgspec.Struct, frozen=True, tag_field="t", tag="tokens"):
    """Sampled ids; `position` is the index of the first among the response's output tokens.

    `logprobs`: for each id its own logprob and the number of alternatives (float32, uint32), then each of them (uint32
    id, float32 logprob), best first; all little-endian. Empty if they were not asked for.
    """

    request: str
    position: int
    ids: bytes
    logprobs: bytes = b""


class Looped(msgspec.Struct, frozen=True, tag_field="t", tag="looped", kw_only=True):
    """The guard met a loop in a request's answer and did something about it.

    `kind`: token, pattern, restart. `action`: excluded, closed, ended. Output token `at` was the first that the action
    had a say in; the loop began with output token `begin`, and what is `period` tokens long had come `times` times.
    """

    request: str
    kind: str
    action: str
    at: int
    begin: int
    period: int
    times: int


class CacheChanged(msgspec.Struct, frozen=True, tag_field="t", tag="cache_changed"):
    """A terminal state became resident (`admit`) or was given up (`evict`). Wants Committed(fact)."""

    fact: int
    change: str
    namespace: str
    request: str  # whose terminal state, "" if unknown
    tokens: int
    blocks: int


class BackedUp(msgspec.Struct, frozen=True, tag_field="t", tag="backed_up", kw_only=True):
    """A state is on disk: its files are written, synced and renamed. Wants Committed(fact), or Refused(fact).

    Until then it is found by nobody. Another one for the same request takes its place; chunks of the former one that
    nothing needs any more are given up with it, in the same commit (CachePurged, cause `replaced`): the engine
    unlinks them after Committed, and sends no PurgePlanned for them.
    """

    fact: int
    request: str
    namespace: str
    space: bytes  # digest of the namespace
    tokens: int
    end: bytes  # hash of its last chunk
    chunks: tuple[Chunk, ...]  # those that are new or were written again, each behind its parent
    write_us: int
    kept: int = -1  # tokens that the session's next turn began with, if that is known already


class Restored(msgspec.Struct, frozen=True, tag_field="t", tag="restored", kw_only=True):
    """KV was read back into device memory for a request, checked, and is resident. One for each tier that gave some."""

    request: str
    tier: str  # ssd, host
    tokens: int
    file_bytes: int  # read
    end: bytes  # hash of the last chunk of it
    space: bytes
    read_us: int
    estimate_us: int  # what reading was expected to take
    recompute_us: int  # what computing these tokens was expected to take


class NearMiss(msgspec.Struct, frozen=True, tag_field="t", tag="near_miss"):
    """A snapshot of `tokens` was nearly met: the prompt is another one from token `position` on."""

    request: str
    nearest: str
    position: int
    tokens: int


class Quarantined(msgspec.Struct, frozen=True, tag_field="t", tag="quarantined"):
    """A chunk's file was refused and moved aside, or is missing; once for each file. It is not met again."""

    file: str  # its name, without folders
    hash: bytes
    space: bytes
    reason: str


class PurgePlanned(msgspec.Struct, frozen=True, tag_field="t", tag="purge_planned", kw_only=True):
    """Chunks of one space are to go. Wants Committed(fact); before that none is unlinked, and none found any more.

    What may not go after all (pinned meanwhile, or needed) comes back as Refused(fact): then none of them went.
    """

    fact: int
    space: bytes
    hashes: tuple[bytes, ...]  # each behind those that continue it
    requests: tuple[str, ...]  # whose snapshots end with them: they get shorter, or go
    file_bytes: int
    cause: str  # quota, stale


class SnapshotsOff(msgspec.Struct, frozen=True, tag_field="t", tag="snapshots_off"):
    """Nothing is written to disk any more; restoring goes on. `reason`: no_space, io_error, stalled."""

    reason: str
    message: str


class SnapshotsOn(msgspec.Struct, frozen=True, tag_field="t", tag="snapshots_on"):
    """States are written to disk again."""


class Reconciled(msgspec.Struct, frozen=True, tag_field="t", tag="reconciled", kw_only=True):
    """The folder was compared with what is known, in the background: once for each start of the engine.

    Orphans and leftovers were unlinked. `missing` are chunks without a file of their size; a page of them at a time,
    and the page that says `last` has the numbers.
    """

    missing: tuple[tuple[bytes, bytes], ...] = ()  # space and hash
    last: bool = True
    files: int = 0  # looked at
    orphans: int = 0
    leftovers: int = 0
    strange: int = 0  # left alone
    file_bytes: int = 0  # that were unlinked


class Finished(msgspec.Struct, frozen=True, tag_field="t", tag="finished", kw_only=True):
    """The request ended well. `reason`: stop (end token), stop_string, length, cancelled, loop or fence.

    Times in microseconds.
    """

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
    # Of the fences:
    fenced: int = 0  # requests that had one
    fences_compiled: int = 0
    fence_compile_us: int = 0
    fence_masks: int = 0  # steps of one request for which what it may say was computed
    fence_mask_us: int = 0
    # Of the snapshots:
    snapshot_bytes: int = 0  # of all files in the folder
    snapshot_chunks: int = 0
    snapshots: int = 0
    host_bytes: int = 0  # of the host cache
    backups_off: bool = False
    backups_lost: int = 0  # states given up before all of them was on disk, since the start


class Reading(msgspec.Struct, frozen=True, tag_field="t", tag="reading"):
    """How far the prompts are that are being read, at most twice a second: request, and tokens that have KV."""

    prompts: tuple[tuple[str, int], ...]


ToEngine = Start | Generate | Cancel | Committed | Refused | Known | Foreign | Pin | Purge | Forget | Stop
FromEngine = (
    Loading
    | Ready
    | Broken
    | Matched
    | Tokens
    | Looped
    | CacheChanged
    | BackedUp
    | Restored
    | NearMiss
    | Quarantined
    | PurgePlanned
    | SnapshotsOff
    | SnapshotsOn
    | Reconciled
    | Finished
    | Failed
    | Gauges
    | Reading
)

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
    return unpack_array(data).tolist()


def unpack_array(data: bytes) -> array.array[int]:
    """As unpack_ids; an array of uint32, without an object for each number."""
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


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
