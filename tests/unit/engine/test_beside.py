"""Work beside the serving thread."""

from __future__ import annotations

import threading

import pytest

from zjournal.engine.decoding.beside import Beside


def test_the_work_is_done_in_one_other_thread_and_in_order() -> None:
    threads: set[int] = set()

    def double(number: int) -> int:
        threads.add(threading.get_ident())
        return 2 * number

    beside = Beside(double, "beside")
    found = []
    for number in range(1, 50):
        beside.give(number)
        found.append(beside.take())
    beside.close()
    assert found == [2 * number for number in range(1, 50)]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_what_the_work_raises_reaches_the_one_that_waits_and_the_thread_goes_on() -> None:
    beside = Beside(lambda number: 10 // number, "beside")
    beside.give(0.0)
    with pytest.raises(ZeroDivisionError):
        beside.take()
    beside.give(5.0)
    assert beside.take() == 2
    beside.close()


def test_it_begins_while_the_other_waits_and_has_no_thread_before() -> None:
    go = threading.Event()
    beside = Beside(lambda number: go.wait(60) and number, "beside")
    assert not _threads()
    beside.give(7)
    with pytest.raises(AssertionError):
        beside.give(8)
    go.set()
    assert beside.take() == 7
    with pytest.raises(AssertionError):
        beside.take()
    assert _threads()
    beside.close()
    beside.close()
    assert not _threads()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("beside")]
