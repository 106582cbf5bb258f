"""Scheduler and cache under random load: everything ends once, nothing leaks, every table spells its tokens.

The scripted runner stands for the device: it proves at each step that the blocks hold what the request says.
`pytest -m soak` runs the long one.
"""

import random
from collections import Counter

import pytest

from zjournal.checkpoint.script import Script, Turn
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine.cache.prefix import COLD, EVICTED, EXTENDED, FORKED, NO_ROOM, WHOLE
from zjournal.engine.models.scripted import TOKEN_KV_BYTES, ScriptedRunner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.link import wire

BLOCKS = 40
REQUESTS = 500
SOAK_REQUESTS = 10_000
STEP_TOKENS = 48
TEXT = "the answer is always the same, but it is long enough to cross blocks"


def tokenizer():
    letters = [chr(byte) for byte in range(0x21, 0x7F)]
    tokens = [*letters, "Ġ", "<|end|>"]
    kinds = [1] * (len(letters) + 1) + [3]
    return Tokenizer.byte_level(tokens, kinds, [], "gpt-2", ends=[len(tokens) - 1], specials={"eos": len(tokens) - 1})


class Guess:
    """Guesses the text, with mistakes; a request that has ended is not asked about again."""

    def __init__(self, dice, wanted):
        self.dice = dice
        self.wanted = wanted
        self.ended = set()

    def propose(self, request, ids, prompt, most):
        assert request not in self.ended and most > 0
        at = len(ids) - prompt
        right = self.wanted[at : at + most] + [self.wanted[-1]] * max(at + most - len(self.wanted), 0)
        return [self.dice.randint(0, 3) if self.dice.random() < 0.2 else token for token in right]

    def verified(self, request, drafted, accepted):
        assert 0 <= accepted <= drafted > 0

    def end(self, request):
        self.ended.add(request)


