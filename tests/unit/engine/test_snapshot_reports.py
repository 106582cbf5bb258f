"""Field reports about KV on disk, each with its input, on an engine whose tokens stand for KV.

Those about one part of the engine alone stand in test_restores and test_backups, those that need real processes in
tests/server/test_snapshot_reports.py.
"""

import os

import pytest

from tests.unit.engine.tiers import FILE_BYTES, Tiered, tokens
from zjournal.link import wire

SAYS = (10, 11, 12, 13)


def test_o13_a_smaller_limit_takes_foreign_kv_first(tmp_path):
    """Field report O13: after a restart with half the limit, what no request can use goes first, whatever its worth."""
    engine = Tiered(tmp_path / "s", blocks=1024)
    engine.serve("mine", tokens(520, 1), namespace="mine")
    engine.serve("old", tokens(2000, 2), namespace="old")
    mine = set(engine.journal.path("mine"))
    old = engine.snapshots.shelf.space("old")
    again = engine.restart(limit=5 * FILE_BYTES, foreign=(old,))
    again.run()
    assert again.file_bytes() <= 5 * FILE_BYTES
    planned = again.told(wire.PurgePlanned)
    assert planned and {one.space for one in planned} == {old}
    assert mine <= again.files().keys()


@pytest.mark.parametrize("restarts", [False, True])
def test_o18_a_helper_and_children_do_not_throw_the_main_session_off_the_disk(tmp_path, restarts):
    """Field report O18: 8k tokens, a helper with the same system start, then two children in turn with the parent.

    Device memory holds one of them at a time, the disk not all of them: what is lost is the children's.
    """
    limit = 40 * FILE_BYTES
    engine = Tiered(tmp_path / "s", blocks=600, limit=limit, context=16384)
    system = tokens(27, 1)
    main = [*system, *tokens(8000, 2)]
    engine.serve("main", main, session="main")
    engine.serve("helper", [*system, *tokens(300, 3)], session="helper")
    turns = [*main, *SAYS]
    children = [[*system, *tokens(3000, 10 + number)] for number in range(2)]
    from_disk = 0
    for number in range(6):
        turns += tokens(20, 50 + number)
        matched = engine.serve(f"m{number}", turns, session="main")
        assert matched.cached >= 0.95 * len(turns)
        from_disk += matched.restored
        turns += SAYS
        child = children[number % 2]
        child += tokens(20, 100 + number)
        engine.serve(f"c{number}", child, session=f"child{number % 2}")
        child += SAYS
        assert engine.file_bytes() <= limit
        if restarts:
            engine = engine.restart()
    assert from_disk > 4000, "device memory had lost it"
    newest = set(engine.journal.path("m5"))
    gone = [hash_ for one in engine.told(wire.PurgePlanned) for hash_ in one.hashes]
    assert newest <= engine.files().keys() and not newest & set(gone)


def test_r15_giving_up_a_file_that_is_missing_hurts_nobody(tmp_path):
    """Field report R15: the eviction of a missing file crashed the engine."""
    engine = Tiered(tmp_path / "s", blocks=1024, limit=7 * FILE_BYTES)
    engine.serve("a", tokens(520, 1))
    for path in engine.files().values():
        path.unlink()
    for number in range(4):
        engine.submit(f"r{number}", tokens(520, 10 + number))
        while not engine.of(wire.Finished, f"r{number}") or engine.disk.queue:
            engine.step()
    gone = {hash_ for one in engine.told(wire.PurgePlanned) for hash_ in one.hashes}
    assert gone, "room was made, out of what is not there as well"
    assert len(engine.told(wire.Finished)) == 5
    assert engine.restart().serve("again", [*tokens(520, 13), 7]).cached >= 512


@pytest.mark.parametrize("blocks", [20, 43])
def test_r16_a_snapshot_that_is_larger_than_device_memory_stops_no_start(tmp_path, blocks):
    """Field report R16: a restore that needs more memory than there is ends its request at most, and no engine."""
    engine = Tiered(tmp_path / "s", blocks=1024)
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    small = engine.restart(blocks=blocks)
    small.submit("too long", [*prompt, 7])
    small.submit("short", tokens(100, 2))
    small.run()
    assert [one.request for one in small.told(wire.Finished)] == ["short"]
    (failed,) = small.told(wire.Failed)
    assert failed.request == "too long"
    assert small.scheduler._residency.free + small.scheduler._residency.kept == blocks
    small.serve("part", [*prompt[:250], 8])
    assert small.matched("part").cached == 250
    assert engine.restart().serve("b", [*prompt, 7]).cached == 700, "the next one with room has it all"


@pytest.mark.parametrize("depth", [0, 1])
def test_r20_a_folder_that_leads_elsewhere_is_not_followed(tmp_path, depth):
    """Field report R20: nothing is read from outside through a link, nothing is written there, nothing removed."""
    engine = Tiered(tmp_path / "s", blocks=1024)
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    place = next(iter(engine.files().values())).parents[1 - depth]
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*.zjc")}
    again = engine.restart()
    again.submit("b", [*prompt, 7])
    for _ in range(400):
        again.step()
    assert len(again.told(wire.Finished)) == 1
    assert again.matched("b").cached < 700
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*.zjc")} == before
    assert os.path.islink(place)
