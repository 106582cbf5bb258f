"""Over-commitment: who gives way when memory runs out, that nobody sees it, and that something always ends."""

import random

import pytest

from tests.unit.engine.driver import END, Engine
from zjournal.engine.scheduler import BACKGROUND_PASSES_MAX
from zjournal.link import wire


def long_answer(start, count):
    return [1000 + start * 1000 + number for number in range(count)]


def test_a_default_limit_does_not_keep_others_out():
    """Each of four may say up to 900 tokens, and the pool has 1,024: they run together, as nobody says so much."""
    engine = Engine(blocks=64, context=1024)
    for number in range(4):
        engine.submit(str(number), range(100 * number, 100 * number + 20), says=[5, 6, END], max_tokens=900)
    engine.step()
    assert engine.scheduler.gauges().running == 4
    engine.run()
    assert engine.scheduler.gauges().preemptions == 0


def test_the_last_one_gives_way_and_goes_on_later_without_a_visible_change():
    engine = Engine(blocks=16)  # 256 tokens
    said = {name: long_answer(number, 110) for number, name in enumerate("abc")}
    for number, name in enumerate("abc"):
        engine.submit(name, range(50 * number, 50 * number + 30), says=said[name], max_tokens=110)
    engine.run()
    gauges = engine.scheduler.gauges()
    assert gauges.preemptions > 0
    assert gauges.recomputed > 0
    for name in "abc":
        assert engine.tokens(name) == said[name]
        (matched,) = engine.of(wire.Matched, name)
        assert (matched.cached, matched.prompt) == (0, 30), "told once, and what is computed again is no hit"
        assert engine.of(wire.Finished, name)[0].output == 110
    assert engine.ended()[0] == "a"
    assert sum(engine.computed.values()) == 3 * (30 + 109) + gauges.recomputed


def test_the_first_one_is_never_preempted_and_each_end_brings_the_next():
    engine = Engine(blocks=12, max_running=4)
    for number, name in enumerate("abcd"):
        engine.submit(name, range(50 * number, 50 * number + 30), says=long_answer(number, 150), max_tokens=150)
    engine.run(3000)
    assert engine.ended() == list("abcd")
    assert engine.scheduler.gauges().preemptions >= 2


def test_a_background_request_gives_way_first_even_if_it_came_before():
    engine = Engine(blocks=18)
    engine.submit("first", range(30), says=long_answer(0, 200), max_tokens=200)
    engine.submit("back", range(100, 130), says=long_answer(1, 150), max_tokens=150, background=True)
    engine.step()
    engine.submit("front", range(200, 230), says=long_answer(2, 150), max_tokens=150)
    engine.step()
    assert engine.scheduler.gauges().running == 3
    while not engine.scheduler.gauges().preemptions:
        engine.step()
    assert engine.waiting() == {"back"}
    engine.run()
    assert engine.tokens("back") == long_answer(1, 150)


def test_the_first_of_all_is_not_preempted_even_if_it_is_background():
    engine = Engine(blocks=18)
    engine.submit("back", range(100, 130), says=long_answer(1, 150), max_tokens=150, background=True)
    engine.step()
    engine.submit("front", range(200, 230), says=long_answer(2, 150), max_tokens=150)
    while not engine.scheduler.gauges().preemptions:
        engine.step()
    assert engine.waiting() == {"front"}
    engine.run()
    assert engine.tokens("front") == long_answer(2, 150)


def test_what_is_kept_of_a_preempted_request_is_matched_again():
    engine = Engine(blocks=22)
    engine.submit("a", range(100), says=long_answer(0, 120), max_tokens=120)
    engine.submit("b", range(200, 290), says=long_answer(1, 120), max_tokens=120)
    engine.run()
    gauges = engine.scheduler.gauges()
    assert gauges.preemptions == 1
    assert 0 < gauges.recomputed < 60, "only what a took of it, and the block that was not full"


def test_cancel_of_a_preempted_request_gives_everything_back_and_keeps_its_blocks():
    engine = Engine(blocks=22)
    engine.submit("a", range(100), says=long_answer(0, 120), max_tokens=120)
    engine.submit("b", range(200, 290), says=long_answer(1, 120), max_tokens=120)
    while not engine.scheduler.gauges().preemptions:
        engine.step()
    engine.cancel("b")
    (ended,) = engine.of(wire.Finished)
    assert (ended.request, ended.reason) == ("b", "cancelled")
    assert ended.output == len(engine.tokens("b")) > 0
    engine.run()
    assert engine.serve("again", range(200, 290), says=[END]) > 48


@pytest.mark.parametrize("seed", range(30))
def test_something_always_ends(seed):
    """No deadlock and no livelock: the first in rank runs without a break, so a bounded number of steps ends all."""
    dice = random.Random(seed)
    engine = Engine(blocks=dice.randint(8, 20), max_running=dice.randint(1, 6), queue_max=100, prefill_tokens=40)
    total = 0
    for number in range(25):
        prompt = [dice.randint(3, 5) for _ in range(dice.choice([1, 15, 16, 17, 40, 60]))]
        output = dice.choice([1, 2, 30, 60])
        says = long_answer(number, output)
        background = dice.random() < 0.4
        engine.submit(
            str(number), prompt, says=says, max_tokens=output, background=background, session=str(dice.randint(0, 3))
        )
        total += len(prompt) + output
        engine.says[str(number)] = says
    left = total * 2 + 50 * BACKGROUND_PASSES_MAX
    while not engine.scheduler.idle:
        oldest = min(engine.scheduler._running.values(), key=lambda one: one.rank, default=None)
        engine.step()
        if oldest is not None and not oldest.background:
            assert oldest.ticket is not None or oldest.request in engine.ended(), "the first was preempted"
        left -= 1
        assert left > 0
    assert sorted(engine.ended(), key=int) == [str(number) for number in range(25)]
    for number in range(25):
        assert engine.tokens(str(number)) == engine.says[str(number)]


def test_background_yields_its_place_to_whoever_comes_and_still_comes_to_an_end():
    engine = Engine(max_running=1, queue_max=100)
    engine.submit("back", range(100), says=long_answer(0, 60), max_tokens=60, background=True)
    for _ in range(4):
        engine.step()
    for number in range(3):
        engine.submit(f"front{number}", [500 + number], says=[7, END])
    engine.step()
    assert engine.waiting() == {"back", "front1", "front2"}
    engine.run()
    assert engine.ended() == ["front0", "front1", "front2", "back"]
    assert engine.tokens("back") == long_answer(0, 60)
    assert engine.scheduler.gauges().recomputed < 2 * 16


def test_background_is_not_put_off_for_ever():
    engine = Engine(max_running=1, queue_max=100)
    engine.submit("back", range(20), says=[5, END], background=True)
    number = 0
    while "back" not in engine.ended():
        while engine.scheduler.gauges().waiting < 4:  # there is always somebody with the right of way
            engine.submit(f"front{number}", [500 + number], says=[END])
            number += 1
        engine.step()
    assert BACKGROUND_PASSES_MAX <= len(engine.ended()) - 1 <= BACKGROUND_PASSES_MAX + 6
