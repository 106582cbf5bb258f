"""The worker with nothing to do: it looks at all invariants, a little at a time, and waits for ever after that."""

import pytest

from tests.unit.engine.driver import END, GREEDY
from tests.unit.engine.tiers import Tiered
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Sampled
from zjournal.engine.worker import AUDIT_EVERY_US, Worker
from zjournal.link import wire


class Link:
    """Plays a script of what arrives at each wait, or is called then; remembers how long the worker was to wait."""

    def __init__(self, arrivals):
        self.arrivals = iter(arrivals)
        self.waits = []
        self.sent = []

    def receive(self, timeout_ms):
        self.waits.append(timeout_ms)
        arrival = next(self.arrivals)
        return arrival() if callable(arrival) else arrival

    def send(self, messages):
        self.sent += messages


class Runner:
    vocab_size = 100_000

    def begin(self, request, prompt): ...

    def end(self, request): ...

    def copy_block(self, source, target, count): ...

    def step(self, slices):
        return [Sampled((END,)) for part in slices if part.sampling is not None]


def ask(request, tokens):
    return wire.Generate(
        request=request,
        tokens=wire.pack_ids(range(tokens)),
        namespace="n",
        sampling=GREEDY,
        max_tokens=4,
        end_tokens=(END,),
    )


def worker_with(arrivals, scheduler=None):
    """A clock that moves as far at each look as an audit is apart from the next."""
    now = iter(range(0, 10**12, AUDIT_EVERY_US + 1))
    link = Link(arrivals)
    scheduler = scheduler or Scheduler(Limits(20_000, 4, 8192), 1000, lambda token: b"x")
    return Worker(link, Runner(), scheduler, lambda: next(now)), link, scheduler


def test_it_looks_bit_by_bit_and_then_waits_for_ever():
    worker, link, _ = worker_with([[ask("a", 10_000)], *[[]] * 12, [wire.Stop()]])
    worker.run()
    looks = link.waits[2:]  # before that it waited for the request, and ran it
    assert looks.count(0) >= 2, "10,000 tokens are more blocks than one look takes"
    assert looks[-1] is None


def test_what_is_wrong_ends_the_process():
    worker, _, scheduler = worker_with([[ask("a", 100)], *[[]] * 12])
    scheduler._residency._graph.states = 7
    with pytest.raises(AssertionError):
        worker.run()


def test_a_message_ends_an_audit_that_would_not_be_true_any_more():
    worker, link, _ = worker_with([[ask("a", 10_000)], [], [ask("b", 5_000)], *[[]] * 12, [wire.Stop()]])
    worker.run()
    ended = [message.request for message in link.sent if isinstance(message, wire.Finished)]
    assert ended == ["a", "b"]
    assert link.waits[-1] is None


def test_a_write_may_begin_in_the_middle_of_an_audit(tmp_path):
    """The tail of a turn follows what it continues: that is written, an audit begins, and the next write as well."""
    engine = Tiered(tmp_path)
    lent = []

    def hold(*kinds):
        lent.append(engine.scheduler._residency.lent)
        engine.disk.held = set(kinds)
        return []

    quiet = [[] for _ in range(6)]
    arrivals = [[ask("a", 600)], *[lambda: hold("write")] * 6, hold, lambda: hold("write"), *quiet, hold, *quiet]
    worker, _, _ = worker_with([*arrivals, [wire.Stop()]], engine.scheduler)
    engine.disk.held = {"write"}
    worker.run()
    whole, tail = lent[-3:-1]
    assert whole > tail > 0, "the tail was being written when the audit went on"
    assert worker._audited, "and it came to its end"
