"""A scheduler driven step by step, with a model that says what each test wants; for the tests of this folder.

`says` gives a request's output; a draft is right if it is what the request says next, as the runner would find.
"""

from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Sampled
from zjournal.errors import Fault
from zjournal.link import wire

GREEDY = wire.Sampling(0.0, 1.0, 0, 0)
END = 2


def ask(request, prompt, *, max_tokens=4, stop=(), namespace="n", session="", background=False, sampling=GREEDY):
    return wire.Generate(
        request=request,
        session=session,
        background=background,
        tokens=wire.pack_ids(prompt),
        namespace=namespace,
        sampling=sampling,
        max_tokens=max_tokens,
        end_tokens=(END,),
        stop=stop,
    )


class Engine:
    """A scheduler and a clock that moves 1 ms with each step; `says` gives each request's tokens."""

    def __init__(
        self, *, blocks=64, context=4096, max_running=4, prefill_tokens=64, queue_max=8, drafts_max=0, drafter=None
    ):
        limits = Limits(context, max_running, prefill_tokens, queue_max, drafts_max)
        self.scheduler = Scheduler(limits, blocks, lambda token: bytes([token % 256]), drafter)
        self.now = 0
        self.says = {}
        self.events = []
        self.plans = []
        self.computed = {}  # request -> tokens computed, guesses not counted

    def submit(self, request, prompt, says=(10, 11, 12, 13), **options):
        self.says[request] = list(says)
        self.computed[request] = 0
        self.events += self.scheduler.submit(ask(request, prompt, **options), self.now)

    def cancel(self, request):
        self.events += self.scheduler.cancel(request, self.now)
        self.scheduler.check()

    def step(self):
        assert not self.scheduler.idle, "nothing is left to be done"
        plan = self.scheduler.plan(self.now)
        self.now += 1000
        self.plans.append([(part.request, len(part.tokens)) for part in plan.slices])
        results = []
        for part in plan.slices:
            self.computed[part.request] += len(part.tokens) - part.drafts
            if part.sampling is not None:
                results.append(self.sample(part))
        self.events += plan.events
        self.events += self.scheduler.apply(plan, results, self.now)
        self.scheduler.check()
        return plan

    def sample(self, part):
        said = self.says[part.request]
        tokens = [said[part.index]]
        if isinstance(tokens[0], Fault):
            return tokens[0]
        logprobs = [wire.pack_logprobs(-1.0, [])]
        for draft in part.tokens[len(part.tokens) - part.drafts :]:
            if draft != tokens[-1] or part.index + len(tokens) >= len(said):
                break
            tokens.append(said[part.index + len(tokens)])
            logprobs.append(wire.pack_logprobs(-float(len(tokens)), []))
        return Sampled(tuple(tokens), b"".join(logprobs) if part.sampling.logprobs >= 0 else b"")

    def run(self, limit=1000):
        while not self.scheduler.idle:
            self.step()
            limit -= 1
            assert limit > 0, "it does not come to an end"

    def serve(self, request, prompt, **options):
        """Runs one request to its end; returns how many tokens of its prompt were reused."""
        self.submit(request, prompt, **options)
        self.run()
        return self.cached(request)

    def of(self, kind, request=None):
        return [e for e in self.events if isinstance(e, kind) and request in (None, getattr(e, "request", None))]

    def tokens(self, request):
        ids = []
        for event in self.of(wire.Tokens, request):
            assert event.position == len(ids)
            ids += wire.unpack_ids(event.ids)
        return ids

    def cached(self, request):
        (matched,) = self.of(wire.Matched, request)
        return matched.cached

    def ended(self):
        """The requests in the order in which they ended."""
        return [event.request for event in self.events if isinstance(event, (wire.Finished, wire.Failed))]

    def waiting(self):
        return set(self.scheduler._waiting)
