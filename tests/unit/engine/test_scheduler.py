"""The scheduler: batching, chunks, admission, ends, and the numbers it tells. The model is a counter."""

import pytest

from tests.unit.engine.driver import END, Engine
from zjournal.engine.scheduler import Limits
from zjournal.errors import EngineFailed
from zjournal.link import wire


def test_a_request_from_start_to_end():
    engine = Engine()
    engine.submit("r", range(100, 120), says=[7, 8, END])
    engine.run()
    kinds = [type(event).__name__ for event in engine.events]
    assert kinds == ["Matched", "Tokens", "Tokens", "Tokens", "CacheChanged", "Finished"]
    assert engine.tokens("r") == [7, 8, END]
    assert engine.of(wire.Finished) == [
        wire.Finished(request="r", reason="stop", output=3, queue_us=0, prefill_us=1000, decode_us=2000)
    ]
    (admitted,) = engine.of(wire.CacheChanged)
    assert admitted == wire.CacheChanged(1, "admit", "n", "r", 22, 2)  # the end token's KV was never computed


def test_length_and_end_token_at_once_is_a_stop():
    engine = Engine()
    engine.submit("end", [1], says=[5, END], max_tokens=2)
    engine.submit("length", [1], says=[5, 6], max_tokens=2)
    engine.run()
    assert [event.reason for event in engine.of(wire.Finished)] == ["stop", "length"]


def test_a_stop_string_over_two_tokens_ends_at_the_token_that_completes_it():
    engine = Engine()
    engine.submit("r", [1], says=[ord("a"), ord("b"), ord("c"), ord("d")], stop=(b"bc",))
    engine.run()
    assert engine.tokens("r") == [ord("a"), ord("b"), ord("c")]
    assert engine.of(wire.Finished)[0].reason == "stop_string"


def test_the_next_turn_reuses_all_that_was_computed():
    engine = Engine()
    prompt = list(range(100, 140))
    engine.submit("one", prompt, says=[7, 8, END])
    engine.run()
    engine.submit("two", [*prompt, 7, 8, END, 50, 51], says=[END])
    engine.run()
    assert engine.cached("two") == 42
    engine.submit("fork", [*prompt[:21], 9, 9], says=[END])
    engine.run()
    assert engine.cached("fork") == 21
    engine.submit("foreign", [*prompt, 7], says=[END], namespace="other")
    engine.run()
    assert engine.cached("foreign") == 0


def test_the_whole_prompt_is_never_reused():
    engine = Engine()
    for request in ("one", "two"):
        engine.submit(request, range(32), says=[END])
        engine.run()
    assert engine.cached("two") == 31


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_decode():
    engine = Engine(prefill_tokens=32)
    engine.submit("decode", [1, 2], says=range(10, 18), max_tokens=8)
    engine.step()
    engine.submit("long", range(200, 270), says=[END])
    engine.run()
    assert engine.plans[1:5] == [
        [("decode", 1), ("long", 31)],
        [("decode", 1), ("long", 31)],
        [("decode", 1), ("long", 8)],
        [("decode", 1)],
    ]
    assert engine.tokens("decode") == list(range(10, 18))


def test_two_with_the_same_beginning_that_arrive_together_share_it():
    engine = Engine(prefill_tokens=64)
    shared = range(300, 364)
    engine.submit("a", [*shared, 1], says=[END])
    engine.submit("b", [*shared, 2], says=[END])
    engine.run()
    assert engine.cached("a") == 0
    assert engine.cached("b") == 64


def test_two_that_ask_the_same_at_the_same_time_compute_it_once():
    engine = Engine(prefill_tokens=64)
    engine.submit("a", range(400, 420), says=[7, 8, 9, END])
    engine.submit("b", range(400, 420), says=[7, 8, 9, END])
    engine.run()
    assert engine.plans[:2] == [[("a", 20)], [("a", 1), ("b", 4)]]
    assert engine.cached("b") == 16, "the block that is full; the other one is still being written"
    gauges = engine.scheduler.gauges()
    assert gauges.kv_blocks - gauges.kv_blocks_free == 2
    assert gauges.states == 1


def test_at_most_max_running_run_and_the_rest_waits_in_order():
    engine = Engine(max_running=2)
    for request in "abcd":
        engine.submit(request, [1, ord(request)], says=[5, 6, 7, END])
    engine.step()
    assert (engine.scheduler.gauges().running, engine.scheduler.gauges().waiting) == (2, 2)
    engine.run()
    assert [event.request for event in engine.of(wire.Finished)] == ["a", "b", "c", "d"]


