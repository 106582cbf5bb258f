"""Which sessions a prune would take, why it leaves the others, and how many bytes would go. Changes nothing.

Filters are joined with and, and there is no other filter behind them. What matches and is running or pinned is listed
and left. `max_bytes` takes the least recently used of what matches until the journal would hold no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from zjournal.journal import content
from zjournal.journal.compact import bytes_in_use
from zjournal.journal.projections import Session, Turn
from zjournal.journal.reader import Reader

DELETE, KEEP = "delete", "keep"
RUNNING, PINNED, FITS = "running", "pinned", "fits"
SESSIONS_PAGE = 500
DIGESTS_PAGE = 500


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What to take. At least one must be set. Times in microseconds since 1970."""

    before_us: int | None = None  # last used before this
    model: str | None = None  # every turn asked for this model, by the name the client used
    empty: bool = False  # no turn has given a token
    ids: tuple[str, ...] = ()  # one of these
    max_bytes: int | None = None  # what the journal may hold afterwards

    @property
    def any(self) -> bool:
        return self != Filters()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One matching session."""

    session: str
    turns: int
    opened_us: int
    last_us: int
    last_seq: int  # as it was when it was looked at
    bytes: int  # that go with it when those above it go first
    action: str  # delete, keep
    reason: str = ""  # why it is kept: running, pinned, fits (in max_bytes)


class Plan(msgspec.Struct, frozen=True):
    """All matching sessions, the least recently used first; `held`: the bytes in use in the journal now."""

    rows: tuple[Row, ...]
    held: int

    @property
    def chosen(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.action == DELETE)

    @property
    def bytes(self) -> int:
        """What goes when all that is chosen goes."""
        return sum(row.bytes for row in self.chosen)


class _Candidate:
    """A session that matches, with its turns, and what it holds on to."""

    def __init__(self, session: Session, turns: list[Turn]) -> None:
        self.session = session
        self.turns = turns
        self.payload = 0.0  # bytes that their erasure gives back
        self.digests: Counter[bytes] = Counter()
        running = any(turn.finished_us is None for turn in turns)
        self.reason = RUNNING if running else PINNED if session.pinned else ""


def plan(reader: Reader, filters: Filters) -> Plan:
    """Looks at every session, then once through the facts from the oldest that matches. In short read transactions."""
    assert filters.any
    found = [candidate for candidate in _candidates(reader) if _matches(candidate, filters)]
    found.sort(key=lambda candidate: candidate.session.last_seq)
    free = [candidate for candidate in found if not candidate.reason]
    _weigh(reader, free)
    with reader.transaction() as db:
        held = bytes_in_use(db)
    sizes = _contents(reader, free)
    rows = []
    left = held
    taken: Counter[bytes] = Counter()
    for candidate in found:
        reason, freed = candidate.reason, 0
        if not reason and filters.max_bytes is not None and left <= filters.max_bytes:
            reason = FITS
        if not reason:
            freed = max(round(candidate.payload) + _take(candidate.digests, taken, sizes), 0)
            left -= freed
        rows.append(_row(candidate, freed, reason))
    return Plan(tuple(rows), held)


def _candidates(reader: Reader) -> Iterator[_Candidate]:
    before = None
    while page := reader.sessions(SESSIONS_PAGE, before):
        for session in page:
            yield _Candidate(session, reader.turns(session.session))
        before = page[-1].last_seq


def _matches(candidate: _Candidate, filters: Filters) -> bool:
    session, turns = candidate.session, candidate.turns
    return (
        (filters.before_us is None or session.last_us < filters.before_us)
        and (filters.model is None or all(turn.model == filters.model for turn in turns))
        and (not filters.empty or not any(turn.output for turn in turns))
        and (not filters.ids or session.session in filters.ids)
    )


def _weigh(reader: Reader, candidates: Sequence[_Candidate]) -> None:
    """Notes what the turns of each that can be erased hold, in one pass through the facts."""
    if not candidates:
        return
    kept = _needed(reader, candidates)
    owner = {
        turn.response: candidate
        for candidate in candidates
        for turn in candidate.turns
        if not turn.erased and turn.response not in kept
    }
    at = min(candidate.session.opened_seq for candidate in candidates) - 1
    last = max((turn.last_seq for candidate in candidates for turn in candidate.turns), default=at)
    while facts := reader.weigh(at, last):
        for fact, size in facts:
            holder = owner.get(getattr(fact.event, "response", ""))
            if holder is not None:
                holder.payload += size
                holder.digests.update(content.references(fact.event))
        at = facts[-1][0].seq


def _needed(reader: Reader, candidates: Sequence[_Candidate]) -> set[str]:
    """The turns among these that must keep their content: a turn of a session that stays is built on them."""
    own = {turn.response: turn for candidate in candidates for turn in candidate.turns}
    with reader.transaction() as db:
        links = db.execute(
            "SELECT child.response, child.parent FROM turn AS child JOIN turn AS above"
            " ON substr(above.response, 1, 25) = substr(child.parent, 1, 25) AND above.response = child.parent"
            " WHERE child.parent != '' AND child.erased = 0 AND child.session != above.session"
        ).fetchall()
    kept: set[str] = set()
    for child, parent in links:
        if child in own:
            continue
        while parent in own and parent not in kept:
            kept.add(parent)
            parent = own[parent].parent
    return kept


def _contents(reader: Reader, candidates: Sequence[_Candidate]) -> dict[bytes, tuple[int, int]]:
    """Of each content these hold: how many references it has, and its stored bytes."""
    digests = list({digest for candidate in candidates for digest in candidate.digests})
    found: dict[bytes, tuple[int, int]] = {}
    for at in range(0, len(digests), DIGESTS_PAGE):
        page = digests[at : at + DIGESTS_PAGE]
        marks = ", ".join("?" * len(page))
        query = f"SELECT digest, refs, length(data) FROM content WHERE substr(digest, 1, 8) IN ({marks})"
        with reader.transaction() as db:
            rows = db.execute(query, [digest[:8] for digest in page])
            found.update({digest: (refs, size) for digest, refs, size in rows})
    return found


def _take(digests: Counter[bytes], taken: Counter[bytes], sizes: dict[bytes, tuple[int, int]]) -> int:
    """Counts references as taken back; returns the bytes of contents that nobody holds any more."""
    freed = 0
    for digest, count in digests.items():
        taken[digest] += count
        refs, size = sizes.get(digest, (0, 0))
        if taken[digest] == refs:
            freed += size
    return freed


def _row(candidate: _Candidate, freed: int, reason: str) -> Row:
    session = candidate.session
    return Row(
        session=session.session,
        turns=session.turns,
        opened_us=session.opened_us,
        last_us=session.last_us,
        last_seq=session.last_seq,
        bytes=freed,
        action=KEEP if reason else DELETE,
        reason=reason,
    )
