"""Speculation by prompt lookup: a request that repeats what stands in its prompt or output is guessed from there.

The last three tokens are looked up among all tokens so far; where they stood before, what followed may follow again
(prompt lookup decoding; the index is the hash chain of LZ77). A guess is verified by the step that gets it, so a
wrong one costs time and changes nothing. How many are made follows from how many proved right.

Pure: token ids in, token ids out. The index of a request grows by the new tokens alone, and a look-up walks a bounded
number of places, so that a step costs the same behind 100,000 tokens as behind a hundred.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

GRAM = 3  # tokens that must agree; two agree too often by chance
SLOTS_BITS_MIN, SLOTS_BITS_MAX = 10, 16  # of the table, by the length of the prompt: 4 KiB to 256 KiB
WALK_MAX = 32  # places that one look-up visits, equal ones and such as share their slot
MATCH_MAX = 32  # tokens that are compared behind a place; the longest match wins, of equals the latest
SCALAR_MAX = 64  # new tokens up to which the index is extended one by one
BULK_MAX = 65_536  # and at most so many in one step; what is left is for the next one
DRAFTS_FIRST = 3  # guesses at first
REST_BITS_MAX = 5  # the longest rest, after as many failures in a row, is 2 ** 5 - 1 steps

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK = (1 << 64) - 1


class PromptLookup:
    """Guesses for the requests of one engine (see sequence.Drafter); keeps an index for each that runs.

    Memory of a request: four bytes for each of its tokens and the table.
    """

    def __init__(self, drafts_max: int) -> None:
        """`drafts_max`: guesses for one step of a request, at least 1."""
        assert drafts_max > 0, drafts_max
        self._drafts_max = drafts_max
        self._requests: dict[str, _Request] = {}

    def propose(self, request: str, ids: Sequence[int], prompt: int, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow `ids`. Between two calls for a request tokens are only appended."""
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _Request(Index(len(ids)), min(DRAFTS_FIRST, self._drafts_max))
        if known.rest > 0:
            known.rest -= 1
            return ()
        known.index.extend(ids)
        return known.index.continuation(ids, min(known.length, most))

    def verified(self, request: str, drafted: int, accepted: int) -> None:
        """Doubles the guesses of who is always right, shortens those of others; who fails rests, ever longer."""
        assert 0 <= accepted <= drafted and drafted > 0, (drafted, accepted)
        known = self._requests.get(request)
        if known is None:
            return
        if accepted == drafted:
            known.length = min(max(2 * drafted, known.length), self._drafts_max)
        else:
            known.length = min(accepted + 1, self._drafts_max)
        known.failures = 0 if accepted else min(known.failures + 1, REST_BITS_MAX)
        known.rest = (1 << known.failures) - 1

    def end(self, request: str) -> None:
        """Forgets the request; one that never guessed may be named too."""
        self._requests.pop(request, None)


class _Request:
    """An index, how many guesses are made next, and how many steps rest before that."""

    def __init__(self, index: Index, length: int) -> None:
        self.index = index
        self.length = length
        self.rest = 0
        self.failures = 0  # in a row


class Index:
    """Where each run of GRAM tokens stood, latest first: a table of the latest place of each hash, and from each place
    the one before it. A place is the number of tokens before what followed; 0 is none."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: about how many there will be."""
        bits = min(max(tokens.bit_length() + 1, SLOTS_BITS_MIN), SLOTS_BITS_MAX)
        self._shift = 64 - bits
        self._latest = np.zeros(1 << bits, dtype=np.int32)
        self._before = array("i", bytes(4 * GRAM))  # by place; the first GRAM are none

    def extend(self, ids: Sequence[int]) -> None:
        """Takes the tokens that are new in `ids`, at most BULK_MAX. A run at the very end has no place yet."""
        start, end = len(self._before), min(len(ids), len(self._before) + BULK_MAX)
        if end - start > SCALAR_MAX:
            self._extend_bulk(np.array(ids[start - GRAM : end], dtype=np.uint64), start)
            return
        for place in range(start, end):
            slot = self._slot(ids, place)
            self._before.append(int(self._latest[slot]))
            self._latest[slot] = place

    def continuation(self, ids: Sequence[int], most: int) -> list[int]:
        """What followed the longest match of the end of `ids`: `most` tokens, round and round where it ends, or none.

        Of the latest WALK_MAX places with the same hash. `extend` must have seen `ids`.
        """
        count = len(ids)
        if count <= GRAM or most <= 0:
            return []
        best = found = 0
        place = int(self._latest[self._slot(ids, count)])
        for _ in range(WALK_MAX):
            if place == 0 or best == MATCH_MAX:
                break
            length = _match(ids, place)
            if length >= GRAM and length > best:
                best, found = length, place
            place = self._before[place]
        if not found:
            return []
        period = count - found
        return [ids[found + at % period] for at in range(most)]

    def _slot(self, ids: Sequence[int], place: int) -> int:
        a, b, c = _FACTORS
        return ((ids[place - 3] * a + ids[place - 2] * b + ids[place - 1] * c) & _MASK) >> self._shift

    def _extend_bulk(self, ids: np.ndarray, start: int) -> None:
        """The same for many places at once. `ids`: uint64, from GRAM before place `start`."""
        count = len(ids) - GRAM
        sums = np.zeros(count, dtype=np.uint64)
        for at, factor in enumerate(_FACTORS):
            sums += ids[at : at + count] * np.uint64(factor)
        slots = (sums >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.ones(count, dtype=bool)  # of those with the same hash
        first[1:] = ordered[1:] != ordered[:-1]
        before = np.empty(count, dtype=np.int32)
        before[order[1:]] = order[:-1] + start
        before[order[first]] = self._latest[ordered[first]]
        self._before.frombytes(before.tobytes())
        last = np.append(first[1:], True)
        self._latest[ordered[last]] = order[last] + start


def _match(ids: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal those at the end, at most MATCH_MAX."""
    length = 0
    end = len(ids)
    while length < min(MATCH_MAX, place) and ids[place - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length
