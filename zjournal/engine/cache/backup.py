"""Backup: which chunk of which state is written next, and when.

The chunks of a state that has ended are written at once, full ones only: those that are on disk already are not
written again. What is left, its tail, waits until nothing runs, or until it has waited long enough, for the next
turn may make it worthless; then it is dropped. A turn that runs for long gets its full chunks written as it goes.

Nothing here waits. Blocks are lent while they are written, a limited number of bytes at a time; what has lost its
blocks before its turn came is lost. A full or broken disk turns backups off for a while, and nothing else.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zjournal.engine.cache.codecs import Choice
from zjournal.engine.cache.host import Held
from zjournal.engine.cache.residency import Residency
from zjournal.engine.cache.shelf import (
    FREE_BYTES_MIN,
    IN_ITS_PLACE,
    STALE,
    Room,
    Shelf,
    Standing,
    Told,
    is_full,
    is_of_place,
)
from zjournal.engine.cache.staging import Out, Stages
from zjournal.errors import SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import chunk as chunks
from zjournal.snapshots import format
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.format import (
    BLOCK_TOKENS,
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    CHUNK_TOKENS_BYTES,
    HEADER_BYTES,
    TOKEN_BYTES,
    Codec,
)
from zjournal.snapshots.index import Chunk, Row

EVERY_TOKENS = 1024  # new tokens of a running turn after which its full chunks are written
TELL_CHUNKS = 4  # new chunks that are told together while more of the state is being written
TAIL_AFTER_US = 5_000_000  # a tail is written after so long even if something always runs
IN_FLIGHT_BYTES = 64 << 20  # that are being written: what a kill leaves unnamed at most; one chunk always may
FACTS_OPEN_MAX = 64  # facts that the journal has not answered: beyond that nothing is written
STATES_MAX = 1024  # states that wait to be written; the oldest is dropped
RETRY_US = 30_000_000  # after which a disk that refused is tried again
STALE_LOOKS = 4  # neighbours of a new chunk that are looked at for what it repeats


log = logging.getLogger("zjournal.engine")


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a state: the `number`-th, with the packed tokens."""

    number: int
    parent: bytes
    hash: bytes
    tokens: bytes

    @property
    def start(self) -> int:
        return self.number * CHUNK_TOKENS

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(eq=False)
class State:
    """A state on its way to disk. `final`: its turn has ended, and so its tail counts."""

    request: str
    session: str
    namespace: str
    space: bytes
    tokens: bytes  # packed
    since_us: int
    final: bool
    hashes: list[bytes] = field(default_factory=list)  # of its full chunks, as far as they are known
    at: int = 0  # number of the next piece that is looked at
    told: int = 0  # pieces without a gap that are on disk, and the new ones told
    named: int = 0  # pieces of the snapshot as it was told last
    fresh: list[tuple[Row, bytes]] = field(default_factory=list)  # new chunks before `told`, and tokens, not told yet
    rows: dict[int, Row | None] = field(default_factory=dict)  # pieces from `told` on that are on disk; None: they were
    writing: int = 0  # pieces that are being written
    spent_us: int = 0  # writing what is to be told next
    tail: bool = True  # its tail is wanted
    closed: bool = False  # nothing more is written

    @property
    def full(self) -> int:
        """Full chunks."""
        return len(self.tokens) // CHUNK_TOKENS_BYTES

    @property
    def pieces(self) -> int:
        """All that are to be written, the tail included."""
        has_tail = self.final and self.tail and len(self.tokens) % CHUNK_TOKENS_BYTES > 0
        return self.full + has_tail

    @property
    def open(self) -> bool:
        """Whether something of it is still to be written or told."""
        return not self.closed and (self.at < self.pieces or self.writing > 0 or bool(self.fresh))

    def piece(self, number: int) -> Piece:
        """The chunk of this number; those before it are known."""
        parent = self.hashes[number - 1] if number else format.ROOT
        tokens = self.tokens[number * CHUNK_TOKENS_BYTES : (number + 1) * CHUNK_TOKENS_BYTES]
        if number < len(self.hashes):
            return Piece(number, parent, self.hashes[number], tokens)
        hash_ = format.chain(parent, self.space, format.PLAIN, tokens)
        if number < self.full:
            self.hashes.append(hash_)
        return Piece(number, parent, hash_, tokens)


