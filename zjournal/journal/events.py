"""The facts. Each is frozen, in the past tense, with a stable tag and a version; this file is the whole vocabulary.

A fact has a body (numbers, ids, digests: kept for ever) and may have a payload (content: erasable). The
body is the msgpack of the Struct below. The payload travels beside it in a `Fact` and is stored salted,
so that its digest stays in the hash chain after the bytes are gone and cannot be guessed back.

The table in docs/journal.md is made from here: what happened, then `By:`, `When:`, `Promise:`, and where they
apply `Payload:` and `Later:` (defined, and first written then); fields with the comments behind them.

A released body never changes. A new version takes the next number, its predecessor gets an entry in `UPCASTS`, and
the schema gets a step, so that a zjournal that does not know it refuses the journal at once.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of all facts. `tenant` owns the fact; "" is the server itself."""

    tenant: str = ""


class ServerStarted(Event, frozen=True, kw_only=True, tag="server_started.1"):
    """A server owns the data directory.

    By: API process.
    When: it holds the lock and the journal is open; before it takes a request.
    Promise: in one commit with `server_crashed`, where that is due. Between two of them stands one end.
    """

    version: str  # of zjournal
    pid: int


class ServerStopped(Event, frozen=True, kw_only=True, tag="server_stopped.1"):
    """A server came to an orderly end.

    By: API process.
    When: after the drain and the end of the engine.
    Promise: nothing was running any more. Where it is missing, the next start writes `server_crashed`.
    """


class ServerCrashed(Event, frozen=True, kw_only=True, tag="server_crashed.1"):
    """The server before this one left no orderly end: a kill, a power cut, or a disk that took no more.

    By: API process, the next one.
    When: at its start, just before its own `server_started`.
    Promise: its time is that of the discovery. What was running then ends with `response_failed`.
    """

    pid: int  # of the server that is gone, 0 if it was not found among the last facts
    started: int  # seq of its `server_started`, 0 likewise


class EngineStarted(Event, frozen=True, kw_only=True, tag="engine_started.1"):
    """The engine has loaded the model, and the tokenizer is known as well. Its tenant is `server`.

    By: API process.
    When: both are ready; before any request is taken.
    Promise: what is rendered and sampled until the next one can be read with its `vocabulary`, without the model.
    """

    pid: int
    model: str  # display name
    fingerprint: str  # of weights and numerics, as in the namespace
    kernels: str  # for people
    context: int  # tokens
    kv_tokens: int  # capacity of the KV pool
    vocabulary: bytes = b""  # content: the bytes of each token id, packed
    template: bytes = b""  # content: the chat template
    parts: tuple[tuple[str, str], ...] = ()  # of the fingerprint: each by its name, and a short digest or a word
    unstable: tuple[str, ...] = ()  # probes whose prompt was not the beginning of the next one, and where they parted


class EngineStopped(Event, frozen=True, kw_only=True, tag="engine_stopped.1"):
    """The engine process ended because it was asked to.

    By: API process.
    When: its end has been seen, at shutdown.
    Promise: only after an `engine_started` with this pid. Its device state is gone.
    """

    pid: int
    status: int  # as of wait: 0, or negative for a signal: it did not end in time and was killed


class EngineCrashed(Event, frozen=True, kw_only=True, tag="engine_crashed.1"):
    """The engine process ended unasked; its device state is gone. It may have been loading still.

    By: API process.
    When: its end has been seen.
    Promise: each response in `running` that had no end yet gets `response_failed`.
    """

    pid: int
    status: int  # as of wait: negative is a signal
    running: tuple[str, ...]  # responses that it worked for


class SessionOpened(Event, frozen=True, kw_only=True, tag="session_opened.1"):
    """A client began a thread of work.

    By: submit.
    When: with the session's first turn, in the same commit.
    Promise: once for each session, before all of its turns.
    """

    session: str
    key: bytes = b""  # keyed digest of the client's own name for it, if it gave one


class EngineImported(Event, frozen=True, kw_only=True, tag="engine_imported.1"):
    """An engine of another journal made turns that were imported here. Its tenant is `server`.

    By: the operation `sessions.import`.
    When: in its commit, before the `session_imported` of the first such turns.
    Promise: turns of this namespace that no engine here has made can be read with its `vocabulary`.
    """

    namespace: str  # as it stands in those turns: made from the other journal's tenant
    model: str  # display name
    fingerprint: str
    kernels: str  # for people
    vocabulary: bytes = b""  # content, as in `engine_started`
    template: bytes = b""  # content, likewise
    parts: tuple[tuple[str, str], ...] = ()  # likewise


