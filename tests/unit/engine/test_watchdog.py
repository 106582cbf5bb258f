"""The watchdog of a device: it is called for work that does not end, and for no other."""

from __future__ import annotations

import threading

from zjournal.engine.watchdog import Watchdog

DEADLINE_S = 30


def test_work_that_does_not_end_is_told_of() -> None:
    late = threading.Event()
    dog = Watchdog(0.01, late.set)
    with dog.watching():
        assert late.wait(DEADLINE_S)
    dog.close()


def test_what_counts_is_the_time_since_this_work_began() -> None:
    now = 0.0
    called = threading.Event()
    dog = Watchdog(3600, called.set, lambda: now)
    assert not dog.overdue()
    with dog.watching():
        now = 3600.0
        assert not dog.overdue()
        now = 3600.5
        assert dog.overdue()
    assert not dog.overdue()
    with dog.watching():
        now = 7000.0
        assert not dog.overdue()
    dog.close()
    assert not called.is_set()