def test_room_for_some_growth_is_kept_and_who_does_not_fit_waits():
    engine = Engine(blocks=4)
    engine.submit("a", range(16), says=[5] * 33, max_tokens=33)  # 3 blocks in the end
    engine.submit("b", range(50, 70), says=[6] * 4)  # 2 blocks
    engine.step()
    assert (engine.scheduler.gauges().running, engine.scheduler.gauges().waiting) == (1, 1)
    engine.run()
    assert [event.request for event in engine.of(wire.Finished)] == ["a", "b"]


def test_kept_states_give_way_to_what_runs():
    engine = Engine(blocks=4)
    for number in range(5):
        engine.submit(str(number), range(100 * number, 100 * number + 30), says=[END])
        engine.run()
    changes = [(event.fact, event.change, event.request) for event in engine.of(wire.CacheChanged)]
    assert changes == [
        (1, "admit", "0"),
        (2, "admit", "1"),
        (3, "evict", "0"),
        (4, "admit", "2"),
        (5, "evict", "1"),
        (6, "admit", "3"),
        (7, "evict", "2"),
        (8, "admit", "4"),
    ]


def test_a_partial_hit_that_would_cost_the_last_block_is_given_up():
    """Its source and its copy would both be needed; the request takes the whole pool, so it computes instead."""
    engine = Engine(blocks=3)
    engine.submit("a", range(20), says=[END])
    engine.run()
    engine.submit("b", [*range(18), *range(500, 526)], says=[1, 2, 3, 4])
    engine.run()
    assert engine.cached("b") == 16
    assert engine.of(wire.Finished)[-1].request == "b"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [(4000, 97, ("4000", "97", "4096")), (1000, 26, ("1000", "26", "1024"))],
)
def test_what_can_never_run_is_refused_at_once_with_the_numbers(prompt, max_tokens, numbers):
    engine = Engine(blocks=64, context=4096)
    engine.submit("r", [3] * prompt, max_tokens=max_tokens)
    (failed,) = engine.events
    assert failed.code == "context_length_exceeded"
    for number in numbers:
        assert number in failed.message
    assert engine.scheduler.idle


def test_what_just_fits_runs():
    engine = Engine(blocks=64, context=4096)
    engine.submit("r", [3] * 1000, says=[5] * 25, max_tokens=25)
    engine.run()
    assert engine.of(wire.Finished)[0].reason == "length"


def test_a_full_queue_refuses():
    engine = Engine(queue_max=2)
    for request in "abc":
        engine.submit(request, [1])
    (failed,) = engine.events
    assert (failed.request, failed.code) == ("c", "rate_limit_exceeded")


def test_cancel_in_the_queue_in_prefill_and_in_decode_returns_everything():
    engine = Engine(max_running=2, prefill_tokens=32)
    engine.submit("decode", [1, 2], says=[5] * 50, max_tokens=50)
    engine.step()
    engine.submit("prefill", range(1000, 1100), says=[5])
    engine.step()
    engine.submit("queue", [3])
    engine.step()
    assert engine.tokens("prefill") == []
    for request in ("queue", "prefill", "decode"):
        engine.cancel(request)
    assert engine.scheduler.idle
    assert [event.reason for event in engine.of(wire.Finished)] == ["cancelled"] * 3
    assert engine.of(wire.CacheChanged) == []
    engine.submit("again", range(1000, 1100), says=[END])
    engine.run()
    assert engine.cached("again") == 62  # the two chunks of 31


def test_cancel_of_an_ended_request_is_nothing():
    engine = Engine()
    engine.submit("r", [1], says=[END])
    engine.run()
    before = list(engine.events)
    engine.cancel("r")
    engine.cancel("never seen")
    assert engine.events == before


def test_a_fault_fails_its_own_request_only():
    engine = Engine()
    engine.submit("bad", range(40), says=[EngineFailed("broken")])
    engine.submit("good", range(100, 120), says=[5, END])
    engine.run()
    (failed,) = engine.of(wire.Failed)
    assert failed == wire.Failed("bad", "engine_error", "broken")
    assert engine.tokens("good") == [5, END]
    engine.submit("after", range(40), says=[END])
    engine.run()
    assert engine.cached("after") == 0  # nothing of the step that failed is trusted


def test_a_fault_in_decode_keeps_what_earlier_steps_computed():
    engine = Engine()
    engine.submit("bad", range(100, 120), says=[7, 8, EngineFailed("broken")])
    engine.run()
    assert engine.of(wire.CacheChanged) == []  # kept, but no terminal state
    engine.submit("after", [*range(100, 120), 7, 8, 9], says=[END])
    engine.run()
    assert engine.cached("after") == 21


def test_limits_that_could_starve_a_prompt_are_a_bug():
    with pytest.raises(AssertionError):
        Limits(context=100, max_running=8, prefill_tokens=8)
