"""The block pool: which blocks are free, and how many holders each of the others has.

A block is the KV of 16 tokens in all layers. Here it is a number; the tensors behind it belong to the runner.
A holder is a running request's table or a node of the prefix graph. A block without a holder is free.
"""

from __future__ import annotations

from collections.abc import Mapping

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Returns how many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """`count` blocks, numbered from 0. Taking from an empty pool is a bug: the caller reserves first."""

    def __init__(self, count: int) -> None:
        assert count > 0, count
        self.count = count
        self._holders = [0] * count
        # A stack, low numbers on top: a lightly used pool touches little of the device's memory.
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self) -> int:
        """Returns a free block, now with one holder."""
        assert self._free, "the pool is empty: something was admitted without room"
        block = self._free.pop()
        assert self._holders[block] == 0, block
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Adds a holder to a block that has one."""
        assert self._holders[block] > 0, block
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Takes one holder away; the block is free when none is left."""
        assert self._holders[block] > 0, block
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def check(self, expected: Mapping[int, int]) -> None:
        """Asserts that the blocks have exactly the `expected` holders (block -> count) and that the rest is free."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(expected) == self.count, (len(free), len(expected), self.count)
        for block, holders in enumerate(self._holders):
            assert holders == expected.get(block, 0), (block, holders, expected.get(block, 0))
            assert (block in free) == (holders == 0), block
