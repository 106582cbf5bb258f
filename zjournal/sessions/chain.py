"""Chains: which turn a request continues, in which session, and with which earlier items.

A turn's parent is `previous_response_id`, else the turn whose history (items and output, or where the client changed
that output the items alone) is the longest prefix of the items that the client resent. Either way, what this server
said earlier is replayed as the tokens it sampled, found by response id or by the digest of what the client saw; where
a client changed a text, no digest matches and the client's value stands.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from zjournal import ask, errors
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect
from zjournal.journal import events
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.journal.transaction import ParentErased
from zjournal.link import wire
from zjournal.sessions import follow, identity
from zjournal.sessions.makers import Makers
from zjournal.sessions.memory import Memory
from zjournal.sessions.records import Records

CACHED_BYTES_MAX = 16 << 20  # of texts and token ids of recent turns, about
TURN_BYTES = 1_000  # of a remembered turn beside its texts and token ids, about
CHAIN_TURNS_MAX = 10_000
OPENING_ITEMS = 2  # by which a new conversation finds one that began alike
OPENINGS_BYTES_MAX = 1 << 20
OPENINGS_MAX = 1_024
OPENING_BYTES = 200  # of a remembered one, about

Decoders = Mapping[str, Callable[[bytes], Sequence[ask.Item]]]  # protocol to what reads the items of a body


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request stands."""

    session: str  # "" when a new one is to be opened
    session_key: bytes  # digest of the client's own name for its session, or empty
    parent: str  # response id, or ""
    items: tuple[ask.Item, ...]  # everything the prompt is made of, earlier outputs as Output
    new: tuple[ask.Item, ...]  # those of the request that its parent's history does not hold
    history: bytes  # rolling digest after all items
    base: bytes = b""  # digest of the record that this one's repeats most of, as far as is known
    openings: tuple[str, ...] = ()  # names for how the conversation begins

    def outputs(self) -> Callable[[str], Sequence[int]]:
        """What gives the ids of an earlier output among the items; none if it is not there."""
        found = {item.response: item.tokens for item in self.items if isinstance(item, ask.Output)}
        return lambda response: wire.unpack_ids(found.get(response, b""))


class _Known(msgspec.Struct, frozen=True):
    """One turn that has ended: what it continued, and what it answered."""

    previous: str
    output: tuple[ask.Item, ...]


def _size(items: Sequence[ask.Item]) -> int:
    """About how many bytes it takes to remember these."""
    size = TURN_BYTES
    for item in items:
        match item:
            case ask.Output():
                size += len(item.tokens) + _size(item.items)
            case ask.Call():
                size += len(item.arguments)
            case _:
                size += sum(len(part.text) for part in item.parts)
    return size


class _Stops(msgspec.Struct):
    """The stop strings in a recorded body, whatever else is in it."""

    stop: str | list[str] | None = None


_decode_stops = msgspec.json.Decoder(_Stops).decode