class SessionImported(Event, frozen=True, kw_only=True, tag="session_imported.1"):
    """Turns of another journal were brought here from a file.

    By: the operation `sessions.import`.
    When: just before the facts it brought, in one commit with them.
    Promise: the fact at its own seq + 1 + n is the n-th that it lists. The turns keep their ids.
    """

    session: str  # the one that was asked for; a turn that it builds on may be of another
    source: bytes  # id of the journal that wrote the file
    digest: bytes  # SHA-256 of the file
    seqs: tuple[int, ...]  # where the facts stood there: the first, then each one's distance from the one before
    times: tuple[int, ...]  # when they happened, in microseconds, listed in the same way


class SessionReplayed(Event, frozen=True, kw_only=True, tag="session_replayed.1"):
    """A session is a replay: its turns are recorded requests of another one, asked again.

    By: the operation `sessions.replay`.
    When: with the replay's first turn, in the same commit.
    Promise: the session `source` gets no fact by it. Each turn that is compared has a `replay_compared`.
    """

    session: str  # the replay
    source: str  # the session whose requests are asked again
    only: str = ""  # the one response whose request is asked again; empty: all


class ReplayCompared(Event, frozen=True, kw_only=True, tag="replay_compared.1"):
    """The answer to a request that was asked again has been compared with the one that is recorded.

    By: the operation `sessions.replay`.
    When: the new answer is durable, and before the next request is asked.
    Promise: `response` was asked with the very tokens, settings and seed of `source`. It says nothing of their content.
    """

    response: str  # the new one
    source: str  # the one whose request was asked again
    equal: int  # tokens from the beginning that are the same
    diverged: bool  # whether a token differs, or one of the two goes on
    differs: tuple[str, ...] = ()  # the parts of the fingerprint that are not those of `source`


class SessionPinned(Event, frozen=True, kw_only=True, tag="session_pinned.1"):
    """A session is to be kept.

    By: the operation `sessions.pin`.
    When: in the commit of it.
    Promise: neither prune nor a cap takes the session, and delete refuses it.
    """

    session: str


class SessionUnpinned(Event, frozen=True, kw_only=True, tag="session_unpinned.1"):
    """The pin was taken back.

    By: the operation `sessions.unpin`.
    When: in the commit of it.
    Promise: as if it had never been pinned.
    """

    session: str


class SessionDeleted(Event, frozen=True, kw_only=True, tag="session_deleted.1"):
    """A session was deleted, with `response_deleted` for each of its turns.

    By: an administrator's operation, or a cap.
    When: in the commit that hides the turns.
    Promise: nothing can be added to it any more. `payload_erased` tells when a turn's content is gone.
    """

    session: str
    cause: str  # deleted (by its id), pruned (by a filter), age_cap, size_cap


class AdminActed(Event, frozen=True, kw_only=True, tag="admin_acted.1"):
    """An operation that an administrator asked for has succeeded.

    By: the process that owns the journal.
    When: after the operation.
    Promise: what it changed is told by facts of its own, before this one.
    """

    action: str  # the operation's name, such as sessions.delete
    pid: int  # of the process that did it: the server, or the command itself where no server runs


