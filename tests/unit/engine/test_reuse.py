"""What is kept for whom: reports of the field as tests, with their numbers, at the scheduler."""

import pytest

from tests.unit.engine.driver import END, Engine
from zjournal.engine.cache.prefix import STATES_PER_BRANCH_MAX
from zjournal.link import wire

SYSTEM = list(range(10_000, 10_027))  # the beginning that a helper shares with the session


def fresh(start, count):
    return list(range(20_000 + start, 20_000 + start + count))


def big(tokens, **options):
    return Engine(blocks=tokens // 16, context=200_000, prefill_tokens=1024, **options)


@pytest.mark.parametrize("capacity", [8_700, 9_500, 12_000, 16_000])
def test_o18_a_helper_and_children_do_not_throw_out_the_main_session(capacity):
    """8,000 tokens; a helper of 300; a turn; two children of 3,000 that alternate with it for six rounds."""
    rounds = 6 if capacity > 11_200 else 0  # where a child and the session do not fit together, only the helper comes
    engine = big(capacity)
    main = SYSTEM + fresh(0, 8_000 - 27)
    engine.serve("main", main, says=[END])
    main += [END, *fresh(50_000, 40)]
    assert engine.serve("helper", SYSTEM + fresh(60_000, 273), says=[7, END]) == 27
    assert engine.serve("main+1", main, says=[END]) >= 0.95 * 8_000
    for turn in range(rounds):
        for child in range(2):
            engine.serve(f"child{child} {turn}", SYSTEM + fresh(70_000 + 5_000 * child, 2_973), says=[END])
            main += [END, *fresh(100_000 + 100 * turn + 50 * child, 40)]
            cached = engine.serve(f"main {turn} {child}", main, says=[END])
            assert cached >= 0.95 * (len(main) - 41), (turn, child, cached, len(main))


def test_o18_two_children_in_a_row_do_not_throw_it_out_either():
    """By age alone the session would be the next to go when the second child comes."""
    engine = big(12_000)
    main = SYSTEM + fresh(0, 8_000 - 27)
    engine.serve("main", main, says=[END])
    for turn in range(6):
        for child in range(2):
            engine.serve(f"child{child} {turn}", SYSTEM + fresh(70_000 + 5_000 * child, 2_973), says=[END])
        cached = engine.serve(f"main {turn}", [*main, 7], says=[END])
        assert cached >= 0.95 * len(main), (turn, cached)


def test_a_session_that_nobody_asks_for_goes_in_the_end():
    engine = big(12_000)
    engine.serve("main", fresh(0, 8_000), says=[END])
    for number in range(40):
        engine.serve(str(number), fresh(50_000 + 5_000 * number, 3_000), says=[END])
    assert engine.serve("late", fresh(0, 8_000), says=[END]) < 4_000


def test_a_beginning_that_many_share_outlives_their_tails():
    engine = big(6_000)
    system = fresh(0, 1_000)
    for number in range(8):
        engine.serve(f"shares{number}", system + fresh(10_000 + 1_000 * number, 600), says=[END])
    for number in range(3):
        engine.serve(f"foreign{number}", fresh(100_000 + 5_000 * number, 4_000), says=[END])
    assert engine.serve("again", [*system, 7], says=[END]) == 1_000


def test_ds4_four_tool_rounds_cost_their_deltas_and_not_5779_tokens_each():
    """The client leaves out the thoughts, so each round departs from what was generated; the first behind 5,779."""
    engine = big(20_000)
    prompt = fresh(0, 5_779)
    engine.serve("round 0", prompt, says=[*fresh(50_000, 200), END], max_tokens=300)
    for number in range(1, 5):
        call = fresh(60_000 + 1_000 * number, 35)
        delta = [*call, *fresh(70_000 + 1_000 * number, 120)]  # the call without its thoughts, and the tool's result
        before, prompt = len(prompt), prompt + delta
        cached = engine.serve(
            f"round {number}", prompt, says=[*fresh(50_000 + 1_000 * number, 200), END], max_tokens=300
        )
        assert cached == before, "all of the last prompt, to the single token"
        assert engine.computed[f"round {number}"] == len(delta) + 200
        assert not [event for event in engine.of(wire.CacheChanged) if event.change == "evict"]


def test_ds4_a_departure_inside_a_block_copies_it_and_leaves_the_other_branch_whole():
    engine = Engine(blocks=64)
    engine.serve("one", range(100, 125), says=[50, 51, 52, END])
    assert engine.serve("two", [*range(100, 125), 50, 60, 61], says=[END]) == 26
    assert engine.serve("one again", [*range(100, 125), 50, 51, 52, 70], says=[END]) == 28
    assert engine.serve("two again", [*range(100, 125), 50, 60, 61, 70], says=[END]) == 28


def test_r15_making_room_never_takes_the_prefix_that_is_about_to_be_used():
    """The pool is full, and the oldest state is the one that is asked for: the others go."""
    engine = big(3_200)
    engine.serve("wanted", fresh(0, 1_000), says=[END])
    for number in range(2):
        engine.serve(str(number), fresh(10_000 + 2_000 * number, 1_000), says=[END])
    assert engine.serve("long", [*fresh(0, 1_000), *fresh(50_000, 1_500)], says=[END]) == 1_000


def test_r16_what_does_not_fit_is_refused_and_what_fits_runs_whatever_is_kept():
    engine = big(1_600)
    engine.serve("kept", fresh(0, 1_500), says=[END])
    engine.submit("too large", fresh(10_000, 1_590), says=[END], max_tokens=20)
    (failed,) = engine.of(wire.Failed)
    assert "1590 prompt tokens and up to 20 output tokens" in failed.message
    assert "1600 tokens" in failed.message
    engine.serve("all of it", fresh(20_000, 1_590), says=[5] * 10, max_tokens=10)
    assert engine.of(wire.Finished)[-1].reason == "length"
    assert engine.scheduler.gauges().states == 1


def test_r18_sessions_with_the_same_beginning_stay_apart():
    """Two with 200 equal tokens, then different ones: each finds its own history, and what both share."""
    engine = big(16_000)
    histories = {name: fresh(0, 200) + [number] * 30 for number, name in enumerate("ab", 60)}
    for turn in range(4):
        for name, history in histories.items():
            before = len(history) if turn else {"a": 0, "b": 200}[name]
            history += fresh(1_000 * turn + 5_000 * (name == "b") + 30_000, 50)
            assert engine.serve(f"{name}{turn}", history, says=[END], session=name) == before


def test_r27_the_pool_is_a_limit():
    engine = big(1_600, max_running=4, queue_max=100)
    for number in range(60):
        engine.submit(str(number), fresh(1_000 * number, 10 * number + 1), says=[5] * 50, max_tokens=50)
    while not engine.scheduler.idle:
        engine.step()
        gauges = engine.scheduler.gauges()
        assert 0 <= gauges.kv_blocks_free <= gauges.kv_blocks == 100
        assert gauges.states <= 100
    assert len(engine.of(wire.Finished)) == 60


def test_the_terminal_states_of_a_branch_are_bounded_and_its_blocks_stay():
    engine = big(16_000)
    history = fresh(0, 100)
    turns = STATES_PER_BRANCH_MAX + 10
    for turn in range(turns):
        cached = engine.serve(f"turn{turn}", history, says=[END])
        assert cached == (len(history) - 21 if turn else 0)
        history += [END, *fresh(10_000 + 100 * turn, 20)]
    assert engine.scheduler.gauges().states == STATES_PER_BRANCH_MAX
    evicted = [event.request for event in engine.of(wire.CacheChanged) if event.change == "evict"]
    assert evicted == [f"turn{turn}" for turn in range(10)]
    assert engine.serve("back to the third turn", [*history[:142], 7], says=[END]) == 142


def test_states_where_ways_part_stay():
    engine = big(16_000)
    base = fresh(0, 96)
    engine.serve("fork", base, says=[END])
    for number in range(STATES_PER_BRANCH_MAX + 5):
        engine.serve(f"branch{number}", [*base, *fresh(10_000 + 100 * number, 20)], says=[END])
    assert [event.request for event in engine.of(wire.CacheChanged) if event.change == "evict"] == []
