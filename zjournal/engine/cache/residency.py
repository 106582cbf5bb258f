"""Residency: who may have device memory, and what is given up for it.

A request gets a ticket for the blocks that it asks for, its prompt and some growth, or none. The promise behind all
tickets is kept by one inequality: outstanding growth <= free + evictable blocks. So what is kept for later requests
is given up only when a block is really taken. A request that outgrows its ticket asks for more (`grow`); where there
is none, the scheduler preempts another one, whose blocks then count as kept.

What a request computes is filed in the prefix graph block by block, so that others can use it before it ends.
When it ends well, its last tokens are filed too and marked as a terminal state. Each state that becomes resident
or is given up is a numbered fact. Numbers only: copying and computing are the runner's.

Blocks that a disk writes from or reads into are lent: nobody else gets them before they are given back, whatever
becomes of the request or the node that they belong to. A kept block that is lent does not help anyone by being given
up, so it does not count as evictable meanwhile.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zjournal.engine.cache.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from zjournal.engine.cache.prefix import NO_ROOM, Node, PrefixGraph, State
from zjournal.link.wire import CacheChanged


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the KV of the first `count` tokens of block `source` into block `target`."""

    source: int
    target: int
    count: int


@dataclass(eq=False, slots=True)
class Ticket:
    """What one running request holds. The first `filed` blocks of `table` are the path to `node` in the graph."""

    request: str
    namespace: str
    table: list[int]
    node: Node
    cached: int  # tokens reused, the copied ones included
    growth: int  # blocks it may still take
    reason: str  # why no more is reused
    nearest: str  # the request that this is about, "" if unknown
    copy: Copy | None = None  # to be done before its first step

    @property
    def filed(self) -> int:
        return self.node.depth // BLOCK_TOKENS + (self.node.parent is not None)


