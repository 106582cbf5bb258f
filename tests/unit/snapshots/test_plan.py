"""What goes when room is needed: the worthless first, then what is cheapest to compute again, never what is needed."""

from __future__ import annotations

import math

import pytest

from tests.unit.snapshots import chunks
from tests.unit.snapshots.test_index import Disk
from zjournal.snapshots import format, plan
from zjournal.snapshots.plan import Rates, Stakes, Why, make_room, sweep

NS = chunks.NAMESPACE
FOREIGN = format.digest("other weights", "local")
TB = format.TOKEN_BYTES
HOUR = 3_600_000_000
STAKES = Stakes(now_us=1000, rates=Rates(1000))
MB = 1_000_000


def foreign(namespace: bytes) -> bool:
    return namespace == FOREIGN


def names_left(disk: Disk, made: plan.Plan) -> dict[str, int]:
    """Carries the plan out; what is left of each snapshot, in tokens."""
    told = {one.hash: one.snapshots for one in made.deletions}
    for hash_, names in told.items():
        assert set(names) == set(disk.index.chunks[hash_].ends or {})
        disk.index.drop(hash_)
        disk.index.check()
    return {name: one.tokens for name, one in disk.index.snapshots.items()}


def test_nothing_goes_while_there_is_room():
    disk = Disk()
    disk.keep(chunks.tokens(600))
    made = make_room(disk.index, 100, disk.index.file_bytes + 100, STAKES)
    assert made == plan.Plan((), 0, True)
    assert not make_room(disk.index, 101, disk.index.file_bytes + 100, STAKES, worth=0).deletions