class Chains:
    """Reads chains from the journal; remembers recent turns, which never change."""

    def __init__(
        self,
        journal: Reader,
        secret: bytes,
        makers: Makers,
        vocabulary: bytes,
        tokenizer: Tokenizer,
        dialect: Dialect,
        end_tokens: frozenset[int],
        decoders: Decoders,
    ) -> None:
        """`secret` is the journal's, for digests that nobody can guess back; `vocabulary` the digest of today's."""
        self._journal = journal
        self._secret = secret
        self._makers = makers
        self._records = Records(journal, makers)
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._end_tokens = end_tokens
        self._decoders = decoders
        self._known: Memory[_Known] = Memory(CACHED_BYTES_MAX // 2)
        self._items: Memory[tuple[ask.Item, ...]] = Memory(CACHED_BYTES_MAX // 2)
        self._openings: Memory[bytes] = Memory(OPENINGS_BYTES_MAX, OPENINGS_MAX)

    def place(self, request: ask.Ask, tenant: str) -> Place:
        """Resolves a request. Raises PreviousResponseNotFound, or BadRequest for a turn that cannot be continued.

        Raises ParentErased when a turn goes while it is read; the next try does not find it any more.
        """
        key = self._key(request, tenant)
        start = identity.history_start(self._secret)
        parent: Turn | None
        alike: Turn | None = None
        if request.previous is not None:
            items, parent = self._continued(request, request.previous, tenant)
            new = request.items
        else:
            items, parent, known, alike = self._recognise(request.items, start, tenant)
            new = request.items[known:]
        named = self._journal.find_session(tenant, key) if key else None
        session = named.session if named else parent.session if parent and not key else ""
        openings = tuple(f"{tenant} {identity.history_step(start, item).hex()}" for item in items[:OPENING_ITEMS])
        return Place(
            session=session,
            session_key=key,
            parent=parent.response if parent else "",
            items=items,
            new=new,
            history=identity.history(start, items),
            base=self._base(alike or parent, session, openings),
            openings=openings,
        )

    def accepted(self, place: Place, record: bytes) -> None:
        """Remembers the record of a request, for conversations that begin alike."""
        for opening in place.openings:
            self._openings.put(opening, record, OPENING_BYTES)

    def forget(self, response: str) -> None:
        """Drops what is remembered of a response that was deleted."""
        self._known.forget(response)
        self._items.forget(response)
        self._records.forget(response)

    def _key(self, request: ask.Ask, tenant: str) -> bytes:
        if request.session_key is None:
            return b""
        return hmac.digest(self._secret, f"session\0{tenant}\0{request.session_key}".encode(), "sha256")

    def _base(self, turn: Turn | None, session: str, openings: tuple[str, ...]) -> bytes:
        """The record to store the new one in terms of: a relative's, else one of the same session or beginning."""
        if turn is None and session:
            turn = self._journal.newest(session)
        if turn is not None and not turn.erased:
            return self._records.accepted(turn).record
        return next((found for opening in openings[::-1] if (found := self._openings.get(opening))), b"")

    def _continued(self, request: ask.Ask, previous: str, tenant: str) -> tuple[tuple[ask.Item, ...], Turn]:
        """The items of a request that continues a response by its id, and that response's turn."""
        earlier: list[ask.Item] = []
        turns = self._ancestors(previous, tenant)
        for turn in turns:
            earlier += self._items_of(turn) + self._turn(turn).output
        return (*earlier, *request.items), turns[-1]  # as it was found: if it goes meanwhile, the commit says so

    def _ancestors(self, response: str, tenant: str) -> list[Turn]:
        """The turns of a `previous_response_id` chain, oldest first. Every hop must belong to the tenant."""
        turns: list[Turn] = []
        wanted = response
        while not turns or wanted:  # an empty id is an unknown one too
            turn = self._journal.turn(wanted)
            # A deleted turn cannot be named any more, but what its living descendants need of it is kept.
            usable = turn is not None and turn.tenant == tenant and not turn.erased
            if turn is None or not usable or (not turns and not visible(turn, tenant)) or len(turns) >= CHAIN_TURNS_MAX:
                raise errors.PreviousResponseNotFound(
                    f"Previous response with id '{response}' not found.", param="previous_response_id"
                )
            if turn.status in ("running", "failed"):
                raise errors.BadRequest(
                    f"Response '{wanted}' cannot be continued: it is {turn.status}.", param="previous_response_id"
                )
            turns.append(turn)
            wanted = self._turn(turn).previous
        return turns[::-1]

    def _turn(self, turn: Turn) -> _Known:
        """What a turn that has ended adds to a conversation."""
        known = self._known.get(turn.response)
        if known is None:
            with self._erasure_told(turn):
                known = self._read(turn)
            self._known.put(turn.response, known, _size(known.output))
        return known

    def _items_of(self, turn: Turn) -> tuple[ask.Item, ...]:
        """The items that a turn's request brought: its body, read again by its protocol."""
        items = self._items.get(turn.response)
        if items is None:
            with self._erasure_told(turn):
                items = tuple(self._decoders[turn.protocol](self._records.body(turn)))
            self._items.put(turn.response, items, _size(items))
        return items

    @contextmanager
    def _erasure_told(self, turn: Turn) -> Iterator[None]:
        """Tells a content that was erased since its turn's row was read from one that is damaged."""
        try:
            yield
        except errors.JournalFault:
            now = self._journal.turn(turn.response)
            if now is None or now.erased:
                raise ParentErased(turn.response) from None
            raise

    def _read(self, turn: Turn) -> _Known:
        records = self._journal.read_response(turn.response)
        accepted = records[0].event
        assert isinstance(accepted, events.RequestAccepted), accepted
        tail = follow.recorded_tail(records)
        ids = tail.ids
        stop = stop_strings(self._records.body(turn)) if accepted.stop else ()
        maker = self._makers.of(turn)
        earlier = None if maker is None or maker.vocabulary == self._vocabulary else self._makers.vocabulary(maker)
        if earlier is not None:
            text = follow.read_text(follow.without_end(tail).ids, follow.foreign_reader(earlier, self._dialect, stop))
        else:
            text = follow.read_text(ids, follow.reader(self._tokenizer, self._dialect, self._end_tokens, stop))
        message = ask.Message("assistant", (ask.Text(text, f"response[{turn.response}]"),))
        if turn.reason == "stop_string" or earlier is not None:
            # After a stop string the tokens spell more than the client saw; an earlier model's mean something else now.
            return _Known(accepted.previous, (message,))
        while ids and ids[-1] in self._end_tokens:
            ids.pop()
        return _Known(accepted.previous, (ask.Output(turn.response, (message,), wire.pack_ids(ids)),))

    def _recognise(
        self, items: tuple[ask.Item, ...], start: bytes, tenant: str
    ) -> tuple[tuple[ask.Item, ...], Turn | None, int, Turn | None]:
        """Finds our own outputs in a resent history.

        The items with them as Output; the parent, whose answer or, where the client changed that, whose whole request
        is the longest beginning of the items; how many items that beginning has; and a turn alike, whose request is
        the longest beginning, be it the same one sent again.
        """
        digests: list[bytes] = []
        digest = start
        for item in items:
            digest = identity.history_step(digest, item)
            digests.append(digest)
        places = {digest: index for index, digest in enumerate(digests)}
        boundaries = {digests[k]: k for k, item in enumerate(items) if _said(item)}
        newest = self._journal.find_by_history(tenant, list(reversed(boundaries)))
        alike = self._journal.find_by_request(tenant, digests[::-1])
        asked = alike
        if alike is not None and places[alike.asked] == len(items) - 1:
            asked = self._journal.find_by_request(tenant, digests[-2::-1])
        if newest is None or (asked is not None and places[asked.asked] > boundaries[newest.history]):
            newest = asked
        found: dict[int, Turn] = {}
        turn, turns = newest, 0
        while turn is not None and not turn.erased and turns < CHAIN_TURNS_MAX:
            if turn.history in boundaries:
                found[boundaries[turn.history]] = turn
            turn, turns = self._journal.turn(turn.parent) if turn.parent else None, turns + 1
        replaced = tuple(
            output
            for index, item in enumerate(items)
            for output in (self._turn(found[index]).output if index in found else (item,))
        )
        known = 0 if newest is None else 1 + (places[newest.asked] if newest is asked else boundaries[newest.history])
        return replaced, newest, known, alike


def _said(item: ask.Item) -> bool:
    return isinstance(item, ask.Message) and item.role == "assistant"


def visible(turn: Turn, tenant: str) -> bool:
    """Whether the API shows this turn to this tenant: its own, stored, and not deleted."""
    return turn.tenant == tenant and turn.stored and turn.status != "deleted" and not turn.erased


def stop_strings(raw: bytes) -> tuple[str, ...]:
    """The stop strings of a recorded body."""
    stop = _decode_stops(raw).stop
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
