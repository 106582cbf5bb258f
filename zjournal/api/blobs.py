"""What a text model is told of an image or a file: a fixed placeholder with its type, size and digest. Pure.

Equal blobs have equal placeholders, however they are encoded, and others have other ones: so two images never share
what was computed for one of them. The bytes stay in the request's body; they are never tokenised.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from zjournal.errors import BadRequest

DIGEST_HEX = 16
TYPE_CHARACTERS_MAX = 64
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*/[A-Za-z0-9][A-Za-z0-9.+-]*")


def placeholder(kind: str, media_type: str, data: bytes) -> str:
    """`[image: image/png, 68 bytes, sha256 0123456789abcdef]`; `kind` is the client's word, such as image."""
    known = media_type if _TYPE.fullmatch(media_type) and len(media_type) <= TYPE_CHARACTERS_MAX else "unknown type"
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_HEX]
    return f"[{kind}: {known.lower()}, {len(data)} bytes, sha256 {digest}]"


def encoded(kind: str, media_type: str, text: str, at: str) -> str:
    """The placeholder of a blob in base64. Raises BadRequest with the path `at`."""
    return placeholder(kind, media_type, _decoded(text, at))


def linked(kind: str, url: str, at: str) -> str:
    """The placeholder of what a URL says. A `data:` URL is the blob itself; others are named, and never fetched."""
    head = _DATA_URL.match(url)
    if head is None:
        digest = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_HEX]
        return f"[{kind}: not fetched, sha256 of its address {digest}]"
    text = url[head.end() :]
    if not head[2].lower().endswith(";base64"):
        return placeholder(kind, head[1], text.encode("utf-8", "surrogatepass"))
    return encoded(kind, head[1], text, at)


def _decoded(text: str, at: str) -> bytes:
    """Base64 of either alphabet, with line ends and with or without padding."""
    plain = "".join(text.split()).translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"`{at}` is no base64.", param=at) from None
