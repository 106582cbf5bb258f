"""The first words of a session: what a person said first, as far as the journal still has it, to tell sessions apart.

A list of a thousand sessions must not read a thousand conversations. So of a body only the outline is made, in which
texts that the prompt says are marks, and of one of these texts only the beginning is spelled.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

CHARS_MAX = 200  # of a text that are told
READ_CHARS = 2 * CHARS_MAX  # that are read of it, for white space is told as one space
READ_TOKENS = 4 * READ_CHARS  # which have as many characters or more: a token has a byte of them at least
_TAGGED = re.compile(r"\s*<[A-Za-z][\w-]*>")  # how clients mark what they themselves put into a person's message


class FirstWords:
    """Reads the beginnings of one journal's sessions. For one thread at a time."""

    def __init__(self, journal: Reader) -> None:
        self._journal = journal
        self._makers = Makers(journal)
        self._records = Records(journal, self._makers)
        self.damaged = 0  # sessions of which it cannot be read

    def of(self, session: str) -> str | None:
        """The first words of the first user message in the first turn of a session that was not deleted or erased.

        One line, without control characters; None if there is none. A text that begins with a tag is a client's own
        (reminders, what it knows of its surroundings): it is told only where there is no other.
        """
        turn = self._journal.oldest(session)
        if turn is None:
            return None
        try:
            return self._told(turn)
        except JournalFault:
            now = self._journal.turn(turn.response)
            if now is not None and not now.erased:  # else it was erased while this was read
                self.damaged += 1
            return None

    def _told(self, turn: Turn) -> str | None:
        mark = secrets.token_hex(8)  # no text of a client can know it
        outline = self._records.outline(turn, mark)
        try:
            body = msgspec.json.decode(outline)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # nested too deep for this reader
        tagged = None
        for text in _user_texts(body):
            words = shown(self._spelled(turn, text.split(mark)))
            if words and not _TAGGED.match(words):
                return words
            tagged = tagged or words
        return tagged or None

    def _spelled(self, turn: Turn, parts: list[str]) -> str:
        """The beginning of a text of the outline; every second part is the number of a text that the prompt says."""
        text = parts[0]
        for number, behind in zip(parts[1::2], parts[2::2], strict=True):
            if len(text) > READ_CHARS:
                break
            text += self._records.beginning(turn, int(number), READ_TOKENS) + behind
        return text


def shown(text: str) -> str:
    """The first CHARS_MAX characters of a text as one line; what is not printable is escaped."""
    words = " ".join(text[:READ_CHARS].split())
    visible = (one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in words)
    told = "".join(visible)
    return told if len(told) <= CHARS_MAX and len(text) <= READ_CHARS else told[: CHARS_MAX - 1].rstrip() + "…"


def _user_texts(body: Any) -> Iterator[str]:
    """The texts that users say in a body of any of the protocols, in order."""
    if not isinstance(body, dict):
        return
    said = body.get("messages") if isinstance(body.get("messages"), list) else body.get("input")
    if isinstance(said, str):
        yield said
    for item in said if isinstance(said, list) else ():
        if not isinstance(item, dict) or item.get("role") != "user":
            continue
        content = item.get("content")
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
