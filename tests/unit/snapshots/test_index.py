"""The index: the longest beginning that is on disk, to the token, and what a chunk is needed for."""

from __future__ import annotations

import pytest

from tests.unit.snapshots import chunks
from zjournal.snapshots import format, index
from zjournal.snapshots.index import Found, Index, Near

NS = chunks.NAMESPACE
TB = format.TOKEN_BYTES


class Disk:
    """An index and what its chunks' headers would say."""

    def __init__(self) -> None:
        self.index = Index()
        self.headers: dict[bytes, bytes] = {}
        self.reads: list[bytes] = []
        self.names = 0

    def keep(self, data: bytes, session: str = "s", namespace: bytes = NS) -> str:
        """A snapshot of this state; only chunks that are not there yet are told of, as the engine does."""
        made = chunks.split(data, namespace=namespace)
        self.headers |= {one.hash: one.tokens for one in made}
        there = self.index.chunks
        rows = [chunks.row(one) for one in made if one.hash not in there or there[one.hash].bad]
        self.names += 1
        self.index.add(f"snap{self.names}", session, namespace, made[-1].hash, rows, self.names)
        self.index.check()
        return f"snap{self.names}"

    def tokens_of(self, chunk: index.Chunk) -> bytes | None:
        self.reads.append(chunk.hash)
        return self.headers.get(chunk.hash)

    def find(self, prompt: bytes, namespace: bytes = NS, **more) -> Found:
        return self.index.find(namespace, prompt, self.tokens_of, **more)


@pytest.mark.parametrize("kept", [1, 15, 16, 255, 256, 257, 511, 512, 700])
@pytest.mark.parametrize("shared", [0, 1, 16, 17, 255, 256, 257, 511, 512, 513, 700])
def test_the_longest_beginning_is_found_to_the_token(kept, shared):
    state = chunks.tokens(kept)
    disk = Disk()
    disk.keep(state)
    prompt = state[: shared * TB] + chunks.tokens(800, 9)[: (800 - shared) * TB]
    found = disk.find(prompt)
    assert found.tokens == min(shared, kept)
    assert [one.hash for one in found.chunks] == [one.hash for one in chunks.split(state)[: len(found.chunks)]]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 256, 257, 512, 600])
def test_the_last_token_of_a_prompt_is_never_found(length):
    """Only computing it gives the logits that are wanted."""
    state = chunks.tokens(600)
    disk = Disk()
    disk.keep(state)
    assert disk.find(state[: length * TB]).tokens == length - 1


def test_of_many_continuations_the_best_is_found_though_few_headers_are_read():
    base = chunks.tokens(100)
    disk = Disk()
    for seed in range(200):
        disk.keep(base[: seed % 90 * TB] + chunks.tokens(150, seed + 1))
    best = base[: 96 * TB] + chunks.tokens(150, 999)
    disk.keep(best)
    for seed in range(200, 300):
        disk.keep(base[: seed % 90 * TB] + chunks.tokens(150, seed + 1))
    found = disk.find(base + chunks.tokens(50, 5000))
    assert found.tokens == 96 and found.partial is not None and found.partial.tokens == 246
    assert len(disk.reads) <= index.CANDIDATES_MAX
    disk.reads.clear()
    assert disk.find(base + chunks.tokens(50, 5001)).tokens == 96
    assert disk.reads == []


def test_of_too_many_alike_nothing_but_a_part_of_a_block_is_lost():
    base = chunks.tokens(64)
    disk = Disk()
    for extra in range(15):
        for seed in range(4):
            disk.keep(base + chunks.tokens(64, 77)[: extra * TB] + chunks.tokens(64, 100 * extra + seed))
    found = disk.find(base + chunks.tokens(64, 77))
    assert 64 <= found.tokens <= 78
    assert len(disk.reads) <= index.CANDIDATES_MAX


