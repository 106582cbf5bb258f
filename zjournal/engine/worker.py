"""The engine process: `python -m zjournal.engine.worker --fd N`, where N is its end of a socket pair.

One thread owns everything. It waits while there is nothing to do, looks at the socket between two steps, and
sends all that a step brought in one write. It lives as long as its parent holds the other end: SIGINT from the
terminal and SIGTERM from a supervisor are for the parent, and when the parent is gone the process leaves at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.models.scripted import ScriptedRunner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Drafter, Sampled, Slice
from zjournal.errors import ConfigFault, EngineStartFault, Fault
from zjournal.link import logs, wire

READ_BYTES = 1 << 18
GAUGES_EVERY_US = 500_000
AUDIT_EVERY_US = 10_000_000  # all invariants are looked at when idle, at most so often
FACTS_MAX = 65_536  # unacknowledged cache facts that are remembered

log = logging.getLogger("zjournal.engine")


class AnyRunner(Protocol):
    """From slices to tokens: the model and the device."""

    fingerprint: str
    parts: Mapping[str, str]
    kernels: str
    context: int
    block_count: int
    vocab_size: int

    def begin(self, request: str, prompt: Sequence[int]) -> None: ...

    def end(self, request: str) -> None: ...

    def copy_block(self, source: int, target: int, count: int) -> None: ...

    def step(self, slices: list[Slice]) -> list[Sampled | Fault]: ...


class ParentGone(Exception):
    """The other end of the socket is closed."""


class Link:
    """The engine's end of the socket: whole messages in, whole batches of messages out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deframer = wire.Deframer(wire.ToEngine)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive(self, timeout_ms: float | None) -> list[wire.ToEngine]:
        """Returns what has arrived, in order; waits up to `timeout_ms` for the first byte (None: for ever).

        Raises ParentGone when the other end is closed.
        """
        messages: list[wire.ToEngine] = []
        while self._poll.poll(timeout_ms):
            try:
                data = self._sock.recv(READ_BYTES)
            except ConnectionError as error:
                raise ParentGone from error
            if not data:
                raise ParentGone
            messages += self._deframer.feed(data)
            timeout_ms = 0
        return messages

    def send(self, messages: Sequence[wire.FromEngine]) -> None:
        """Sends all in one write. Raises ParentGone when nobody can read it."""
        if not messages:
            return
        try:
            self._sock.sendall(b"".join(map(wire.frame, messages)))
        except OSError as error:
            raise ParentGone from error