class _Written(NamedTuple):
    """What a writing thread brought back."""

    codec: Codec
    file_bytes: int
    took_us: int
    free: int | None
    held: Held | None


class Backups:
    """The states that are to be written, and those who write. For the engine's thread."""

    def __init__(
        self,
        shelf: Shelf,
        residency: Residency,
        stages: Stages,
        clear_behind: Callable[[memoryview, int], None],
        layout: bytes,
        block_bytes: int,
        clock: Callable[[], int],
    ) -> None:
        self._shelf = shelf
        self._residency = residency
        self._stages = stages
        self._clear_behind = clear_behind
        self._layout = layout
        self._block_bytes = block_bytes
        self._clock = clock
        self._due: dict[str, State] = {}  # with full chunks to write, or something in flight
        self._tails: dict[str, State] = {}  # with nothing but a tail
        self._of_session: dict[str, State] = {}
        self._in_flight = 0
        self._choice = Choice()
        self._off_until_us: int | None = None
        self._trying = False  # the first write after backups were off
        self._stalled = False  # too much waits for the journal
        self._crowded = False  # the disk is so full that nothing is begun
        self.lost = 0  # states that were given up before all of them was on disk
        shelf.growing = self._frontier

    @property
    def off(self) -> bool:
        return self._stalled or self._crowded or self._off_until_us is not None

    @property
    def refused(self) -> bool:
        """Whether the disk has refused a write and is left alone for a while."""
        return self._off_until_us is not None

    @property
    def waiting(self) -> int:
        """States of which something is still to be written or told."""
        return sum(state.open for states in (self._due, self._tails) for state in states.values())

    # --- what there is to write --------------------------------------------------------------------------

    def grew(self, request: str, session: str, namespace: str, tokens: bytes, *, final: bool) -> None:
        """The KV of these packed tokens is kept: those of a turn that goes on, or (`final`) of one that has ended."""
        state = self._due.get(request) or self._tails.pop(request, None)
        if state is None:
            space = self._shelf.space(namespace)
            state = State(request, session, namespace, space, tokens, self._clock(), final)
        assert not state.final or state.tokens == tokens
        state.tokens, state.final, state.tail = tokens, final, True
        state.since_us = self._clock()
        self._due[request] = state
        self._succeed(state)
        start = state.at * CHUNK_BLOCKS
        self._residency.set_due(namespace, tokens, start, True)
        if len(self._due) + len(self._tails) > STATES_MAX:
            states = itertools.chain(self._tails.values(), self._due.values())
            # Those that are being written end by themselves; closing them now would not make them fewer.
            if (oldest := next((one for one in states if not one.writing), None)) is not None:
                self._lose(oldest)

    def drop(self, request: str) -> None:
        """Nothing more of this state is written: its turn was erased."""
        state = self._due.get(request) or self._tails.get(request)
        if state is not None:
            self._close(state)

    def _succeed(self, state: State) -> None:
        """What the session's state before this one would still have written is worth nothing if this one repeats it."""
        before = self._of_session.get(state.session)
        self._of_session[state.session] = state
        if before is None or before.request == state.request:
            return
        if before.tokens == state.tokens[: len(before.tokens)]:
            before.tail = False
            self._residency.set_due(before.namespace, before.tokens, 0, False)
            self._settle(before)

    # --- writing -----------------------------------------------------------------------------------------

    def pump(self, *, idle: bool, flush: bool = False) -> None:
        """Begins to write what is due, as far as the limits allow. `flush`: tails are due at once."""
        if not (self._due or self._tails) or not self._may_write(flush):
            return
        for state in list(self._due.values()):
            if not self._go_on(state):
                return
        now_us = self._clock()
        for state in list(self._tails.values()):
            if not (idle or flush or now_us - state.since_us >= TAIL_AFTER_US):
                return  # the others ended later
            if not self._go_on(state):
                return

    def due_us(self) -> int | None:
        """When something has to be looked at again although nothing happens; None: never."""
        until_us = self._off_until_us
        return until_us if until_us is not None and self.waiting and until_us > self._clock() else None

    def _may_write(self, flush: bool) -> bool:
        stalled = self._shelf.facts_open >= FACTS_OPEN_MAX
        if stalled != self._stalled:
            self._stalled = stalled
            message = f"{self._shelf.facts_open} facts of the snapshots are not in the journal yet"
            self._shelf.events.append(wire.SnapshotsOff("stalled", message) if stalled else wire.SnapshotsOn())
        if stalled or self._trying:
            return False
        return self._off_until_us is None or (not flush and self._clock() >= self._off_until_us)

    def _go_on(self, state: State) -> bool:
        """Writes what may be written of a state; False if nobody else may write either just now."""
        state.at = max(state.at, state.told)
        blocks: list[int] = []
        while state.at < state.pieces and not state.closed:
            if state.at >= state.full and state.request in self._due:
                if state.writing:
                    break  # the tail comes after what it continues
                self._due.pop(state.request)
                self._tails[state.request] = state
                return True
            if state.at in state.rows:  # behind one that failed, and on disk already: not told, so it would look busy
                state.at += 1
                continue
            piece = state.piece(state.at)
            standing = self._shelf.standing(piece.hash)
            if standing is Standing.BUSY:
                return True
            if standing is Standing.THERE:
                state.rows[piece.number] = None
                state.at += 1
                continue
            if not blocks:  # they stay where they are until this is over
                blocks = self._residency.resident(state.namespace, state.tokens)
            if not self._write(state, piece, blocks):
                return False
            if self._trying:
                return False
        self._settle(state)
        return True

    def _write(self, state: State, piece: Piece, resident: Sequence[int]) -> bool:
        """Begins to write a piece, or closes the state if that cannot be; False if it has to wait.

        `resident` are the state's blocks that are kept.
        """
        count = format.blocks_for(piece.count)
        size = self._size_max(count)
        if self._in_flight and self._in_flight + size > IN_FLIGHT_BYTES:
            return False
        first = piece.number * CHUNK_BLOCKS
        blocks = resident[first : first + count]
        if len(blocks) < count:
            self._lose(state)
            return True
        whole = len(state.tokens) // TOKEN_BYTES
        whole_bytes = self._size_max(format.blocks_for(whole)) + state.full * HEADER_BYTES
        room = self._shelf.room(size, piece.start, piece.count, (whole, whole_bytes))
        if room is Room.NONE:
            self._note_room(size <= self._shelf.limit or size > self._shelf.settings.limit)
            # What others have on disk already may not go while they are written behind: the oldest of all gives way.
            oldest = min((*self._due.values(), *self._tails.values()), key=lambda one: one.since_us)
            self._lose(oldest)
            return oldest is state
        if room is Room.LATER or not self._residency.lend_kept(blocks):
            return False
        out = self._stages.out(blocks)
        if out is None:
            self._residency.give_back(blocks, written=True)
            return False
        self._submit(state, piece, blocks, out, size)
        return True

    def _submit(self, state: State, piece: Piece, blocks: Sequence[int], out: Out, size: int) -> None:
        shelf = self._shelf
        made = format.Chunk(
            state.space, self._layout, piece.parent, format.PLAIN, piece.start, piece.tokens, self._block_bytes
        )
        keep = shelf.host.limit > 0
        codec, clock = self._codec, self._clock

        def work() -> _Written:
            begun_us = clock()
            stored = self._cleared(out.views(), piece.count)
            header = chunks.write(shelf.folder, made, stored, Packer(codec))
            held = Held.copy(made, stored) if keep else None
            return _Written(codec, header.file_bytes, clock() - begun_us, shelf.measure(), held)

        def then(result: _Written | SnapshotFault) -> None:
            out.close()
            self._residency.give_back(blocks, written=True)
            self._in_flight -= size
            state.writing -= 1
            self._written(state, piece, result)

        self._note_room(True)
        self._trying = self._off_until_us is not None
        self._in_flight += size
        state.writing += 1
        state.at += 1
        shelf.writing[piece.hash] = size
        shelf.disk.write(work, then)

    def _cleared(self, memory: Sequence[memoryview], tokens: int) -> Sequence[memoryview]:
        """The blocks of so many tokens, with nothing behind the last one. For any thread.

        What lies there in memory is KV of another turn, which may be deleted long before this one.
        """
        if tokens % BLOCK_TOKENS == 0:
            return memory
        last = chunks.aligned(self._block_bytes)
        last[:] = memory[-1].cast("B")
        self._clear_behind(last, tokens % BLOCK_TOKENS)
        return [*memory[:-1], last]

    def _written(self, state: State, piece: Piece, result: _Written | SnapshotFault) -> None:
        """A piece is on disk, or it is not."""
        shelf = self._shelf
        if isinstance(result, SnapshotFault):
            del shelf.writing[piece.hash]
            if is_of_place(result):
                self._give_up(state, piece, result)
                return
            self._turn_off(result)
            state.at = min(state.at, piece.number)  # it is tried again, with those behind it
            if state.closed:
                self._settle(state)
                self._clean(state)
            return
        self._turn_on()
        shelf.measured(result.free)
        self._choice.wrote(result.codec, format.blocks_for(piece.count) * self._block_bytes, result.took_us)
        shelf.writing[piece.hash] = result.file_bytes
        if result.held is not None:
            shelf.host.put(result.held)
        marks = format.marks(piece.tokens)
        state.rows[piece.number] = Row(piece.hash, piece.parent, piece.count, result.file_bytes, marks)
        state.spent_us += result.took_us
        self._settle(state)
        self._clean(state)

    def _give_up(self, state: State, piece: Piece, fault: SnapshotFault) -> None:
        """Something that is not ours lies where a chunk belongs: the disk is well, and so are the other states."""
        log.warning("a state is not kept on disk: %s", fault.message)
        self._trying = False
        if fault.errno in IN_ITS_PLACE:
            self._shelf.leaving.put_aside(state.space, piece.hash, 0)
        self._close(state)

    def _settle(self, state: State) -> None:
        """Tells what can be told of a state, and forgets it when that is all."""
        while state.told in state.rows:
            row = state.rows.pop(state.told)
            if row is not None:
                state.fresh.append((row, state.piece(state.told).tokens))
            state.told += 1
        done = (state.closed or state.at >= state.pieces) and not state.writing
        ends = done and state.final and state.named < state.told  # it is told where it ends, even if nothing is new
        if ends or (state.fresh and (not state.writing or len(state.fresh) >= TELL_CHUNKS)):
            self._tell(state)
        if done and (state.final or state.closed):  # a turn that goes on is remembered, and so is what it stands on
            self._forget(state)

    def _tell(self, state: State) -> None:
        rows = tuple(row for row, _ in state.fresh)
        tokens = tuple(packed for _, packed in state.fresh)
        end = state.piece(state.told - 1)
        event = wire.BackedUp(
            fact=self._shelf.next_fact(),
            request=state.request,
            namespace=state.namespace,
            space=state.space,
            tokens=end.start + end.count,
            end=end.hash,
            chunks=tuple(wire.Chunk(*row) for row in rows),
            write_us=state.spent_us,
        )
        state.spent_us, state.named, state.fresh = 0, state.told, []
        self._residency.set_due(state.namespace, state.tokens[: event.tokens * TOKEN_BYTES], 0, False)
        self._shelf.tell(event, state.session, rows, tokens)

    def _lose(self, state: State) -> None:
        """There is no room for it, or its blocks have gone."""
        self.lost += 1
        self._close(state)

    def _close(self, state: State) -> None:
        """Nothing more of it is written. What is behind a gap on disk is given up."""
        state.closed = True
        self._residency.set_due(state.namespace, state.tokens, 0, False)
        self._settle(state)
        self._clean(state)

    def _clean(self, state: State) -> None:
        """Unlinks what a closed state has on disk behind a gap: nothing will ever name it."""
        if not state.closed or state.writing:
            return
        for number in [number for number in state.rows if number >= state.told]:
            row = state.rows.pop(number)
            if row is not None:
                del self._shelf.writing[row.hash]
                self._shelf.unlink(state.space, {row.hash: row.file_bytes})

    def _frontier(self) -> set[bytes]:
        """The chunks that something is, or will be, written behind: they stay on disk, and so do those before them."""
        states = [*self._due.values(), *self._tails.values()]
        ends = ((state, min(number, state.full)) for state in states for number in (state.told, state.at))
        needed = {state.hashes[number - 1] for state, number in ends if number > 0}
        # What others have on disk may stand before `told` reaches it: what is written behind it is no child of it yet.
        needed |= {
            state.hashes[number]
            for state in states
            for number, row in state.rows.items()
            if row is None and number < state.full
        }
        return needed | {row.parent for state in states for row, _ in state.fresh}

    def _forget(self, state: State) -> None:
        for waiting in (self._due, self._tails):
            if waiting.get(state.request) is state:
                del waiting[state.request]
        if (state.final or state.closed) and self._of_session.get(state.session) is state:
            del self._of_session[state.session]

    def committed(self, told: Told) -> None:
        """A snapshot is found from now on. Tails that its new chunks repeat are worth nothing, and go."""
        shelf = self._shelf
        stale: list[bytes] = []
        for row, tokens in zip(told.rows, told.tokens, strict=True):
            chunk = shelf.index.chunks.get(row.hash)
            looked: set[bytes] = set()
            while chunk is not None and len(looked) < STALE_LOOKS:
                near = shelf.index.neighbours(chunk, looked)
                looked.update(one.hash for one in near)
                stale += [one.hash for one in near if _repeats(one, row, told.space, tokens) and shelf.may_go(one)]
                if not near:
                    break
        if stale:
            shelf.plan_purge(told.space, list(dict.fromkeys(stale)), STALE)

    # --- the disk ----------------------------------------------------------------------------------------

    @property
    def _codec(self) -> Codec:
        wanted = self._shelf.settings.codec
        return self._choice.codec if wanted == "auto" else Codec[wanted.upper()]

    def _size_max(self, count: int) -> int:
        """The most bytes that a file with so many blocks can have."""
        most = self._block_bytes if self._codec is Codec.RAW else format.stored_max(self._block_bytes)
        return HEADER_BYTES + count * format.paged(most)

    def _turn_off(self, fault: SnapshotFault) -> None:
        told = self._off_until_us is not None
        self._off_until_us = self._clock() + RETRY_US
        self._trying = False
        if not told:
            reason = "no_space" if is_full(fault) else "io_error"
            self._shelf.events.append(wire.SnapshotsOff(reason, fault.message))

    def _note_room(self, enough: bool) -> None:
        """Tells when the disk has become too full for any chunk, or is not any more."""
        if self._crowded == enough:
            self._crowded = not enough
            message = (
                f"{self._shelf.folder.path}: the disk has less than {FREE_BYTES_MIN} bytes free beside the snapshots"
            )
            self._shelf.events.append(wire.SnapshotsOn() if enough else wire.SnapshotsOff("no_space", message))

    def _turn_on(self) -> None:
        if self._trying:
            self._trying, self._off_until_us = False, None
            self._shelf.events.append(wire.SnapshotsOn())


def _repeats(tail: Chunk, row: Row, space: bytes, tokens: bytes) -> bool:
    """Whether a chunk holds nothing but the first tokens of another one; by their hashes."""
    if tail.tokens >= row.tokens or not tail.plain:
        return False
    return format.chain(row.parent, space, format.PLAIN, tokens[: tail.tokens * TOKEN_BYTES]) == tail.hash
