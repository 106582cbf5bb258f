"""The cache against a naive model: any order of requests, with a pool so small that everything is contested.

The model keeps whole token prefixes in a dictionary and looks at all of them each time. It knows what must
be found, what must be given up and in which order; a record of what was computed into each block proves that
each table spells its request's tokens.
"""

from array import array
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zjournal.engine.cache.blocks import BLOCK_TOKENS, blocks_for
from zjournal.engine.cache.prefix import ATTENTION_TOKENS, USES_MAX
from zjournal.engine.cache.residency import Residency

POOL = 12
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)
namespaces = st.sampled_from(["a", "b"])


def packed(ids):
    return array("I", ids).tobytes()


def common(a, b):
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


@dataclass
class Kept:
    tick: int  # of the last use
    base: float  # the level then
    uses: int = 0  # requests that began with it


class Naive:
    """Kept prefixes by (namespace, tokens of the path), and what each is worth."""

    def __init__(self):
        self.kept = {}
        self.tick = 0
        self.level = 0.0

    @staticmethod
    def parent(key):
        namespace, path = key
        return namespace, path[: (len(path) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]

    @staticmethod
    def path(key):
        namespace, ids = key
        ends = [*range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS), len(ids)]
        return {(namespace, ids[:end]) for end in ends if end}

    def best(self, namespace, ids):
        return max((common(path, ids) for ns, path in self.kept if ns == namespace), default=0)

    def touch(self, key):
        self.tick += 1
        for one in self.path(key):
            self.kept[one].tick, self.kept[one].base = self.tick, self.level

    def use(self, key):
        self.touch(key)
        for one in self.path(key):
            self.kept[one].uses = min(self.kept[one].uses + 1, USES_MAX)

    def insert(self, key):
        siblings = [one for one in self.kept if self.parent(one) == self.parent(key)]
        for one in siblings:
            if one[1][: len(key[1])] == key[1]:
                return one
        shorter = [one for one in siblings if key[1][: len(one[1])] == one[1]]
        self.kept[key] = Kept(self.tick, self.level, max((self.kept.pop(one).uses for one in shorter), default=0))
        return key

    def worth(self, key):
        kept = self.kept[key]
        return kept.base + (1 + len(self.parent(key)[1]) / ATTENTION_TOKENS) * (1 + kept.uses)

    def evict(self, pinned):
        parents = {self.parent(one) for one in self.kept}
        leaves = [one for one in self.kept if one not in parents and one not in pinned]
        least = min(leaves, key=lambda one: (self.worth(one), self.kept[one].tick))
        self.level = max(self.level, self.worth(least))
        del self.kept[least]


