"""The memory of recent values: bounded, the latest used stay, and for any thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from zjournal.journal import content, rows, segments
from zjournal.sessions.memory import Memory


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_the_latest_used_stay() -> None:
    memory: Memory[int] = Memory(30)
    for name in "abc":
        memory.put(name, ord(name), 10)
    assert memory.get("a") == ord("a")
    memory.put("d", 4, 10)
    assert [memory.get(name) for name in "abcd"] == [ord("a"), None, ord("c"), 4]
    memory.put("d", 5, 31)  # too large: not kept, and what it was before is gone
    assert [memory.get(name) for name in "acd"] == [ord("a"), ord("c"), None]
    memory.put("a", 6, 20)
    memory.forget("a")
    memory.forget("a")
    memory.put("b", 7, 30)
    assert (memory.get("a"), memory.get("b")) == (None, 7)


def test_it_is_bounded_by_their_number_as_well() -> None:
    memory: Memory[int] = Memory(1_000, values_max=2)
    for name in "abc":
        memory.put(name, 1, 1)
    assert [memory.get(name) for name in "abc"] == [None, 1, 1]


@pytest.mark.usefixtures("switching")
def test_threads_at_once_neither_fail_nor_lose_count() -> None:
    """One renders and looks for what began alike, while another remembers what was accepted."""
    memory: Memory[int] = Memory(40)
    failed: list[BaseException] = []
    start = threading.Barrier(3)

    def use(step: int) -> None:
        try:
            start.wait()
            for k in range(20_000):
                name = str(k * step % 7)
                if memory.get(name) is None:
                    memory.put(name, k, 10)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(step,)) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert memory._bytes == 10 * len(memory) <= 40


def test_r27_one_entry_cannot_break_a_limit() -> None:
    """Field report R27: the limit of a cache in memory is none, for one entry may be over it."""
    memory: Memory[bytes] = Memory(1_000)
    plains = content.Plains(1_000)
    for size in (400, 1_001, 400, 5_000):
        memory.put(f"{size}", bytes(size), size)
        plains.put(size.to_bytes(32), bytes(size))
    assert [memory.get(f"{size}") is not None for size in (400, 1_001, 5_000)] == [True, False, False]
    assert [plains.get(size.to_bytes(32)) is not None for size in (400, 1_001, 5_000)] == [True, False, False]


def test_r27_unpacked_segments_keep_to_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "UNPACKED_BYTES_MAX", 10_000)
    unpacked = rows.Unpacked()
    for size in (1_000, 3_000, 5_000, 9_999, 2_000):
        facts = [segments.Bare(1, 0, "tokens_sampled", 1, b"", bytes(size), None)]
        assert unpacked.facts(1, 1, segments.pack(facts)) == facts
        assert unpacked.bytes <= 10_000
    assert unpacked.bytes >= 2_000
    unpacked.clear()
    assert unpacked.bytes == 0
