"""Compaction: what a long conversation is replaced by, in a text that a client keeps and this server can read for ever.

The text holds the summary itself, so nothing has to be looked up: it survives a restart and the deletion of every turn.
It is versioned, and authenticated for the tenant whose conversation it was, so that nobody can put words into a
conversation under another one's name. It is not secret: it says to its owner what its owner said. Pure.
"""

from __future__ import annotations

import base64
import hmac
from binascii import Error as BadBase64

from zjournal.errors import BadRequest

PREFIX = "zj1."  # the version of the form
MAC_BYTES = 16

ASKED = (
    "Write a summary of the conversation above for the assistant that will go on with it and sees nothing else of it. "
    "State the goal, what was decided, what was done and found, names, paths and values that matter, and what is left "
    "to do. Write the summary only."
)
_HEAD = "Summary of the conversation before this point:\n\n"


def seal(summary: str, secret: bytes, tenant: str) -> str:
    """The text that a client keeps. `secret` is the journal's."""
    body = _encoded(summary.encode("utf-8", "replace"))
    return f"{PREFIX}{body}.{_encoded(_mac(body, secret, tenant))}"


def told(blob: str, at: str) -> str:
    """What a model is told of it; whether it is ours, `genuine` says. Raises BadRequest for what has not its form."""
    body, _, mac = blob.removeprefix(PREFIX).partition(".")
    try:
        if not blob.startswith(PREFIX) or not mac:
            raise ValueError("no compaction of this server")
        return _HEAD + _decoded(body).decode()
    except ValueError:
        raise _foreign(at) from None


def genuine(blob: str, at: str, secret: bytes, tenant: str) -> None:
    """Raises BadRequest for a text that this server has not made for this tenant."""
    body, _, mac = blob.removeprefix(PREFIX).partition(".")
    # As text: of one proof, base64 has several spellings.
    right = _encoded(_mac(body, secret, tenant))
    if not hmac.compare_digest(mac.encode(errors="surrogatepass"), right.encode()):
        raise _foreign(at)


def _foreign(at: str) -> BadRequest:
    return BadRequest(f"`{at}` is no compaction that this server has made for this key.", param=at)


def _mac(body: str, secret: bytes, tenant: str) -> bytes:
    return hmac.digest(secret, f"compaction\0{tenant}\0{body}".encode(errors="surrogatepass"), "sha256")[:MAC_BYTES]


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    """Raises ValueError."""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True)
    except (BadBase64, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None