class Request:
    def __init__(self, ticket, ids, room):
        self.ticket = ticket
        self.ids = array("I", ids)
        self.room = room
        self.computed = ticket.cached


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.residency = Residency(POOL)
        self.naive = Naive()
        self.running = []
        self.known = [[0]]
        self.content = {}
        self.number = 0
        self.states = 0

    def pinned(self):
        keys = set()
        for one in self.running:
            for block in range(one.ticket.filed):
                keys.add((one.ticket.namespace, tuple(one.ids[: (block + 1) * BLOCK_TOKENS])))
        return keys

    def real(self):
        keys = set()
        todo = list(self.residency._graph._roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.parent is not None:
                spelled = b"".join(one.key for one in reversed(list(node.path())))
                keys.add((node.namespace, tuple(array("I", spelled))))
        return keys

    def sync(self):
        """Follows the evictions of the operation that has just run, in the order the model says."""
        real = self.real()
        while len(self.naive.kept) > len(real):
            self.naive.evict(self.pinned())
        assert set(self.naive.kept) == real

    @rule(data=st.data(), namespace=namespaces, fresh=tokens, growth=st.integers(1, 40))
    def admit(self, data, namespace, fresh, growth):
        base = data.draw(st.sampled_from(self.known))
        ids = [*base[: data.draw(st.integers(0, len(base)))], *fresh][: POOL * BLOCK_TOKENS // 2]
        room = min(len(ids) + growth, POOL * BLOCK_TOKENS)
        best = self.naive.best(namespace, ids[:-1])
        self.number += 1
        ticket = self.residency.admit(str(self.number), namespace, packed(ids), room)
        if ticket is None:
            assert self.running, "an idle cache must admit"
            self.sync()
            return
        assert ticket.cached in (best, best // BLOCK_TOKENS * BLOCK_TOKENS)
        if ticket.copy is not None:
            source = self.content[ticket.copy.source]
            self.naive.use(self.key_of_partial(namespace, ids, ticket, source))
            self.content[ticket.copy.target] = source[: ticket.copy.count]
        else:
            self.naive.use((namespace, tuple(ids[: ticket.cached])))
        self.running.append(Request(ticket, ids, room))
        self.sync()

    def key_of_partial(self, namespace, ids, ticket, source):
        """Which kept prefix was copied from: the model may have several that share equally much."""
        start = (ticket.cached - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for key in self.naive.kept:
            if key[0] == namespace and key[1][:start] == tuple(ids[:start]) and len(key[1]) > start:
                here = key[1][start : start + BLOCK_TOKENS]
                if len(key[1]) <= start + BLOCK_TOKENS and list(here) == list(source[: len(here)]):
                    return key
        raise AssertionError("copied from a block that is not kept")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 30))
    def compute(self, data, count):
        one = data.draw(st.sampled_from(self.running))
        if one.computed == len(one.ids):
            if len(one.ids) == one.room:
                return
            one.ids.append(data.draw(st.integers(0, 2)))
        end = min(one.computed + count, len(one.ids))
        self.residency.extend(one.ticket, end)
        self.sync()
        for at in range(one.computed, end):
            row = self.content.setdefault(one.ticket.table[at // BLOCK_TOKENS], [])
            del row[at % BLOCK_TOKENS :]
            row.append(one.ids[at])
        one.computed = end
        before = one.ticket.filed
        self.residency.file(one.ticket, one.ids, end)
        for block in range(before, one.ticket.filed):
            self.naive.insert((one.ticket.namespace, tuple(one.ids[: (block + 1) * BLOCK_TOKENS])))
        self.sync()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), terminal=st.booleans())
    def release(self, data, terminal):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        terminal = terminal and one.computed > 0
        self.residency.release(one.ticket, one.ids, one.computed, terminal=terminal)
        key = (one.ticket.namespace, tuple(one.ids[: one.computed]))
        if one.computed:
            self.naive.touch(self.naive.insert(key) if one.computed % BLOCK_TOKENS else key)
        self.known.append(list(one.ids))
        self.sync()

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def forget(self, data):
        """Which blocks go is left to the cache; it must keep what runs, and leave no state of what is forgotten."""
        requests = data.draw(st.sets(st.integers(1, self.number).map(str), min_size=1, max_size=4))
        self.residency.forget(requests)
        before, after = set(self.naive.kept), self.real()
        assert (before - after).isdisjoint(self.pinned())
        for namespace, spelled in after - before:  # the beginning of a block whose end went
            cut = [key for key in before - after if key[0] == namespace and key[1][: len(spelled)] == spelled]
            like = max((self.naive.kept[key] for key in cut), key=lambda kept: kept.tick)
            self.naive.kept[namespace, spelled] = Kept(like.tick, like.base, like.uses)
        for key in before - after:
            del self.naive.kept[key]
        self.sync()
        for node in self.residency._graph._all():
            assert requests.isdisjoint(state.request for state in node.states.values())

    @invariant()
    def sound(self):
        self.residency.check([one.ticket for one in self.running])
        for change in self.residency.take_changes():
            self.states += 1 if change.change == "admit" else -1
            assert change.blocks == blocks_for(change.tokens)
        assert self.states == self.residency.states

    @invariant()
    def tables_spell_their_tokens(self):
        for one in self.running:
            spelled = []
            for block in one.ticket.table[: blocks_for(one.computed)]:
                spelled += self.content.get(block, [])[:BLOCK_TOKENS]
            assert spelled[: one.computed] == list(one.ids[: one.computed])

    def teardown(self):
        for one in self.running:
            self.residency.release(one.ticket, one.ids, one.computed, terminal=False)
        self.residency.check([])
        assert self.residency.free + self.residency.kept == POOL


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
