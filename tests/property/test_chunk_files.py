"""A damaged chunk file is a ChunkFault and nothing else: no other error, no memory by its numbers, never wrong KV."""

from __future__ import annotations

import itertools
import os
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.snapshots import chunks
from zjournal.errors import ChunkFault
from zjournal.snapshots import chunk, format
from zjournal.snapshots.chunk import ChunkFile
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Codec, Reason

MEMORY_MAX = 4 << 20
SAMPLES = 600  # bytes of the data in which a bit is turned

FILES = [
    (Codec.RAW, 256, 4096),
    (Codec.RAW, 20, 4100),
    (Codec.ZSTD, 256, 4096),
    (Codec.ZSTD, 20, 4100),
]


@pytest.fixture(params=FILES, ids=lambda one: f"{one[0].name}-{one[1]}-{one[2]}")
def stored(request, tmp_path):
    """A folder, a chunk in it, its path, and the bytes of its file."""
    codec, count, size = request.param
    made = chunks.make(chunks.tokens(count), block_bytes=size)
    with Folder(tmp_path / "snapshots") as folder:
        chunks.store(folder, made, codec)
        path = folder.where(made.namespace, made.hash)
        yield folder, made, path, path.read_bytes()


def refusal(folder, made) -> ChunkFault:
    with pytest.raises(ChunkFault) as refused:
        chunk.verify(folder, made.namespace, made.hash)
    return refused.value


def test_a_bit_turned_in_any_byte_of_the_header_is_refused(stored):
    folder, made, path, data = stored
    with path.open("r+b", buffering=0) as file:
        for at in range(format.HEADER_BYTES):
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
            assert refusal(folder, made).reason in (Reason.MAGIC, Reason.VERSION, Reason.HEADER), at
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert chunk.verify(folder, made.namespace, made.hash).chunk == made


def test_a_bit_turned_in_the_data_is_refused_and_the_block_is_named(stored):
    folder, made, path, data = stored
    sections = format.decode(data).sections
    places = set(range(format.HEADER_BYTES, len(data), max(len(data) // SAMPLES, 1)))
    places |= {one.offset for one in sections} | {one.end - 1 for one in sections}
    with path.open("r+b", buffering=0) as file:
        for at in sorted(places):
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
            refused = refusal(folder, made)
            assert refused.reason == Reason.SECTION
            assert refused.block == next(index for index, one in enumerate(sections) if at < one.end)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert chunk.verify(folder, made.namespace, made.hash).chunk == made


def test_a_cut_anywhere_is_refused(stored):
    folder, made, path, data = stored
    ends = {one.offset for one in format.decode(data).sections} | {one.end for one in format.decode(data).sections}
    sizes = {0, 1, 7, 8, 12, 55, 255, 256, 1279, 1280, 4079, 4080, 4095, 4096, 4097, len(data) // 2}
    sizes |= {end + more for end, more in itertools.product(ends, (-4096, -1, 0, 1))}
    for size in sorted(size for size in sizes if 0 <= size < len(data)):
        path.write_bytes(data[:size])
        assert refusal(folder, made).reason == Reason.CUT, size
    for more in (b"\0", bytes(4096), data):
        path.write_bytes(data + more)
        assert refusal(folder, made).reason == Reason.TRAILING


def test_two_files_that_changed_places_are_both_refused(stored):
    folder, made, path, data = stored
    for other in (
        chunks.make(chunks.tokens(made.count, 1), block_bytes=made.block_bytes),
        chunks.make(made.tokens, block_bytes=made.block_bytes, extra=b"x" * 32),
        chunks.make(made.tokens, parent=b"p" * 32, start=256, block_bytes=made.block_bytes),
    ):
        chunks.store(folder, other)
        there = folder.where(other.namespace, other.hash)
        path.write_bytes(there.read_bytes())
        there.write_bytes(data)
        assert refusal(folder, made).reason == refusal(folder, other).reason == Reason.HASH


def test_sections_that_changed_places_are_refused(stored):
    folder, made, path, data = stored
    first, second, *_ = format.decode(data).sections
    damaged = bytearray(data)
    size = min(first.end - first.offset, second.end - second.offset)
    damaged[first.offset : first.offset + size] = data[second.offset : second.offset + size]
    damaged[second.offset : second.offset + size] = data[first.offset : first.offset + size]
    path.write_bytes(damaged)
    assert refusal(folder, made).reason == Reason.SECTION


EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 17), st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8))), max_size=4
)


@given(EDITS, st.integers(0, 1 << 17))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_any_damage_is_refused_or_is_none(stored, edits, cut):
    folder, made, path, data = stored
    damaged = bytearray(data)
    for at, new in edits:
        at %= len(data)
        damaged[at : at + len(new)] = new[: len(data) - at]
    if cut % 3 == 0:
        del damaged[len(data) - cut % len(data) :]
    path.write_bytes(damaged)
    into = chunks.room(made)
    tracemalloc.start()
    try:
        with ChunkFile(folder, made.namespace, made.hash) as file:
            file.prove(made.layout, made.parent, made.start, made.tokens)
            file.read(into)
    except ChunkFault as refused:
        assert refused.path == str(path) and damaged != data
    else:
        assert damaged == data
        assert [bytes(one) for one in into] == [bytes(one) for one in chunks.kv(made)]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY_MAX


@given(
    st.sampled_from(Codec),
    st.integers(1, 256),
    st.integers(1, 3000).map(lambda count: count * 4),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=60
)
def test_whatever_is_written_is_read(tmp_path, codec, count, size, kind, dice):
    """Noise, zeros, KV, and few different bytes; some of the blocks or all of them."""
    fill = [dice.randbytes, bytes, lambda size: bytes(chunks.kv(one)[0])[:size], lambda size: b"ab" * (size // 2)][kind]
    one = chunks.make(chunks.tokens(count), block_bytes=size)
    blocks = [memoryview(fill(size)) for _ in range(one.blocks)]
    with Folder(tmp_path / "snapshots") as folder:
        header = chunk.write(folder, one, blocks, Packer(codec))
        into = chunks.room(one, dice.randint(1, one.blocks))
        with ChunkFile(folder, one.namespace, one.hash) as file:
            assert file.header == header
            file.read(into, direct=dice.random() < 0.5)
        assert [bytes(got) for got in into] == [bytes(block) for block in blocks[: len(into)]]
        assert folder.size(one.namespace, one.hash) == header.file_bytes
