"""Backing up: what is written, when and how much of it, and what happens when disk or journal do not go along."""

import random
import shutil
from array import array

import pytest

from tests.unit.engine.tiers import FILE_BYTES, Tiered, tokens
from tests.unit.snapshots import chunks
from zjournal.engine.cache import backup, shelf
from zjournal.engine.cache.backup import FACTS_OPEN_MAX, IN_FLIGHT_BYTES, RETRY_US, TAIL_AFTER_US
from zjournal.errors import SnapshotFault
from zjournal.link import wire
from zjournal.snapshots.folder import Folder


@pytest.fixture
def engine(tmp_path):
    return Tiered(tmp_path / "snapshots", blocks=1024)


def new_chunks(engine, request):
    return [chunk.tokens for told in engine.of(wire.BackedUp, request) for chunk in told.chunks]


def test_r22_each_turn_writes_what_is_new(engine):
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


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_turn_that_is_kept_is_written_as_far_as_it_came(engine, steps):
    engine.submit("a", tokens(3000, 2), says=[7] * 100, max_tokens=100)
    for _ in range(steps):
        engine.step()
    computed = engine.computed["a"]
    engine.cancel("a", keep=True)
    engine.run()
    found = engine.restart().serve("b", [*tokens(3000, 2), 5]).cached
    assert found == min(computed, 3000)
    assert (found > 0) == (steps > 0)


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


def test_o13_the_limit_is_never_passed(tmp_path):
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


def test_what_is_on_disk_stays_while_the_first_chunk_behind_it_is_written(tmp_path):
    """Room is made between two chunks of a state that begins with one of another's, which nothing else continues."""
    engine = Tiered(tmp_path / "s", blocks=300, limit=2 * FILE_BYTES)
    shared = tokens(256, 1)
    engine.serve("a", [*shared, *tokens(250, 2)])
    engine.serve("b", [*shared, *tokens(544, 3)])
    (purge,) = engine.told(wire.PurgePlanned)
    assert (len(purge.hashes), purge.cause) == (1, "quota"), "the tail of the other went, not what both begin with"
    assert new_chunks(engine, "b") == [256]
    assert engine.restart().serve("c", [*shared, *tokens(544, 3), 7]).cached == 512


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


def test_o13_o15_foreign_kv_goes_first(tmp_path):
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
    assert engine.snapshots.stuck and not engine.snapshots.open, "the end need not wait"
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
    engine.serve("b", tokens(700, 2))
    (off,) = engine.told(wire.SnapshotsOff)
    assert off.reason == "no_space" and engine.scheduler.gauges().backups_off
    monkeypatch.undo()
    engine.snapshots.shelf.measured(1 << 40)
    engine.serve("c", tokens(700, 3))
    assert engine.files() and len(engine.told(wire.SnapshotsOn)) == 1
    assert not engine.scheduler.gauges().backups_off


def test_a_disk_that_others_fill_costs_what_is_over_and_not_all(tmp_path, monkeypatch):
    """What is unlinked is free at once: it once went on counting as taken, and all of it went for one state."""
    engine = Tiered(tmp_path / "s", blocks=1024)
    disk = shelf.FREE_BYTES_MIN + 8 * FILE_BYTES
    monkeypatch.setattr(engine.snapshots.shelf, "measure", lambda: disk - engine.file_bytes())
    engine.snapshots.shelf.measured(disk)
    for number in range(12):
        engine.serve(f"r{number}", tokens(520, number), session=f"s{number}")
        assert engine.file_bytes() <= 8 * FILE_BYTES
        if number >= 3:
            assert engine.file_bytes() >= 4 * FILE_BYTES
    assert engine.snapshots.shelf.used == engine.file_bytes()
    assert engine.restart().serve("again", [*tokens(520, 11), 7]).cached >= 512


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


def test_a_tail_has_nothing_of_another_turn_behind_its_last_token(engine):
    """Its block was copied from the other one's as a whole, and the other one may be deleted long before it."""
    secret = [9001, 9002, 9003, 9004]
    shared = tokens(20, 1)
    engine.serve("a", [*shared, 1, 2, 3, *secret], session="s")
    engine.serve("b", [*shared, 5, 6], session="t", says=(7,))
    packed = array("I", secret).tobytes()
    ends = {request: engine.files()[end].read_bytes() for request, (_, end) in engine.journal.ends.items()}
    assert {request: packed in data for request, data in ends.items()} == {"a": True, "b": False}


def test_more_states_than_can_wait_cost_the_oldest_and_nothing_else(engine, monkeypatch):
    """Those that are being written cannot be closed: the engine once went round for ever here."""
    monkeypatch.setattr(backup, "STATES_MAX", 4)
    engine.disk.held.add("write")
    for number in range(12):
        engine.submit(f"r{number}", tokens(30, number), session=f"s{number}")
        while not engine.of(wire.Finished, f"r{number}"):
            engine.step()
        engine.step()
    engine.disk.held.clear()
    engine.run()
    assert not engine.snapshots.unwritten
    assert len(engine.files()) == 12 - engine.snapshots.gauges()["backups_lost"] < 12


