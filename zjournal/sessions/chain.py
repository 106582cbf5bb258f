"""Chains: which turn a request continues, in which session, and with which earlier items.

A turn's parent is `previous_response_id`, else the turn whose history (items and output, or where the client changed
that output the items alone) is the longest prefix of the items that the client resent. Either way, what this server
said earlier is replayed as the tokens it sampled, found by response id, by the digest of what the client saw, or by the
ids of its calls; arguments that are equal as JSON are equal. Where a client changed a value, the client's stands.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from zjournal import ask, errors
from zjournal.growing import Growing
from zjournal.journal.projections import COMPLETED, DELETED, FAILED, INCOMPLETE, RUNNING, Turn
from zjournal.journal.reader import Reader
from zjournal.journal.transaction import ParentErased
from zjournal.link import wire
from zjournal.sessions import identity
from zjournal.sessions.items import (
    Unit,
    call_ids,
    change,
    digests,
    items_of,
    settled,
    thoughts_of,
    units,
    unrepeated,
)
from zjournal.sessions.makers import Makers
from zjournal.sessions.memory import Memory
from zjournal.sessions.reading import Answers, Decoders, Model, Models, Terms
from zjournal.sessions.records import Records

CACHED_BYTES_MAX = 16 << 20  # of texts and token ids of recent turns, about
TURN_BYTES = 1_000  # of a remembered turn beside its texts and token ids, about
TERMS_BYTES_MAX = 4 << 20  # of the tools and stop strings of requests whose answers were not continued yet
TERMS_BYTES = 500  # of one of them beside its texts, and of each tool, about
HISTORIES_BYTES_MAX = 16 << 20  # of resent histories that were told apart lately
UNIT_BYTES = 500  # of each unit of them beside its texts, about
CHAIN_TURNS_MAX = 10_000
OPENING_ITEMS = 2  # by which a new conversation finds one that began alike
OPENINGS_BYTES_MAX = 1 << 20
OPENINGS_MAX = 1_024
OPENING_BYTES = 200  # of a remembered one, about


class Replayed(msgspec.Struct, frozen=True):
    """How the answers of ours in a resent history are replayed.

    `restored`: so many with thoughts that the client left out. `forks`: responses whose answers the client changed
    since they were told, and what of it; it stands as the client has it. `apart`: responses that are no ancestors.
    """

    restored: int = 0
    forks: tuple[tuple[str, str], ...] = ()
    apart: frozenset[str] = frozenset()


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
    replayed: Replayed = Replayed()

    def outputs(self) -> Callable[[str], Sequence[int]]:
        """What gives the ids of an ancestor's output among the items; none if it is not there.

        Those of others may be deleted while this turn lives, so its record has to hold them itself.
        """
        outputs = (item for item in self.items if isinstance(item, ask.Output))
        found = {item.response: item.tokens for item in outputs if item.response not in self.replayed.apart}
        return lambda response: wire.unpack_array(found.get(response, b""))


class _Known(msgspec.Struct, frozen=True):
    """One turn that has ended: what it continued, and what it answered."""

    previous: str
    output: tuple[ask.Item, ...]

    @property
    def whole(self) -> ask.Output:
        """The answer as one output, be it one that can be replayed or not."""
        if len(self.output) == 1 and isinstance(self.output[0], ask.Output):
            return self.output[0]
        thoughts = "".join(item.text for item in self.output if isinstance(item, ask.Thought))
        seen = tuple(item for item in self.output if isinstance(item, ask.Message | ask.Call))
        return ask.Output("", seen, b"", thoughts)


class _Ours(msgspec.Struct, frozen=True):
    """The turns whose answers stand in a resent history, by the unit. `known`: those that are equal by their digest."""

    turns: dict[int, Turn]
    known: frozenset[int]
    apart: frozenset[str]  # as in Replayed


class _Resent(msgspec.Struct, frozen=True):
    """What was found in a resent history."""

    items: tuple[ask.Item, ...]  # with our answers as outputs
    replayed: Replayed
    parent: Turn | None  # whose answer or, where that was changed, whose request is the longest beginning of it
    known: int  # how many items that beginning has
    alike: Turn | None  # whose request is the longest beginning, be it the same one sent again
    history: bytes  # rolling digest of all of it


class _History(msgspec.Struct, frozen=True):
    """A resent history: its units, the digest behind each, and about how many bytes it takes up to there."""

    units: Sequence[Unit]
    digests: Sequence[bytes]
    sizes: Sequence[int]


def _terms_size(terms: Terms) -> int:
    """About how many bytes it takes to remember these."""
    tools = sum(TERMS_BYTES + len(tool.parameters) + len(tool.description or "") for tool in terms.tools)
    return TERMS_BYTES + tools + sum(map(len, terms.stop))


def _size(items: Sequence[ask.Item]) -> int:
    """About how many bytes it takes to remember these."""
    size = TURN_BYTES
    for item in items:
        match item:
            case ask.Output():
                size += len(item.tokens) + len(item.thoughts) + _size(item.items)
            case ask.Call():
                size += len(item.arguments)
            case _:
                size += sum(len(part.text) for part in item.parts)
    return size


class _Stops(msgspec.Struct):
    """The stop strings in a recorded body, whatever else is in it."""

    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None  # as Messages has them


_decode_stops = msgspec.json.Decoder(_Stops).decode


class Chains:
    """Reads chains from the journal; remembers recent turns, which never change."""

    def __init__(
        self,
        journal: Reader,
        secret: bytes,
        makers: Makers,
        vocabulary: bytes,
        model: Model,
        decoders: Decoders,
        restores: bool = True,
    ) -> None:
        """`secret` is the journal's, for digests that nobody can guess back. `vocabulary`: digest of that of `model`.

        `restores`: whether thoughts that a client left out of its history are put back.
        """
        self._journal = journal
        self._secret = secret
        self._records = Records(journal, makers)
        self._terms: Memory[Terms] = Memory(TERMS_BYTES_MAX)
        models = Models(makers, model, vocabulary)
        self._answers = Answers(journal, self._records, models, decoders, self._terms.get)
        self._decoders = decoders
        self._restores = restores
        self._known: Memory[_Known] = Memory(CACHED_BYTES_MAX // 2)
        self._items: Memory[tuple[ask.Item, ...]] = Memory(CACHED_BYTES_MAX // 2)
        self._openings: Memory[bytes] = Memory(OPENINGS_BYTES_MAX, OPENINGS_MAX)
        self._histories: Growing[_History] = Growing(HISTORIES_BYTES_MAX)

    def place(self, request: ask.Ask, tenant: str) -> Place:
        """Resolves a request. Raises PreviousResponseNotFound, or BadRequest for a turn that cannot be continued.

        Raises ParentErased when a turn goes while it is read; the next try does not find it any more.
        """
        key = self._key(request, tenant)
        start = identity.history_start(self._secret)
        parent: Turn | None
        alike: Turn | None = None
        if request.previous is not None:
            items, new, replayed, parent = self._continued(request, request.previous, start, tenant)
            history = digests(units(new), parent.history)[-1] if parent.history else digests(units(items), start)[-1]
        else:
            resent = self._recognise(request.items, start, tenant)
            items, replayed, parent, alike = resent.items, resent.replayed, resent.parent, resent.alike
            new, history = request.items[resent.known :], resent.history
        named = self._journal.find_session(tenant, key) if key else None
        session = named.session if named else parent.session if parent and not key else ""
        openings = tuple(f"{tenant} {identity.history_step(start, item).hex()}" for item in items[:OPENING_ITEMS])
        return Place(
            session=session,
            session_key=key,
            parent=parent.response if parent else "",
            items=items,
            new=new,
            history=history,
            base=self._base(alike or parent, session, openings),
            openings=openings,
            replayed=replayed,
        )

    def accepted(self, request: ask.Ask, place: Place, record: bytes, responses: Sequence[str], terms: Terms) -> None:
        """Remembers the record of a request, for conversations that begin alike, and what its next turns ask for.

        `responses`: of all its choices. To learn its terms and items again later, its whole body would have to be read.
        """
        for opening in place.openings:
            self._openings.put(opening, record, OPENING_BYTES)
        size = _terms_size(terms)
        for response in responses:
            self._terms.put(response, terms, size)
            if request.previous is not None and request.protocol == "responses":  # others' recorded items may differ
                self._items.put(response, request.items, _size(request.items))

    def forget(self, response: str) -> None:
        """Drops what is remembered of a response that was deleted."""
        self._known.forget(response)
        self._items.forget(response)
        self._terms.forget(response)
        self._records.forget(response)

    def forget_texts(self) -> None:
        """Drops what is remembered of histories that clients resent: which of their texts were erased is not known."""
        self._histories.clear()

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

    def _continued(
        self, request: ask.Ask, previous: str, start: bytes, tenant: str
    ) -> tuple[tuple[ask.Item, ...], tuple[ask.Item, ...], Replayed, Turn]:
        """All items of a request that continues a response by its id, its new ones, and that response's turn."""
        turns = self._ancestors(previous, tenant, request)
        first = self._items_of(turns[0])  # they may be resent history, which is replayed as it was then
        parent = self._journal.turn(turns[0].parent) if turns[0].parent else None
        found = units(first)
        ours = self._ours(found, _boundaries(found, digests(found, start)), parent, tenant)
        first, replayed = self._spliced(first, found, ours, len(found))
        earlier = [*first, *self._turn(turns[0]).output]
        for turn in turns[1:]:
            earlier += unrepeated(earlier, self._items_of(turn)) + self._turn(turn).output
        new = unrepeated(earlier, request.items)
        return (*earlier, *new), new, replayed, turns[-1]  # as found: if it goes meanwhile, the commit says so

    def _ancestors(self, response: str, tenant: str, request: ask.Ask) -> list[Turn]:
        """The turns of a `previous_response_id` chain, oldest first. Every hop must belong to the tenant.

        The response itself must be one of the request's protocol: the others have no such resource, and what their
        bodies say could not be listed as items of this one. If the request is `local`, it need not be stored.
        """
        turns: list[Turn] = []
        wanted = response
        line = self._journal.line(response, CHAIN_TURNS_MAX)  # a turn's parent is what it continues, if that is there
        while not turns or wanted:  # an empty id is an unknown one too
            turn = next(line, None)
            if turn is None or turn.response != wanted:
                turn = self._journal.turn(wanted)
            # A deleted turn cannot be named any more, but what its living descendants need of it is kept.
            usable = turn is not None and turn.tenant == tenant and not turn.erased
            named = bool(turns) or (
                turn is not None and visible(turn, tenant, request.local) and turn.protocol == request.protocol
            )
            if turn is None or not usable or not named or len(turns) >= CHAIN_TURNS_MAX:
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
            self._terms.forget(turn.response)
            self._known.put(turn.response, known, _size(known.output))
        return known

    def _items_of(self, turn: Turn) -> tuple[ask.Item, ...]:
        """The items that a turn's request brought: its body, read again by its protocol."""
        items = self._items.get(turn.response)
        if items is None:
            with self._erasure_told(turn):
                items = self._decoders[turn.protocol](self._records.body(turn)).items
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
        answer = self._answers.of(turn)
        if answer is None:
            raise errors.JournalFault(
                f"{self._journal.path}: nothing says what the tokens of {turn.response} stand for"
            )
        if answer.accepted.max_tokens == 0:  # its prompt was read for this very request: it has said nothing
            return _Known(answer.accepted.previous, ())
        path = f"response[{turn.response}]"
        secret = answer.accepted.item_secret or identity.item_secret(self._secret, turn.response)
        ids = call_ids(secret, turn.response, answer.deltas, answer.accepted.nameless)
        seen = items_of(answer.deltas, ids, path)
        thoughts = thoughts_of(answer.deltas)
        if turn.reason == "stop_string" or answer.foreign:
            # After a stop string the tokens spell more than the client saw; an earlier model's mean something else now.
            thought = (ask.Thought((ask.Text(thoughts, path),)),) if thoughts else ()
            return _Known(answer.accepted.previous, (*thought, *seen))
        output = ask.Output(turn.response, seen, wire.pack_ids(answer.tail.ids), thoughts)
        return _Known(answer.accepted.previous, (output,))

    # --- resent histories -------------------------------------------------------------------------------

    def _recognise(self, items: tuple[ask.Item, ...], start: bytes, tenant: str) -> _Resent:
        """Finds our own outputs in a resent history, and what it continues."""
        found, behind = self._told_apart(items, start, tenant)
        places = {digest: index for index, digest in enumerate(behind)}
        boundaries = _boundaries(found, behind)
        newest = self._journal.find_by_history(tenant, list(reversed(boundaries)))
        alike = self._journal.find_by_request(tenant, behind[::-1])
        asked = alike
        if alike is not None and places[alike.asked] == len(found) - 1:
            asked = self._journal.find_by_request(tenant, behind[-2::-1])
        last = -1 if newest is None else boundaries[newest.history]  # the unit that the beginning ends with
        if asked is not None and places[asked.asked] > last:
            newest, last = asked, places[asked.asked]
        else:
            asked = None
        ours = self._ours(found, boundaries, newest, tenant)
        if asked is not None and asked.status in (COMPLETED, INCOMPLETE):
            ours.turns.setdefault(last + 1, asked)  # its answer was changed or left out
        spliced, replayed = self._spliced(items, found, ours, last)
        return _Resent(spliced, replayed, newest, found[last].end if newest is not None else 0, alike, behind[-1])

    def _told_apart(self, items: tuple[ask.Item, ...], start: bytes, tenant: str) -> tuple[list[Unit], list[bytes]]:
        """The units of a resent history and the digests behind them; those of the last time are not made anew."""
        beginning = self._histories.longest(tenant, items)
        first = beginning.value or _History((), (), ())
        known = settled(first.units, items, beginning.length)
        found = units(items, first.units[:known])
        behind = digests(found, start, first.digests[:known])
        sizes = list(first.sizes[:known])
        for unit in found[known:]:
            sizes.append((sizes[-1] if sizes else 0) + UNIT_BYTES + _size(unit.items) + len(unit.thoughts))
        self._histories.put(tenant, items, _History(found, behind, sizes), sizes[-1] if sizes else 0, beginning)
        return found, behind

    def _ours(self, found: Sequence[Unit], boundaries: Mapping[bytes, int], newest: Turn | None, tenant: str) -> _Ours:
        """Whose answers stand at these units, perhaps changed: ancestors', and others' by the ids of calls."""
        ours = {boundaries[turn.history]: turn for turn in self._line(newest) if turn.history in boundaries}
        known, apart = frozenset(ours), set()
        for index, unit in enumerate(found):
            if index not in ours and unit.calls and (maker := self._maker_of(unit.calls, tenant)) is not None:
                ours[index] = maker
                apart.add(maker.response)
        return _Ours(ours, known, frozenset(apart))

    def _line(self, turn: Turn | None) -> Iterator[Turn]:
        """A turn and its ancestors, as far as they are there."""
        if turn is None or turn.erased:
            return
        yield turn
        if turn.parent:
            line = self._journal.line(turn.parent, CHAIN_TURNS_MAX - 1)
            yield from itertools.takewhile(lambda ancestor: not ancestor.erased, line)

    def _maker_of(self, calls: Sequence[ask.Call], tenant: str) -> Turn | None:
        """The turn that made one of these calls, by its id."""
        for call in calls:
            for beginning in identity.responses_of_call(call.call_id):
                turn = self._journal.turn_beginning(beginning)
                usable = turn is not None and turn.tenant == tenant and not turn.erased
                if turn is None or not usable or turn.status in (RUNNING, FAILED, DELETED):
                    continue
                own = (item.call_id for item in self._turn(turn).whole.items if isinstance(item, ask.Call))
                if call.call_id in own:
                    return turn
        return None

    def _spliced(
        self,
        items: Sequence[ask.Item],
        found: Sequence[Unit],
        ours: _Ours,
        last: int,
    ) -> tuple[tuple[ask.Item, ...], Replayed]:
        """The items with our answers as outputs, where the client has them as they were.

        What was changed before unit `last` is not told, for it was when it came.
        """
        spliced: list[ask.Item] = []
        forks: list[tuple[str, str]] = []
        restored = 0
        for index, unit in enumerate(found):
            turn = ours.turns.get(index)
            known = index in ours.known
            output, changed, thoughts = self._compared(turn, unit, known) if turn is not None else ((), "", "")
            if turn is not None and changed and index >= last:
                forks.append((turn.response, changed))
            if turn is None or changed or (thoughts and not unit.thoughts and not self._restores):
                spliced += items[unit.start : unit.end]
            else:
                restored += bool(thoughts) and not unit.thoughts
                spliced += output
        return tuple(spliced), Replayed(restored, tuple(forks), ours.apart)

    def _compared(self, turn: Turn, unit: Unit, known: bool) -> tuple[tuple[ask.Item, ...], str, str]:
        """The answer of a turn, what of it is changed in this unit, and its thoughts. `known` as for `change`."""
        output = self._turn(turn)
        whole = output.whole
        return output.output, change(whole, unit if unit.said else None, known), whole.thoughts


def _boundaries(found: Sequence[Unit], behind: Sequence[bytes]) -> dict[bytes, int]:
    """The units that an assistant said, by the digest behind them."""
    return {behind[index]: index for index, unit in enumerate(found) if unit.said}


def visible(turn: Turn, tenant: str, local: bool = False) -> bool:
    """Whether the API shows this turn to this tenant: its own, stored or `local`, and not deleted."""
    return turn.tenant == tenant and (turn.stored or local) and turn.status != "deleted" and not turn.erased


def stop_strings(raw: bytes) -> tuple[str, ...]:
    """The stop strings of a recorded body."""
    stops = _decode_stops(raw)
    stop = stops.stop_sequences if stops.stop is None else stops.stop
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