def test_marks_that_lie_cost_a_header_and_nothing_else():
    state, other = chunks.tokens(64), chunks.tokens(64, 1)
    disk = Disk()
    disk.keep(state)
    liar = chunks.row(chunks.split(other)[0])._replace(marks=format.marks(chunks.tokens(64, 2)))
    disk.headers[liar.hash] = other
    disk.index.add("liar", "s", NS, liar.hash, [liar], 1)
    assert disk.find(chunks.tokens(100, 2)).tokens == 0
    assert disk.find(state + other).tokens == 64


def test_a_header_that_cannot_be_read_is_passed_over():
    state = chunks.tokens(100)
    disk = Disk()
    disk.keep(state)
    disk.headers.clear()
    assert disk.find(state + state).tokens == 0
    assert disk.index.find(NS, state + state, lambda chunk: state).tokens == 100


def test_namespaces_do_not_meet():
    state, foreign = chunks.tokens(600), format.digest("another model", "local")
    disk = Disk()
    disk.keep(state)
    assert disk.find(state, foreign).tokens == 0
    disk.keep(state[: 300 * TB], namespace=foreign)
    assert disk.find(state, foreign).tokens == 300
    assert disk.find(state).tokens == 599


def test_r21_the_same_placeholders_of_two_images_do_not_meet():
    """R21: two images, the same placeholder tokens."""
    state, cat, dog = chunks.tokens(400), b"c" * 32, b"d" * 32
    first = chunks.make(state[:1024], extra=cat)
    tail = chunks.make(state[1024:], first.hash, 256)
    disk = Disk()
    disk.headers |= {first.hash: first.tokens, tail.hash: tail.tokens}
    disk.index.add("snap", "s", NS, tail.hash, [chunks.row(first), chunks.row(tail)], 1)
    assert disk.find(state + state, extras={0: cat}).tokens == 400
    assert disk.find(state + state, extras={0: dog}).tokens == 0
    assert disk.find(state + state).tokens == 0
    assert disk.index.covered(NS, state, {0: cat}) == 256


def test_what_branches_share_is_there_once():
    parent = chunks.tokens(600)
    disk = Disk()
    disk.keep(parent)
    before = disk.index.file_bytes
    names = [disk.keep(parent + chunks.tokens(20, seed + 1)) for seed in range(10)]
    tail = chunks.row(chunks.split(parent + chunks.tokens(20, 1))[-1]).file_bytes
    assert disk.index.file_bytes == before + 10 * tail
    for name in names:
        assert len(disk.index.remove(name)) == 1
        disk.index.check()
    assert disk.index.file_bytes == before
    gone = disk.index.remove("snap1")
    assert [one.start for one in gone] == [512, 256, 0]
    assert not disk.index.chunks and not disk.index.snapshots and disk.index.file_bytes == 0
    disk.index.check()


def test_r22_only_new_chunks_are_to_be_written():
    """R22: no checkpoint rewrites its prefix."""
    state = chunks.tokens(1000)
    disk = Disk()
    assert disk.index.covered(NS, state) == 0
    disk.keep(state[: 700 * TB])
    assert disk.index.covered(NS, state) == 512


def test_a_bad_chunk_hides_what_is_behind_it_until_it_is_written_again():
    state = chunks.tokens(700)
    disk = Disk()
    disk.keep(state)
    second = chunks.split(state)[1]
    disk.index.refuse(second.hash)
    disk.index.check()
    assert disk.find(state + state).tokens == 256
    assert disk.index.covered(NS, state) == 256
    disk.keep(state)
    assert disk.find(state + state).tokens == 700
    assert not disk.index.bad


def test_a_bad_tail_is_not_asked_again():
    state = chunks.tokens(100)
    disk = Disk()
    disk.keep(state)
    assert disk.find(state + state).tokens == 100
    disk.index.refuse(chunks.split(state)[0].hash)
    disk.reads.clear()
    assert disk.find(state + state).tokens == 0 and disk.reads == []


