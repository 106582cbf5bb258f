"""What each token id stands for, packed as the journal keeps it, so that prompts can be read without the model.

docs/journal.md has the format. Nothing here knows a tokenizer: it is bytes in, bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from zjournal.errors import JournalFault
from zjournal.link import wire
from zjournal.sessions.memory import Memory

MAGIC = b"zjvocab\0"
VERSION = 2
WITHOUT_CONTROL = 1  # the version that does not say which tokens are control tokens
TOKENS_MAX = 1 << 20
SPELLED_BYTES_MAX = 8 << 20  # of runs that are remembered, with their ids,
SPELLED_MAX = 8_192  # at most so many,
SPELLED_TOKENS_MIN = 16  # each of so many tokens or more,
SPELLED_BYTES = 200  # and beside its ids and text about so large
_HEAD = struct.Struct("<8sII")  # magic, version, number of tokens


def pack(tokens: Iterable[bytes], control: Iterable[int] = ()) -> bytes:
    """The tokens' bytes, in the order of their ids, and the ids of the control tokens, as one content."""
    texts, special = list(tokens), sorted(control)
    assert len(texts) <= TOKENS_MAX, len(texts)
    assert not special or 0 <= special[0] <= special[-1] < len(texts), "a control token that is none"
    numbers = wire.pack_ids([*map(len, texts), len(special), *special])
    return b"".join((_HEAD.pack(MAGIC, VERSION, len(texts)), numbers, *texts))


class Vocabulary:
    """The bytes behind token ids. An id beyond the vocabulary, which a damaged prompt may hold, is a JournalFault."""

    def __init__(self, data: bytes) -> None:
        """`data` as `pack` makes it. Raises JournalFault: not a vocabulary, of a newer version, or damaged."""
        if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
            raise JournalFault("the content that should be a vocabulary is none")
        _, version, count = _HEAD.unpack_from(data)
        if version not in (WITHOUT_CONTROL, VERSION):
            raise JournalFault(f"the vocabulary is of version {version}, this zjournal reads {VERSION}")
        if count > TOKENS_MAX:
            raise JournalFault(f"the vocabulary is damaged: it cannot hold {count} tokens")
        lengths, rest = _numbers(data[_HEAD.size :], count)
        special: Sequence[int] = ()
        if version != WITHOUT_CONTROL:
            (number,), rest = _numbers(rest, 1)
            special, rest = _numbers(rest, number)
        self._starts = list(accumulate(lengths, initial=0))
        self._bytes = rest
        if self._starts[-1] != len(self._bytes):
            raise JournalFault(f"the vocabulary is damaged: {len(self._bytes)} bytes, not {self._starts[-1]}")
        if any(token >= count for token in special):
            raise JournalFault("the vocabulary is damaged: it names control tokens that it does not have")
        self.control = frozenset(special)  # their ids; none are known in a vocabulary of version 1

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

    def tokens(self) -> Tokens:
        """What a dialect can be built with, to read what was written."""
        return Tokens({self.token(token).decode("utf-8", "replace"): token for token in sorted(self.control)})


class Spelling:
    """What runs of tokens spell; long ones are remembered by tenant, for histories come again. For one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._texts: Memory[bytes] = Memory(SPELLED_BYTES_MAX, SPELLED_MAX)

    def of(self, tenant: str) -> Callable[[Sequence[int]], bytes]:
        """What decodes ids as Vocabulary does, for one tenant."""
        owner = tenant.encode() + b"\0"

        def text_of(ids: Sequence[int]) -> bytes:
            if len(ids) < SPELLED_TOKENS_MIN:
                return self._vocabulary.decode(ids)
            key = owner + wire.pack_ids(ids)
            text = self._texts.get(key)
            if text is None:
                text = self._vocabulary.decode(ids)
                self._texts.put(key, text, len(key) + len(text) + SPELLED_BYTES)
            return text

        return text_of

    def forget(self) -> None:
        """Drops everything, as after an erasure: which of the texts it was cannot be told."""
        self._texts.clear()


class Tokens:
    """A vocabulary as dialects ask for it: its control tokens by their literal, and any text as its bytes."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self.control = control

    def encode(self, text: str) -> list[int]:
        """Numbers that stand for the text; how it was cut into tokens is no longer known, and not needed to read."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `encode`."""
        return bytes(ids).decode()


def _numbers(data: bytes, count: int) -> tuple[Sequence[int], bytes]:
    """The first `count` numbers of `data`, and what is behind them. Raises JournalFault."""
    numbers = data[: 4 * count]
    if len(numbers) != 4 * count:
        raise JournalFault(f"the vocabulary is damaged: it cannot hold {count} numbers")
    return wire.unpack_ids(numbers), data[4 * count :]
