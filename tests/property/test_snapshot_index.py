"""The index and the plans against a model that keeps whole states and compares them token by token."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.snapshots import chunks
from zjournal.snapshots import format, index, plan
from zjournal.snapshots.index import Index
from zjournal.snapshots.plan import Rates, Stakes, Why

TB = format.TOKEN_BYTES
NAMESPACES = [format.digest("model", tenant) for tenant in ("a", "b")]
STREAMS = [chunks.tokens(700, seed) for seed in range(3)]
# A state goes along one stream, then another; the places are those where something changes.
PLACES = st.sampled_from([0, 1, 15, 16, 17, 100, 250, 255, 256, 257, 272, 300, 511, 512, 513, 600, 700])
STATES = st.builds(
    lambda first, second, cut, length: (STREAMS[first][: cut * TB] + STREAMS[second][cut * TB :])[: length * TB],
    st.integers(0, 2),
    st.integers(0, 2),
    PLACES,
    PLACES,
).filter(bool)


@dataclass
class Kept:
    """A snapshot as the model knows it: all its tokens, as far as they are left."""

    session: str
    namespace: bytes
    data: bytes
    pinned: bool = False


def starts(data: bytes) -> list[bytes]:
    """What the files of a state hold, each with everything before it."""
    step = format.CHUNK_TOKENS_BYTES
    return [data[: min(end, len(data))] for end in range(step, len(data) + step, step)]


class SnapshotIndex(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.kept: dict[str, Kept] = {}
        self.bad: set[tuple[bytes, bytes]] = set()
        self.headers: dict[bytes, bytes] = {}
        self.clock = 0

    # --- the model ---------------------------------------------------------------------------------------

    def files(self) -> set[tuple[bytes, bytes]]:
        return {(one.namespace, start) for one in self.kept.values() for start in starts(one.data)}

    def leaves(self) -> list[tuple[bytes, bytes]]:
        files = self.files()
        inner = {(namespace, starts(data)[-2]) for namespace, data in files if len(starts(data)) > 1}
        return sorted(files - inner)

    def hash_of(self, file: tuple[bytes, bytes]) -> bytes:
        return chunks.split(file[1], namespace=file[0])[-1].hash

    def readable(self, namespace: bytes) -> list[bytes]:
        return [
            data
            for place, data in self.files()
            if place == namespace and not any((place, start) in self.bad for start in starts(data))
        ]

    def drop(self, file: tuple[bytes, bytes]) -> set[str]:
        """What becomes of the snapshots when a file goes; the names of those that are gone."""
        namespace, data = file
        ended = [name for name, one in self.kept.items() if (one.namespace, one.data) == file]
        before = starts(data)[-2] if len(starts(data)) > 1 else b""
        rest = {name: one for name, one in self.kept.items() if name not in ended}
        needed = any(one.namespace == namespace and before in starts(one.data) for one in rest.values())
        gone = {name for name in ended if not before or (needed and not self.kept[name].pinned)}
        for name in ended:
            self.kept[name].data = before
        for name in gone:
            del self.kept[name]
        self.bad.discard(file)
        return gone

    # --- what happens ------------------------------------------------------------------------------------

    @rule(data=STATES, namespace=st.sampled_from(NAMESPACES), session=st.sampled_from("xyz"))
    def keep(self, data, namespace, session):
        self.clock += 1
        made = chunks.split(data, namespace=namespace)
        rows = [chunks.row(one) for one in made if one.hash not in self.index.chunks or self.index.chunks[one.hash].bad]
        self.headers |= {one.hash: one.tokens for one in made}
        self.index.add(f"n{self.clock}", session, namespace, made[-1].hash, rows, self.clock)
        self.kept[f"n{self.clock}"] = Kept(session, namespace, data)
        self.bad -= {(namespace, start) for start in starts(data)}

    @precondition(lambda self: self.kept)
    @rule(pick=st.randoms(use_true_random=False))
    def remove(self, pick):
        name = pick.choice(sorted(self.kept))
        before = self.files()
        del self.kept[name]
        gone = {one.hash for one in self.index.remove(name)}
        lost = before - self.files()
        assert gone == {self.hash_of(one) for one in lost}
        self.bad -= lost

    @precondition(lambda self: self.kept)
    @rule(pick=st.randoms(use_true_random=False))
    def drop_a_leaf(self, pick):
        file = pick.choice(self.leaves())
        assert set(self.index.drop(self.hash_of(file))) == self.drop(file)

    @precondition(lambda self: self.kept)
    @rule(pick=st.randoms(use_true_random=False))
    def refuse(self, pick):
        file = pick.choice(sorted(self.files()))
        self.bad.add(file)
        self.index.refuse(self.hash_of(file))

    @precondition(lambda self: self.kept)
    @rule(pick=st.randoms(use_true_random=False), pinned=st.booleans(), kept=PLACES)
    def pin_or_go_on(self, pick, pinned, kept):
        name = pick.choice(sorted(self.kept))
        self.kept[name].pinned = pinned
        self.index.pin(name, pinned)
        self.index.went_on(name, kept)

    @rule(part=st.floats(0, 1), live=st.sets(st.sampled_from("xyz")), foreign=st.booleans(), pick=st.data())
    def make_room(self, part, live, foreign, pick):
        keep = {self.hash_of(file) for file in self.files() if pick.draw(st.integers(0, 9)) == 0}
        limit = int(self.index.file_bytes * part)
        stakes = Stakes(self.clock, Rates(1000), live, keep, lambda one: foreign and one == NAMESPACES[1])
        before = set(self.index.chunks)
        made = plan.make_room(self.index, 0, limit, stakes)
        assert made == plan.make_room(self.index, 0, limit, stakes) and set(self.index.chunks) == before
        needed = set()
        for name, one in self.kept.items():
            if one.pinned:
                needed |= {chunk.hash for chunk in self.index.snapshots[name].chunk.path()}
        for hash_ in keep:
            needed |= {chunk.hash for chunk in self.index.chunks[hash_].path()}
        assert not needed & {one.hash for one in made.deletions}
        assert made.fits or {one.hash for one in made.deletions} == before - needed
        files = {self.hash_of(file): file for file in self.files()}
        size = self.index.file_bytes
        for one in made.deletions:
            assert set(one.snapshots) == set(self.index.chunks[one.hash].ends)
            assert one.why is not Why.LIVE or live & {self.index.snapshots[name].session for name in one.snapshots}
            assert set(self.index.drop(one.hash)) == self.drop(files[one.hash])
        assert self.index.file_bytes == size - made.freed
        assert made.fits == (self.index.file_bytes <= limit)

    @rule()
    def sweep(self):
        """What a sweep takes costs a session that may come back no more than a part of a block."""
        held = [
            (one.namespace, one.data)
            for name, one in self.kept.items()
            if self.index.snapshots[name].kept is None and one.data in self.readable(one.namespace)
        ]
        files = {self.hash_of(file): file for file in self.files()}
        for one in plan.sweep(self.index, Stakes(self.clock, Rates(1000))).deletions:
            assert one.why in (Why.BAD, Why.ABANDONED, Why.SUPERSEDED)
            assert set(self.index.drop(one.hash)) == self.drop(files[one.hash])
        for namespace, data in held:
            assert self.found(namespace, data + bytes(8)) > len(data) // TB - format.BLOCK_TOKENS

    def found(self, namespace, prompt) -> int:
        return self.index.find(namespace, prompt, lambda one: self.headers[one.hash]).tokens

    @rule(data=STATES, more=st.booleans(), namespace=st.sampled_from(NAMESPACES))
    def find(self, data, more, namespace):
        prompt = data + (chunks.tokens(40, 99) if more else b"")
        reads = []

        def tokens_of(one):
            reads.append(one)
            return self.headers[one.hash]

        found = self.index.find(namespace, prompt, tokens_of)
        usable = prompt[:-TB]
        shared = [index.shared_tokens(one, usable) for one in self.readable(namespace)]
        assert found.tokens == max(shared, default=0)
        assert len(reads) <= index.CANDIDATES_MAX
        whole = chunks.split(prompt, namespace=namespace)[: len(found.chunks)]
        assert [one.hash for one in found.chunks] == [one.hash for one in whole]

    @invariant()
    def agrees(self):
        self.index.check()
        assert {name: one.tokens * TB for name, one in self.index.snapshots.items()} == {
            name: len(one.data) for name, one in self.kept.items()
        }
        assert self.index.chunks.keys() == {self.hash_of(file) for file in self.files()}
        assert self.index.bad == {self.hash_of(file) for file in self.bad}


SnapshotIndex.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestSnapshotIndex = SnapshotIndex.TestCase
