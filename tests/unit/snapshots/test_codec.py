"""The codecs: bytes come back as they were, and a frame that promises something else is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from zjournal.snapshots import codec
from zjournal.snapshots.codec import Packer, Unpacker
from zjournal.snapshots.format import Codec, Malformed, Reason, stored_max


def test_bytes_are_sorted_by_weight_and_back():
    block = bytes(range(16))
    told = codec.shuffled(memoryview(block)).tobytes()
    assert told == bytes([0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15])
    back = bytearray(16)
    codec.unshuffle(told, memoryview(back))
    assert back == block


def test_a_raw_block_is_not_copied():
    block = memoryview(bytearray(64))
    assert Packer(Codec.RAW).pack(block).obj is block.obj


def test_noise_takes_no_more_than_the_bound():
    for size in (4, 1000, 131_072, 737_280):
        noise = memoryview(np.random.default_rng(0).bytes(size))
        assert len(Packer(Codec.ZSTD).pack(noise)) <= stored_max(size)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no frame",
        zstandard.compress(bytes(60)),
        zstandard.compress(bytes(64)) + b"x",
        zstandard.compress(bytes(64))[:-1],
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)),
        zstandard.compress(bytes(1 << 26)),
    ],
    ids=["nothing", "no frame", "less", "more behind it", "cut", "size untold", "64 MiB"],
)
def test_a_frame_that_is_not_the_block_is_refused(frame):
    tracemalloc.start()
    try:
        with pytest.raises(Malformed) as refused:
            Unpacker().unpack(memoryview(frame), memoryview(bytearray(64)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.reason is Reason.FRAME