@pytest.mark.parametrize("place", ["chunk", "folder"])
def test_what_lies_in_a_chunk_s_place_costs_that_state_and_no_other(engine, place):
    prompt = tokens(700, 1)
    engine.serve("a", prompt, session="s")
    (*_, path) = (engine.files()[hash_] for hash_ in engine.journal.path("a"))
    if place == "chunk":
        path.unlink()
        path.mkdir()
        (path / "mine").write_text("x")
    else:
        shutil.rmtree(path.parent)
        path.parent.write_text("x")
    again = engine.restart(blocks=1024)
    again.run()
    again.serve("b", [*prompt, 7], session="s")
    again.serve("c", tokens(700, 2), session="t")
    assert "c" in again.journal.ends, "others are written"
    assert not again.told(wire.SnapshotsOff)
    assert not again.snapshots.unwritten
    if place == "chunk":
        again.serve("d", [*prompt, 7, *tokens(30, 3)], session="s")
        assert "d" in again.journal.ends, "the folder was put aside"
        assert (engine.folder / "quarantine" / path.name / "mine").exists()


# --- the limit ---------------------------------------------------------------------------------------------


def orphan(engine, seed):
    """A file as a kill between rename and commit leaves it."""
    made = chunks.make(chunks.tokens(256, seed), block_bytes=64)
    with Folder(engine.folder) as folder:
        chunks.store(folder, made)
        return folder.where(made.namespace, made.hash)


def test_what_a_kill_left_counts_until_it_is_gone(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=512, limit=4 * FILE_BYTES)
    left = [orphan(engine, seed) for seed in range(4)]
    engine.disk.held = {"write"}
    engine.submit("a", tokens(1024, 1))
    for _ in range(40):
        engine.step()
    assert engine.snapshots.shelf.used == engine.file_bytes() == 4 * FILE_BYTES, "nothing is begun beside them"
    engine.disk.held.clear()
    engine.run()
    assert not any(path.exists() for path in left)
    assert engine.file_bytes() == engine.snapshots.shelf.used <= 4 * FILE_BYTES
    assert engine.files().keys() == engine.journal.chunks.keys()


def test_nothing_is_written_before_the_folder_is_known(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=512, limit=4 * FILE_BYTES)
    orphan(engine, 1)
    engine.disk.held = {"read"}
    engine.submit("a", tokens(1024, 1))
    for _ in range(40):
        engine.step()
    assert len(engine.files()) == 1 and not engine.told(wire.BackedUp)
    engine.disk.held.clear()
    engine.run()
    assert len(engine.told(wire.BackedUp)[-1].chunks) > 0


def test_a_file_that_was_put_aside_counts_once_and_the_quarantine_is_bounded(tmp_path):
    limit = 32 * FILE_BYTES
    engine = Tiered(tmp_path / "s", blocks=1024, limit=limit)
    for number in range(6):
        engine.serve(f"a{number}", tokens(256, number))
    again = engine.restart()
    for path in again.files().values():
        path.write_bytes(path.read_bytes()[:-1])
    again.run()
    for number in range(6):
        again.serve(f"b{number}", [*tokens(256, number), 7])
    aside = [path.stat().st_size for path in (again.folder / "quarantine").iterdir()]
    assert 0 < sum(aside) <= limit // 16 < 6 * FILE_BYTES
    assert again.file_bytes() == again.snapshots.shelf.used, "neither counted twice nor forgotten"
    third = again.restart()
    assert third.snapshots.shelf.used >= third.file_bytes(), "from the first moment on"
    third.run()
    assert third.snapshots.shelf.used == third.file_bytes()


def test_what_cannot_be_unlinked_goes_on_counting(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=512)
    engine.serve("a", tokens(700, 1))
    before = engine.file_bytes()

    def refuse(kind):
        raise SnapshotFault("no", errno=5)

    engine.disk.fault = refuse
    space, _ = engine.journal.ends["a"]
    hashes = tuple(engine.journal.path("a"))
    engine.journal.ends, engine.journal.chunks = {}, {}
    engine.snapshots.take(wire.Purge(space=space, hashes=hashes, requests=("a",), cause="deleted"))
    engine.disk.finish()
    engine.disk.fault = None
    assert engine.snapshots.shelf.used == engine.file_bytes() == before
    assert not engine.snapshots.shelf.index.chunks
    again = engine.restart()
    again.run()
    assert again.snapshots.shelf.used == again.file_bytes() == 0


def test_the_only_request_waits_for_a_disk_that_writes_what_would_make_room(tmp_path):
    """All that could be given up for it is lent. That was once taken for a pool too small, and the engine died."""
    engine = Tiered(tmp_path / "s", blocks=40)
    engine.disk.held.add("write")
    engine.serve_held("a", tokens(512, 1))
    says = tokens(200, 2)
    engine.submit("b", tokens(16, 3), says=says)
    for _ in range(260):
        engine.step()
    assert not engine.of(wire.Finished, "b"), "it had room that was lent"
    assert engine.scheduler.gauges().running == 1
    engine.disk.held.clear()
    engine.run()
    assert engine.of(wire.Finished, "b")[0].output == 200
    assert engine.restart().serve("c", [*tokens(512, 1), 10, 11]).cached == 512


def test_what_a_running_request_shares_with_the_disk_is_taken_off_once(tmp_path):
    """It is pinned, and so it does not count as evictable: to take it off again kept others out of free blocks."""
    engine = Tiered(tmp_path / "s", blocks=64)
    engine.disk.held.add("write")
    shared = tokens(480, 1)
    engine.serve_held("a", shared)
    engine.submit("b", [*shared, *tokens(20, 2)], says=tokens(60, 4))
    engine.submit("c", tokens(300, 3))
    for _ in range(8):
        engine.step()
    assert engine.scheduler._residency.lent >= 30
    assert engine.of(wire.Finished, "c"), "it fits beside what is lent and shared"
    engine.disk.held.clear()
    engine.run()
