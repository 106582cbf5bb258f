"""Backing up: what is written, when and how much of it, and what happens when disk or journal do not go along."""

import random

import pytest

from tests.unit.engine.tiers import FILE_BYTES, Tiered, tokens
from zjournal.engine.cache.backup import FACTS_OPEN_MAX, IN_FLIGHT_BYTES, RETRY_US, TAIL_AFTER_US
from zjournal.errors import SnapshotFault
from zjournal.link import wire


@pytest.fixture
def engine(tmp_path):
    return Tiered(tmp_path / "snapshots", blocks=1024)


def new_chunks(engine, request):
    return [chunk.tokens for told in engine.of(wire.BackedUp, request) for chunk in told.chunks]


def test_each_turn_writes_what_is_new(engine):
    """Field report R22: no turn writes what was on disk before."""
    history = tokens(600, 1)
    for turn in range(4):
        engine.serve(f"t{turn}", history, session="s", says=tokens(100, 10 + turn))
        history = [*history, *tokens(100, 10 + turn), *tokens(50, 20 + turn)]
    written = [sum(new_chunks(engine, f"t{turn}")) for turn in range(4)]
    assert written[0] == 699
    assert all(count <= 150 + 255 for count in written[1:]), "the new tokens, and what stood in the last tail"
    assert max(len([one for one in new_chunks(engine, f"t{turn}") if one < 256]) for turn in range(4)) == 1


def test_an_obsolete_tail_goes_when_the_next_turn_is_on_disk(engine):
    first = tokens(600, 1)
    engine.serve("a", first, session="s")
    engine.serve("b", [*first, 10, 11, 12, 13, *tokens(30, 2)], session="s")
    planned = engine.told(wire.PurgePlanned)
    assert [one.cause for one in planned] == ["stale"]
    assert len(engine.files()) == 3, "two full chunks and one tail"
    assert engine.restart().serve("c", [*first, 10, 11, 12, 7]).cached == 603


