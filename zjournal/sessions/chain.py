"""Chains: which turn a request continues, in which session, and with which earlier items.

A turn's parent is `previous_response_id`, else the turn whose history (items and output) is the longest
prefix of the items that the client resent. Either way, what this server said earlier is replayed as the
tokens it sampled, found by response id or by the digest of what the client saw; where a client changed a
text, no digest matches and the client's value stands.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

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

CACHED_BYTES_MAX = 16 << 20  # of texts and token ids of recent turns, about
TURN_BYTES = 1_000  # of a remembered turn beside its texts and token ids, about
CHAIN_TURNS_MAX = 10_000

_decode_items = msgspec.msgpack.Decoder(tuple[ask.Item, ...]).decode
encode_items = msgspec.msgpack.Encoder().encode


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request stands."""

    session: str  # "" when a new one is to be opened
    session_key: bytes  # digest of the client's own name for its session, or empty
    parent: str  # response id, or ""
    items: tuple[ask.Item, ...]  # everything the prompt is made of, earlier outputs as Output
    new: tuple[ask.Item, ...]  # those of the request that its parent's history does not hold
    history: bytes  # rolling digest after all items


class _Known(msgspec.Struct, frozen=True):
    """One turn that has ended: what it continued, what it brought, what it answered."""

    previous: str
    items: tuple[ask.Item, ...]
    output: tuple[ask.Item, ...]

    @property
    def size(self) -> int:
        """About how many bytes it takes to remember this turn."""
        return TURN_BYTES + sum(_size(item) for item in self.items + self.output)


def _size(item: ask.Item) -> int:
    match item:
        case ask.Output():
            return len(item.tokens) + sum(map(_size, item.items))
        case ask.Call():
            return len(item.arguments)
        case _:
            return sum(len(part.text) for part in item.parts)


class _Stops(msgspec.Struct):
    """The stop strings in a recorded body, whatever else is in it."""

    stop: str | list[str] | None = None


_decode_stops = msgspec.json.Decoder(_Stops).decode


class Chains:
    """Reads chains from the journal; remembers recent outputs, which never change."""

    def __init__(
        self,
        journal: Reader,
        secret: bytes,
        makers: Makers,
        vocabulary: bytes,
        tokenizer: Tokenizer,
        dialect: Dialect,
        end_tokens: frozenset[int],
    ) -> None:
        """`secret` is the journal's, for digests that nobody can guess back; `vocabulary` the digest of today's."""
        self._journal = journal
        self._secret = secret
        self._makers = makers
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._end_tokens = end_tokens
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._known_bytes = 0

    def place(self, request: ask.Ask, tenant: str) -> Place:
        """Resolves a request. Raises PreviousResponseNotFound, or BadRequest for a turn that cannot be continued.

        Raises ParentErased when a turn goes while it is read; the next try does not find it any more.
        """
        key = self._key(request, tenant)
        start = identity.history_start(self._secret)
        if request.previous is not None:
            ancestors = self._ancestors(request.previous, tenant)
            earlier = tuple(item for turn in ancestors for item in turn.items + turn.output)
            items, parent = earlier + request.items, self._journal.turn(request.previous)
            new = request.items
        else:
            items, parent, known = self._recognise(request.items, start, tenant)
            new = request.items[known:]
        named = self._journal.find_session(tenant, key) if key else None
        session = named.session if named else parent.session if parent and not key else ""
        return Place(
            session=session,
            session_key=key,
            parent=parent.response if parent else "",
            items=items,
            new=new,
            history=identity.history(start, items),
        )

    def forget(self, response: str) -> None:
        """Drops what is remembered of a response that was deleted."""
        known = self._known.pop(response, None)
        if known is not None:
            self._known_bytes -= known.size

    def _key(self, request: ask.Ask, tenant: str) -> bytes:
        if request.session_key is None:
            return b""
        return hmac.digest(self._secret, f"session\0{tenant}\0{request.session_key}".encode(), "sha256")

    def _ancestors(self, response: str, tenant: str) -> list[_Known]:
        """The turns of a `previous_response_id` chain, oldest first. Every hop must belong to the tenant."""
        turns: list[_Known] = []
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
            known = self._turn(turn)
            turns.append(known)
            wanted = known.previous
        return turns[::-1]

    def _turn(self, turn: Turn) -> _Known:
        """What a turn that has ended adds to a conversation."""
        known = self._known.get(turn.response)
        if known is None:
            try:
                known = self._read(turn)
            except errors.JournalFault:
                now = self._journal.turn(turn.response)
                if now is not None and now.erased:  # since its row was read
                    raise ParentErased(turn.response) from None
                raise
            self._known[turn.response] = known
            self._known_bytes += known.size
            while self._known_bytes > CACHED_BYTES_MAX:
                self.forget(next(iter(self._known)))
        return known

    def _read(self, turn: Turn) -> _Known:
        records = self._journal.read_response(turn.response)
        accepted = records[0].event
        assert isinstance(accepted, events.RequestAccepted), accepted
        items = _decode_items(self._journal.content(turn.tenant, accepted.items))
        tail = follow.recorded_tail(records)
        ids = tail.ids
        stop = stop_strings(self._journal.content(turn.tenant, accepted.raw)) if accepted.stop else ()
        maker = self._makers.of(turn)
        earlier = None if maker is None or maker.vocabulary == self._vocabulary else self._makers.vocabulary(maker)
        if earlier is not None:
            text = follow.read_text(follow.without_end(tail).ids, follow.foreign_reader(earlier, self._dialect, stop))
        else:
            text = follow.read_text(ids, follow.reader(self._tokenizer, self._dialect, self._end_tokens, stop))
        message = ask.Message("assistant", (ask.Text(text, f"response[{turn.response}]"),))
        if turn.reason == "stop_string" or earlier is not None:
            # After a stop string the tokens spell more than the client saw; an earlier model's mean something else now.
            return _Known(accepted.previous, items, (message,))
        while ids and ids[-1] in self._end_tokens:
            ids.pop()
        return _Known(accepted.previous, items, (ask.Output(turn.response, (message,), wire.pack_ids(ids)),))

    def _recognise(
        self, items: tuple[ask.Item, ...], start: bytes, tenant: str
    ) -> tuple[tuple[ask.Item, ...], Turn | None, int]:
        """Finds our own outputs in a resent history.

        The items with them as Output, the newest such turn, and how many items end with its output.
        """
        boundaries: dict[bytes, int] = {}
        digest = start
        for index, item in enumerate(items):
            digest = identity.history_step(digest, item)
            if isinstance(item, ask.Message) and item.role == "assistant":
                boundaries[digest] = index
        newest = self._journal.find_by_history(tenant, list(reversed(boundaries)))
        found: dict[int, Turn] = {}
        turn = newest
        while turn is not None and not turn.erased and turn.history in boundaries and len(found) < CHAIN_TURNS_MAX:
            found[boundaries[turn.history]] = turn
            turn = self._journal.turn(turn.parent) if turn.parent else None
        replaced = tuple(
            output
            for index, item in enumerate(items)
            for output in (self._turn(found[index]).output if index in found else (item,))
        )
        return replaced, newest, boundaries[newest.history] + 1 if newest else 0


def visible(turn: Turn, tenant: str) -> bool:
    """Whether the API shows this turn to this tenant: its own, stored, and not deleted."""
    return turn.tenant == tenant and turn.stored and turn.status != "deleted" and not turn.erased


def stop_strings(raw: bytes) -> tuple[str, ...]:
    """The stop strings of a recorded body."""
    stop = _decode_stops(raw).stop
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