def test_it_frees_what_is_asked_for_and_not_much_more():
    disk = Disk()
    for seed in range(8):
        disk.keep(chunks.tokens(600, seed))
    before = disk.index.file_bytes
    made = make_room(disk.index, 0, before // 2, STAKES)
    assert made.fits and before - before // 2 <= made.freed
    assert made.freed - made.deletions[-1].file_bytes < before - before // 2
    assert made == make_room(disk.index, 0, before // 2, STAKES)
    plan.apply(disk.index, made)
    disk.index.check()
    assert disk.index.file_bytes == before - made.freed <= before // 2


def test_bytes_outside_of_the_index_count():
    disk = Disk()
    disk.keep(chunks.tokens(600))
    size = disk.index.file_bytes
    assert not make_room(disk.index, 0, size, STAKES).deletions
    assert make_room(disk.index, 0, size, STAKES, other=1).deletions
    assert not make_room(disk.index, 0, 0, STAKES, other=1).fits


def test_a_session_gives_up_its_end_before_its_beginning():
    disk = Disk()
    name = disk.keep(chunks.tokens(1000))
    made = make_room(disk.index, 0, disk.index.file_bytes - 1, STAKES)
    assert [(one.start, one.tokens, one.why, one.snapshots) for one in made.deletions] == [
        (768, 232, Why.LEAST, (name,))
    ]
    assert names_left(disk, made) == {name: 768}


def test_o18_a_short_session_goes_before_the_end_of_a_long_one():
    """O18: a small helper does not throw out the main session, though that is older."""
    disk = Disk()
    main = disk.keep(chunks.tokens(8 * 1024), "main")
    for seed in range(4):
        disk.keep(chunks.tokens(256, seed + 1), "helper")
    made = make_room(disk.index, 0, disk.index.file_bytes - 1, STAKES)
    assert [one.start for one in made.deletions] == [0]
    assert names_left(disk, made)[main] == 8192


def test_what_is_worth_less_than_anything_else_gets_no_room():
    """The same the other way round: nobody is thrown out for the helper's own snapshot."""
    disk = Disk()
    disk.keep(chunks.tokens(8 * 1024))
    size = chunks.row(chunks.split(chunks.tokens(256))[0]).file_bytes
    worth = plan.worth_of(STAKES.rates, 0, 256, size)
    made = make_room(disk.index, size, disk.index.file_bytes, STAKES, worth=worth)
    assert not made.fits and not made.deletions
    assert make_room(disk.index, size, disk.index.file_bytes, STAKES).fits
    deep = plan.worth_of(STAKES.rates, 20_000, 256, size)
    assert make_room(disk.index, size, disk.index.file_bytes, STAKES, worth=deep).fits


def test_r15_what_is_about_to_be_read_or_continued_stays():
    """R15: storing a state does not throw out the prefix that is about to be loaded."""
    state = chunks.tokens(1000)
    disk = Disk()
    disk.keep(state)
    disk.keep(chunks.tokens(300, 1))
    keep = {one.hash for one in chunks.split(state)[:3]}
    stakes = Stakes(now_us=1000, rates=Rates(1000), keep=keep)
    made = make_room(disk.index, 0, 0, stakes)
    assert not made.fits
    assert {one.hash for one in made.deletions} == disk.index.chunks.keys() - keep


def test_pinned_stays_and_live_goes_last():
    disk = Disk()
    pinned, live, other = (disk.keep(chunks.tokens(300, seed), f"s{seed}") for seed in range(3))
    disk.index.pin(pinned, True)
    stakes = Stakes(now_us=1000, rates=Rates(1000), live={"s1"})
    made = make_room(disk.index, 0, 0, stakes)
    assert not made.fits
    assert [(one.why, one.snapshots) for one in made.deletions] == [
        (Why.LEAST, (other,)),
        (Why.LEAST, (other,)),
        (Why.LIVE, (live,)),
        (Why.LIVE, (live,)),
    ]
    assert names_left(disk, made) == {pinned: 300}


def test_the_unused_and_the_old_go_first():
    disk = Disk()
    old, new, used = (disk.keep(chunks.tokens(256, seed)) for seed in range(3))
    for chunk in disk.index.chunks.values():
        chunk.used_us = 0
    disk.index.snapshots[new].chunk.used_us = 2 * HOUR
    found = disk.find(chunks.tokens(256, 2) + bytes(8))
    disk.index.used(found, 0)
    stakes = Stakes(now_us=2 * HOUR, rates=Rates(1000))
    order = [one.snapshots[0] for one in make_room(disk.index, 0, 0, stakes).deletions]
    assert order == [old, new, used]


def test_no_age_is_too_great_and_no_clock_too_early():
    disk = Disk()
    disk.keep(chunks.tokens(300))
    for now_us in (-(10**18), 10**18):
        made = make_room(disk.index, 0, 0, Stakes(now_us=now_us, rates=Rates(1e-9)))
        assert made.fits and all(math.isfinite(one.recompute_s) for one in made.deletions)


def test_a_tail_that_the_next_turn_did_not_keep_goes_first():
    """ds4's report: generated, never hit again, crowding out the rest. What it shares with the next turn stays."""
    turn = chunks.tokens(1000)
    disk = Disk()
    first = disk.keep(turn)
    other = disk.keep(chunks.tokens(256, 3), "helper")
    disk.index.went_on(first, 600)
    made = make_room(disk.index, 0, disk.index.file_bytes - 1, STAKES)
    assert [(one.why, one.start, one.recompute_s) for one in made.deletions] == [(Why.ABANDONED, 768, 0)]
    assert names_left(disk, made) == {first: 768, other: 256}
    assert not sweep(disk.index, STAKES).deletions  # 88 tokens of the third chunk are what the next turn began with
    disk.index.went_on(first, 512)
    assert not sweep(disk.index, STAKES).deletions  # another next turn keeps no less than before


def test_of_several_next_turns_the_one_counts_that_kept_most():
    disk = Disk()
    name = disk.keep(chunks.tokens(1000))
    disk.index.went_on(name, 300)
    disk.index.went_on(name, 900)
    disk.index.went_on("one that is gone", 5)
    assert not sweep(disk.index, STAKES).deletions


def test_one_tail_is_kept_for_a_branch():
    state = chunks.tokens(1000)
    disk = Disk()
    name = disk.keep(state[: 300 * TB])
    for before, length in ((300, 400), (400, 500), (500, 900)):
        disk.index.went_on(name, before)
        name = disk.keep(state[: length * TB])
    live = Stakes(now_us=1000, rates=Rates(1000), live={"s"})
    made = sweep(disk.index, live)
    assert {(one.start, one.tokens, one.why) for one in made.deletions} == {
        (256, 44, Why.SUPERSEDED),
        (256, 144, Why.SUPERSEDED),
        (256, 244, Why.SUPERSEDED),
    }
    assert {one.recompute_s for one in made.deletions} == {0}
    assert names_left(disk, made) == {name: 900}
    assert disk.find(state + state).tokens == 900


def test_a_full_chunk_of_which_the_next_turn_kept_a_part_is_superseded_by_its():
    state = chunks.tokens(512)
    disk = Disk()
    first = disk.keep(state)
    disk.index.went_on(first, 400)
    assert not sweep(disk.index, STAKES).deletions
    second = disk.keep(state[: 400 * TB] + chunks.tokens(200, 1))
    made = sweep(disk.index, STAKES)
    assert [(one.start, one.tokens, one.why) for one in made.deletions] == [(256, 256, Why.SUPERSEDED)]
    assert names_left(disk, made) == {second: 600}


def test_of_two_that_repeat_each_other_one_stays():
    base = chunks.tokens(64)
    disk = Disk()
    for seed in (1, 2):
        disk.keep(base + chunks.tokens(5, seed))
    assert [one.why for one in sweep(disk.index, STAKES).deletions] == [Why.SUPERSEDED]


def test_what_goes_itself_supersedes_nothing():
    """The longer state was not kept by its next turn: then the shorter one is all there is."""
    state = chunks.tokens(500)
    disk = Disk()
    short, long = disk.keep(state[: 200 * TB], "a"), disk.keep(state, "b")
    disk.index.went_on(long, 0)
    made = sweep(disk.index, STAKES)
    assert [(one.start, one.why) for one in made.deletions] == [(256, Why.ABANDONED), (0, Why.ABANDONED)]
    assert names_left(disk, made) == {short: 200}


def test_what_is_kept_for_less_supersedes_no_more():
    """The full chunk stays on disk for 20 tokens of it, and goes with them: the tail of 200 must not lean on it."""
    state = chunks.tokens(256)
    disk = Disk()
    short, long = disk.keep(state[: 200 * TB], "a"), disk.keep(state, "b")
    disk.index.went_on(long, 20)
    next_turn = disk.keep(state[: 20 * TB] + chunks.tokens(100, 1), "b")
    made = sweep(disk.index, STAKES)
    assert [(one.tokens, one.why, one.snapshots) for one in made.deletions] == [(256, Why.SUPERSEDED, (long,))]
    assert names_left(disk, made) == {short: 200, next_turn: 120}


def test_what_another_session_may_come_back_for_supersedes():
    state = chunks.tokens(500)
    disk = Disk()
    short, long = disk.keep(state[: 200 * TB], "a"), disk.keep(state, "b")
    made = sweep(disk.index, STAKES)
    assert [(one.tokens, one.why, one.snapshots) for one in made.deletions] == [(200, Why.SUPERSEDED, (short,))]
    assert names_left(disk, made) == {long: 500}


def test_r21_two_images_repeat_nothing():
    """R21 again: equal tokens behind other images are other KV."""
    disk = Disk()
    for name, image in (("a", b"c" * 32), ("b", b"d" * 32)):
        tail = chunks.make(chunks.tokens(100), extra=image)
        disk.index.add(name, "s", NS, tail.hash, [chunks.row(tail)], 1)
    assert not sweep(disk.index, STAKES).deletions


def test_tails_of_two_branches_stay():
    state = chunks.tokens(300)
    disk = Disk()
    for seed in (1, 2):
        disk.keep(state + chunks.tokens(40, seed))
    assert not sweep(disk.index, STAKES).deletions


def test_what_cannot_be_read_goes_with_all_behind_it():
    state = chunks.tokens(1000)
    disk = Disk()
    name = disk.keep(state)
    disk.index.refuse(chunks.split(state)[1].hash)
    made = sweep(disk.index, STAKES)
    assert [(one.start, one.why, one.recompute_s) for one in made.deletions] == [
        (768, Why.BAD, 0),
        (512, Why.BAD, 0),
        (256, Why.BAD, 0),
    ]
    assert names_left(disk, made) == {name: 256}


def test_o15_foreign_kv_goes_first_but_only_for_room():
    """O15: other weights make it stale; the weights may come back."""
    disk = Disk()
    stale = disk.keep(chunks.tokens(5000, 1), namespace=FOREIGN)
    disk.keep(chunks.tokens(300))
    stakes = Stakes(now_us=1000, rates=Rates(1000), foreign=foreign)
    assert not sweep(disk.index, stakes).deletions
    made = make_room(disk.index, 0, disk.index.file_bytes - 1, stakes)
    assert [(one.why, one.snapshots, one.recompute_s) for one in made.deletions] == [(Why.FOREIGN, (stale,), 0)]


@pytest.mark.parametrize("size", [MB, 7 * MB])
def test_o13_a_limit_is_never_passed_and_holds_after_a_restart(size):
    """O13: 20 sessions of 20 MB under 200 MB, 50 MB of another model, then a limit of 100 MB."""
    disk = Disk()

    def store(seed, session, namespace, limit):
        made = chunks.split(chunks.tokens(20 * MB // size * 256 + 10, seed), namespace=namespace)
        for at, one in enumerate(made):
            row = chunks.row(one, size)
            keep = {done.hash for done in made[:at]}
            stakes = Stakes(now_us=seed, rates=Rates(1000), keep=keep)
            room = make_room(disk.index, size, limit, stakes)
            assert room.fits
            plan.apply(disk.index, room)
            name = f"{session}.{at}"
            disk.index.add(name, session, namespace, one.hash, [row], seed)
            if at:
                disk.index.went_on(f"{session}.{at - 1}", one.start)
            assert disk.index.file_bytes <= limit
        disk.index.check()

    for seed in range(20):
        store(seed, f"s{seed}", NS, 200 * MB)
    assert disk.index.file_bytes > 200 * MB - 2 * size
    store(20, "foreign", FOREIGN, 200 * MB)
    stakes = Stakes(now_us=21, rates=Rates(1000), foreign=foreign)
    predicted = make_room(disk.index, 0, 100 * MB, stakes)
    assert predicted.fits
    count = sum(one.why is Why.FOREIGN for one in predicted.deletions)
    assert count and all(one.why is Why.FOREIGN for one in predicted.deletions[:count])
    assert count == sum(chunk.namespace == FOREIGN for chunk in disk.index.chunks.values())
    assert make_room(disk.index, 0, 100 * MB, stakes) == predicted
    plan.apply(disk.index, predicted)
    disk.index.check()
    assert 100 * MB - 2 * size < disk.index.file_bytes <= 100 * MB


def test_the_floor_of_free_space_limits_too():
    assert plan.limit_of(quota=1000, held=300, free=10_000, floor=500) == 1000
    assert plan.limit_of(quota=1000, held=300, free=600, floor=500) == 400
    assert plan.limit_of(quota=1000, held=300, free=0, floor=500) == -200


def test_recomputing_costs_more_the_deeper_it_is():
    rates = Rates(1000)
    assert rates.recompute_s(0, 0) == 0
    assert rates.recompute_s(0, 2048) == pytest.approx(2.048 * 1.5)
    assert rates.recompute_s(2048, 256) > 2 * 0.256
    whole = rates.recompute_s(0, 1024)
    assert whole == pytest.approx(sum(rates.recompute_s(start, 256) for start in range(0, 1024, 256)))


def test_what_is_named_goes_as_far_as_nothing_else_needs_it():
    disk = Disk()
    base = chunks.tokens(512, 1)
    a, b, c = map(disk.keep, (base, base + chunks.tokens(300, 2), base + chunks.tokens(40, 3)))
    made = plan.remove(disk.index, [b], Rates(1000))
    assert [(one.start, one.why, one.snapshots) for one in made.deletions] == [
        (768, Why.ASKED, (b,)),
        (512, Why.ASKED, (b,)),
    ]
    assert made.fits and made.freed == sum(one.file_bytes for one in made.deletions)
    assert not plan.remove(disk.index, [a], Rates(1000)).deletions, "others go on from it"
    everything = plan.remove(disk.index, [a, c, b], Rates(1000))
    assert len(everything.deletions) == len(disk.index.chunks) and everything.freed == disk.index.file_bytes
    disk.index.pin(c, True)
    some = plan.remove(disk.index, [a, c, b], Rates(1000))
    assert not some.fits and {one.start for one in some.deletions} == {512, 768}
    plan.apply(disk.index, some)
    disk.index.check()
    assert {name: one.tokens for name, one in disk.index.snapshots.items()} == {a: 512, c: 552}
