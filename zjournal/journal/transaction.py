"""One write transaction: facts go in, are chained, stored, and folded into the projections, all or nothing.

It lives on the writer thread between BEGIN and COMMIT. Rows are gathered and inserted with one executemany, and
the fold runs over all of them at once. That is where the rate of token facts comes from.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence

from zjournal.journal import chain, content, rows
from zjournal.journal.chain import TAGS, Head
from zjournal.journal.events import AnyEvent, Fact, Recorded, RequestAccepted, SessionOpened, encode_body
from zjournal.journal.projections import BY_RESPONSE, effects
from zjournal.journal.segments import Bare

_INSERT = f"INSERT INTO event ({chain.COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class ParentErased(Exception):
    """The turn or session that a request was about to continue went before the request was written down."""


class Transaction:
    """`db` may be read and changed by the function that was given to `Journal.run`; facts go through `append`."""

    def __init__(
        self,
        db: sqlite3.Connection,
        head: Head,
        packer: content.Packer,
        plains: content.Plains,
        secret_of: Callable[[str], bytes | None],
        salt_of: Callable[[AnyEvent], bytes],
        now: int,
    ) -> None:
        self.db = db
        self.head = head
        self.now = now  # microseconds
        self.recorded: list[Recorded] = []
        self._packer = packer
        self._plains = plains
        self._secret_of = secret_of
        self._salt_of = salt_of
        self._rows: list[chain.Row] = []
        self._folded = 0  # this many of `recorded` are in the tables
        self._unfolded: set[str] = set()  # turns and sessions that `recorded` makes, and the tables do not have yet
        self._gone: set[int] = set()
        self._unpacked = rows.Unpacked()

    def append(self, facts: Sequence[Fact]) -> int:
        """Appends and folds at once, so that what follows in this transaction sees it. Returns the last number."""
        self.add(facts, self.now)
        self.flush()
        return self.head.seq

    def add(self, facts: Sequence[Fact], now: int, *, placed: bool = False) -> None:
        """Chains facts and stores their contents; the rows wait for `flush`. `now` in microseconds.

        `placed`: the caller has looked by itself whether what a request continues is there.
        """
        seq, previous, last = self.head.seq, self.head.link, self.head.time
        time = max(now, last)
        for fact in facts:
            seq += 1
            tag, version = TAGS[type(fact.event)]
            body = encode_body(fact.event)
            assert len(body) <= chain.BODY_BYTES_MAX, len(body)
            payload = payload_sha = None
            if fact.payload:
                assert len(fact.payload) <= chain.PAYLOAD_BYTES_MAX, len(fact.payload)
                payload = self._salt_of(fact.event) + fact.payload
                payload_sha = hashlib.sha256(payload).digest()
            if isinstance(fact.event, RequestAccepted):
                if not placed:
                    self._check_place(fact.event)
                self._unfolded.add(fact.event.response)
            elif isinstance(fact.event, SessionOpened):
                self._unfolded.add(fact.event.session)
            if fact.contents or content.references(fact.event):
                content.hold(self.db, self._packer, fact, self._secret_of(fact.event.tenant), self._plains)
            previous = chain.link(previous, seq, tag, version, time, body, payload_sha)
            self._rows.append((seq, time, tag, version, body, payload, payload_sha, previous))
            self.recorded.append(Recorded(seq, time, fact.event, fact.payload))
        self.head = Head(seq, previous, time)

    def facts(self, after: int, upto: int) -> list[Bare]:
        """The facts from `after` to `upto` as they lie in the journal, those of this transaction included."""
        return list(rows.facts(rows.find(self.db, after, upto), self._unpacked))

    def erase_payloads(self, numbers: Iterable[int]) -> None:
        """Takes the payloads of these facts away before the end of the transaction: of many facts at once."""
        self._gone.update(numbers)

    def flush_erased(self) -> int:
        """Takes them away now; returns the bytes that went."""
        self.flush()
        freed = rows.erase_payloads(self.db, self._gone)
        self._gone.clear()
        return freed

    def _check_place(self, accepted: RequestAccepted) -> None:
        """Raises ParentErased: a prompt must not hold, nor a chain need, what a deletion promised to remove."""
        # What is deleted and erased has no row any more, so that none is as good as an erased one.
        parent = f"SELECT 1 FROM turn WHERE {BY_RESPONSE} AND erased = 0"
        known = not accepted.parent or accepted.parent in self._unfolded
        if not known and not self.db.execute(parent, (accepted.parent, accepted.parent)).fetchone():
            raise ParentErased(accepted.parent)
        session = "SELECT 1 FROM session WHERE session = ? AND deleted = 0"
        known = not accepted.session or accepted.session in self._unfolded
        if not known and not self.db.execute(session, (accepted.session,)).fetchone():
            raise ParentErased(accepted.session)

    def finish(self) -> None:
        """What is left to do before the commit."""
        self.flush_erased()

    def flush(self) -> None:
        """Writes the waiting rows and carries them into the projections."""
        self.db.executemany(_INSERT, self._rows)
        self._rows.clear()
        for sql, values in effects(self.recorded[self._folded :]):
            self.db.execute(sql, values)
        self._folded = len(self.recorded)
        self._unfolded.clear()
