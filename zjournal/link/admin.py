"""What crosses `admin.sock`: one frame with an operation, one frame with its outcome.

The socket lies in the data directory (0700) with mode 0600, so only the owner of the journal reaches it. A frame is a
little-endian uint32 length and one msgpack map. A fault crosses by the name of its class, so that a command leaves
with the same exit code whether a server did the work or the command itself.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from zjournal import errors

SOCKET_FILE = "admin.sock"
VERSION = 1
FRAME_BYTES_MAX = 64 << 20
SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 104 to 108, the closing zero included
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class Call(msgspec.Struct, frozen=True):
    """An operation by name, with its arguments as the operation's own msgpack."""

    version: int
    name: str
    arguments: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """A Fault on its way: the name of its class, and what it says."""

    kind: str
    message: str
    param: str | None = None


NIL = msgspec.Raw(b"\xc0")


class Outcome(msgspec.Struct, frozen=True):
    """The result as msgpack, or a failure."""

    version: int
    result: msgspec.Raw = NIL
    failure: Failure | None = None


_encoder = msgspec.msgpack.Encoder()
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def frame(message: Call | Outcome) -> bytes:
    """One message as bytes for the socket. Raises BadRequest when it is too long for one."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise errors.BadRequest(f"An operation of {len(body)} bytes does not fit a frame of {FRAME_BYTES_MAX}.")
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """The length of the body behind the first LENGTH_BYTES of a frame. Raises BadRequest over the limit."""
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise errors.BadRequest(f"A frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}.")
    return length


def failure_of(fault: errors.Fault) -> Failure:
    """A fault as it crosses."""
    return Failure(type(fault).__name__, fault.message, fault.param)


def fault_of(failure: Failure) -> errors.Fault:
    """The fault that crossed; a plain Fault where this side does not know its class."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.Fault)):
        kind = errors.Fault
    return kind(failure.message, param=failure.param)


@contextlib.contextmanager
def address(data_dir: Path) -> Iterator[str]:
    """The path to bind or connect to. Where it is too long for a socket's address it goes by an open directory.

    Raises OSError when there is no such directory.
    """
    path = data_dir.absolute() / SOCKET_FILE
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET_FILE}"
    finally:
        os.close(folder)
