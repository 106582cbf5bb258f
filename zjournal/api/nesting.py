"""How deep a body may be nested: a limit of ours, the same on every machine, and looked at before anything is decoded.

Whatever reads JSON recurses, here or in a client's schema that is compiled later, and how deep an interpreter goes is
nobody's promise. What stands inside a string, as the arguments of calls do, is a text and does not count. Pure.
"""

from __future__ import annotations

import array
import itertools

from zjournal.errors import BadRequest

JSON_DEPTH_MAX = 128  # objects and lists in each other, the body itself included

_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")  # as signed bytes: one deeper, one less deep
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def check(body: bytes) -> None:
    """Raises BadRequest for a body that is nested deeper than JSON_DEPTH_MAX. What is no JSON is not judged."""
    if body.count(b"[") + body.count(b"{") <= JSON_DEPTH_MAX:
        return
    # Without escapes every quote begins or ends a string, so what is outside of strings is every other piece.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    steps = array.array("b", b"".join(plain.split(b'"')[::2]).translate(_STEPS, _OTHERS))
    if max(itertools.accumulate(steps), default=0) > JSON_DEPTH_MAX:  # no loop here: a body may be full of them
        raise BadRequest(f"The request body is nested deeper than {JSON_DEPTH_MAX} objects and lists.")
