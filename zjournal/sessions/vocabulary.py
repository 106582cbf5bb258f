"""What each token id stands for, packed as the journal keeps it, so that prompts can be read without the model.

docs/journal.md has the format. Nothing here knows a tokenizer: it is bytes in, bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate

from zjournal.errors import JournalFault
from zjournal.link import wire

MAGIC = b"zjvocab\0"
VERSION = 1
TOKENS_MAX = 1 << 20
_HEAD = struct.Struct("<8sII")  # magic, version, number of tokens


def pack(tokens: Iterable[bytes]) -> bytes:
    """The tokens' bytes, in the order of their ids, as one content."""
    texts = list(tokens)
    assert len(texts) <= TOKENS_MAX, len(texts)
    return b"".join((_HEAD.pack(MAGIC, VERSION, len(texts)), wire.pack_ids(map(len, texts)), *texts))


class Vocabulary:
    """The bytes behind token ids. An id beyond the vocabulary, which a damaged prompt may hold, is a JournalFault."""

    def __init__(self, data: bytes) -> None:
        """`data` as `pack` makes it. Raises JournalFault: not a vocabulary, of a newer version, or damaged."""
        if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
            raise JournalFault("the content that should be a vocabulary is none")
        _, version, count = _HEAD.unpack_from(data)
        if version != VERSION:
            raise JournalFault(f"the vocabulary is of version {version}, this zjournal reads {VERSION}")
        lengths = data[_HEAD.size : _HEAD.size + 4 * count]
        if count > TOKENS_MAX or len(lengths) != 4 * count:
            raise JournalFault(f"the vocabulary is damaged: it cannot hold {count} tokens")
        self._starts = list(accumulate(wire.unpack_ids(lengths), initial=0))
        self._bytes = data[_HEAD.size + 4 * count :]
        if self._starts[-1] != len(self._bytes):
            raise JournalFault(f"the vocabulary is damaged: {len(self._bytes)} bytes, not {self._starts[-1]}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def token(self, token: int) -> bytes:
        """The bytes of one id. Raises JournalFault."""
        return self.decode((token,))

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`, one after another. Raises JournalFault."""
        starts, run = self._starts, self._bytes
        try:
            return b"".join([run[starts[token] : starts[token + 1]] for token in ids])
        except IndexError:
            raise JournalFault(f"a prompt holds token {max(ids)}, the vocabulary has {len(self)}") from None