def test_a_dropped_end_leaves_the_rest_of_its_snapshot():
    state = chunks.tokens(700)
    disk = Disk()
    name = disk.keep(state)
    _, second, tail = chunks.split(state)
    with pytest.raises(AssertionError):
        disk.index.drop(second.hash)
    assert disk.index.drop(tail.hash) == []
    assert disk.index.snapshots[name].tokens == 512
    other = disk.keep(state[: 256 * TB] + chunks.tokens(300, 1))
    assert disk.index.drop(second.hash) == [name]
    assert list(disk.index.snapshots) == [other]
    disk.index.check()


def test_rows_that_do_not_fit_change_nothing():
    state = chunks.tokens(700)
    first, second, tail = map(chunks.row, chunks.split(state))
    made = Index()
    made.add("a", "s", NS, second.hash, [first, second], 1)
    stray = chunks.row(chunks.make(chunks.tokens(20, 3)))
    wrong = [
        ("a", NS, tail.hash, [tail]),  # the name is taken
        ("b", NS, tail.hash, []),  # the end is not known
        ("b", NS, tail.hash, [tail, stray]),  # more than is needed
        ("b", NS, tail.hash, [tail._replace(parent=b"?" * 32)]),
        ("b", NS, tail.hash, [tail, tail]),
        ("b", NS, tail.hash, [tail._replace(tokens=0)]),
        ("b", NS, tail.hash, [tail._replace(marks=b"")]),
        ("b", NS, tail.hash, [tail._replace(file_bytes=0)]),
        ("b", NS, second.hash, [second._replace(parent=format.ROOT)]),
        ("b", bytes(32), tail.hash, [tail]),
        ("b", bytes(32), second.hash, []),
    ]
    for name, namespace, end, rows in wrong:
        with pytest.raises(ValueError):
            made.add(name, "s", namespace, end, rows, 1)
        made.check()
        assert list(made.snapshots) == ["a"] and len(made.chunks) == 2
    made.add("b", "s", NS, tail.hash, [tail], 1)
    with pytest.raises(ValueError, match="continues a tail"):
        more = chunks.row(chunks.make(chunks.tokens(20, 4), tail.hash, 768))
        made.add("c", "s", NS, more.hash, [more], 1)


def test_a_near_miss_is_told_with_its_place():
    """At least 1,024 tokens in common and more than 90 % of a snapshot."""
    state = chunks.tokens(1200)
    disk = Disk()
    name = disk.keep(state)
    other = chunks.tokens(200, 1)
    assert disk.find(state[: 1100 * TB] + other).near == Near(name, 1100, 1200)
    assert disk.find(state[: 1080 * TB] + other).near is None
    assert disk.find(state + other).near is None  # the whole snapshot was met
    assert disk.find(state[: 1100 * TB]).near is None  # the prompt ends there, and forks nowhere
    disk.keep(state[: 1000 * TB] + other)
    assert disk.find(state[: 1010 * TB] + chunks.tokens(9, 7)).near is None  # 1,010 are too few


def test_of_snapshots_behind_the_fork_the_nearest_is_told():
    state = chunks.tokens(5000)
    disk = Disk()
    names = [disk.keep(state[: length * TB]) for length in (5000, 4900, 4700)]
    assert disk.find(state[: 4600 * TB] + chunks.tokens(9, 1)).near == Near(names[2], 4600, 4700)
    at_once = disk.keep(state[: 4608 * TB])
    assert disk.find(state[: 4600 * TB] + chunks.tokens(9, 1)).near == Near(at_once, 4600, 4608)


def test_use_is_counted_along_the_path():
    state = chunks.tokens(700)
    disk = Disk()
    disk.keep(state)
    for _ in range(20):
        disk.index.used(disk.find(state[: 600 * TB]), 50)
    uses = [disk.index.chunks[one.hash].uses for one in chunks.split(state)]
    assert uses == [index.USES_MAX] * 3
    disk.index.used(Found((), None, 0), 50)


def test_shared_tokens_are_whole_tokens():
    one = chunks.packed([1, 2, 3])
    assert [index.shared_tokens(one, chunks.packed(other)) for other in ([1, 2, 3], [1, 2], [1, 2, 259], [2], [])] == [
        3, 2, 2, 0, 0,
    ]  # fmt: skip
