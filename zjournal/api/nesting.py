"""How deep a body may be nested: a limit of ours, the same on every machine, and looked at before anything is decoded.

Whatever reads JSON recurses, here or in a client's schema that is compiled later, and how deep an interpreter goes is
nobody's promise. What stands inside a string, as the arguments of calls do, is a text and does not count. Pure.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator

import msgspec

from zjournal.errors import BadRequest

JSON_DEPTH_MAX = 128  # objects and lists in each other, the body itself included
COUNTED_BYTES_MAX = 4096  # of a value whose brackets are counted before it is taken apart
PARTS_DEPTH_MAX = 8  # so often a value is taken apart,
PARTS_MAX = 1 << 17  # into so many parts, about: each takes some 60 bytes and 200 ns, and a body can have millions

BLOCK_BYTES = 1 << 20  # that are searched for escapes at once: between two of them is an object, of fifty bytes or so

_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")  # as signed bytes: one deeper, one less deep
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def check(body: bytes) -> None:
    """Raises BadRequest for a body that is nested deeper than JSON_DEPTH_MAX. What is no JSON is not judged."""
    try:
        if _surely(body.strip(), JSON_DEPTH_MAX, PARTS_DEPTH_MAX):
            return
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # the skipping reader recurses as any other; the brackets say what it is
    # Without escapes every quote begins or ends a string, so what is outside of strings is every other piece.
    plain = b"".join(map(_unescaped, _blocks(body))) if b"\\" in body else body
    steps = array.array("b", b"".join(plain.translate(None, _OTHERS).split(b'"')[::2]).translate(_STEPS))
    if max(itertools.accumulate(steps), default=0) > JSON_DEPTH_MAX:  # no loop here: a body may be full of them
        raise BadRequest(f"The request body is nested deeper than {JSON_DEPTH_MAX} objects and lists.")


def _surely(value: bytes, allowed: int, parts: int) -> bool:
    """Whether a value is sure to be nested `allowed` deep at most, by its shape: a long body is mostly long strings.

    It is skipped through, `parts` levels of it at most, at a fraction of the time that looking at each byte takes.
    """
    if value[:1] not in (b"[", b"{"):
        return True
    if len(value) <= COUNTED_BYTES_MAX and value.count(b"[") + value.count(b"{") <= allowed:
        return True
    if not parts or not allowed or value.count(b",") >= PARTS_MAX:
        return False
    if value[:1] == b"[":
        return all(_surely(bytes(inner), allowed - 1, parts - 1) for inner in _elements(value))
    members = _members(value)
    inner = [bytes(raw) for raw in members.values()]
    # Of members with the same name only the last is seen. What is not seen has fewer bytes than it takes to be deeper.
    unseen = len(value) - sum(map(len, inner)) - sum(map(len, members))
    return unseen < allowed and all(_surely(one, allowed - 1, parts - 1) for one in inner)


def _blocks(body: bytes) -> Iterator[bytes]:
    """The body in blocks, none of which ends within an escape."""
    at = 0
    while at < len(body):
        block = body[at : at + BLOCK_BYTES]
        slashes = len(block) - len(block.rstrip(b"\\"))
        if slashes % 2 and len(block) > 1:  # the last one belongs to the byte behind it, if there is one
            block = block[:-1]
        yield block
        at += len(block)


def _unescaped(body: bytes) -> bytes:
    """The body without its backslashes and the byte behind each: to search for pairs of bytes is far slower."""
    first, *pieces = body.split(b"\\")
    if b"" not in pieces:
        return first + b"".join([piece[1:] for piece in pieces])
    parts = [first]
    escaped = False  # whether the piece stands behind a backslash that is escaped itself
    for piece in pieces:
        parts.append(piece if escaped else piece[1:])
        escaped = not escaped and not piece
    return b"".join(parts)
