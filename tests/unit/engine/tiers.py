"""A scheduler with snapshots, driven step by step: tokens stand for KV, a disk does what it is told, a journal answers.

Every step proves that the table of each slice spells its request's tokens, byte by byte, so a wrong restore is seen at
once. `restart` is a kill: a new engine with empty memory, over the same folder, that knows what the journal committed.
"""

import random
from array import array

import msgspec

from tests.unit.engine.driver import ask
from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.cache.snapshots import Settings, Snapshots
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Sampled
from zjournal.errors import SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import format

BLOCK_BYTES = 4 * BLOCK_TOKENS
FILE_BYTES = format.HEADER_BYTES + 16 * format.PAGE_BYTES  # of a full chunk of such blocks
KEY = bytes(range(32))
MANY = 1 << 30


class Disk:
    """Does nothing by itself: `finish` runs what was begun, in order, unless it is held."""

    def __init__(self):
        self.queue = []  # kind, work, then
        self.held = set()  # kinds that wait
        self.fault = None  # called with the kind before each work; may raise

    @property
    def pending(self):
        return len(self.queue)

    def read(self, work, then):
        self.queue.append(("read", work, then))

    def write(self, work, then):
        self.queue.append(("write", work, then))

    def finish(self):
        count = 0
        while (at := next((at for at, one in enumerate(self.queue) if one[0] not in self.held), None)) is not None:
            self.one(at)
            count += 1
        return count

    def one(self, at):
        """Runs the work that stands there, and what follows from it."""
        kind, work, then = self.queue.pop(at)
        try:
            if self.fault is not None:
                self.fault(kind)
            result = work()
        except SnapshotFault as fault:
            result = fault
        then(result)

    def close(self):
        self.queue = []


class Journal:
    """What was committed: chunks, and where each request's snapshot ends."""

    def __init__(self):
        self.chunks = {}  # hash -> (space, wire.Chunk)
        self.ends = {}  # request -> (space, end)
        self.sessions = {}
        self.bad = set()  # chunks whose files were put aside or are missing, until they are written again
        self.refused = False  # something was: so what builds on that is refused as well
        self.erased = set()  # requests and chunks: what is of them, or builds on them, is refused

    def commit(self, event):
        """Takes a fact; False if it is of a turn that was erased, or stands on what was refused or went with one."""
        match event:
            case wire.BackedUp() if event.request in self.erased:
                return False
            case wire.BackedUp() if (self.refused or self.stood(event) & self.erased) and not self.stands(event):
                return False
            case wire.BackedUp():
                for chunk in event.chunks:
                    assert chunk.parent == format.ROOT or chunk.parent in self.chunks, "a chunk without its parent"
                    self.chunks[chunk.hash] = (event.space, chunk)
                    self.bad.discard(chunk.hash)
                assert event.end in self.chunks
                self.ends[event.request] = (event.space, event.end)
            case wire.PurgePlanned():
                for hash_ in event.hashes:
                    self.drop(hash_)
        return True

    def note(self, event):
        """Takes a fact that wants no answer."""
        match event:
            case wire.Quarantined():
                self.bad.add(event.hash)
            case wire.Reconciled():
                self.bad.update(hash_ for _, hash_ in event.missing)

    def stood(self, event):
        """The chunks that it names and does not bring."""
        return {event.end, *(chunk.parent for chunk in event.chunks)} - {chunk.hash for chunk in event.chunks}

    def stands(self, event):
        known = set(self.chunks) | {format.ROOT}
        for chunk in event.chunks:
            if chunk.parent not in known:
                return False
            known.add(chunk.hash)
        return event.end in known

    def erase(self, request):
        """Gives a turn up, and what no other needs; returns the space and those chunks, the last first."""
        space = self.ends[request][0]
        own = list(self.path(request))
        del self.ends[request]
        kept = {hash_ for other in self.ends for hash_ in self.path(other)}
        gone = [hash_ for hash_ in own if hash_ not in kept]
        for hash_ in gone:
            del self.chunks[hash_]
        self.erased |= {request, *gone}
        return space, tuple(gone)

    def drop(self, hash_):
        _, chunk = self.chunks[hash_]
        assert not self.needed_by(hash_), "a chunk was given up that another continues"
        del self.chunks[hash_]
        for request, (space, end) in list(self.ends.items()):
            if end == hash_:
                others = [one for one, (_, at) in self.ends.items() if at == chunk.parent and one != request]
                if chunk.parent == format.ROOT or others or self.needed_by(chunk.parent):
                    del self.ends[request]
                else:
                    self.ends[request] = (space, chunk.parent)

    def needed_by(self, hash_):
        return [one for one, (_, chunk) in self.chunks.items() if chunk.parent == hash_]

    def path(self, request):
        _, at = self.ends[request]
        while at != format.ROOT:
            yield at
            at = self.chunks[at][1].parent

    def known(self):
        """What an engine is told at its start."""
        needed = {hash_ for request in self.ends for hash_ in self.path(request)}
        pages = {}
        for hash_, (space, chunk) in self.chunks.items():
            if hash_ in needed:
                told = msgspec.structs.replace(chunk, bad=hash_ in self.bad)
                pages.setdefault(space, ([], []))[0].append(told)
        for request, (space, end) in self.ends.items():
            session = self.sessions.get(request) or "\0" + request
            pages[space][1].append(wire.Snapshot(request, session, end, 0, 1, False))
        told = [wire.Known(space=space, chunks=tuple(a), snapshots=tuple(b)) for space, (a, b) in pages.items()]
        return [*told, wire.Known(space=bytes(32), last=True)]


