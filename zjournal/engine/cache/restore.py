"""The restore of one request: what of its prompt is on disk, whether to read it, and how far the reading got.

It goes through four stages. LOOKING: headers are read, of chunks that may share a part of the prompt. READY: it is
known what to read, and the table must be made to reach there. READING: each chunk is read and checked by itself,
straight into blocks that nobody else knows. ENDED: `reached` tokens are proved without a gap. Whoever gives it up calls
`abandon`; reads that have begun go on into blocks that stay lent until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from zjournal.engine.cache.blocks import BLOCK_TOKENS, blocks_for
from zjournal.engine.cache.host import Held
from zjournal.engine.cache.prefix import COLD, EXTENDED, FORKED, WHOLE
from zjournal.engine.cache.residency import Residency, Ticket
from zjournal.engine.cache.shelf import Shelf
from zjournal.engine.cache.staging import Into, Stages
from zjournal.errors import SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import format
from zjournal.snapshots.chunk import ChunkFile, read_header
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import TOKEN_BYTES
from zjournal.snapshots.index import Chunk, Found, shared_marks

SSD, HOST = "ssd", "host"
LOOKS_MAX = 4  # times that headers are read for one request
OWNER_STEPS_MAX = 256  # chunks looked at to name the snapshot that goes on elsewhere
SLOW, UNREADABLE = "recompute", "unreadable"  # why less was restored than there is
STALE = "fingerprint: "  # likewise, before the parts of it that have changed


class Stage(Enum):
    LOOKING = auto()
    READY = auto()
    READING = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Part:
    """What is read of one chunk: the blocks from `first` on, with the tokens up to position `upto` of the prompt."""

    chunk: Chunk
    tokens: bytes  # those of the prompt that it must begin with
    first: int
    upto: int
    blocks: list[int] = field(default_factory=list)
    held: Held | None = None  # where it lies in host memory
    done: bool = False

    @property
    def count(self) -> int:
        """Blocks that are read."""
        return blocks_for(self.upto - self.chunk.start) - self.first

    @property
    def file_bytes(self) -> int:
        """About so many are read of the file."""
        return self.chunk.file_bytes * self.count // blocks_for(self.chunk.tokens)

    @property
    def tier(self) -> str:
        return SSD if self.held is None else HOST


@dataclass(eq=False)
class Restore:
    """`base`: tokens that are resident in full blocks; `cached`: with those of a block that was copied."""

    request: str
    space: bytes
    prompt: bytes
    base: int
    cached: int
    stage: Stage = Stage.LOOKING
    headers: dict[bytes, bytes | None] = field(default_factory=dict)  # tokens of chunks, None: refused
    looks: int = 0
    found: Found | None = None
    parts: list[Part] = field(default_factory=list)
    left: int = 0  # parts that are being read
    begun_us: int = 0
    read_us: int = 0
    estimate_us: int = 0
    recompute_us: int = 0
    reason: str = ""  # why the match is not longer, if this knows better than the memory; as in Matched
    nearest: str = ""
    broken: bool = False  # a part failed: what was not begun is not read any more
    started: bool = False  # something may have been read into the blocks
    abandoned: bool = False
    namespace: str = ""

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def target(self) -> int:
        """The position up to which is read."""
        return self.parts[-1].upto

    @property
    def proved(self) -> list[Part]:
        """The parts that were read without a gap before them."""
        whole = next((at for at, part in enumerate(self.parts) if not part.done), len(self.parts))
        return self.parts[:whole]

    @property
    def reached(self) -> int:
        """Tokens that are resident now. Where nothing was read into the blocks, the copied ones count as well."""
        if self.started:
            proved = self.proved
            return proved[-1].upto if proved else self.base
        return self.cached

    def plan(self, found: Found) -> None:
        """Settles which parts are to be read for what was found."""
        self.found = found
        chunks = [*found.chunks, *([found.partial] if found.partial else [])]
        for chunk in chunks:
            upto = min(chunk.end, found.tokens)
            if upto <= self.base:
                continue
            first = max(self.base - chunk.start, 0) // BLOCK_TOKENS
            tokens = self.prompt[chunk.start * TOKEN_BYTES : upto * TOKEN_BYTES]
            self.parts.append(Part(chunk, tokens, first, upto))

    def assign(self, blocks: Sequence[int]) -> None:
        """Hands out the blocks behind the resident ones, part by part."""
        at = 0
        for part in self.parts:
            part.blocks = list(blocks[at : at + part.count])
            at += part.count
        assert at == len(blocks), (at, len(blocks))

    def told(self) -> list[wire.FromEngine]:
        """What each tier gave, in the order of the prompt."""
        parts = self.proved
        tiers = dict.fromkeys(part.tier for part in parts)
        return [self._told(tier, parts) for tier in tiers]

    def matched(self, prompt: int) -> wire.Matched:
        """What is reused of a prompt of so many tokens, that in device memory included."""
        gains = self._tokens()
        restored = sum(gains.values())
        tier = self.proved[-1].tier if restored else "device"
        weighed = (self.estimate_us, self.recompute_us) if self.reason == SLOW else (0, 0)  # else Restored tells them
        return wire.Matched(
            request=self.request,
            cached=self.reached,
            prompt=prompt,
            tier=tier,
            reason=self.reason,
            nearest=self.nearest,
            restored=restored,
            restored_host=gains[HOST],
            estimate_us=weighed[0],
            recompute_us=weighed[1],
        )

    def _tokens(self) -> dict[str, int]:
        """Tokens by the tier that gave them."""
        gains = {SSD: 0, HOST: 0}
        before = self.base
        for part in self.proved:
            gains[part.tier] += part.upto - before
            before = part.upto
        return gains

    def _told(self, tier: str, parts: Sequence[Part]) -> wire.Restored:
        of_tier = [part for part in parts if part.tier == tier]
        return wire.Restored(
            request=self.request,
            tier=tier,
            tokens=self._tokens()[tier],
            file_bytes=sum(part.file_bytes for part in of_tier),
            end=of_tier[-1].chunk.hash,
            space=self.space,
            read_us=self.read_us,
            estimate_us=self.estimate_us,
            recompute_us=self.recompute_us,
        )

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.abandoned = True


def loader(
    restore: Restore, part: Part, folder: Folder, layout: bytes, into: Into, keep: bool
) -> Callable[[], bool | Held]:
    """The work of a reading thread for one part: True when all its blocks are read and proved, False if given up.

    With `keep` it is a copy for host memory, if the whole chunk was read. It raises ChunkFault or SnapshotFault. A hit
    is proved here, by tokens; nothing else knows the blocks yet.
    """
    chunk = part.chunk
    parent = format.ROOT if chunk.parent is None else chunk.parent.hash
    start, held = chunk.start, part.held

    def load() -> bool | Held:
        if restore.abandoned or restore.broken:
            return False
        if held is not None:
            with into.open() as views:
                held.read(parent, start, part.tokens, views, part.first)
                into.store()
            return True
        with ChunkFile(folder, restore.space, chunk.hash) as file:
            file.prove(layout, parent, start, part.tokens)
            with into.open() as views:
                file.read(views, first=part.first)
                into.store()
                if keep and len(views) == len(file.header.sections) and part.upto == chunk.end:
                    return Held.copy(file.header.chunk, views)
        return True

    return load


class Restorer:
    """Finds, decides, reads; hands blocks out and takes them back. For the engine's thread."""

    def __init__(
        self,
        shelf: Shelf,
        residency: Residency,
        stages: Stages,
        layout: bytes,
        clock: Callable[[], int],
    ) -> None:
        """`clock` gives microseconds."""
        self._shelf = shelf
        self._residency = residency
        self._stages = stages
        self._layout = layout
        self._clock = clock

    def begin(self, ticket: Ticket, prompt: bytes) -> Restore | None:
        """Looks for more of a prompt than the ticket has; None if there is nothing to be had."""
        base = ticket.cached - (ticket.copy.count if ticket.copy else 0)
        restore = Restore(ticket.request, self._shelf.space(ticket.namespace), prompt, base, ticket.cached)
        restore.reason, restore.nearest, restore.namespace = ticket.reason, ticket.nearest, ticket.namespace
        if ticket.cached >= len(prompt) // TOKEN_BYTES - 1:
            return None
        self._look(restore)
        return None if restore.ended and restore.reason == ticket.reason else restore

    def read(self, restore: Restore, blocks: Sequence[int]) -> None:
        """Begins to read into the blocks behind the resident ones, as many as the parts take."""
        assert restore.stage is Stage.READY
        restore.stage, restore.started = Stage.READING, True
        restore.begun_us = self._clock()
        restore.left = len(restore.parts)
        restore.assign(blocks)
        self._residency.lend_own(blocks)
        for part in restore.parts:
            self._shelf.reading[part.chunk.hash] += 1
            into = self._stages.into(part.blocks)
            work = loader(restore, part, self._shelf.folder, self._layout, into, self._shelf.host.limit > 0)
            self._shelf.disk.read(work, self._part_end(restore, part))

    # --- looking -----------------------------------------------------------------------------------------

    def _look(self, restore: Restore) -> None:
        """Finds the longest beginning; where headers are missing, goes on when they are read."""
        unread: list[Chunk] = []

        def tokens_of(chunk: Chunk) -> bytes | None:
            known = self._shelf.tokens(chunk.hash) or restore.headers.get(chunk.hash)
            if known is None and chunk.hash not in restore.headers and self._is_worth_a_look(restore, chunk):
                unread.append(chunk)
            return known

        found = self._shelf.index.find(restore.space, restore.prompt, tokens_of)
        restore.looks += 1
        if not unread or restore.looks > LOOKS_MAX:
            self._decide(restore, found)
            return
        folder, space = self._shelf.folder, restore.space

        def work() -> list[bytes | SnapshotFault]:
            return [_tokens(folder, space, chunk) for chunk in unread]

        def then(told: list[bytes | SnapshotFault] | SnapshotFault) -> None:
            for at, chunk in enumerate(unread):
                one = told if isinstance(told, SnapshotFault) else told[at]
                if isinstance(one, SnapshotFault):
                    self._shelf.found_bad(space, chunk.hash, one)
                restore.headers[chunk.hash] = None if isinstance(one, SnapshotFault) else one
            if not restore.abandoned:
                self._look(restore)

        self._shelf.disk.read(work, then)

    def _is_worth_a_look(self, restore: Restore, chunk: Chunk) -> bool:
        """Whether what a chunk may share at most, by its marks, takes longer to compute than to read."""
        want = restore.prompt[chunk.start * TOKEN_BYTES : chunk.end * TOKEN_BYTES]
        shared = (shared_marks(chunk.marks, format.marks(want)) + 1) * BLOCK_TOKENS - 1
        gain = min(chunk.start + shared, chunk.end) - restore.cached
        gate = self._shelf.gate
        block_bytes = chunk.file_bytes // blocks_for(chunk.tokens)
        return gain > 0 and gate.lets_read(gate.read_us(block_bytes), gate.recompute_us(restore.cached, gain))

    def _decide(self, restore: Restore, found: Found) -> None:
        """Whether what was found is more than there is, and reading it is faster than computing it."""
        if self._shelf.probing and found.tokens > restore.cached:  # by then something else may be found
            self._shelf.after_probe(lambda: None if restore.abandoned else self._look(restore))
            return
        restore.stage = Stage.ENDED
        if found.near is not None:
            near = found.near
            self._shelf.events.append(wire.NearMiss(restore.request, near.snapshot, near.at, near.tokens))
        found = self._without_going(found)
        if found.tokens <= restore.cached:
            known = restore.reason not in (COLD, EXTENDED, FORKED)
            if not known and (changed := self._shelf.stale(restore.namespace, restore.prompt, restore.cached)):
                restore.reason, restore.nearest = STALE + changed, ""
            return
        restore.plan(found)
        for part in restore.parts:
            part.held = self._shelf.host.get(part.chunk.hash)
        gate = self._shelf.gate
        from_disk = sum(part.file_bytes for part in restore.parts if part.held is None)
        restore.estimate_us = gate.read_us(from_disk)
        restore.recompute_us = gate.recompute_us(restore.cached, found.tokens - restore.cached)
        if not gate.lets_read(restore.estimate_us, restore.recompute_us):
            gate.refused()
            restore.reason, restore.nearest = SLOW, _owner(restore.parts[-1].chunk)
            restore.parts = []
            return
        restore.stage = Stage.READY

    def _without_going(self, found: Found) -> Found:
        """What is found without what is about to be given up."""
        for at, chunk in enumerate(found.chunks):
            if self._shelf.is_going(chunk):
                return Found(found.chunks[:at], None, 0)
        if found.partial is not None and self._shelf.is_going(found.partial):
            return Found(found.chunks, None, 0)
        return found

    # --- reading -----------------------------------------------------------------------------------------

    def _part_end(self, restore: Restore, part: Part) -> Callable[[bool | Held | SnapshotFault], None]:
        def then(result: bool | Held | SnapshotFault) -> None:
            shelf = self._shelf
            self._residency.give_back(part.blocks, written=False)
            shelf.release(part.chunk.hash)
            if isinstance(result, SnapshotFault):
                restore.broken = True
                if part.held is None:
                    shelf.found_bad(restore.space, part.chunk.hash, result)
                else:
                    shelf.host.drop((part.chunk.hash,))
            elif isinstance(result, Held):
                shelf.host.put(result)
            part.done = result is True or isinstance(result, Held)
            restore.left -= 1
            if not restore.left:
                self._end(restore)

        return then

    def _end(self, restore: Restore) -> None:
        restore.stage = Stage.ENDED
        restore.read_us = max(self._clock() - restore.begun_us, 1)
        if restore.abandoned:
            return
        proved = restore.proved
        from_disk = sum(part.file_bytes for part in proved if part.held is None)
        self._shelf.gate.restored(from_disk, restore.read_us)
        if len(proved) < len(restore.parts):
            restore.reason, restore.nearest = UNREADABLE, ""
        else:
            self._explain(restore)
        if proved:
            last = proved[-1]
            chunks = tuple(reversed(list(last.chunk.path())))
            self._shelf.index.used(Found(chunks, None, 0), self._shelf.wall())

    def _explain(self, restore: Restore) -> None:
        """Why what was restored is not one token longer."""
        if None in restore.headers.values():
            restore.reason = UNREADABLE  # it might have been longer
            return
        last, usable = restore.parts[-1], len(restore.prompt) // TOKEN_BYTES - 1
        restore.nearest = _owner(last.chunk)
        if restore.target == usable:
            restore.reason = WHOLE
        elif restore.target < last.chunk.end or last.chunk.children:
            restore.reason = FORKED
        else:
            restore.reason = EXTENDED


def _tokens(folder: Folder, space: bytes, chunk: Chunk) -> bytes | SnapshotFault:
    """A chunk's tokens from its header, or why they cannot be had."""
    try:
        return read_header(folder, space, chunk.hash).chunk.tokens
    except SnapshotFault as fault:
        return fault


def _owner(chunk: Chunk) -> str:
    """A snapshot that ends with this chunk or goes through it, "" if none is near."""
    for _ in range(OWNER_STEPS_MAX):
        if chunk.ends:
            return next(reversed(chunk.ends.values())).name
        if not chunk.children:
            break
        chunk = chunk.children[-1][2]
    return ""
