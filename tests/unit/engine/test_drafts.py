"""Guesses in the scheduler: nothing but the number of steps changes, and no memory is taken from others for them."""

import random

import pytest

from tests.unit.engine.driver import END, GREEDY, Engine
from zjournal.errors import EngineFailed
from zjournal.link import wire

SAID = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59]


class Guess:
    """Guesses what `right` says, `wrong` places excepted; remembers what it was told."""

    def __init__(self, right=None, *, wrong=(), seed=None):
        self.right = right
        self.wrong = set(wrong)
        self.dice = random.Random(seed) if seed is not None else None
        self.results = []
        self.ended = []

    def propose(self, request, ids, prompt, most):
        assert most > 0
        said = self.right[request] if isinstance(self.right, dict) else self.right
        at = len(ids) - prompt
        guesses = [token if at + place not in self.wrong else 9 for place, token in enumerate(said[at : at + most])]
        if self.dice:
            guesses = [9 if self.dice.random() < 0.3 else guess for guess in guesses[: self.dice.randint(0, most)]]
        return [guess for guess in guesses if not isinstance(guess, EngineFailed)]

    def verified(self, request, drafted, accepted):
        self.results.append((drafted, accepted))

    def end(self, request):
        self.ended.append(request)


def engine_with(guess, **options):
    return Engine(drafter=guess, **{"drafts_max": 4, **options})


def told(engine, request):
    return [list(wire.unpack_ids(event.ids)) for event in engine.of(wire.Tokens, request)]


def test_right_guesses_come_with_one_token_more():
    guess = Guess(SAID)
    engine = engine_with(guess)
    engine.submit("r", range(100, 120), says=SAID, max_tokens=10)
    engine.run()
    assert told(engine, "r") == [[50], [51, 52, 53, 54, 55], [56, 57, 58, 59]]
    assert guess.results == [(4, 4), (3, 3)], "no guess that could not be told any more"
    assert guess.ended == ["r"]
    gauges = engine.scheduler.gauges()
    assert (gauges.drafted, gauges.accepted) == (7, 7)


def test_the_first_wrong_guess_ends_what_is_taken():
    engine = engine_with(Guess(SAID, wrong=[3, 4]))
    engine.submit("r", range(100, 120), says=SAID, max_tokens=10)
    engine.run()
    assert told(engine, "r") == [[50], [51, 52, 53], [54], [55, 56, 57, 58, 59]]


@pytest.mark.parametrize(
    ("said", "options", "wanted", "reason"),
    [
        ([50, 51, END, 53, 54], {}, [50, 51, END], "stop"),
        ([50, ord("a"), ord("b"), 53, 54], {"stop": (b"ab",)}, [50, ord("a"), ord("b")], "stop_string"),
        ([50, 51, 52, 53, 54], {"max_tokens": 3}, [50, 51, 52], "length"),
    ],
)
def test_an_end_inside_a_run_of_right_guesses_ends_it_there(said, options, wanted, reason):
    """What stands behind the end is never told and never kept: the state is the one that single steps leave."""
    states = []
    for guess in (None, Guess(said)):
        engine = engine_with(guess)
        options = {"max_tokens": 5, **options}
        engine.submit("r", range(100, 113), says=said, **options)
        engine.run()
        assert engine.tokens("r") == wanted
        assert engine.of(wire.Finished)[0].reason == reason
        states += [(event.tokens, event.blocks) for event in engine.of(wire.CacheChanged)]
        assert engine.serve("next", [*range(100, 113), *said], says=[END]) == 13 + len(wanted) - 1
    assert states[0] == states[1]


def test_logprobs_are_cut_with_the_tokens():
    said = [50, 51, END, 53, 54]
    engine = engine_with(Guess(said))
    sampling = wire.Sampling(0.0, 1.0, 0, 0, logprobs=0)
    engine.submit("r", range(100, 113), says=said, max_tokens=5, sampling=sampling)
    engine.run()
    last = engine.of(wire.Tokens)[-1]
    assert len(wire.cut_logprobs(last.logprobs, 2)) == len(wire.unpack_ids(last.ids)) == 2


