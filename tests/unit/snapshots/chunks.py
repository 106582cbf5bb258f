"""Small chunks for tests: tokens, blocks of made-up KV, files of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from zjournal.snapshots import chunk, format
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Chunk, Codec, Header
from zjournal.snapshots.index import Row

NAMESPACE = format.digest("a model", "local")
LAYOUT = format.digest("fp32", "2 layers")
BLOCK_BYTES = 8192


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def tokens(count: int, seed: int = 0) -> bytes:
    return packed(random.Random(seed).choices(range(50_000), k=count))


def make(
    data: bytes, parent: bytes = format.ROOT, start: int = 0, block_bytes: int = BLOCK_BYTES, **other: bytes
) -> Chunk:
    known = {"namespace": NAMESPACE, "layout": LAYOUT, "extra": format.PLAIN, **other}
    return Chunk(parent=parent, start=start, tokens=data, block_bytes=block_bytes, **known)


def kv(made: Chunk, seed: int = 0) -> list[memoryview]:
    """Numbers as KV has them, one block after the other."""
    dice = np.random.default_rng(seed)
    count = made.block_bytes // 4
    return [memoryview(dice.normal(size=count).astype(np.float32)).cast("B") for _ in range(made.blocks)]


def store(folder: Folder, made: Chunk, codec: Codec = Codec.RAW, seed: int = 0) -> Header:
    return chunk.write(folder, made, kv(made, seed), Packer(codec))


def room(made: Chunk, blocks: int | None = None) -> list[memoryview]:
    """Memory to read into, aligned where the blocks' size lets it be."""
    size = made.block_bytes
    memory = chunk.aligned(size * made.blocks)
    return [memory[at * size : (at + 1) * size] for at in range(made.blocks if blocks is None else blocks)]


def split(data: bytes, **other: bytes) -> list[Chunk]:
    """A state's chunks: full ones and a tail."""
    step = format.CHUNK_TOKENS_BYTES
    found: list[Chunk] = []
    for at in range(0, len(data), step):
        parent = found[-1].hash if found else format.ROOT
        found.append(make(data[at : at + step], parent, at // format.TOKEN_BYTES, **other))
    return found


def row(made: Chunk, file_bytes: int | None = None) -> Row:
    size = made.blocks * made.block_bytes + format.HEADER_BYTES if file_bytes is None else file_bytes
    return Row(made.hash, made.parent, made.count, size, format.marks(made.tokens), made.extra == format.PLAIN)