def test_branches_share_their_parent(engine):
    parent = tokens(6000 - 6000 % 16, 1)
    engine.serve("parent", parent, says=(10,))
    before = engine.file_bytes()
    own = 300
    for branch in range(10):
        engine.serve(f"b{branch}", [*parent, *tokens(own - 1, 100 + branch)], says=(10,))
    blocks = -(-6000 // 16) + 10 * -(-own // 16)
    assert engine.file_bytes() <= 1.2 * (before + blocks * 4096)


def test_a_long_turn_is_written_as_it_goes(engine):
    engine.submit("a", tokens(100, 1), says=[7] * 3000, max_tokens=3000)
    for _ in range(1500):
        engine.step()
    assert not engine.told(wire.Finished)
    (told, *_) = engine.of(wire.BackedUp, "a")[-1:]
    assert told.tokens >= 1024
    assert told.tokens % 256 == 0, "full chunks only: it goes on"
    again = engine.restart()
    matched = again.serve("b", [*tokens(100, 1), *[7] * 1400])
    assert matched.cached >= 1024


def test_a_tail_waits_until_nothing_runs_but_not_for_ever(engine):
    engine.submit("long", tokens(16, 1), says=[7] * 900, max_tokens=900, session="l")
    engine.step()
    engine.submit("a", tokens(300, 2), session="s")
    for _ in range(50):
        engine.step()
    assert new_chunks(engine, "a") == [256]
    engine.now += TAIL_AFTER_US
    for _ in range(3):
        engine.step()
    assert new_chunks(engine, "a") == [256, 47]
    assert not engine.of(wire.Finished, "long")


def test_the_tail_of_a_turn_that_went_on_is_never_written(engine):
    engine.submit("long", tokens(16, 1), says=[7] * 400, max_tokens=400, session="l")
    engine.step()
    first = tokens(300, 2)
    engine.submit("a", first, session="s")
    for _ in range(20):
        engine.step()
    engine.submit("b", [*first, 10, 11, 12, 13, 14, 15], session="s")
    engine.run()
    assert new_chunks(engine, "a") == [256]
    assert new_chunks(engine, "b") == [305 + 4 - 256]


def test_at_the_end_everything_is_written(engine):
    engine.submit("long", tokens(16, 1), says=[7] * 900, max_tokens=900, session="l")
    engine.step()
    engine.submit("a", tokens(300, 2), session="s")
    for _ in range(20):
        engine.step()
    engine.cancel("long")
    engine.disk.held.add("write")
    engine.tell(flush=True)
    assert engine.snapshots.open and engine.snapshots.unwritten
    engine.disk.held.clear()
    engine.snapshots.settle()
    engine.tell(flush=True)
    assert not engine.snapshots.unwritten
    assert engine.restart().serve("b", [*tokens(300, 2), 10, 11, 12, 5]).cached == 303


def test_a_cancelled_turn_is_not_written(engine):
    engine.submit("a", tokens(300, 2), says=[7] * 100, max_tokens=100)
    for _ in range(10):
        engine.step()
    engine.cancel("a")
    engine.run()
    assert not engine.told(wire.BackedUp)
    assert not engine.files()


def test_what_is_being_written_is_bounded(engine, monkeypatch):
    monkeypatch.setattr("zjournal.engine.cache.backup.IN_FLIGHT_BYTES", 3 * FILE_BYTES)
    engine.disk.held.add("write")
    engine.submit("a", tokens(3000, 2))
    for _ in range(30):
        engine.step()
    assert len([one for one in engine.disk.queue if one[0] == "write"]) == 3
    engine.disk.held.clear()
    engine.run()
    assert sum(new_chunks(engine, "a")) == 3003
    assert IN_FLIGHT_BYTES > FILE_BYTES


def test_blocks_that_are_written_are_nobody_else_s(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=40)
    engine.disk.held.add("write")
    engine.submit("a", tokens(500, 1))
    for _ in range(10):
        engine.step()
    assert engine.scheduler._residency.lent > 0
    engine.submit("b", tokens(500, 2))  # it needs the room of what is being written
    for _ in range(10):
        engine.step()
    assert not engine.of(wire.Matched, "b"), "it waits for the disk"
    engine.disk.held.clear()
    engine.run()
    assert sum(new_chunks(engine, "a")) >= 256
    assert engine.of(wire.Finished, "b")


# --- the journal -----------------------------------------------------------------------------------------


def test_nothing_is_found_before_its_fact_is_committed(engine):
    engine.answers = False
    prompt = tokens(700, 1)
    engine.submit("a", prompt)
    engine.run()
    assert engine.told(wire.BackedUp)
    assert not engine.snapshots.shelf.index.chunks
    again = engine.restart()
    assert again.serve("b", [*prompt, 7]).cached == 0


def test_a_refused_snapshot_leaves_no_file(engine):
    engine.answers = False
    engine.submit("a", tokens(700, 1))
    engine.run()
    assert len(engine.files()) == 3
    for event in engine.unanswered:
        engine.snapshots.take(wire.Refused(event.fact))
    engine.unanswered = []
    engine.run()
    assert not engine.files()


def test_when_the_journal_stalls_backups_stop_and_decoding_goes_on(engine):
    engine.answers = False
    for number in range(FACTS_OPEN_MAX + 4):
        engine.submit(f"r{number}", tokens(20, number))
        engine.run()
    assert [one.reason for one in engine.told(wire.SnapshotsOff)] == ["stalled"]
    assert len(engine.told(wire.BackedUp)) == FACTS_OPEN_MAX
    assert len(engine.told(wire.Finished)) == FACTS_OPEN_MAX + 4
    assert engine.scheduler.gauges().backups_off
    engine.answers = True
    engine.hear([])
    engine.run()
    assert len(engine.told(wire.SnapshotsOn)) == 1
    assert len(engine.told(wire.BackedUp)) == FACTS_OPEN_MAX + 4


def test_an_erased_turn_goes_from_disk(engine):
    shared = tokens(512, 1)
    engine.serve("a", [*shared, *tokens(100, 2)])
    engine.serve("b", [*shared, *tokens(100, 3)])
    space = engine.snapshots.shelf.space("n")
    own = [hash_ for hash_ in engine.journal.path("a") if hash_ not in set(engine.journal.path("b"))]
    engine.scheduler.forget(["a"])
    engine.snapshots.take(wire.Purge(space=space, hashes=tuple(own), requests=("a",), cause="deleted"))
    engine.run()
    assert engine.files().keys() == set(engine.journal.path("b"))
    assert engine.serve("c", [*shared, *tokens(100, 2)]).cached == 512


# --- limits and faults -------------------------------------------------------------------------------------


def test_the_limit_is_never_passed(tmp_path):
    """Field report O13."""
    limit = 8 * FILE_BYTES
    engine = Tiered(tmp_path / "s", blocks=1024, limit=limit)
    for number in range(12):
        engine.submit(f"r{number}", tokens(520, number))
        while not engine.of(wire.Finished, f"r{number}") or engine.disk.queue:
            engine.step()
            assert engine.file_bytes() <= limit
            assert engine.snapshots.shelf.used <= limit
        engine.run()
    assert {one.cause for one in engine.told(wire.PurgePlanned)} == {"quota"}
    assert engine.snapshots.shelf.used == engine.file_bytes()
    assert engine.restart().serve("again", [*tokens(520, 11), 7]).cached == 520


@pytest.mark.parametrize("seed", range(4))
def test_many_states_at_once_under_a_limit_and_the_last_one_stays(tmp_path, seed):
    """Nothing is given up that another state is still written behind; the journal would refuse what stands on it."""
    dice = random.Random(seed)
    engine = Tiered(tmp_path / "s", blocks=4096, limit=30 * FILE_BYTES)
    engine.run()
    for number in range(14):
        engine.submit(f"r{number}", tokens(2320, number), says=(10, 11))
        engine.disk.held = {"write", "read"}
        while not engine.of(wire.Finished, f"r{number}"):
            engine.step()
            if engine.disk.queue and dice.random() < 0.5:
                engine.disk.one(dice.randrange(len(engine.disk.queue)))
            assert engine.file_bytes() <= 30 * FILE_BYTES
    engine.disk.held = set()
    engine.run()
    assert sum(new_chunks(engine, "r13")) == 2321


def test_a_smaller_limit_after_a_restart_is_kept_at_once(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=1024)
    for number in range(6):
        engine.serve(f"r{number}", tokens(520, number))
    again = engine.restart(limit=6 * FILE_BYTES)
    again.hear(again.snapshots.take_events())
    again.run()
    assert again.file_bytes() <= 6 * FILE_BYTES
    assert again.told(wire.PurgePlanned)


def test_foreign_kv_goes_first(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=1024, limit=7 * FILE_BYTES)
    engine.serve("old", tokens(520, 1), namespace="old")
    again = engine.restart()
    again.snapshots.take(wire.Foreign((again.snapshots.shelf.space("old"),)))
    again.serve("a", tokens(520, 2))
    again.serve("b", tokens(520, 3))
    again.serve("c", tokens(520, 4))
    gone = [hash_ for one in again.told(wire.PurgePlanned) for hash_ in one.hashes]
    assert gone
    assert {one.space for one in again.told(wire.PurgePlanned)[:1]} == {again.snapshots.shelf.space("old")}


def test_pinned_snapshots_stay(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=1024, limit=7 * FILE_BYTES)
    engine.serve("pinned", tokens(520, 1))
    engine.snapshots.take(wire.Pin("pinned", True))
    for number in range(8):
        engine.serve(f"r{number}", tokens(520, 10 + number))
    assert set(engine.journal.path("pinned")) <= engine.files().keys()


@pytest.mark.parametrize(("number", "reason"), [(28, "no_space"), (122, "no_space"), (5, "io_error")])
def test_a_disk_that_takes_no_more_turns_backups_off_and_nothing_else(engine, number, reason):
    def refuse(kind):
        if kind == "write":
            raise SnapshotFault("no", errno=number)

    engine.disk.fault = refuse
    engine.serve("a", tokens(700, 1))
    engine.serve("b", tokens(700, 2))
    (off,) = engine.told(wire.SnapshotsOff)
    assert off.reason == reason
    assert engine.scheduler.gauges().backups_off
    assert len(engine.told(wire.Finished)) == 2
    assert engine.snapshots.shelf.used == 0
    engine.disk.fault = None
    engine.now += RETRY_US
    engine.run()
    assert len(engine.told(wire.SnapshotsOn)) == 1
    assert not engine.scheduler.gauges().backups_off
    assert engine.restart().serve("c", [*tokens(700, 1), 9]).cached == 700


def test_a_nearly_full_disk_is_left_alone(engine, monkeypatch):
    monkeypatch.setattr(engine.snapshots.shelf, "measure", lambda: 1 << 20)
    engine.snapshots.shelf.measured(1 << 20)
    engine.serve("a", tokens(700, 1))
    assert not engine.files()
    assert engine.of(wire.Finished, "a")


def test_memory_prefers_to_give_up_what_is_on_disk(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=100)
    engine.serve("old", tokens(500, 1))
    engine.disk.held.add("write")
    engine.submit("new", tokens(500, 2))
    for _ in range(20):
        engine.step()
    engine.submit("more", tokens(600, 3))
    for _ in range(20):
        engine.step()
    engine.disk.held.clear()
    engine.run()
    assert sum(new_chunks(engine, "new")) == 503, "what was not on disk yet was not lost"
