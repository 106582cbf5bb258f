"""Chunks in host memory, in front of the disk: those that were written or read last, within a number of bytes.

What comes from here is checked as what comes from a file is: place in the chain, tokens, and a checksum for each block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from zjournal.errors import ChunkFault
from zjournal.snapshots import format
from zjournal.snapshots.format import Reason


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk in memory: all its blocks, one behind the other, and a checksum for each."""

    chunk: format.Chunk
    memory: np.ndarray  # uint8 [blocks, block_bytes]
    checksums: tuple[bytes, ...]

    @classmethod
    def copy(cls, chunk: format.Chunk, blocks: Sequence[memoryview]) -> Held:
        """A copy of the blocks as they are now."""
        memory = np.empty((len(blocks), chunk.block_bytes), np.uint8)
        for row, block in zip(memory, blocks, strict=True):
            np.copyto(row, np.frombuffer(block, np.uint8))
        return cls(chunk, memory, tuple(xxhash.xxh3_128_digest(row.data) for row in memory))

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def read(self, parent: bytes, start: int, tokens: bytes, into: Sequence[memoryview], first: int) -> None:
        """Fills `into` with the blocks from `first` on, checked. Raises ChunkFault."""
        chunk = self.chunk
        if (chunk.parent, chunk.start) != (parent, start):
            raise self._refused(Reason.PARENT, "continues another chunk")
        if not chunk.tokens.startswith(tokens):
            raise self._refused(Reason.TOKENS, "has other tokens")
        for at, block in enumerate(into, first):
            np.copyto(np.frombuffer(block, np.uint8), self.memory[at])
            if xxhash.xxh3_128_digest(block) != self.checksums[at]:
                raise self._refused(Reason.SECTION, f"block {at} does not match its checksum")

    def _refused(self, reason: Reason, detail: str) -> ChunkFault:
        return ChunkFault(f"host memory, {self.chunk.hash.hex()}", reason, detail)


class HostCache:
    """At most `limit` bytes of chunks; what was used last stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._held: OrderedDict[bytes, Held] = OrderedDict()

    def get(self, hash_: bytes) -> Held | None:
        """The chunk, and it counts as used."""
        held = self._held.get(hash_)
        if held is not None:
            self._held.move_to_end(hash_)
        return held

    def put(self, held: Held) -> None:
        """Keeps a chunk, if it fits at all."""
        if held.nbytes > self.limit:
            return
        self.drop((held.chunk.hash,))
        self._held[held.chunk.hash] = held
        self.nbytes += held.nbytes
        while self.nbytes > self.limit:
            _, oldest = self._held.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def drop(self, hashes: Collection[bytes]) -> None:
        """Gives up these chunks, as far as they are here."""
        for hash_ in hashes:
            held = self._held.pop(hash_, None)
            self.nbytes -= held.nbytes if held is not None else 0

    def check(self) -> None:
        """Asserts the sum."""
        assert self.nbytes == sum(held.nbytes for held in self._held.values()) <= self.limit
