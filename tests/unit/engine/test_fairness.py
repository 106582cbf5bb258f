"""Who is served when: between sessions, within one, short beside long, and that nothing is computed twice at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.driver import END, Engine
from zjournal.engine.scheduler import PREFILLS_MAX
from zjournal.engine.shares import shares
from zjournal.link import wire


def test_one_session_with_fifty_requests_does_not_starve_another():
    engine = Engine(max_running=2, queue_max=100)
    for number in range(50):
        engine.submit(f"many{number}", [1000 + number] * 40, says=[5, 6, END], session="many")
    engine.step()
    for number in range(3):
        engine.submit(f"few{number}", [3000 + number] * 40, says=[5, 6, END], session="few")
    engine.run()
    order = engine.ended()
    assert [order.index(f"few{number}") for number in range(3)] <= [4, 6, 8]
    assert [name for name in order if name.startswith("many")] == [f"many{number}" for number in range(50)]


def test_a_session_pays_for_what_its_prompts_cost():
    """The short prompts of one session go between the long ones of another."""
    engine = Engine(blocks=1024, max_running=1, queue_max=100, context=20_000, prefill_tokens=512)
    for number in range(4):
        engine.submit(f"long{number}", [1000 + number] * 2000, says=[END], session="long")
        engine.submit(f"short{number}", [3000 + number], says=[END], session="short")
    engine.run()
    order = engine.ended()
    assert order.index("short3") < order.index("long2")


def test_equal_sessions_and_requests_without_one_are_served_in_order():
    engine = Engine(max_running=1, queue_max=100)
    for number in range(20):
        engine.submit(str(number), [100 + number], says=[END], session="" if number % 2 else f"s{number}")
    engine.run()
    assert engine.ended() == [str(number) for number in range(20)]


def test_a_short_prompt_does_not_stand_behind_a_long_one():
    engine = Engine(blocks=2048, context=32_000)
    engine.submit("long", range(20_000), says=[END])
    for _ in range(3):
        engine.step()
    engine.submit("short", [7] * 60, says=[END])
    engine.step()
    engine.step()
    assert engine.plans[-2:] == [[("long", 32), ("short", 32)], [("long", 36), ("short", 28)]]
    assert engine.ended() == ["short"]


def test_a_helper_of_the_same_session_does_not_stand_behind_it_either():
    engine = Engine(blocks=2048, context=32_000)
    engine.submit("long", range(20_000), says=[END], session="s")
    engine.step()
    engine.submit("helper", [7] * 60, says=[END], session="s")
    engine.step()
    engine.step()
    assert engine.ended() == ["helper"]


def test_sessions_share_a_step_and_not_their_requests():
    engine = Engine(blocks=2048, context=32_000)
    for name in "abc":
        engine.submit(name, [ord(name)] * 5000, says=[END], session="greedy")
    engine.submit("d", [7] * 5000, says=[END], session="modest")
    engine.step()
    got = dict(engine.plans[0])
    assert got["d"] == 32
    assert sum(got[name] for name in got.keys() - {"d"}) == 32


def test_background_prompts_get_what_is_left_and_never_nothing():
    engine = Engine(blocks=2048, context=32_000, prefill_tokens=256)
    engine.submit("front", range(5000), says=[END])
    engine.submit("back", range(10_000, 15_000), says=[END], background=True)
    engine.step()
    assert dict(engine.plans[0]) == {"front": 224, "back": 32}
    engine.run()
    assert engine.ended() == ["front", "back"]


@pytest.mark.parametrize("prefill_tokens", [24, 20])
def test_background_prompts_progress_where_a_step_is_too_small_for_two(prefill_tokens):
    engine = Engine(blocks=2048, context=32_000, prefill_tokens=prefill_tokens)
    engine.submit("front", range(2000), says=[END])
    engine.submit("back", range(10_000, 10_100), says=[END], background=True)
    for _ in range(60):
        engine.step()
    assert engine.computed["back"] == 100
    assert "front" not in engine.ended()


def test_at_most_so_many_prompts_are_read_side_by_side():
    engine = Engine(blocks=4096, context=32_000, max_running=20, queue_max=100, prefill_tokens=256)
    for number in range(15):
        engine.submit(str(number), [100 + number] * 3000, says=[END])
    engine.step()
    assert len(engine.plans[0]) == PREFILLS_MAX
    engine.run(2000)
    assert len(engine.ended()) == 15


def test_parallel_samples_of_one_prompt_compute_it_once_and_share_its_blocks():
    engine = Engine(blocks=256, max_running=8, queue_max=100)
    prompt = list(range(200, 400))
    for number in range(8):
        engine.submit(str(number), prompt, says=[50 + number] * 20, max_tokens=20)
    while engine.scheduler.gauges().waiting:
        engine.step()
    gauges = engine.scheduler.gauges()
    assert gauges.kv_blocks - gauges.kv_blocks_free <= 12 + 8 * 3
    engine.run()
    assert [engine.cached(str(number)) for number in range(8)] == [0] + [192] * 7
    assert sum(engine.computed.values()) == 200 + 7 * 8 + 8 * 19


def test_an_identical_request_waits_for_the_first_and_goes_on_where_that_was_cancelled():
    engine = Engine(blocks=256)
    prompt = list(range(200, 500))
    engine.submit("first", prompt, says=[END])
    engine.step()
    engine.submit("again", prompt, says=[END])
    engine.step()
    assert engine.waiting() == {"again"}
    engine.cancel("first")
    engine.run()
    assert engine.cached("again") == 128
    assert engine.computed == {"first": 128, "again": 300 - 128}


def test_who_waits_for_a_background_request_hurries_it():
    engine = Engine(blocks=1024, context=32_000, prefill_tokens=128)
    engine.submit("back", range(2000), says=[END], background=True)
    engine.step()
    engine.submit("other", [7] * 5000, says=[END])
    engine.submit("front", [*range(2000), 7], says=[END])
    engine.step()
    engine.step()
    assert dict(engine.plans[-1])["back"] == 64
    engine.run()
    assert engine.cached("front") == 2000


def test_o20_a_queued_requests_cancel_leaves_the_running_one_alone():
    """One place; a decodes 400 tokens, b waits and leaves, c leaves in the moment in which a ends."""
    engine = Engine(blocks=64, max_running=1)
    said = [10 + number % 50 for number in range(399)] + [END]
    engine.submit("a", range(100, 120), says=said, max_tokens=500)
    engine.submit("b", [1])
    engine.submit("c", [3])
    for _ in range(200):
        engine.step()
    engine.cancel("b")
    while "a" not in engine.ended():
        engine.step()
    engine.cancel("c")
    assert engine.scheduler.idle
    assert engine.tokens("a") == said
    ends = {event.request: (event.reason, event.output) for event in engine.of(wire.Finished)}
    assert ends == {"a": ("stop", 400), "b": ("cancelled", 0), "c": ("cancelled", 0)}


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_o19_a_client_that_left_costs_nothing_more_and_its_prefix_stays(phase):
    """A prompt of 10,000 tokens; the next step does nothing for it, and its finished blocks serve the retry."""
    engine = Engine(blocks=1024, context=32_000, prefill_tokens=512, max_running=1)
    prompt = list(range(10_000))
    if phase == "queue":
        engine.submit("other", [7] * 5000, says=[END])
    engine.submit("gone", prompt, says=[5] * 100, max_tokens=100)
    for _ in range({"queue": 2, "prefill": 10, "decode": 30}[phase]):
        engine.step()
    before = engine.computed["gone"]
    assert (before == 0, before < 10_000) == {
        "queue": (True, True),
        "prefill": (False, True),
        "decode": (False, False),
    }[phase]
    engine.cancel("gone")
    engine.run()
    assert engine.computed["gone"] == before
    (end,) = [event for event in engine.of(wire.Finished) if event.request == "gone"]
    assert (end.reason, end.output) == ("cancelled", len(engine.tokens("gone")))
    assert engine.serve("retry", prompt, says=[END]) == min(before, 9_999)


@given(
    st.integers(0, 600),
    st.lists(st.integers(1, 300), max_size=12),
    st.integers(1, 32),
)
def test_shares_are_spent_and_fair(budget, wants, least):
    given_ = shares(budget, wants, least)
    assert sum(given_) == min(budget, sum(wants))
    assert all(0 <= got <= want for got, want in zip(given_, wants, strict=True))
    if budget >= least * len(wants):
        for got, want in zip(given_, wants, strict=True):
            assert got == want or got >= max(given_) - 1, "who wants more gets no less than others"
