"""Where in a JSON text something wrong stands, if the decoder does not say. Only asked once a body is refused. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

KEY_CHARS_SHOWN = 64  # of a key in a path: a client may send any
KEYS_MAX = 4096  # of a map that is searched
SEARCHED_BYTES_MAX = 1 << 20  # of a text that is read once more for a path; of a longer one only the byte is told
_WORD = re.compile(r"[\w-]+\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Over everything that is sound (plain text, other escapes, whole pairs), up to an escape of one half alone.
_HALF = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+(\\u[dD][89a-fA-F]..)?", re.DOTALL
)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

Refuses = Callable[[bytes], str | None]  # the decoder's sentence on a text, or None if it takes it


class _Pairs(tuple[tuple[str, Any], ...]):
    """An object as it stands in the text: the same key may come twice."""

    __slots__ = ()


class Half(NamedTuple):
    """Half of a surrogate pair. It stands for no character, so no UTF-8 can hold it."""

    escape: str  # as sent, such as "\\ud800"
    byte: int
    path: str  # of its text; of a key that of the object; "" where that is the whole, or was not looked for


def lone_surrogate(raw: bytes | msgspec.Raw) -> Half | None:
    """The first half of a surrogate pair without the other. None: there is none."""
    text = bytes(raw)
    found = _HALF.match(text)
    if found is None or found[1] is None:
        return None
    path = ""
    if len(text) <= SEARCHED_BYTES_MAX:
        try:
            path = next(_halves(json.loads(text, object_pairs_hook=_Pairs, parse_int=str), ""), "")
        except (ValueError, RecursionError):  # it is no JSON for another reason as well
            path = ""
    return Half(found[1].decode("ascii", "replace"), found.start(1), path)


def _halves(value: Any, path: str) -> Iterator[str]:
    """The paths of texts with such a half, in their order."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            yield path
    elif isinstance(value, _Pairs):
        for key, inner in value:
            if _SURROGATE.search(key):
                yield path
            yield from _halves(inner, below(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _halves(inner, f"{path}[{index}]")


def below(path: str, key: str) -> str:
    """The path of a member: `a.b`, or `a["b c"]` where the key is no word. Of a long key only the beginning."""
    shown = key if len(key) <= KEY_CHARS_SHOWN else f"{key[:KEY_CHARS_SHOWN]}…"
    if not _WORD.match(key):
        quoted = json.dumps(shown, ensure_ascii=False).replace("`", "\\u0060")  # messages put paths between backticks
        return f"{path}[{quoted}]"
    return f"{path}.{shown}" if path else shown


def refused_key(raw: bytes | msgspec.Raw, name: str, refuses: Refuses) -> str | None:
    """The first key of the map `name` of an object whose value is what the decoder refuses.

    `refuses` is asked of ever smaller parts of the map: as much work as twice the map is long. None: the map has over
    KEYS_MAX keys, or it is no value alone.
    """
    try:
        items = list(_object_decoder.decode(_object_decoder.decode(raw)[name]).items())
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, RecursionError):
        return None
    if len(items) > KEYS_MAX:
        return None
    sentence = refuses(_object(name, items))
    if sentence is None:
        return None
    while len(items) > 1:
        half = len(items) // 2
        items = items[:half] if refuses(_object(name, items[:half])) == sentence else items[half:]
    return items[0][0] if items and refuses(_object(name, items)) == sentence else None


def _object(name: str, items: list[tuple[str, msgspec.Raw]]) -> bytes:
    return msgspec.json.encode({name: dict(items)})
