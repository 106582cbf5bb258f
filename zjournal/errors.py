"""Every way to fail: one class per fault, with whose fault it is, its HTTP meaning and its exit code.

A `Fault` is something the world did (a bad request, a full disk, a missing file). Our own bugs are
assertions and never a Fault. The API turns a request fault into the client's protocol; the CLI prints
a start fault as one line and leaves with `exit_code`.
"""

from __future__ import annotations


class Fault(Exception):
    """Base of all faults. `message` is one sentence for a person; `param` names the field at fault."""

    status = 500
    code = "server_error"
    kind = "server_error"  # OpenAI's `error.type`
    exit_code = 1
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


# --- faults of a request -----------------------------------------------------------------------------


class BadRequest(Fault):
    """The request is malformed or asks for something that cannot be; `param` is the JSON path."""

    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ContextTooLong(BadRequest):
    """The rendered prompt (and the asked output) does not fit the context window.

    In tokens, 0 where it is not known: what the prompt has, what was asked for, and what there is room for. `least`:
    what a prompt that was not counted has at least.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        prompt: int = 0,
        asked: int = 0,
        limit: int = 0,
        least: int = 0,
    ) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt
        self.asked = asked
        self.limit = limit
        self.least = least


class PreviousResponseNotFound(BadRequest):
    """`previous_response_id` names nothing that this key can see."""

    code = "previous_response_not_found"


class ThreadContinued(BadRequest):
    """The reply that a thread is to be continued from has been continued, and each is continued once."""

    code = "thread_already_continued"


class ThreadInFlight(BadRequest):
    """Another request is continuing from the same reply just now."""

    code = "thread_continue_in_flight"


class ThreadMismatch(BadRequest):
    """A field that belongs to the thread is not what the thread was created with."""

    code = "thread_fingerprint_mismatch"


class ConnectionLimit(BadRequest):
    """A WebSocket has been open for as long as one may be."""

    code = "websocket_connection_limit_reached"


class NotFound(Fault):
    """The named thing does not exist, or is not visible to this key."""

    status, code, kind = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    """The model's name is none of the accepted ones."""

    code = "model_not_found"


class ThreadNotFound(NotFound):
    """There is no reply of a thread by this id that this key can see and that could be continued."""

    code = "thread_not_found"


class Unauthorized(Fault):
    """No key, or a wrong one."""

    status, code, kind = 401, "invalid_api_key", "authentication_error"


class Forbidden(Fault):
    """A foreign Host or Origin: a web page must not drive a local server."""

    status, code, kind = 403, "forbidden", "permission_error"


class UpgradeRefused(Fault):
    """This server does not speak WebSocket. Codex takes the status to go on over HTTP at once."""

    status, code, kind = 426, "invalid_request", "invalid_request_error"


class BodyTooLarge(Fault):
    """The body is over the limit."""

    status, code, kind = 413, "request_too_large", "invalid_request_error"


class UnsupportedEncoding(BadRequest):
    """The body is compressed, or otherwise not as it is."""

    status, code = 415, "unsupported_encoding"


class Overloaded(Fault):
    """The queue is full."""

    status, code, kind, retry_after_s = 429, "rate_limit_exceeded", "rate_limit_error", 1


class RateLimited(Overloaded):
    """A key has used what it may; `limit` is requests, tokens or streams."""

    def __init__(self, message: str, limit: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Unavailable(Fault):
    """The server cannot take requests just now: it is loading, draining, or its engine is restarting."""

    status, code, kind, retry_after_s = 503, "server_unavailable", "server_error", 2


class JournalUnavailable(Unavailable):
    """The journal cannot be written, so nothing may be accepted."""

    code, retry_after_s = "journal_unavailable", 5


class EngineFailed(Fault):
    """The engine gave up on this request, or died under it."""

    status, code, kind = 500, "engine_error", "server_error"


class FenceFailed(EngineFailed):
    """The grammar of what a request may answer cannot be compiled, or broke off under it."""

    code = "fence_error"


# --- faults at the start and of the command line ------------------------------------------------------


class ConfigFault(Fault):
    """A setting is wrong; raised before anything is loaded. 78 is EX_CONFIG of sysexits.h."""

    code, exit_code = "config", 78


class ModelFault(Fault):
    """The model cannot be used: missing, not a GGUF, cut, or of a kind we do not run. 66 is EX_NOINPUT."""

    code, exit_code = "model", 66


class HubNotFound(ModelFault):
    """The hub has no such model, revision or file, or does not show it."""

    code = "hub_not_found"


class HubUnreachable(ModelFault):
    """The hub cannot be reached, or answers with an error of its own; another try may help. 69 is EX_UNAVAILABLE."""

    code, exit_code = "hub_unreachable", 69


class HubDenied(ModelFault):
    """The hub wants a login, or the model's terms accepted. 77 is EX_NOPERM."""

    code, exit_code = "hub_denied", 77


class HubDiskFull(ModelFault):
    """The disk has no room for the model. 74 is EX_IOERR."""

    code, exit_code = "hub_disk_full", 74


class DataDirFault(Fault):
    """The data directory cannot be used: not ours, not writable, or in use. 73 is EX_CANTCREAT."""

    code, exit_code = "data_dir", 73


class DataDirLocked(DataDirFault):
    """Another server owns the data directory. 75 is EX_TEMPFAIL."""

    code, exit_code = "data_dir_locked", 75


class ServerGone(Fault):
    """No server of ours answers at the address. 69 is EX_UNAVAILABLE."""

    code, exit_code = "server_gone", 69


class PortInUse(Fault):
    """The address cannot be bound. 69 is EX_UNAVAILABLE."""

    code, exit_code = "port_in_use", 69


class JournalFault(Fault):
    """The journal is damaged, foreign or of a newer schema. 65 is EX_DATAERR."""

    code, exit_code = "journal", 65


class OutputFault(Fault):
    """A file that was asked for cannot be made: it exists, or its folder or disk refuses. 73 is EX_CANTCREAT."""

    code, exit_code = "output", 73


class ImportFault(Fault):
    """A file is no export of ours, is damaged, or does not fit into this journal. 65 is EX_DATAERR."""

    code, exit_code = "import", 65


class SnapshotFault(Fault):
    """The snapshots' folder, or a file in it, cannot be read or written just now. 74 is EX_IOERR.

    `errno` is the system's, 0 where it is not the system that refuses. No file is to blame: none is put aside.
    """

    code, exit_code = "snapshot", 74

    def __init__(self, message: str, *, errno: int = 0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.errno = errno


class ChunkFault(SnapshotFault):
    """A file of the snapshots is not what it should be, and is not believed. 65 is EX_DATAERR.

    `reason` is one of `snapshots.format.Reason`, `block` the block's index in the chunk, None if it is the whole file.
    """

    code, exit_code = "snapshot_chunk", 65

    def __init__(self, path: str, reason: str, detail: str, *, block: int | None = None) -> None:
        super().__init__(f"{path}: {detail}")
        self.path, self.reason, self.block = path, reason, block


class EngineStartFault(Fault):
    """The engine process could not load the model or set up its device."""

    code, exit_code = "engine_start", 70