class RequestAccepted(Event, frozen=True, kw_only=True, tag="request_accepted.1", omit_defaults=True):
    """A request was taken.

    By: submit.
    When: it is decoded, placed, rendered and within the limits.
    Promise: durable before the engine hears of the request. Refused requests leave no fact. No credential is in it.
    Payload: what `loosened` counts, a line each, as UTF-8.
    """

    response: str
    session: str
    parent: str = ""  # the turn this one continues
    previous: str = ""  # previous_response_id as the client gave it
    protocol: str  # chat, responses, messages
    model: str  # the name the client used
    namespace: str  # under which its KV may be shared
    stored: bool
    stream: bool
    created: int  # Unix seconds, as told to the client
    record: bytes  # content: the body, the prompt's tokens and where they came from, packed
    client: bytes = b""  # content: the headers that say who asks; empty if there were none
    history: bytes = b""  # rolling digest of all items up to here, to find a parent by content
    dialect: str  # which the answer is read in
    encoder: int  # version of the protocol encoder that tells this response
    temperature: float
    top_p: float
    top_k: int
    seed: int  # the client's, or drawn
    max_tokens: int
    stop: int = 0  # number of stop strings; the strings are in the raw body
    tools: int = 0  # number of tools whose calls were looked for in the answer; they are in the raw body
    reasoning_replay: str = "auto"  # the setting, by which thoughts of earlier answers are in the prompt or not
    restored: int = 0  # answers of ours in the prompt with thoughts that the client left out
    rewritten: int = 0  # answers that are not in it as sampled, for the dialect keeps their thoughts no longer
    forks: tuple[tuple[str, str], ...] = ()  # answers that the client sent back changed: response, and what of it
    begun: str = ""  # what the prompt had already said of the answer: tags of thoughts, and white space
    tagged: bool = False  # a call needed the dialect's tags, for the answer could be JSON that was asked for
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: int = 0  # number of biased tokens; they and their biases are in the raw body
    min_tokens: int = 0  # before an end token may come
    logprobs: int = -1  # alternatives recorded beside each token; -1: no logprobs at all
    salt: str = ""  # HMAC of the client's `cache_salt`, which narrows the namespace; empty if there was none
    guard: tuple[int, ...] = ()  # limits of the guard, in the order of loops.LIMITS; empty: it was off
    fence: bytes = b""  # of what the answer may be, as derived from the body: digest by the turn's secret; empty: free
    skipped: tuple[str, ...] = ()  # types of tools and items that no model can be told of, and so are not in the prompt
    ignored: tuple[str, ...] = ()  # rules by which a part of the body is not in the prompt, by name
    loosened: int = 0  # keywords of the client's schemas that the fence leaves out: results are checked afterwards
    item_secret: bytes = b""  # of an imported turn: ids of its output items are derived from it, as in its own journal
    nameless: bool = False  # its calls have no ids: results name the function (`function_call` of Chat)
    choice: int = 0  # which of the choices of its request it is; each is a response of its own
    first: str = ""  # of a later choice: the response that is choice 0, whose id the client was told for all of them


class PromptRendered(Event, frozen=True, kw_only=True, tag="prompt_rendered.1"):
    """The request became tokens.

    By: submit.
    When: with the acceptance, in the same commit.
    Promise: the tokens in the record are those that the engine got, and the spans cover them.
    """

    response: str
    count: int  # tokens
    dropped: int = 0  # bytes of the text that no token of the vocabulary stands for: the model does not see them


class ToolResultSeen(Event, frozen=True, kw_only=True, tag="tool_result_seen.1"):
    """The client sent results of tool calls, for the first time in this chain.

    By: submit.
    When: with the acceptance, in the same commit; not for results that the parent's history holds.
    Promise: a call whose key stands in no such fact has got no result from any accepted request.
    """

    response: str  # of the request that brought them
    calls: tuple[bytes, ...]  # keys of the call ids: keyed digests, 16 bytes each, in the order of the results


class CacheMatched(Event, frozen=True, kw_only=True, tag="cache_matched.1", omit_defaults=True):
    """The request was admitted: KV of the first `cached` tokens of its prompt is reused.

    By: engine.
    When: at admission.
    Promise: tokens were compared one by one, in this namespace only; `reason` says why it was not one token more.
    """

    response: str
    tier: str  # where the last of them lay: device, host (memory), ssd
    cached: int  # tokens
    prompt: int  # tokens
    reason: str = ""  # whole, extended, forked, evicted, cold, room, recompute, unreadable, fingerprint: see below
    nearest: str = ""  # the response whose state was met, forked from, or given up; empty if unknown
    restored: int = 0  # tokens of `cached` that were not in device memory and were read back
    restored_host: int = 0  # tokens of these that were in host memory
    estimate_us: int = 0  # where `reason` is recompute: what reading was expected to take
    recompute_us: int = 0  # and what computing the same tokens was


class CacheAdmitted(Event, frozen=True, kw_only=True, tag="cache_admitted.1"):
    """A terminal state became resident.

    By: engine.
    When: the response ended well.
    Promise: `cache_evicted` or the end of the engine tells its end.
    """

    response: str
    namespace: str
    tokens: int
    blocks: int


