"""Memory, disk and journal together, in any order: whatever happens, no request reads KV that is not its own.

Requests come and are cancelled; the disk does its work late, out of order, with faults and damaged files; the journal
answers late or refuses; turns are erased; the engine is killed at any moment and starts again on what was committed.
After each step every table spells its request's tokens and what the journal names is there; the limit holds, and in the
end everything that was held is given back.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.tiers import FILE_BYTES, Tiered, tokens
from zjournal.engine.cache.backup import RETRY_US
from zjournal.errors import SnapshotFault
from zjournal.link import wire

STEPS_MAX = 6000
BASES = [tokens(700, seed) for seed in range(2)]


class TiersMachine(RuleBasedStateMachine):
    @initialize(blocks=st.sampled_from([60, 150]), files=st.sampled_from([6, 10_000]), host=st.sampled_from([0, 4096]))
    def start(self, blocks, files, host):
        limit = files * FILE_BYTES
        self.folder = tempfile.TemporaryDirectory()
        self.engine = Tiered(Path(self.folder.name) / "s", blocks=blocks, limit=limit, host=host, queue_max=8)
        self.limit = limit
        self.number = 0
        self.damaged = False
        self.lives = []
        self.open = {}
        self.ended = []

    @rule(
        base=st.integers(0, 1),
        cut=st.sampled_from([10, 100, 300, 520, 700]),
        more=st.integers(0, 60),
        seed=st.integers(0, 5),
        output=st.integers(1, 30),
        session=st.sampled_from(["s", "t", ""]),
        namespace=st.sampled_from(["n", "n", "n", "m"]),
        steps=st.sampled_from([0, 2, 40, 40]),
    )
    def submit(self, base, cut, more, seed, output, session, namespace, steps):
        request = f"r{self.number}"
        self.number += 1
        prompt = [*BASES[base][:cut], *tokens(more, 100 + seed)]
        self.open[request] = None
        self.engine.submit(request, prompt, says=tokens(output, 7), session=session, namespace=namespace)
        self.run(steps)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), keep=st.booleans())
    def cancel(self, data, keep):
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))), keep)

    @rule(count=st.integers(1, 20))
    def go_on(self, count):
        self.run(count)

    def run(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def finish(self):
        """Everything goes well for a while, and comes to its end."""
        self.engine.disk.held, self.engine.answers = set(), True
        self.engine.hear([])
        self.engine.run(STEPS_MAX)

    @rule(kinds=st.sampled_from([(), (), ("read",), ("write",), ("read", "write")]), answers=st.sampled_from([1, 1, 0]))
    def hold(self, kinds, answers):
        self.engine.disk.held = set(kinds)
        self.engine.answers = bool(answers)

    @precondition(lambda self: self.engine.disk.queue)
    @rule(data=st.data(), fails=st.booleans())
    def late(self, data, fails):
        """One work of the disk, and perhaps it fails: whichever read, or the next write, for one thread writes."""

        def refuse(kind):
            raise SnapshotFault("no", errno=data.draw(st.sampled_from([5, 28, 24])))

        self.engine.audit = None
        self.engine.disk.fault = refuse if fails else None
        kinds = [kind for kind, *_ in self.engine.disk.queue]
        at = data.draw(st.integers(0, len(kinds) - 1))
        self.engine.disk.one(at if kinds[at] == "read" else kinds.index("write"))
        self.engine.disk.fault = None

    @precondition(lambda self: self.engine.unanswered)
    @rule()
    def refuse(self):
        """The journal refuses all that is open: what builds upon a snapshot that is refused would be as well."""
        self.engine.audit = None
        for event in self.engine.unanswered:
            self.engine.snapshots.take(wire.Refused(event.fact))
        self.engine.journal.refused = True
        self.engine.unanswered = []

    @rule(data=st.data())
    def damage(self, data):
        files = sorted(self.engine.files().values())
        if files:
            self.damaged = True
            path = data.draw(st.sampled_from(files))
            content = bytearray(path.read_bytes())
            if data.draw(st.booleans()):
                content[data.draw(st.integers(0, len(content) - 1))] ^= 0x10
                path.write_bytes(content)
            else:
                path.write_bytes(content[: len(content) // 2])

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def erase(self, data):
        request = data.draw(st.sampled_from(self.ended))
        self.ended.remove(request)
        journal = self.engine.journal
        if request not in journal.ends or self.engine.unanswered:
            return
        self.engine.audit = None
        self.engine.hear(self.engine.scheduler.forget([request]))
        space, gone = journal.erase(request)
        self.engine.snapshots.take(wire.Purge(space=b"", hashes=(), requests=(request,), cause="deleted"))
        self.engine.snapshots.take(wire.Purge(space=space, hashes=gone, requests=(), cause="deleted"))

    @precondition(lambda self: self.engine.told(wire.BackedUp))
    @rule()
    def kill(self):
        self.open = {}
        self.lives.append(self.engine)
        self.engine = self.engine.restart()

    @invariant()
    def sound(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.scheduler.check()
        for event in engine.events:
            if isinstance(event, (wire.Finished, wire.Failed)) and event.request in self.open:
                del self.open[event.request]
                self.ended.append(event.request)
        assert engine.file_bytes() <= self.limit, "the limit holds, whatever is on its way, put aside or left over"
        named = engine.journal.chunks.keys() - engine.snapshots.shelf.index.bad
        assert named <= engine.files().keys() | self.missing(), "a fact names a file that is not there"

    def missing(self):
        """What the engine itself found missing or put aside."""
        return {
            one.hash for life in [*self.lives, self.engine] for one in life.events if isinstance(one, wire.Quarantined)
        } | {
            hash_
            for life in [*self.lives, self.engine]
            for one in life.events
            if isinstance(one, wire.Reconciled)
            for _, hash_ in one.missing
        }

    def teardown(self):
        if hasattr(self, "engine"):
            with self.folder:
                self.end()

    def end(self):
        engine = self.engine
        engine.disk.held, engine.disk.fault, engine.answers = set(), None, True
        engine.hear([])
        engine.run(STEPS_MAX)
        assert engine.scheduler.idle
        assert engine.scheduler._residency.lent == 0
        engine.now += RETRY_US  # a disk that refused a write is tried again, and what was written behind that is told
        engine.run(STEPS_MAX)
        assert engine.scheduler._residency.free + engine.scheduler._residency.kept == engine.options["blocks"]
        assert engine.snapshots.shelf.facts_open == 0 and not engine.snapshots.shelf.writing
        told = [one.request for one in engine.told(wire.Matched)]
        assert len(told) == len(set(told)), "a match is told once"
        shelf = engine.snapshots.shelf
        if not shelf.leaving.unremoved and not self.damaged:
            assert engine.file_bytes() == shelf.used, "each file counts once"


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
