"""The rows of chunks and snapshots are a fold: they agree with the engine's index, and come out the same again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.journal.facts import open_journal, session, whole_turn
from tests.unit.journal.stored import back_up, ends, hashes, known, purge
from tests.unit.snapshots import chunks
from zjournal.journal import retention, snapshots
from zjournal.journal.verify import verify
from zjournal.sessions import snapshots as files
from zjournal.snapshots import format
from zjournal.snapshots.index import Index

NAMES = [f"r{number}" for number in range(4)]
STREAMS = [chunks.tokens(800, seed) for seed in range(2)]
PLACES = st.sampled_from([1, 16, 255, 256, 257, 300, 512, 600, 768, 800])
TB = format.TOKEN_BYTES


class Kept(RuleBasedStateMachine):
    """Four turns of two sessions, states that branch off each other, and an index that hears of all that happens."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.journal = open_journal(self.path)
        self.journal.append([session("s0"), session("s1")]).result()
        for number, name in enumerate(NAMES):
            self.journal.append(whole_turn(self.journal, name, session=f"s{number % 2}")).result()
        self.index = Index()
        self.data: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.journal.close()
        assert verify(self.path).fault is None
        self.folder.cleanup()

    @rule(name=st.sampled_from(NAMES), first=st.integers(0, 1), cut=PLACES, length=PLACES)
    def back_up(self, name: str, first: int, cut: int, length: int) -> None:
        data = (STREAMS[first][: cut * TB] + STREAMS[1 - first][cut * TB :])[: length * TB]
        there = self.journal.turn(name)
        assert back_up(self.journal, name, data) == (there is not None)
        if there is None:
            return
        fresh = [chunks.row(one, 4096) for one in chunks.split(data) if one.hash not in self.index.chunks]
        end = hashes(data)[-1]
        self.index.add("new", "s", chunks.NAMESPACE, end, fresh, 1)
        if name in self.index.snapshots:
            self.index.remove(name)
        self.index.add(name, "s", chunks.NAMESPACE, end, [], 1)
        self.index.remove("new")
        self.data[name] = data

    @rule(pick=st.integers(0, 30), rest=st.booleans())
    def purge(self, pick: int, rest: bool) -> None:
        """One chunk from the end of a branch, or all that is left of the branch."""
        leaves = sorted(one.hash for one in self.index.chunks.values() if not one.children)
        if not leaves:
            return
        at = self.index.chunks[leaves[pick % len(leaves)]]
        gone = [at]
        while rest and gone[-1].parent is not None and len(gone[-1].parent.children or ()) == 1:
            gone.append(gone[-1].parent)
        done = purge(self.journal, [one.hash for one in gone])
        assert done.hashes == tuple(one.hash for one in gone)
        for one in gone:
            self.index.drop(one.hash)

    @rule(pick=st.integers(0, 30))
    def purge_in_the_middle(self, pick: int) -> None:
        inner = sorted(one.hash for one in self.index.chunks.values() if one.children)
        if inner:
            assert purge(self.journal, [inner[pick % len(inner)]], whole=True).left

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        retention.delete(self.journal, "local", name).result()
        if name in self.index.snapshots:
            self.index.remove(name)

    @invariant()
    def the_rows_are_those_of_the_index(self) -> None:
        want = {one.hash: one.parent.hash if one.parent else format.ROOT for one in self.index.chunks.values()}
        assert known(self.journal) == want
        found = {name: (one.chunk.hash, one.tokens) for name, one in self.index.snapshots.items()}
        assert ends(self.journal) == found
        loaded, _ = files.load(self.journal)
        loaded.check()
        assert loaded.chunks.keys() == want.keys()
        assert snapshots.totals(self.journal).file_bytes == self.index.file_bytes


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
