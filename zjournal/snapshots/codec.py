"""How a block becomes the bytes of a section and back: as it is, or its bytes sorted by weight and packed by zstd.

The numbers of KV differ most in their last bytes and least in sign and exponent. Put side by side, the bytes of one
weight repeat each other, and zstd finds what it does not find in the numbers as they stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zstandard

from zjournal.snapshots.format import BLOCK_BYTES_STEP, Codec, Malformed, Reason

if TYPE_CHECKING:
    import numpy as np

LEVEL = 1  # a higher one took longer and saved nothing: docs/log.md
ELEMENT_BYTES = 4

assert ELEMENT_BYTES == BLOCK_BYTES_STEP


class Packer:
    """Packs blocks with one codec. Not for two threads at once."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.level = LEVEL if codec is Codec.ZSTD else 0
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)

    def pack(self, block: memoryview) -> memoryview:
        """The bytes to store; of a raw block, its own memory."""
        if self.codec is Codec.RAW:
            return block
        return memoryview(self._compressor.compress(shuffled(block).data))


class Unpacker:
    """Unpacks blocks. Not for two threads at once."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()

    def unpack(self, stored: memoryview, into: memoryview) -> None:
        """Fills `into` with the block that a frame holds.

        Raises Malformed if the frame does not hold exactly that many bytes; its size is looked at before memory is
        taken. Afterwards `into` may hold anything.
        """
        try:
            told = zstandard.frame_content_size(stored)
            if told != len(into):
                raise Malformed(Reason.FRAME, f"holds {told} bytes, not {len(into)}")
            plain = self._decompressor.decompress(stored, max_output_size=len(into), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Malformed(Reason.FRAME, f"cannot be unpacked ({error})") from None
        if len(plain) != len(into):
            raise Malformed(Reason.FRAME, f"has {len(plain)} bytes, not {len(into)}")
        unshuffle(plain, into)


def shuffled(block: memoryview) -> np.ndarray:
    """The first bytes of all elements, then the second, third and fourth; uint8 [4, elements]."""
    import numpy as np  # here and below: who only looks at headers, as every `zj serve` does, goes without

    return np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, ELEMENT_BYTES).T)


def unshuffle(plain: bytes, into: memoryview) -> None:
    """The inverse of shuffled."""
    import numpy as np

    planes = np.frombuffer(plain, np.uint8).reshape(ELEMENT_BYTES, -1)
    elements = np.frombuffer(into, np.uint8).reshape(-1, ELEMENT_BYTES)
    for at, plane in enumerate(planes):  # one plane after the other: sixteen times faster than all at once
        elements[:, at] = plane