def test_a_step_that_prompts_fill_makes_no_guesses():
    engine = engine_with(Guess({"r": SAID, "long": [END]}), prefill_tokens=32)
    engine.submit("r", [1], says=SAID, max_tokens=10)
    engine.step()
    engine.submit("long", range(200, 270), says=[END])
    engine.run()
    assert engine.plans[1:5] == [
        [("r", 1), ("long", 31)],
        [("r", 1), ("long", 31)],
        [("r", 5), ("long", 8)],
        [("r", 2)],
    ]


def test_nothing_is_given_up_for_a_guess():
    engine = engine_with(Guess(SAID * 10), blocks=4)
    engine.serve("kept", range(300, 330), says=[END])
    engine.submit("r", range(14), says=SAID * 2, max_tokens=20)  # 3 blocks in the end; two are free
    engine.step()
    engine.step()
    assert engine.plans[-1] == [("r", 1 + 4)]
    assert [event.change for event in engine.of(wire.CacheChanged)] == ["admit"]
    engine.step()
    engine.step()
    assert engine.scheduler.gauges().preemptions == 0
    engine.run()
    assert engine.tokens("r") == SAID * 2


def test_blocks_of_wrong_guesses_are_given_back():
    engine = engine_with(Guess([9] * 100), blocks=64)
    engine.submit("r", range(14), says=SAID * 8, max_tokens=80)
    for _ in range(3):  # 14 tokens, then 15 and 16, whose guesses reach into a second block
        engine.step()
        gauges = engine.scheduler.gauges()
        assert gauges.kv_blocks - gauges.kv_blocks_free == 1 + (len(engine.tokens("r")) > 2)
    assert engine.plans[1:] == [[("r", 5)], [("r", 5)]]
    engine.run()
    assert engine.tokens("r") == SAID * 8


def test_a_fault_in_a_step_with_guesses_gives_everything_back():
    said = [50, 51, EngineFailed("broken")]
    engine = engine_with(Guess([50, 7, 7, 7, 7, 7]))
    engine.submit("bad", range(100, 120), says=said, max_tokens=10)
    engine.run()
    assert engine.tokens("bad") == [50, 51]
    assert engine.of(wire.Failed)[0].code == "engine_error"
    gauges = engine.scheduler.gauges()
    assert gauges.kv_blocks - gauges.kv_blocks_free == 2, "the 21 tokens of the prompt and its first answer"


@pytest.mark.parametrize("seed", range(20))
def test_with_and_without_guesses_the_same_is_told(seed):
    dice = random.Random(seed)
    requests = {}
    for number in range(12):
        said = [dice.randint(40, 60) for _ in range(60)]
        if dice.random() < 0.5:
            said[dice.randint(0, 59)] = END
        stop = (bytes(said[20:22]),) if dice.random() < 0.3 and END not in said[20:22] else ()
        prompt = [dice.randint(3, 5) for _ in range(dice.randint(1, 60))]
        requests[str(number)] = (prompt, said, {"max_tokens": dice.randint(1, 60), "stop": stop})
    answers = []
    for guess in (None, Guess({request: said for request, (_, said, _) in requests.items()}, seed=seed)):
        engine = engine_with(guess, blocks=14, max_running=3, queue_max=20, prefill_tokens=30)
        for request, (prompt, said, options) in requests.items():
            engine.submit(request, prompt, says=said, sampling=GREEDY, **options)
        engine.run(3000)
        ends = {event.request: (event.reason, event.output) for event in engine.of(wire.Finished)}
        answers.append(({request: engine.tokens(request) for request in requests}, ends))
        assert guess is None or sorted(guess.ended) == sorted(requests)
    assert answers[0] == answers[1]
