"""The prefix graph: which blocks continue which, and so which KV a prompt may reuse.

Each namespace has a tree. A node is one kept block with the 1 to 16 tokens whose KV it holds; only a full block
has children. A child is found under the bytes of its own tokens, so that a hit is proved by comparing tokens at
every level, and no hash is ever trusted. Siblings are an antichain (none begins with another) and sorted, so
that the longest common beginning is found at one of two neighbours, however many branches there are.

Pinned paths belong to running requests and stay. The rest is given up from the leaves inwards, so that tails go
before the beginnings they share, and of the leaves the one goes first whose loss weighs least (GreedyDual, Young 1994,
with frequency): a leaf weighs what it takes to compute it again, at its depth, times the requests that used it, and
each use lifts it above what has been given up so far. So age alone does not make a long session the victim of short
ones, what many share stays longest, and nothing stays for ever. What is on its way to disk (`due`) goes after all that
is not, for it is lost otherwise. A terminal state is a mark on a node: who ended there,
and after how many tokens. When room is needed is residency's business.

Why a match is no longer than it is can be told as well (`why`). For that the last blocks that were given up are
remembered by the digest of what stood before them; that memory explains, and takes no part in a hit.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from zjournal.engine.cache.blocks import BLOCK_TOKENS, BlockPool
from zjournal.engine.cache.heap import Heap

TOKEN_BYTES = 4  # tokens are packed as uint32, in the machine's byte order
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
DIGEST_BYTES = 16
GIVEN_UP_MAX = 4096  # nodes below which blocks that were given up are remembered
GIVEN_UP_BELOW_MAX = 8  # blocks remembered below one node
OWNER_STEPS_MAX = 1024  # blocks looked at to name the state that goes on elsewhere
ATTENTION_TOKENS = 2048  # the depth at which a token's attention costs as much as all the rest of it
USES_MAX = 8  # uses that count for what a block is worth
DUE_WORTH = 1e12  # more than any level that evictions reach
STATES_PER_BRANCH_MAX = 16  # terminal states on one path; earlier ones lose their mark and keep their blocks
AUDIT_NODES = 256  # that are checked in one go

# Why a match is not one token longer; docs/journal.md explains them.
WHOLE, EXTENDED, FORKED, EVICTED, COLD, NO_ROOM = "whole", "extended", "forked", "evicted", "cold", "room"


@dataclass(frozen=True, slots=True)
class State:
    """A resident terminal state: `request` ended after `tokens` tokens, all of whose KV is kept."""

    request: str
    namespace: str
    tokens: int


@dataclass(eq=False, slots=True)
class Node:
    """A kept block. The root of a namespace is a node without tokens and without a block (-1)."""

    namespace: str
    parent: Node | None
    key: bytes
    block: int
    depth: int  # tokens before this node
    digest: bytes  # of the namespace and all tokens up to the end of this node
    used: int = 0  # tick of the last use, that of kept children not counted
    base: float = 0.0  # what the graph's `_level` was then
    uses: int = 0  # requests that began with it, at most USES_MAX
    pins: int = 0  # running requests whose path goes through or ends here
    place: int = -1  # in the heap of those that can be given up
    due: bool = False  # it is to be written to disk, and was not yet
    alive: bool = True
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)  # the children's keys, sorted
    states: dict[int, State] = field(default_factory=dict)  # tokens of this node used -> who ended there

    @property
    def evictable(self) -> bool:
        return self.alive and not self.children and not self.pins and self.parent is not None

    @property
    def worth(self) -> float:
        """What its loss weighs: recomputation in units of a block at depth 0, above the level of its last use."""
        return self.base + (1 + self.depth / ATTENTION_TOKENS) * (1 + self.uses) + DUE_WORTH * self.due

    def path(self) -> Iterator[Node]:
        """Yields this node and its ancestors, the root excluded, the deepest first."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    @property
    def owner(self) -> str:
        """A request whose terminal state ends in this node or below it, "" if none is near."""
        node = self
        for _ in range(OWNER_STEPS_MAX):
            if node.states:
                return next(reversed(node.states.values())).request
            if not node.children:
                break
            node = next(reversed(node.children.values()))
        return ""

    def nearest(self, want: bytes) -> tuple[Node | None, int]:
        """Returns the child that shares the longest beginning with `want`, and its length in tokens."""
        at = bisect_left(self.order, want)
        best, length = None, 0
        for key in self.order[max(at - 1, 0) : at + 1]:
            shared = shared_tokens(key, want)
            if shared > length:
                best, length = self.children[key], shared
        return best, length


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is kept: the full blocks from the root to `node`, then `partial_tokens` of `partial`."""

    node: Node
    blocks: list[int]
    partial: Node | None
    partial_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.partial_tokens


def shared_tokens(a: bytes, b: bytes) -> int:
    """Returns how many tokens two packed runs have in common from their start."""
    end = min(len(a), len(b))
    for at in range(0, end, TOKEN_BYTES):
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return end // TOKEN_BYTES


def _digest(before: bytes, more: bytes) -> bytes:
    return hashlib.blake2b(before + more, digest_size=DIGEST_BYTES).digest()


class PrefixGraph:
    """The trees of all namespaces over one pool; each node holds its block once."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[str, Node] = {}
        self._tick = 0
        self._leaves: Heap[Node] = Heap()  # those that can be given up, by worth and age
        self._level = 0.0  # the highest worth that was ever given up
        # Digest of a node -> blocks below it that were given up: their tokens, and whose state went with them.
        self._given_up: OrderedDict[bytes, list[tuple[bytes, str]]] = OrderedDict()
        self.nodes = 0  # kept blocks
        self.pinned = 0  # kept blocks on the path of a running request
        self.states = 0  # terminal states

    @property
    def evictable(self) -> int:
        """Blocks that can be had by evicting, sooner or later: all that no running request needs."""
        return self.nodes - self.pinned

    # --- finding -----------------------------------------------------------------------------------------

    def match(self, namespace: str, packed: bytes) -> Match:
        """Finds the longest kept beginning of a prompt, exact to the token; its last token is never reused.

        The last one is left out because its logits are wanted and only computing it gives them. The caller
        pins what it uses before it changes anything else.
        """
        usable = max(len(packed) - TOKEN_BYTES, 0)
        node = self._roots.get(namespace) or Node(namespace, None, b"", -1, 0, _digest(b"", namespace.encode()))
        blocks: list[int] = []
        at = 0
        while at + BLOCK_BYTES <= usable:
            child = node.children.get(packed[at : at + BLOCK_BYTES])
            if child is None:
                break
            node = child
            blocks.append(node.block)
            at += BLOCK_BYTES
        partial, tokens = node.nearest(packed[at : min(at + BLOCK_BYTES, usable)])
        return Match(node, blocks, partial, tokens)

    def why(self, match: Match, packed: bytes) -> tuple[str, str]:
        """Why a match of this prompt is not one token longer, and the request that this is about ("" if unknown)."""
        node, partial, length = match.node, match.partial, match.partial_tokens
        here = partial or node
        usable = len(packed) - TOKEN_BYTES
        if match.tokens * TOKEN_BYTES >= usable:
            return WHOLE, here.owner
        at = len(match.blocks) * BLOCK_BYTES
        for key, request in reversed(self._given_up.get(node.digest, ())):
            if shared_tokens(key, packed[at : min(at + BLOCK_BYTES, usable)]) > length:
                return EVICTED, request
        if node.parent is None and not node.children:
            return COLD, ""
        state = here.states.get(length or BLOCK_TOKENS)
        if state is not None:
            return EXTENDED, state.request
        if partial is None and node.children:
            return FORKED, next(reversed(node.children.values())).owner
        ended = partial is None or length * TOKEN_BYTES == len(partial.key)
        return (EXTENDED, "") if ended else (FORKED, here.owner)

    def path(self, namespace: str, packed: bytes) -> list[Node]:
        """The kept nodes that hold the packed tokens from their first on, as far as they do, in order."""
        node = self._roots.get(namespace)
        found: list[Node] = []
        for at in range(0, len(packed), BLOCK_BYTES):
            key = packed[at : at + BLOCK_BYTES]
            child = node.children.get(key) if node is not None else None
            if child is None and node is not None and len(key) < BLOCK_BYTES:
                longer, shared = node.nearest(key)
                child = longer if shared * TOKEN_BYTES == len(key) else None
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def set_due(self, node: Node, due: bool) -> None:
        """Notes that a node is to be written to disk, or need not be any more."""
        if node.due != due:
            self._leaves.remove(node)
            node.due = due
            self._offer(node)

    # --- pinning and use ---------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keeps the path to `node` from eviction, once more. A namespace exists from its first pin on."""
        root = self._roots.setdefault(node.namespace, node)
        assert node.alive and (node is root) == (node.parent is None)
        self._leaves.remove(node)
        for one in node.path():
            one.pins += 1
            self.pinned += one.pins == 1
        root.pins += 1

    def advance(self, child: Node) -> None:
        """Moves one pin from a node to its child; the path above stays as it is, so this costs nothing."""
        assert child.alive and child.parent is not None
        self._leaves.remove(child)
        child.pins += 1
        self.pinned += child.pins == 1

    def unpin(self, node: Node) -> None:
        """Takes back one `pin`."""
        assert node.alive
        for one in node.path():
            assert one.pins > 0
            one.pins -= 1
            self.pinned -= one.pins == 0
        self._offer(node)
        root = self._roots[node.namespace]
        root.pins -= 1
        self._drop_root(root)

    def use(self, node: Node) -> None:
        """A request begins with the path to `node`."""
        for one in node.path():
            one.uses = min(one.uses + 1, USES_MAX)
        self.touch(node)

    def touch(self, node: Node) -> None:
        """Marks the path to `node` as the latest. The nodes above learn of it when they become leaves themselves."""
        self._leaves.remove(node)
        self._tick += 1
        node.used = self._tick
        node.base = self._level
        self._offer(node)

    # --- growing -----------------------------------------------------------------------------------------

    def insert(self, parent: Node, key: bytes, block: int, like: Node | None = None) -> Node:
        """Keeps `block`, which holds the KV of the tokens `key` after `parent`; returns the node that covers them.

        Where a kept child covers the tokens already, that child is returned and `block` is not kept: the KV is
        the same. A partial child whose tokens begin `key` is absorbed: its states move, its block goes. The node is as
        old as `like`, else new. The caller touches, pins or offers it before anything else happens.
        """
        assert parent.alive
        assert parent.parent is None or len(parent.key) == BLOCK_BYTES
        assert 0 < len(key) <= BLOCK_BYTES and len(key) % TOKEN_BYTES == 0
        at = bisect_left(parent.order, key)
        if at < len(parent.order) and parent.order[at].startswith(key):
            return parent.children[parent.order[at]]
        depth = parent.depth + len(parent.key) // TOKEN_BYTES
        node = Node(parent.namespace, parent, key, block, depth, _digest(parent.digest, key))
        node.used, node.base, node.uses = (like.used, like.base, like.uses) if like else (self._tick, self._level, 0)
        if at > 0 and key.startswith(parent.order[at - 1]):
            shorter = parent.children[parent.order[at - 1]]
            assert not shorter.children and not shorter.pins
            node.states, shorter.states = shorter.states, {}
            node.uses = shorter.uses
            self._remove(shorter)
        self._pool.hold(block)
        self._leaves.remove(parent)
        parent.children[key] = node
        insort(parent.order, key)
        self.nodes += 1
        return node

    def mark(self, node: Node, tokens: int, request: str) -> list[State]:
        """Makes the first `tokens` of `node` the end of a terminal state; returns the states that this displaces.

        That is the one that ended at the same place, and the earliest on the way there where those are too many.
        """
        assert 0 < tokens <= len(node.key) // TOKEN_BYTES
        before = node.states.get(tokens)
        node.states[tokens] = State(request, node.namespace, node.depth + tokens)
        self.states += before is None
        return [*([before] if before else ()), *self._thin_out(node, tokens)]

    def _thin_out(self, node: Node, tokens: int) -> list[State]:
        """Takes the marks of all but the last states on the way to here; those where ways part stay."""
        lost = []
        count = 0
        for one in node.path():
            for at in sorted(one.states, reverse=True):
                if one is node and at > tokens:
                    continue
                count += 1
                if count > STATES_PER_BRANCH_MAX and len(one.children) <= 1:
                    lost.append(one.states.pop(at))
        self.states -= len(lost)
        return lost

    # --- giving up ---------------------------------------------------------------------------------------

    def evict(self) -> list[State]:
        """Gives up the leaf that is worth least; returns the terminal states that are lost with it.

        Something must be evictable. A state that ends further inside stays, and so does a beginning that another
        branch shares.
        """
        assert self.evictable > 0
        (worth, _), node = self._leaves.pop()
        self._level = max(self._level, worth - DUE_WORTH * node.due)
        lost = list(node.states.values())
        self._remember(node)
        self._remove(node)
        return lost

    def forget(self, requests: Collection[str]) -> list[State]:
        """Gives up the tails that only these requests left behind; returns the terminal states that are lost.

        A beginning that another branch or state goes through stays, and so does what a running request uses. Looks
        at every node: it is for what somebody asks for by hand.
        """
        wanted = frozenset(requests)
        ends = [
            (node, tokens) for node in self._all() for tokens, state in node.states.items() if state.request in wanted
        ]
        lost = [node.states.pop(tokens) for node, tokens in ends]
        self.states -= len(lost)
        for node, tokens in ends:
            if node.evictable and all(at < tokens for at in node.states):
                self._cut(node, max(node.states, default=0))
        self._given_up.clear()  # it holds tokens
        return lost

    def _cut(self, node: Node, tokens: int) -> None:
        """Gives up what a leaf keeps behind its first `tokens` tokens; if that is all, then what only led there too."""
        parent = node.parent
        assert parent is not None
        if tokens:
            states = node.states
            self._pool.hold(node.block)
            self.pin(parent)  # else a root without children would be forgotten
            self._remove(node)
            shorter = self.insert(parent, node.key[: tokens * TOKEN_BYTES], node.block, like=node)
            self._offer(shorter)
            self.states += len(states.keys() - shorter.states.keys())
            shorter.states = states | shorter.states
            self.unpin(parent)
            self._pool.release(node.block)
            return
        self._remove(node)
        while parent is not None and parent.evictable and not parent.states:
            node, parent = parent, parent.parent
            self._remove(node)

    def _all(self) -> Iterator[Node]:
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _remember(self, node: Node) -> None:
        """Keeps in mind what is given up, below its parent. What was given up below the node cannot be met any more."""
        assert node.parent is not None
        below = self._given_up.pop(node.digest, None)
        request = node.owner or (below[-1][1] if below else "")
        siblings = self._given_up.setdefault(node.parent.digest, [])
        siblings.append((node.key, request))
        del siblings[:-GIVEN_UP_BELOW_MAX]
        self._given_up.move_to_end(node.parent.digest)
        if len(self._given_up) > GIVEN_UP_MAX:
            self._given_up.popitem(last=False)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children and not node.pins
        self._leaves.remove(node)
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        node.alive = False
        parent.used = max(parent.used, node.used)
        parent.base = max(parent.base, node.base)
        self.nodes -= 1
        self.states -= len(node.states)
        self._pool.release(node.block)
        self._offer(parent)
        self._drop_root(parent)

    def _offer(self, node: Node) -> None:
        if node.place < 0 and node.evictable:
            self._leaves.add((node.worth, node.used), node)

    def _drop_root(self, root: Node) -> None:
        """Forgets a namespace that keeps nothing, so that memory does not grow with the namespaces ever seen."""
        if root.parent is None and not root.children and not root.pins:
            root.alive = False
            del self._roots[root.namespace]

    # --- checking ----------------------------------------------------------------------------------------

    def audit(self, held: dict[int, int]) -> Iterator[None]:
        """Asserts every invariant of the trees, and tells the blocks they hold (block -> 1); pauses now and then.

        Nothing may change in a pause.
        """
        pinned = states = 0
        todo = list(self._roots.values())
        self._leaves.check()
        assert all(key == (node.worth, node.used) for key, node in self._leaves)
        evictable = 0
        for number in itertools.count(1):
            if not todo:
                break
            node = todo.pop()
            self._check_node(node)
            evictable += node.evictable
            if node.parent is not None:
                assert node.block not in held, node.block
                held[node.block] = 1
                pinned += node.pins > 0
                states += len(node.states)
            todo.extend(node.children.values())
            if number % AUDIT_NODES == 0:
                yield
        assert (len(held), pinned, states) == (self.nodes, self.pinned, self.states)
        assert evictable == len(self._leaves)
        assert len(self._given_up) <= GIVEN_UP_MAX

    def check(self) -> dict[int, int]:
        """Asserts every invariant of the trees; returns the blocks they hold (block -> 1)."""
        held: dict[int, int] = {}
        for _ in self.audit(held):
            pass
        return held

    def _check_node(self, node: Node) -> None:
        assert node.alive
        assert node.order == sorted(node.children)
        for a, b in zip(node.order, node.order[1:], strict=False):
            assert not b.startswith(a), "siblings must not begin with one another"
        assert node.pins >= sum(child.pins for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node and child.key == key and child.namespace == node.namespace
            assert child.depth == node.depth + len(node.key) // TOKEN_BYTES
        if node.parent is None:
            assert self._roots[node.namespace] is node and not node.key and not node.states
            return
        assert 0 < len(node.key) <= BLOCK_BYTES and len(node.key) % TOKEN_BYTES == 0
        assert not node.children or len(node.key) == BLOCK_BYTES, "a partial block is a leaf"
        assert (node.place >= 0) == node.evictable, "a leaf nobody could evict, or one that may not be"
        assert 0 <= node.base <= self._level and 0 <= node.uses <= USES_MAX
        assert node.pins == 0 or len(node.key) == BLOCK_BYTES
        for tokens, state in node.states.items():
            assert 0 < tokens <= len(node.key) // TOKEN_BYTES
            assert state.tokens == node.depth + tokens