class Load:
    """Agents that branch from each other's histories, cancel, break, and now and then ask for too much."""

    def __init__(self, seed, drafts_max=0):
        self.random = random.Random(seed)
        start = wire.Start(model="soak", kv_bytes=BLOCKS * 16 * TOKEN_KV_BYTES, context=600)
        fails = [Turn(text=TEXT, fail_after=after) for after in (0, 1, 3, 18, 40)]
        turns = [turn for fail in fails for turn in (Turn(text=TEXT), fail)] * 8
        self.runner = ScriptedRunner(Script(turns=(*turns, Turn(text=TEXT))), tokenizer(), start, "d")
        limits = Limits(600, max_running=5, prefill_tokens=STEP_TOKENS, queue_max=6, drafts_max=drafts_max)
        self.wanted = [*self.runner.tokenizer.encode(TEXT), self.runner._end]
        guess = Guess(self.random, self.wanted) if drafts_max else None
        self.scheduler = Scheduler(limits, self.runner.block_count, self.runner.tokenizer.token_bytes, guess)
        self.histories = [[]]
        self.asked = {}
        self.ended = {}
        self.begun = set()
        self.matched = set()
        self.output = {}
        self.cached = Counter()
        self.states = 0

    def submit(self):
        base = self.random.choice(self.histories[-30:])
        prompt = [*base[: self.random.randint(0, len(base))], *self.fresh()]
        ask = wire.Generate(
            request=str(len(self.asked)),
            session=self.random.choice(["", "one", "two", "three"]),
            background=self.random.random() < 0.25,
            tokens=wire.pack_ids(prompt),
            namespace=self.random.choice("ab"),
            sampling=wire.Sampling(0.0, 1.0, 0, 0),
            max_tokens=self.random.choice([1, 5, 20, 100, 600 - len(prompt)]),
            end_tokens=(self.runner._end,),
            stop=(b"long",) if self.random.random() < 0.2 else (),
        )
        self.asked[ask.request] = (ask, prompt)
        self.output[ask.request] = []
        self.tell(self.scheduler.submit(ask, 0))

    def fresh(self):
        return [self.random.randint(0, 3) for _ in range(self.random.choice([1, 3, 17, 60, 90]))]

    def step(self):
        plan = self.scheduler.plan(0)
        assert sum(len(part.tokens) for part in plan.slices) <= STEP_TOKENS
        for request, prompt in plan.begun:
            self.runner.begin(request, prompt)
            self.begun.add(request)
        for copy in plan.copies:
            self.runner.copy_block(copy.source, copy.target, copy.count)
        self.tell(plan.events)
        self.tell(self.scheduler.apply(plan, self.runner.step(plan.slices), 0))
        self.scheduler.check()

    def tell(self, events):
        for event in events:
            match event:
                case wire.Tokens():
                    assert event.position == len(self.output[event.request])
                    assert event.request not in self.ended
                    self.output[event.request] += wire.unpack_ids(event.ids)
                case wire.Finished() | wire.Failed():
                    self.end(event)
                case wire.CacheChanged():
                    self.states += 1 if event.change == "admit" else -1
                case wire.Matched():
                    assert event.request not in self.matched, "a match is told once"
                    self.matched.add(event.request)
                    assert event.cached < event.prompt
                    assert event.reason in (WHOLE, EXTENDED, FORKED, EVICTED, COLD, NO_ROOM)
                    assert (event.reason == WHOLE) == (event.cached == event.prompt - 1)
                    assert event.cached == 0 or event.reason != COLD
                    self.cached["cached"] += event.cached
        assert self.states == self.scheduler.gauges().states

    def end(self, event):
        assert event.request not in self.ended
        self.ended[event.request] = event
        if event.request in self.begun:
            self.runner.end(event.request)
        ask, prompt = self.asked[event.request]
        got = self.output[event.request]
        assert got == (self.wanted + [self.runner._end] * len(got))[: len(got)]
        if isinstance(event, wire.Finished):
            assert event.output == len(got)
            if event.reason == "length":
                assert len(got) == ask.max_tokens
            self.histories.append([*prompt, *got][:500])

    def cancel(self):
        open_ones = [request for request in self.asked if request not in self.ended]
        if open_ones:
            self.tell(self.scheduler.cancel(self.random.choice(open_ones), 0))
            self.scheduler.check()


def soak(load, requests):
    steps = 0
    while len(load.asked) < requests or not load.scheduler.idle:
        dice = load.random.random()
        if dice < 0.05 and len(load.asked) < requests:
            for _ in range(load.random.choice([1] * 9 + [12])):
                load.submit()
        elif dice < 0.07:
            load.cancel()
        elif dice < 0.075 and load.ended:
            load.tell(load.scheduler.forget(load.random.sample(sorted(load.ended), 1)))
            load.scheduler.check()
        elif not load.scheduler.idle:
            load.step()
        steps += 1
        assert steps < 400 * requests, "something waits for ever"
    load.scheduler.check()
    assert set(load.ended) == set(load.asked)
    reasons = Counter(getattr(event, "reason", None) or event.code for event in load.ended.values())
    wanted = {"stop", "length", "stop_string", "cancelled", "engine_error", "rate_limit_exceeded"}
    assert wanted <= set(reasons), reasons
    assert load.cached["cached"] > 1000
    assert not load.runner._playing
    gauges = load.scheduler.gauges()
    assert gauges.preemptions > 0
    assert gauges.recomputed > 0


@pytest.mark.parametrize(("seed", "drafts_max"), [(0, 0), (1, 0), (2, 3), (3, 7)])
def test_soak(seed, drafts_max):
    load = Load(seed, drafts_max)
    soak(load, REQUESTS)
    assert (load.scheduler.gauges().accepted > 100) == (drafts_max > 0)


@pytest.mark.soak
def test_soak_of_ten_thousand_requests():
    soak(Load(17, 5), SOAK_REQUESTS)
