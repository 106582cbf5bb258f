"""Residency: who may have device memory, and what is given up for it.

A request gets a ticket for the blocks that it asks for, its prompt and some growth, or none. The promise behind all
tickets is kept by one inequality: outstanding growth <= free + evictable blocks. So what is kept for later requests
is given up only when a block is really taken. A request that outgrows its ticket asks for more (`grow`); where there
is none, the scheduler preempts another one, whose blocks then count as kept.

What a request computes is filed in the prefix graph block by block, so that others can use it before it ends.
When it ends well, its last tokens are filed too and marked as a terminal state. Each state that becomes resident
or is given up is a numbered fact. Numbers only: copying and computing are the runner's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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

    def __init__(self, block_count: int) -> None:
        self._pool = BlockPool(block_count)
        self._graph = PrefixGraph(self._pool)
        self._growth = 0  # of all tickets
        self._fact = 0
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
            if self._pool.free == 0:
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

    # --- inside ------------------------------------------------------------------------------------------

    def _has_room(self, need: int) -> bool:
        return self._growth + need <= self._pool.free + self._graph.evictable

    def _changed(self, change: str, states: Iterable[State]) -> None:
        for state in states:
            self._fact += 1
            blocks = blocks_for(state.tokens)
            self._changes.append(CacheChanged(self._fact, change, state.namespace, state.request, state.tokens, blocks))

    def audit(self, tickets: Collection[Ticket]) -> Iterator[None]:
        """Asserts that free + held + kept is the pool, block by block, and that the promise to `tickets` holds.

        Pauses now and then; nothing may change in a pause.
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
        self._pool.check(holders)
        assert growth == self._growth
        assert self._growth <= self._pool.free + self._graph.evictable, "more was promised than there is"

    def check(self, tickets: Collection[Ticket]) -> None:
        """`audit` without pauses."""
        for _ in self.audit(tickets):
            pass
