"""The scheduler as a state machine: arrivals, cancels, faults, right and wrong guesses, erasures, in any order.

The model knows one thing: what a request says is a function of its prompt and the position, whatever happens around
it. What was computed into each block is written down, so that each table is proved to spell its request's tokens, and a
hit can be no longer than what two requests of one namespace have in common. Every invariant is checked at each step.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Sampled
from zjournal.errors import EngineFailed
from zjournal.link import wire

POOL = 9
CONTEXT = 120
STEP_TOKENS = 24
DRAFTS_MAX = 5
END = 3
STEPS_MAX = 40_000  # to the end of all requests that are left

GREEDY = wire.Sampling(0.0, 1.0, 0, 0)
fresh = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def says(prompt, index):
    """Output token `index`: any function will do, one that ends now and then."""
    mixed = (sum(prompt) * 31 + len(prompt) * 7 + index * 13 + index // 5) % 29
    return END if mixed == 0 else mixed % 3


def common(a, b):
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


class Request:
    def __init__(self, ask, prompt):
        self.ask = ask
        self.prompt = prompt
        self.output = []
        self.matched = False
        self.end = None


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.requests = {}
        self.content = {}  # block -> tokens computed into it
        self.known = {"a": [], "b": []}  # all that was ever computed, by namespace
        self.guess = None  # draws whether a guess is right
        limits = Limits(CONTEXT, max_running=3, prefill_tokens=STEP_TOKENS, queue_max=4, drafts_max=DRAFTS_MAX)
        self.scheduler = Scheduler(limits, POOL, lambda token: bytes([token]), self)
        self.states = 0

    # --- the drafter ---

    def propose(self, request, ids, prompt, most):
        one = self.requests[request]
        assert one.end is None and list(ids) == one.prompt + one.output
        if self.guess is None:
            return []
        right = [says(one.prompt, len(one.output) + place) for place in range(most)]
        return [token if self.guess.draw(st.booleans()) else (token + 1) % 3 for token in right]

    def verified(self, request, drafted, accepted):
        assert 0 <= accepted <= drafted <= DRAFTS_MAX

    def end(self, request):
        assert request in self.requests

    # --- rules ---

    @rule(
        data=st.data(),
        namespace=st.sampled_from("ab"),
        tail=fresh,
        max_tokens=st.integers(1, 80),
        session=st.sampled_from(["", "s", "t"]),
        background=st.booleans(),
        stop=st.sampled_from([(), (b"\0\0\0",)]),
    )
    def submit(self, data, namespace, tail, max_tokens, session, background, stop):
        base = data.draw(st.sampled_from([[], *self.known[namespace][-6:]]))
        prompt = [*base[: data.draw(st.integers(0, len(base)))], *tail]
        request = str(len(self.requests))
        ask = wire.Generate(
            request=request,
            session=session,
            background=background,
            tokens=wire.pack_ids(prompt),
            namespace=namespace,
            sampling=GREEDY,
            max_tokens=max_tokens,
            end_tokens=(END,),
            stop=stop,
        )
        self.requests[request] = Request(ask, prompt)
        self.tell(self.scheduler.submit(ask, 0))
        refused = self.requests[request].end is not None
        assert refused or len(prompt) + max_tokens <= CONTEXT
        if len(prompt) + max_tokens > CONTEXT:
            assert self.requests[request].end.code == "context_length_exceeded"

    @precondition(lambda self: not self.scheduler.idle)
    @rule(data=st.data(), count=st.integers(1, 12), guesses=st.booleans(), faults=st.booleans())
    def run(self, data, count, guesses, faults):
        self.guess = data if guesses else None
        for _ in range(count):
            if not self.scheduler.idle:
                self.step(data if faults else None)

    @precondition(lambda self: any(one.end is None for one in self.requests.values()))
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from([name for name, one in self.requests.items() if one.end is None]))
        self.tell(self.scheduler.cancel(request, 0))
        assert self.requests[request].end.reason == "cancelled"

    @precondition(lambda self: any(one.end is not None for one in self.requests.values()))
    @rule(data=st.data())
    def forget(self, data):
        ended = [name for name, one in self.requests.items() if one.end is not None]
        self.tell(self.scheduler.forget(data.draw(st.sets(st.sampled_from(ended), min_size=1, max_size=3))))

    # --- the device ---

    def step(self, data):
        plan = self.scheduler.plan(0)
        assert plan.slices
        assert sum(len(part.tokens) for part in plan.slices) <= STEP_TOKENS
        for copy in plan.copies:
            self.content[copy.target] = list(self.content[copy.source][: copy.count])
            assert len(self.content[copy.target]) == copy.count
        self.tell(plan.events)
        for part in plan.slices:
            for place, token in enumerate(part.tokens, part.start):
                row = self.content.setdefault(part.table[place // BLOCK_TOKENS], [])
                del row[place % BLOCK_TOKENS :]
                assert len(row) == place % BLOCK_TOKENS, "a gap in a block"
                row.append(token)
        results = [self.compute(part, data) for part in plan.slices]
        results = [result for part, result in zip(plan.slices, results, strict=True) if part.sampling is not None]
        self.tell(self.scheduler.apply(plan, results, 0))

    def compute(self, part, data):
        one = self.requests[part.request]
        spelled = [token for block in part.table for token in self.content.get(block, [])]
        ids = one.prompt + one.output
        assert list(part.ids) == ids and part.prompt == len(one.prompt) and part.index == len(one.output)
        end = part.start + len(part.tokens) - part.drafts
        drafts = list(part.tokens[len(part.tokens) - part.drafts :])
        assert spelled[: end + part.drafts] == ids[:end] + drafts, "the table does not spell the request's tokens"
        assert (part.sampling is not None) == (end == len(ids))
        self.known[one.ask.namespace].append(ids[:end] + drafts)
        if data is not None and data.draw(st.integers(0, 20)) == 0:
            return EngineFailed("broken")
        tokens = [says(one.prompt, part.index)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(says(one.prompt, part.index + len(tokens)))
        return Sampled(tuple(tokens))

    def tell(self, events):
        for event in events:
            if isinstance(event, wire.CacheChanged):
                self.states += 1 if event.change == "admit" else -1
                continue
            one = self.requests[event.request]
            assert one.end is None, "told after the end"
            match event:
                case wire.Matched():
                    assert not one.matched, "a match is told once"
                    one.matched = True
                    best = max((common(known, one.prompt) for known in self.known[one.ask.namespace]), default=0)
                    assert event.cached <= min(best, len(one.prompt) - 1)
                case wire.Tokens():
                    assert one.matched and event.position == len(one.output)
                    for token in wire.unpack_ids(event.ids):
                        assert token == says(one.prompt, len(one.output))
                        one.output.append(token)
                case wire.Finished():
                    one.end = event
                    self.ended_rightly(one)
                case wire.Failed():
                    one.end = event

    def ended_rightly(self, one):
        """The end is where single steps would have found it."""
        output, reason = one.output, one.end.reason
        assert one.end.output == len(output) <= one.ask.max_tokens
        assert END not in output[:-1]
        if one.ask.stop:
            assert b"\0\0\0" not in bytes(output[:-1])
        if reason != "cancelled":
            stopped = bool(one.ask.stop) and bytes(output).endswith(b"\0\0\0")
            wanted = "stop" if output[-1] == END else "stop_string" if stopped else "length"
            assert reason == wanted
            assert reason != "length" or len(output) == one.ask.max_tokens

    @invariant()
    def sound(self):
        self.scheduler.check()
        assert self.states == self.scheduler.gauges().states

    def teardown(self):
        self.guess = None
        for _ in range(STEPS_MAX):
            if self.scheduler.idle:
                break
            self.step(None)
        assert self.scheduler.idle, "something waits for ever"
        assert all(one.end is not None for one in self.requests.values())
        self.scheduler.check()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