class CacheEvicted(Event, frozen=True, kw_only=True, tag="cache_evicted.1"):
    """A terminal state was given up for room, or replaced by an equal one.

    By: engine.
    When: its last block is taken.
    Promise: after its `cache_admitted`. Beginnings that other states share stay resident.
    """

    response: str
    namespace: str
    tokens: int
    blocks: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of `cache_backed_up`. An empty `parent` is the chunk that is listed before it."""

    hash: bytes
    parent: bytes
    tokens: int
    file_bytes: int
    plain: bool = True  # its tokens say everything: there is no image in it


class CacheBackedUp(Event, frozen=True, kw_only=True, tag="cache_backed_up.1", omit_defaults=True):
    """A state was written to disk: a snapshot of it, which takes the place of an earlier one of the same response.

    By: engine.
    When: its files are written, synced and renamed.
    Promise: the state can be found only once this is durable.
    Payload: the marks of the chunks that are listed, one after another: what their tokens are found by.
    """

    response: str
    namespace: str
    space: bytes  # digest of the namespace, keyed; its files lie under it
    tokens: int
    end: bytes  # hash of the chunk that it ends with
    chunks: tuple[Chunk, ...]  # those that were written for it, each behind its parent; none of what was there
    write_us: int
    kept: int = -1  # tokens of it that the session's next turn began with; -1: there is none yet


class CacheRestored(Event, frozen=True, kw_only=True, tag="cache_restored.1"):
    """KV was read back into device memory.

    By: engine.
    When: every section has been checked and is resident.
    Promise: before the `cache_matched` that counts its tokens; one for each tier that gave some.
    """

    response: str  # of the request that it is for
    tier: str  # ssd, host
    tokens: int
    file_bytes: int  # that were read
    end: bytes  # hash of the last chunk of it
    space: bytes
    read_us: int
    estimate_us: int  # what reading was expected to take
    recompute_us: int  # what computing these tokens was expected to take


class CacheNearlyMet(Event, frozen=True, kw_only=True, tag="cache_nearly_met.1"):
    """A prompt left a snapshot shortly before its end: `zj sessions diff` shows why.

    By: engine.
    When: at admission, before `cache_matched`.
    Promise: at least 1,024 tokens, and more than nine tenths of the snapshot, are the same.
    """

    response: str  # of the request
    nearest: str  # the response whose snapshot it is
    position: int  # of the first token that differs
    tokens: int  # of the snapshot


class CacheQuarantined(Event, frozen=True, kw_only=True, tag="cache_quarantined.1"):
    """A file was refused and moved aside, or was not there.

    By: engine.
    When: a check of it failed.
    Promise: once for each file; nothing of it was used, and it is not looked at again.
    """

    file: str  # its name, without folders
    hash: bytes  # of the chunk
    space: bytes
    reason: str


class CachePurged(Event, frozen=True, kw_only=True, tag="cache_purged.1"):
    """Chunks on disk were given up. A snapshot that ends with one ends one chunk earlier, or is gone.

    By: engine, for room; else whoever deletes.
    When: before the first of their files is unlinked.
    Promise: from here on they are not found, whether or not the files are gone yet.
    """

    space: bytes
    hashes: tuple[bytes, ...]  # each behind those that continue it
    file_bytes: int  # that become free
    cause: str  # quota, stale, replaced (by a longer one of its response), deleted (with its turn), gc


class CacheReconciled(Event, frozen=True, kw_only=True, tag="cache_reconciled.1"):
    """The folder of the snapshots was compared with the journal.

    By: engine; `zj snapshots gc` where no server runs.
    When: in the background, once for each start.
    Promise: no file that a fact names was unlinked. What is `missing` is not looked for any more.
    """

    files: int  # looked at
    orphans: int  # files of chunks that no fact names; unlinked
    leftovers: int  # files that were being written; unlinked
    strange: int  # others; left alone
    file_bytes: int  # that were unlinked
    missing: tuple[bytes, ...]  # hashes of chunks without a file of their size; more of them may be told before


class CacheStopped(Event, frozen=True, kw_only=True, tag="cache_stopped.1"):
    """Nothing is backed up any more; what is on disk is restored as before.

    By: engine.
    When: the disk is full, reports an error, or commits do not come.
    Promise: requests are answered as before. `cache_resumed` or the end of the engine tells its end.
    """

    reason: str  # no_space, io_error, stalled
    message: str


class CacheResumed(Event, frozen=True, kw_only=True, tag="cache_resumed.1"):
    """States are backed up again.

    By: engine.
    When: the disk takes files again.
    Promise: after a `cache_stopped`.
    """


class SnapshotPinned(Event, frozen=True, kw_only=True, tag="snapshot_pinned.1"):
    """A snapshot is to be kept.

    By: the operation `snapshots.pin`.
    When: in the commit of it.
    Promise: neither the quota nor gc takes it, nor what it needs. It goes with its turn, if that is deleted.
    """

    response: str


class SnapshotUnpinned(Event, frozen=True, kw_only=True, tag="snapshot_unpinned.1"):
    """The pin was taken back.

    By: the operation `snapshots.pin`.
    When: in the commit of it.
    Promise: as if it had never been pinned.
    """

    response: str


class TokensSampled(Event, frozen=True, kw_only=True, tag="tokens_sampled.1"):
    """The model said these tokens.

    By: engine.
    When: in batches of at most 64 tokens or 50 ms.
    Promise: in order and without gaps; what a client was told runs at most one batch ahead.
    Payload: the token ids, little-endian uint32; behind them, if they were asked for, the logprobs of each.
    """

    response: str
    position: int  # of the first among the output
    count: int


class ToolCalled(Event, frozen=True, kw_only=True, tag="tool_called.1"):
    """The answer holds a whole tool call.

    By: API process.
    When: the dialect has parsed it.
    Promise: durable before the client is told that the call is complete; a call without it is told as cut, ever after.
    Payload: what was wrong with its form, or by its schema where the fence leaves something out, as UTF-8; empty if
    nothing was.
    """

    response: str
    call: bytes  # key of its call id, as in `tool_result_seen`
    index: int  # among the calls of the answer, from 0


class LoopMet(Event, frozen=True, kw_only=True, tag="loop_met.1"):
    """The answer said the same again and again, and the guard did something about it.

    By: engine.
    When: at once, one for each thing that was done; the tokens around it may be written after it.
    Promise: the answer holds what it tells of, and what was done depends on the answer and the limits alone.
    """

    response: str
    kind: str  # token (one in a row), pattern (several in a row), restart (of the thoughts, with the same first words)
    action: str  # excluded (the token that would go on with it), closed (the thoughts), ended (the answer)
    at: int  # output token that the action decided on; of ended: the number of tokens
    begin: int  # output token that the loop began with
    period: int  # tokens of what comes again
    times: int  # that it had come


class ResponseWaited(Event, frozen=True, kw_only=True, tag="response_waited.1"):
    """There was nothing to tell of a response for a while, and its clients hear that it lives.

    By: API process.
    When: while it runs, each time that it has been silent for 10 s.
    Promise: durable before anyone is told, and told again at the same place whenever the answer is told again.
    """

    response: str
    position: int  # output tokens that stand before it, whenever they are written
    done: int  # prompt tokens that have KV
    queued: bool = False  # it waits for the engine


class ReaderCut(Event, frozen=True, kw_only=True, tag="reader_cut.1"):
    """The connection of a client that did not read was closed. What it was told may be less than what is written here.

    By: API process.
    When: nothing has left for it for the time that the setting `reader_timeout` gives.
    Promise: nobody waited for it. A response that was running is given up, as one whose client left.
    """

    response: str
    unread: int  # bytes that were made and not taken
    silent_us: int  # since the last byte that it took


class ResponseFinished(Event, frozen=True, kw_only=True, tag="response_finished.1"):
    """The response ended as it should: complete, cut by a limit (incomplete), or given up by its client (cancelled).

    By: engine; submit, for a client that left before the engine heard of it.
    When: after its last token.
    Promise: durable before the client is told the end. The first end of a response counts.
    Payload: what is wrong with the text by the schema of its format, where the fence leaves something out, as UTF-8.
    """

    response: str
    reason: str  # `stop`, `stop_string`, `length`, `loop` (the guard), `fence` (it left no token), `cancelled`
    output: int  # tokens
    history: bytes = b""  # rolling digest after the output, by which a resent history finds this turn
    queue_us: int
    prefill_us: int  # admission to first token
    decode_us: int


class ResponseFailed(Event, frozen=True, kw_only=True, tag="response_failed.1"):
    """The response ended badly.

    By: API process.
    When: the engine refused or died, the journal failed, or a start finds it without an end.
    Promise: as of `response_finished`.
    """

    response: str
    code: str
    message: str


class ResponseDeleted(Event, frozen=True, kw_only=True, tag="response_deleted.1"):
    """A client deleted the response.

    By: API process.
    When: on DELETE, before it is answered.
    Promise: from here on the id behaves as one that never existed. `payload_erased` tells when its content is gone.
    """

    response: str


class ConversationChanged(Event, frozen=True, kw_only=True, tag="conversation_changed.1", omit_defaults=True):
    """Something was done to a conversation: a list of items that a client keeps here under a name.

    By: the routes of conversations, and submit's caller for a response that is made in one.
    When: before the client is told; for a response once it is accepted.
    Promise: the first of a conversation is its creation. One that is deleted has no payload any more.
    Payload: what the client put in, as JSON: `metadata`, `items`, or the id of the `item` that it removed.
    """

    conversation: str
    change: str  # created, updated, added, removed, answered, deleted
    at: int  # Unix seconds, as told to the client
    answered: str = ""  # the response that was made in it
    own: int = 0  # so many of the last items of that response's input are new in the conversation

    @property
    def response(self) -> str:
        """By what `payload_erased` names it."""
        return self.conversation


class PayloadErased(Event, frozen=True, kw_only=True, tag="payload_erased.1"):
    """The content of a turn was redacted: payloads, and contents that no other turn refers to.

    By: retention, or salvage.
    When: in the commit that erases.
    Promise: the chain verifies as before.
    """

    response: str
    cause: str  # deleted, unstored, lost (to damage, in a salvaged copy)


AnyEvent = (
    ServerStarted
    | ServerStopped
    | ServerCrashed
    | EngineStarted
    | EngineStopped
    | EngineCrashed
    | EngineImported
    | SessionOpened
    | SessionImported
    | SessionReplayed
    | ReplayCompared
    | SessionPinned
    | SessionUnpinned
    | SessionDeleted
    | AdminActed
    | RequestAccepted
    | PromptRendered
    | ToolResultSeen
    | CacheMatched
    | CacheAdmitted
    | CacheEvicted
    | CacheBackedUp
    | CacheRestored
    | CacheNearlyMet
    | CacheQuarantined
    | CachePurged
    | CacheReconciled
    | CacheStopped
    | CacheResumed
    | SnapshotPinned
    | SnapshotUnpinned
    | TokensSampled
    | ToolCalled
    | LoopMet
    | ResponseWaited
    | ReaderCut
    | ResponseFinished
    | ResponseFailed
    | ResponseDeleted
    | ConversationChanged
    | PayloadErased
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


# A body as msgpack reads it, with its own tag -> that of the next version, with the next tag.
Upcast = Callable[[Any], Any]
UPCASTS: Mapping[str, Upcast] = MappingProxyType({})  # by the older tag, such as "cache_matched.1"


class NewerEvent(msgspec.ValidationError):
    """The body is of a kind or version that this zjournal does not know yet."""


encode_body = msgspec.msgpack.Encoder().encode
_decode_current = msgspec.msgpack.Decoder(AnyEvent).decode
_VERSIONS = MappingProxyType(
    {
        name: int(version)
        for name, _, version in (str(kind.__struct_config__.tag).rpartition(".") for kind in typing.get_args(AnyEvent))
    }
)
_VERSION_DIGITS_MAX = 10


class _Tagged(msgspec.Struct):
    t: str = ""


_decode_tagged = msgspec.msgpack.Decoder(_Tagged).decode


def decode_body(body: bytes) -> AnyEvent:
    """A body of any version ever released, as the event of today.

    Raises NewerEvent for one of a later release, another msgspec.MsgspecError for what is no body.
    """
    try:
        return _decode_current(body)
    except msgspec.ValidationError:
        older = msgspec.msgpack.decode(body)
        tag = _tag(older)
        if _is_newer(tag):
            raise NewerEvent(f"it is of the kind {tag}, which this zjournal does not know") from None
        if tag not in UPCASTS:
            raise
    while tag in UPCASTS:
        older = UPCASTS[tag](older)
        assert _tag(older) != tag, f"the upcast of {tag} leads nowhere"
        tag = _tag(older)
    return msgspec.convert(older, AnyEvent)


def tag_of(body: bytes) -> str:
    """The tag and version that the body of an event carries itself, such as "cache_matched.1"."""
    return _decode_tagged(body).t


def _tag(body: Any) -> str:
    tag = body.get("t") if isinstance(body, dict) else None
    return tag if isinstance(tag, str) else ""


def _is_newer(tag: str) -> bool:
    name, _, version = tag.rpartition(".")
    if not name or not version.isdecimal() or len(version) > _VERSION_DIGITS_MAX:
        return False
    return int(version) > _VERSIONS.get(name, 0)