class Residency:
    """The pool and the prefix graph under one admission rule."""

    def __init__(self, block_count: int, facts: Iterator[int] | None = None) -> None:
        """`facts` numbers what is told, if others number theirs with it."""
        self._pool = BlockPool(block_count)
        self._graph = PrefixGraph(self._pool)
        self._growth = 0  # of all tickets
        self._facts = facts if facts is not None else itertools.count(1)
        self._writing: Counter[int] = Counter()  # blocks that are lent to be written to disk
        self._reading: Counter[int] = Counter()  # blocks that are lent to be read into
        self._changes: list[CacheChanged] = []
        self.releases = 0  # grows whenever room may have grown

    @property
    def capacity(self) -> int:
        """Tokens that the pool can hold."""
        return self._pool.count * BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        return self._pool.count

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def kept(self) -> int:
        """Blocks in the prefix graph, those that running requests share included."""
        return self._graph.nodes

    @property
    def states(self) -> int:
        return self._graph.states

    @property
    def lent(self) -> int:
        """Blocks that a disk is at."""
        return len(self._writing) + len(self._reading)

    def take_changes(self) -> list[CacheChanged]:
        """Returns the facts since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # --- a request's way through -------------------------------------------------------------------------

    def admit(self, request: str, namespace: str, prompt: bytes, tokens: int) -> Ticket | None:
        """Finds what of the packed `prompt` is kept and reserves room for `tokens` tokens in all; None if it must wait.

        Where everything else is idle it never returns None: `tokens` is at most `capacity`.
        """
        assert len(prompt) // 4 <= tokens <= self.capacity, (len(prompt) // 4, tokens, self.capacity)
        match = self._graph.match(namespace, prompt)
        self._graph.pin(match.node)
        need = blocks_for(tokens) - len(match.blocks)
        partial = match.partial
        if partial is not None:
            # The source of the copy must outlive the taking of its target; where that is one block too many,
            # its tokens are computed instead.
            self._graph.pin(partial)
            if not self._has_room(need):
                self._graph.unpin(partial)
                partial = None
        if not self._has_room(need):
            self._graph.unpin(match.node)
            return None
        # Before anything is given up for this request, or that would be found as the reason.
        reason, nearest = self._graph.why(match, prompt) if partial is match.partial else (NO_ROOM, "")
        self._graph.use(partial or match.node)
        cached = len(match.blocks) * BLOCK_TOKENS
        ticket = Ticket(request, namespace, match.blocks, match.node, cached, need, reason, nearest)
        self._growth += need
        for block in ticket.table:
            self._pool.hold(block)
        if partial is not None:
            self.extend(ticket, ticket.cached + match.partial_tokens)
            ticket.copy = Copy(partial.block, ticket.table[-1], match.partial_tokens)
            ticket.cached += match.partial_tokens
            self._graph.unpin(partial)
        return ticket

    def grow(self, ticket: Ticket, tokens: int) -> bool:
        """Reserves room for `tokens` tokens in all; False, and nothing is changed, if there is none."""
        need = blocks_for(tokens) - len(ticket.table) - ticket.growth
        if need > 0:
            if not self._has_room(need):
                return False
            ticket.growth += need
            self._growth += need
        return True

    def reach(self, ticket: Ticket) -> int:
        """Tokens that the table can be made to hold now, with nothing given up and no promise to others touched."""
        spare = max(self._pool.free - (self._growth - ticket.growth), 0)
        return (len(ticket.table) + spare) * BLOCK_TOKENS

    def trim(self, ticket: Ticket, tokens: int) -> None:
        """Takes the blocks behind the first `tokens` tokens back into the growth: their guesses proved wrong."""
        while len(ticket.table) > blocks_for(tokens):
            self._pool.release(ticket.table.pop())
            ticket.growth += 1
            self._growth += 1

    def extend(self, ticket: Ticket, tokens: int) -> None:
        """Makes the table reach to `tokens` tokens, out of the ticket's growth; evicts where nothing is free."""
        while len(ticket.table) < blocks_for(tokens):
            assert ticket.growth > 0, "more tokens than were reserved"
            while self._pool.free == 0:  # once, unless the block is lent
                self._changed("evict", self._graph.evict())
            ticket.table.append(self._pool.take())
            ticket.growth -= 1
            self._growth -= 1

    def file(self, ticket: Ticket, ids: array[int], computed: int) -> None:
        """Puts the full blocks among the first `computed` tokens into the graph, where others find them.

        Where another request was first with the same tokens, its block takes the place of ours: the KV is equal.
        """
        for at in range(ticket.filed, computed // BLOCK_TOKENS):
            key = ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS].tobytes()
            node = self._graph.insert(ticket.node, key, ticket.table[at])
            self._graph.advance(node)
            ticket.node = node
            if node.block != ticket.table[at]:
                self._pool.hold(node.block)
                self._pool.release(ticket.table[at])
                ticket.table[at] = node.block
                self.releases += 1

    def release(self, ticket: Ticket, ids: array[int], computed: int, *, terminal: bool) -> None:
        """Takes everything back. The KV of the first `computed` tokens stays until its room is needed.

        `terminal`: the request ended well, and what is kept is a terminal state.
        """
        self.file(ticket, ids, computed)
        end, tokens = ticket.node, BLOCK_TOKENS
        if computed % BLOCK_TOKENS:
            tokens = computed % BLOCK_TOKENS
            key = ids[computed - tokens : computed].tobytes()
            end = self._graph.insert(ticket.node, key, ticket.table[computed // BLOCK_TOKENS])
        self._graph.touch(end)
        if terminal:
            assert computed > 0
            self._changed("evict", self._graph.mark(end, tokens, ticket.request))
            self._changed("admit", [State(ticket.request, ticket.namespace, computed)])
        self._graph.unpin(ticket.node)
        for block in ticket.table:
            self._pool.release(block)
        self._growth -= ticket.growth
        ticket.table, ticket.growth = [], 0
        self.releases += 1

    def forget(self, requests: Collection[str]) -> None:
        """Gives up the terminal states of these requests, and the blocks that nothing else needs."""
        lost = self._graph.forget(requests)
        self._changed("evict", lost)
        self.releases += bool(lost)

    # --- disk --------------------------------------------------------------------------------------------

    def resident(self, namespace: str, packed: bytes) -> list[int]:
        """The kept blocks that hold the packed tokens from their first on, as far as they do."""
        return [node.block for node in self._graph.path(namespace, packed)]

    def set_due(self, namespace: str, packed: bytes, start: int, due: bool) -> None:
        """The kept blocks of these tokens, from block `start` on, are to be written to disk, or need not be now."""
        for node in self._graph.path(namespace, packed)[start:]:
            self._graph.set_due(node, due)

    def lend_kept(self, blocks: Sequence[int]) -> bool:
        """Lends kept blocks to be written to disk; False, and nothing is changed, if their room is promised already."""
        self._lend(self._writing, blocks)
        if not self._has_room(0):
            self._take_back(self._writing, blocks)
            return False
        return True

    def lend_own(self, blocks: Sequence[int]) -> None:
        """Lends blocks of a ticket, which nobody else knows yet, to be read into."""
        self._lend(self._reading, blocks)

    def give_back(self, blocks: Sequence[int], *, written: bool) -> None:
        """The disk is done with blocks that were lent (`written`: by `lend_kept`)."""
        self._take_back(self._writing if written else self._reading, blocks)
        self.releases += 1

    def _lend(self, lent: Counter[int], blocks: Sequence[int]) -> None:
        for block in blocks:
            lent[block] += 1
            self._pool.hold(block)

    def _take_back(self, lent: Counter[int], blocks: Sequence[int]) -> None:
        for block in blocks:
            assert lent[block] > 0, block
            lent[block] -= 1
            if not lent[block]:
                del lent[block]
            self._pool.release(block)

    # --- inside ------------------------------------------------------------------------------------------

    def _has_room(self, need: int) -> bool:
        # Of those that are lent, only what nobody but the graph holds counts as evictable, and so is to be taken off.
        tied = sum(self._pool.holders(block) == lent + 1 for block, lent in self._writing.items())
        return self._growth + need <= self._pool.free + self._graph.evictable - tied

    def _changed(self, change: str, states: Iterable[State]) -> None:
        for state in states:
            told = (change, state.namespace, state.request, state.tokens, blocks_for(state.tokens))
            self._changes.append(CacheChanged(next(self._facts), *told))

    def audit(self, tickets: Collection[Ticket]) -> Iterator[None]:
        """Asserts that free + held + kept is the pool, block by block, and that the promise to `tickets` holds.

        Pauses now and then. In a pause nothing may change but what is lent: while nothing runs the disk is given work.
        """
        kept: dict[int, int] = {}
        yield from self._graph.audit(kept)
        holders = Counter(kept)
        growth = 0
        for ticket in tickets:
            assert len(set(ticket.table)) == len(ticket.table), "a block twice in one table"
            assert ticket.filed <= len(ticket.table)
            assert [node.block for node in ticket.node.path()] == ticket.table[: ticket.filed][::-1]
            assert ticket.node.pins > 0 or ticket.node.parent is None
            holders.update(ticket.table)
            growth += ticket.growth
        yield
        holders.update(self._writing)
        holders.update(self._reading)
        self._pool.check(holders)
        assert growth == self._growth
        assert self._has_room(0), "more was promised than there is"

    def check(self, tickets: Collection[Ticket]) -> None:
        """`audit` without pauses."""
        for _ in self.audit(tickets):
            pass