class Tiered:
    """An engine with a disk and a journal; `answers` off: the journal does not commit."""

    learns = False  # whether times say anything

    def __init__(
        self, folder, *, journal=None, disk=None, blocks=256, limit=MANY, host=0, codec="raw", foreign=(), **options
    ):
        self.folder = folder
        self.options = {"blocks": blocks, "limit": limit, "host": host, "codec": codec, **options}
        self.journal = journal or Journal()
        self.disk = disk or Disk()
        self.now = 0
        self.audit = None  # in the middle of looking at all invariants, as the worker does it: bit by bit
        self.says, self.prompts, self.events, self.steps = {}, {}, [], 0
        self.answers = True
        self.unanswered = []
        self.memory = {}
        self.layout, self.block_bytes, self.fingerprint = "test", BLOCK_BYTES, "weights"
        self.computed = {}
        limits = {"context": 8192, "max_running": 4, "prefill_tokens": 512, "queue_max": 64, **options}
        settings = Settings(folder, KEY, limit, codec, host)
        self.scheduler = Scheduler(
            Limits(**limits),
            blocks,
            lambda token: bytes([token % 256]),
            snapshots=lambda residency, facts: Snapshots(
                settings, residency, self, facts, self.clock, self.wall, learns=self.learns, disk=self.disk
            ),
        )
        self.snapshots = self.scheduler.snapshots
        for page in self.journal.known():
            self.snapshots.take(page)
        self.snapshots.take(wire.Foreign(foreign))
        self.hear(self.snapshots.take_events())

    def clock(self):
        return self.now

    def wall(self):
        return 1_700_000_000_000_000 + self.now

    def block_memory(self, block):
        return memoryview(self.memory.setdefault(block, bytearray(BLOCK_BYTES)))

    def clear_behind(self, memory, tokens):
        memory[4 * tokens :] = bytes(len(memory) - 4 * tokens)

    def restart(self, **changed):
        """kill -9: what was not committed never was."""
        options = self.options | changed
        return type(self)(self.folder, journal=self.journal, **options)

    # --- requests ---

    def submit(self, request, prompt, *, says=(10, 11, 12, 13), **options):
        self.says[request], self.prompts[request] = list(says), list(prompt)
        self.computed[request] = 0
        if options.get("session"):
            self.journal.sessions[request] = options["session"]
        options.setdefault("max_tokens", len(says))
        self.audit = None
        self.hear(self.scheduler.submit(ask(request, prompt, **options), self.now))

    def cancel(self, request, keep=False):
        self.audit = None
        self.hear(self.scheduler.cancel(request, self.now, keep))
        self.scheduler.check()

    def step(self):
        """What the worker does between two looks at its socket; whether anything was computed."""
        if self.snapshots.settle():
            self.audit = None
        worked = False
        if self.scheduler.idle:
            self.look()
        else:
            plan = self.scheduler.plan(self.now)
            for copy in plan.copies:
                self.memory[copy.target] = bytearray(self.memory[copy.source])
            self.hear(plan.events)
            if plan.slices:
                worked = True
                results = [result for part in plan.slices if (result := self.compute(part)) is not None]
                self.hear(self.scheduler.apply(plan, results, self.now))
        self.now += 1000
        self.steps += 1
        self.tell(flush=False)
        self.scheduler.check()
        return worked

    def look(self):
        """A part of an audit; what it waits for may begin before the next."""
        self.audit = self.audit or self.scheduler.audit()
        if next(self.audit, self) is self:
            self.audit = None

    def tell(self, *, flush):
        self.snapshots.pump(idle=self.scheduler.idle, flush=flush)
        self.hear(self.snapshots.take_events())

    def compute(self, part):
        self.computed[part.request] += len(part.tokens)
        for place, token in enumerate(part.tokens, part.start):
            row = self.memory.setdefault(part.table[place // BLOCK_TOKENS], bytearray(BLOCK_BYTES))
            if place % BLOCK_TOKENS == 0:
                row[:] = bytes(BLOCK_BYTES)
            at = 4 * (place % BLOCK_TOKENS)
            row[at : at + 4] = token.to_bytes(4, "little")
        self.prove(part)
        if part.sampling is None:
            return None
        return Sampled((self.says[part.request][part.index],))

    def prove(self, part):
        end = part.start + len(part.tokens)
        spelled = b"".join(bytes(self.memory[block]) for block in part.table)[: 4 * end]
        wanted = array("I", [*self.prompts[part.request], *self.says[part.request]][:end]).tobytes()
        assert spelled == wanted, f"the table of {part.request} does not spell its tokens"

    def hear(self, events):
        for event in events:
            self.events.append(event)
            self.journal.note(event)
            if isinstance(event, (wire.BackedUp, wire.PurgePlanned)):
                self.unanswered.append(event)
        while self.answers and self.unanswered:
            event = self.unanswered.pop(0)
            answer = wire.Committed if self.journal.commit(event) else wire.Refused
            self.audit = None
            self.snapshots.take(answer(event.fact))
            self.hear(self.snapshots.take_events())

    def run(self, limit=3000):
        """Until nothing is left to be done, on disk neither."""
        quiet = 0
        while quiet < 3:
            worked = self.step()
            idle = self.scheduler.idle and not self.disk.queue and not worked
            quiet = quiet + 1 if idle else 0
            limit -= 1
            assert limit > 0, "it does not come to an end"
        self.check()

    def serve(self, request, prompt, **options):
        """Runs one request to its end; returns what was told of its match."""
        self.submit(request, prompt, **options)
        self.run()
        return self.matched(request)

    def serve_held(self, request, prompt, **options):
        """Runs one request to its end while a disk that is held has begun to write it."""
        self.submit(request, prompt, **options)
        while not self.of(wire.Finished, request):
            self.step()
        self.step()
        assert self.scheduler._residency.lent, "nothing is being written"

    # --- looking ---

    def of(self, kind, request=None):
        return [one for one in self.events if isinstance(one, kind) and request in (None, one.request)]

    def told(self, kind):
        return [one for one in self.events if isinstance(one, kind)]

    def matched(self, request):
        (matched,) = self.of(wire.Matched, request)
        return matched

    def files(self):
        return {bytes.fromhex(path.stem): path for path in self.folder.glob("*/??/*.zjc")}

    def file_bytes(self):
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def check(self):
        """Nothing is promised that is not there, and nothing lies there that nobody knows."""
        self.scheduler.check()
        bad = self.snapshots.shelf.index.bad
        missing = self.snapshots.shelf.index.chunks.keys() - self.files().keys() - bad
        assert not missing, "the index names a file that is not there"
        assert not self.scheduler._residency.lent or self.disk.queue


def tokens(count, seed):
    """Token ids as no other seed has them."""
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]