class Worker:
    """The loop: messages in, a step, messages out. `clock` gives microseconds, from any start."""

    def __init__(self, link: Link, runner: AnyRunner, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._link = link
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._begun: set[str] = set()
        self._unacknowledged: dict[int, None] = {}  # facts, in order
        self._gauges_due_us = 0
        self._gauges_stale = False
        self._audit: Iterator[None] | None = None  # in the middle of looking at all invariants
        self._audit_due_us = clock() + AUDIT_EVERY_US
        self._audited = True  # nothing has changed since the last audit

    def run(self, early: Sequence[wire.ToEngine] = ()) -> None:
        """Serves until Stop, `early` messages first. Raises ParentGone."""
        messages = list(early)
        while True:
            for message in messages:
                if isinstance(message, wire.Stop):
                    self._stopped()
                    return
                self._take(message)
            if not self._scheduler.idle:
                self._step()
            else:
                self._look()
            self._tell_gauges()
            messages = self._link.receive(self._patience_ms())

    def _look(self) -> None:
        """Checks some more of the invariants, as there is nothing else to do. After a message it begins anew."""
        if self._audited or self._clock() < self._audit_due_us:
            return
        if self._audit is None:
            self._audit = self._scheduler.audit()
        if next(self._audit, self) is self:
            self._audit, self._audited = None, True
            self._audit_due_us = self._clock() + AUDIT_EVERY_US

    def _take(self, message: wire.ToEngine) -> None:
        self._audit, self._audited = None, False
        now_us = self._clock()
        match message:
            case wire.Generate():
                self._send(self._scheduler.submit(message, now_us))
            case wire.Cancel():
                self._send(self._scheduler.cancel(message.request, now_us))
            case wire.Forget():
                self._send(self._scheduler.forget(message.requests))
            case wire.Committed():
                self._unacknowledged.pop(message.fact, None)
            case _:
                raise AssertionError(f"{type(message).__name__} is not expected here")
        self._gauges_stale = True

    def _step(self) -> None:
        plan = self._scheduler.plan(self._clock())
        for request, prompt in plan.begun:
            assert max(prompt) < self._runner.vocab_size, "a prompt token is outside the vocabulary"
            self._runner.begin(request, prompt)
            self._begun.add(request)
        for copy in plan.copies:
            self._runner.copy_block(copy.source, copy.target, copy.count)
        self._send(plan.events)
        results = self._runner.step(plan.slices)
        self._send(self._scheduler.apply(plan, results, self._clock()))
        self._gauges_stale = True

    def _send(self, events: Sequence[wire.FromEngine]) -> None:
        for event in events:
            match event:
                case wire.CacheChanged():
                    self._unacknowledged[event.fact] = None
                    if len(self._unacknowledged) > FACTS_MAX:
                        del self._unacknowledged[next(iter(self._unacknowledged))]
                case wire.Failed():
                    log.warning("%s failed: %s: %s", event.request, event.code, event.message)
                    self._ended(event.request)
                case wire.Finished():
                    self._ended(event.request)
        self._link.send(events)

    def _ended(self, request: str) -> None:
        if request in self._begun:
            self._begun.remove(request)
            self._runner.end(request)

    def _tell_gauges(self) -> None:
        now_us = self._clock()
        if self._gauges_stale and now_us >= self._gauges_due_us:
            self._link.send([self._scheduler.gauges()])
            # Every kept block is an object, and looking through them all takes 150 ms at 10,000 states: the collector
            # looks at what is new, and what it leaves it never looks at again.
            gc.collect()
            gc.freeze()
            self._gauges_due_us = now_us + GAUGES_EVERY_US
            self._gauges_stale = False

    def _patience_ms(self) -> float | None:
        """How long to wait for a message: not at all before a step or in an audit, until one is due, or for ever."""
        if not self._scheduler.idle or self._audit is not None:
            return 0
        due = [self._gauges_due_us] if self._gauges_stale else []
        if not self._audited:
            due.append(self._audit_due_us)
        return max(min(due) - self._clock(), 0) / 1000 + 1 if due else None

    def _stopped(self) -> None:
        self._scheduler.check()
        gauges = self._scheduler.gauges()
        log.info(
            "stopped: %d running, %d waiting, %d of %d blocks free, %d states, %d facts not acknowledged",
            gauges.running,
            gauges.waiting,
            gauges.kv_blocks_free,
            gauges.kv_blocks,
            gauges.states,
            len(self._unacknowledged),
        )


def load(start: wire.Start, progress: Callable[[float], None]) -> tuple[AnyRunner, Callable[[int], bytes], Limits]:
    """Loads what `start` names: the runner, the tokens' bytes, the scheduler's limits. Raises a Fault."""
    if start.prefill_tokens < start.max_running + BLOCK_TOKENS:
        raise ConfigFault(
            f"A step of {start.prefill_tokens} tokens is too small for {start.max_running} running requests; "
            f"it takes at least {start.max_running + BLOCK_TOKENS}."
        )
    if start.threads:
        os.environ["OMP_NUM_THREADS"] = str(start.threads)  # read by torch's runtimes when they are first imported
    progress(0.0)
    runner: AnyRunner
    if start.scripted:
        runner = scripted = ScriptedRunner.load(start, progress)
        token_bytes = scripted.tokenizer.token_bytes
    else:
        from zjournal.engine.runner import Runner  # torch: seconds, and nothing that a scripted engine needs

        runner = Runner.load(start, progress)
        token_bytes = open_checkpoint(start.tokenizer or start.model).tokenizer().token_bytes
    limits = Limits(
        context=runner.context,
        max_running=start.max_running,
        prefill_tokens=start.prefill_tokens,
        queue_max=start.queue_max,
        drafts_max=start.speculation,
    )
    return runner, token_bytes, limits


def drafter(drafts_max: int) -> Drafter | None:
    """What guesses the next tokens of a request; None where nothing is to be guessed."""
    if not drafts_max:
        return None
    from zjournal.engine.decoding.speculation import PromptLookup  # numpy, which a scripted engine may do without

    return PromptLookup(drafts_max)


def serve(link: Link) -> int:
    """The life of the process after its set-up; returns its exit status."""
    messages = link.receive(None)
    while not messages:
        messages = link.receive(None)
    start, *early = messages
    assert isinstance(start, wire.Start), type(start).__name__
    logs.configure(start.log_level, start.log_format)
    begun = time.monotonic()
    try:
        runner, token_bytes, limits = load(start, lambda part: link.send([wire.Loading(part)]))
    except Fault as fault:
        log.error("the model cannot be loaded: %s", fault.message)
        link.send([wire.Broken(fault.code, fault.message)])
        return EngineStartFault.exit_code
    scheduler = Scheduler(limits, runner.block_count, token_bytes, drafter(limits.drafts_max))
    ready = wire.Ready(
        fingerprint=runner.fingerprint,
        kernels=runner.kernels,
        context=runner.context,
        kv_tokens=runner.block_count * BLOCK_TOKENS,
        parts=dict(runner.parts),
    )
    gc.collect()
    gc.freeze()  # what the load left lives as long as the process: no use looking through it between two steps
    gc.disable()  # the worker collects when it tells its gauges
    link.send([ready])
    log.info("ready in %.2f s: %s, %d blocks", time.monotonic() - begun, runner.kernels, runner.block_count)
    Worker(link, runner, scheduler, lambda: time.monotonic_ns() // 1000).run(early)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="zjournal.engine.worker", description="The engine process; zj starts it.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the parent")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group, they mean the parent, who drains first
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("zj-engine")
    with socket.socket(fileno=options.fd) as sock:
        try:
            return serve(Link(sock))
        except ParentGone:
            log.warning("the parent is gone")
            return 0


if __name__ == "__main__":
    sys.exit(main())
