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
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.models.scripted import ScriptedRunner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import Drafter, Sampled, Slice
from zjournal.errors import ConfigFault, EngineStartFault, Fault, SnapshotFault
from zjournal.link import logs, wire

if TYPE_CHECKING:
    from zjournal.checkpoint.tokenizer import Tokenizer
    from zjournal.engine.cache.residency import Residency
    from zjournal.engine.cache.snapshots import Snapshots
    from zjournal.engine.cache.staging import Stages
    from zjournal.engine.decoding.steering import Fences
    from zjournal.engine.decoding.vocabulary import Vocabulary

READ_BYTES = 1 << 18
GAUGES_EVERY_US = 500_000
AUDIT_EVERY_US = 10_000_000  # all invariants are looked at when idle, at most so often
FLUSH_US = 10_000_000  # at the end, for what is not on disk yet
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

    layout: str  # of a block's bytes
    block_bytes: int

    @property
    def stages(self) -> Stages | None: ...  # the way to the blocks for other threads; None: they are memory

    @property
    def step_tokens(self) -> int: ...  # most tokens of a step, where it wants more than was asked for

    def block_memory(self, block: int) -> memoryview: ...

    def clear_behind(self, memory: memoryview, tokens: int) -> None: ...


class ParentGone(Exception):
    """The other end of the socket is closed."""


class Link:
    """The engine's end of the socket: whole messages in, whole batches of messages out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deframer = wire.Deframer(wire.ToEngine)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """From now on `receive` also returns when this descriptor is readable; it is not read here."""
        self._poll.register(descriptor, select.POLLIN)

    def receive(self, timeout_ms: float | None) -> list[wire.ToEngine]:
        """Returns what has arrived, in order; waits up to `timeout_ms` for the first byte (None: for ever).

        Raises ParentGone when the other end is closed.
        """
        messages: list[wire.ToEngine] = []
        while any(descriptor == self._sock.fileno() for descriptor, _ in self._poll.poll(timeout_ms)):
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

    def __init__(
        self,
        link: Link,
        runner: AnyRunner,
        scheduler: Scheduler,
        clock: Callable[[], int],
        fences: Fences | None = None,
    ) -> None:
        """Without `fences` whatever a request's fence and guard say is ignored, as a script does."""
        self._fences = fences
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
        self._snapshots = scheduler.snapshots
        self._stuck = False  # the last step had nothing to compute: the disk is waited for

    def run(self, early: Sequence[wire.ToEngine] = ()) -> None:
        """Serves until Stop, `early` messages first. Raises ParentGone."""
        messages = list(early)
        while True:
            for message in messages:
                if not isinstance(message, wire.Stop):  # what came behind it is heard as well: facts that are durable
                    self._take(message)
            if any(isinstance(message, wire.Stop) for message in messages):
                self._stopped()
                return
            self._settle()
            if not self._scheduler.idle:
                self._step()
            else:
                self._look()
            self._back_up()
            self._tell_gauges()
            messages = self._link.receive(self._patience_ms())

    def _settle(self) -> None:
        """Takes in what the disk has done, and the thread that compiles fences: the next step begins what waited."""
        if self._fences is not None and self._fences.settle():
            self._audit, self._audited = None, False
            self._gauges_stale = True
        if self._snapshots is not None and self._snapshots.settle():
            self._audit, self._audited = None, False
            self._gauges_stale = True

    def _back_up(self, *, flush: bool = False) -> None:
        """Begins to write what is due, and tells what there is to tell of snapshots."""
        if self._snapshots is not None:
            self._snapshots.pump(idle=self._scheduler.idle, flush=flush)
            self._send(self._snapshots.take_events())

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
                steer = self._fences.open(message) if self._fences is not None else None
                self._send(self._scheduler.submit(message, now_us, steer))
            case wire.Cancel():
                self._send(self._scheduler.cancel(message.request, now_us, message.keep))
            case wire.Forget():
                self._send(self._scheduler.forget(message.requests))
            case wire.Committed() if message.fact in self._unacknowledged:
                del self._unacknowledged[message.fact]
            case wire.Committed() | wire.Known() | wire.Refused() | wire.Pin() | wire.Purge() | wire.Foreign() if (
                self._snapshots is not None
            ):
                self._snapshots.take(message)
            case wire.Committed():
                pass  # of a fact that is not remembered any more
            case wire.Known() | wire.Refused() | wire.Pin() | wire.Purge() | wire.Foreign():
                pass  # the folder cannot be used: the files wait for the next start
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
        self._stuck = not plan.slices
        if self._stuck:
            return
        begun_us = self._clock()
        results = self._runner.step(plan.slices)
        now_us = self._clock()
        if self._snapshots is not None:
            self._snapshots.computed([(part.start, len(part.tokens)) for part in plan.slices], now_us - begun_us)
        self._send(self._scheduler.apply(plan, results, now_us))
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
            gauges = self._scheduler.gauges()
            if self._fences is not None:
                gauges = msgspec.structs.replace(gauges, **self._fences.gauges())
            reading = self._scheduler.reading()
            self._link.send([gauges, *([wire.Reading(reading)] if reading else [])])
            # Every kept block is an object, and looking through them all takes 150 ms at 10,000 states: the collector
            # looks at what is new, and what it leaves it never looks at again.
            gc.collect()
            gc.freeze()
            self._gauges_due_us = now_us + GAUGES_EVERY_US
            self._gauges_stale = False

    def _patience_ms(self) -> float | None:
        """How long to wait for a message: not at all before a step or in an audit, until one is due, or for ever."""
        if (not self._scheduler.idle and not self._stuck) or self._audit is not None:
            return 0
        due = [self._gauges_due_us] if self._gauges_stale else []
        if self._snapshots is not None and (at := self._snapshots.due_us()) is not None:
            due.append(at)
        if not self._audited:
            due.append(self._audit_due_us)
        return max(min(due) - self._clock(), 0) / 1000 + 1 if due else None

    def _flush(self) -> None:
        """Writes what is not on disk yet, and hears what the journal says to it, within a time."""
        if self._snapshots is None:
            return
        until_us = self._clock() + FLUSH_US
        while (left_us := until_us - self._clock()) > 0:
            self._back_up(flush=True)
            if not self._snapshots.open and (self._snapshots.stuck or not self._snapshots.unwritten):
                break
            for message in self._link.receive(left_us / 1000):
                if not isinstance(message, wire.Stop):
                    self._take(message)
            self._snapshots.settle()
        if self._snapshots.unwritten:
            log.warning("%d states are not on disk as a whole", self._snapshots.unwritten)

    def _stopped(self) -> None:
        self._flush()
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


def load(start: wire.Start, progress: Callable[[float], None]) -> tuple[AnyRunner, Tokenizer, Limits]:
    """Loads what `start` names: the runner, the tokenizer, the scheduler's limits. Raises a Fault."""
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
        tokenizer = scripted.tokenizer
    else:
        from zjournal.engine import devices  # torch: seconds, and nothing that a scripted engine needs

        runner = devices.load(start, progress)
        tokenizer = open_checkpoint(start.tokenizer or start.model).tokenizer()
    limits = Limits(
        context=runner.context,
        max_running=start.max_running,
        prefill_tokens=max(start.prefill_tokens, runner.step_tokens),
        queue_max=start.queue_max,
        drafts_max=start.speculation,
    )
    return runner, tokenizer, limits


def drafter(drafts_max: int) -> Drafter | None:
    """What guesses the next tokens of a request; None where nothing is to be guessed."""
    if not drafts_max:
        return None
    from zjournal.engine.decoding.speculation import PromptLookup  # numpy, which a scripted engine may do without

    return PromptLookup(drafts_max)


def fences(start: wire.Start, runner: AnyRunner, tokenizer: Tokenizer, link: Link) -> Fences | None:
    """The fences of this engine; None for a script, which says what it says."""
    if start.scripted:
        return None
    from zjournal.engine.decoding.steering import Fences  # numpy

    def vocabulary() -> Vocabulary:
        from zjournal.engine.decoding.vocabulary import Vocabulary  # the grammar library

        known = range(min(tokenizer.vocab_size, runner.vocab_size))
        control = [token for token in tokenizer.control.values() if token in known]
        tokens = [tokenizer.token_bytes(token) for token in known]
        return Vocabulary(tokens, control, runner.vocab_size, tokenizer.encode_unkept)

    made = Fences(vocabulary)
    link.watch(made.fileno())
    return made


def clock_us() -> int:
    """Microseconds, from any start."""
    return time.monotonic_ns() // 1000


def snapshots(
    start: wire.Start, runner: AnyRunner, link: Link
) -> Callable[[Residency, Iterator[int]], Snapshots] | None:
    """What makes the tiers behind the device's memory; None where KV is not to be written anywhere."""
    if not start.snapshots:
        return None
    from zjournal.engine.cache.snapshots import Settings, Snapshots  # numpy

    settings = Settings(
        folder=Path(start.snapshots),
        key=start.snapshot_key,
        limit=start.snapshot_limit,
        codec=start.snapshot_codec,
        host_bytes=start.host_cache,
        always=start.snapshot_restore == "always",
    )

    def make(residency: Residency, facts: Iterator[int]) -> Snapshots:
        made = Snapshots(
            settings,
            residency,
            runner,
            facts,
            clock_us,
            lambda: time.time_ns() // 1000,
            learns=not start.scripted,
            stages=runner.stages,
        )
        try:
            made.shelf.folder.lock()
        except SnapshotFault:
            made.close()
            raise
        link.watch(made.disk.fileno())
        return made

    return make


def serve(link: Link) -> int:
    """The life of the process after its set-up; returns its exit status."""
    messages = link.receive(None)
    while not messages:
        messages = link.receive(None)
    start, *early = messages
    assert isinstance(start, wire.Start), type(start).__name__
    logs.configure(start.log_level, start.log_format)
    begun = time.monotonic()
    gc.disable()  # looking through what will stay is a tenth of an import; later the worker collects with its gauges
    try:
        runner, tokenizer, limits = load(start, lambda part: link.send([wire.Loading(part)]))
    except Fault as fault:
        log.error("the model cannot be loaded: %s", fault.message)
        link.send([wire.Broken(fault.code, fault.message)])
        return EngineStartFault.exit_code
    parts = (limits, runner.block_count, tokenizer.token_bytes, drafter(limits.drafts_max))
    fencing = fences(start, runner, tokenizer, link)
    off: list[wire.FromEngine] = []
    try:
        scheduler = Scheduler(*parts, snapshots(start, runner, link))
    except SnapshotFault as fault:  # a full disk, say; a server without snapshots is better than none
        log.error("KV is neither written nor restored: %s", fault.message)
        off = [wire.SnapshotsOff("io_error", fault.message)]
        scheduler = Scheduler(*parts)
    ready = wire.Ready(
        fingerprint=runner.fingerprint,
        kernels=runner.kernels,
        context=runner.context,
        kv_tokens=runner.block_count * BLOCK_TOKENS,
        parts=dict(runner.parts),
    )
    gc.collect()
    gc.freeze()  # what the load left lives as long as the process: no use looking through it between two steps
    link.send([ready, *off])
    log.info("ready in %.2f s: %s, %d blocks", time.monotonic() - begun, runner.kernels, runner.block_count)
    try:
        if fencing is not None:
            fencing.warm()  # behind Ready: the start does not wait for it, and neither does the first fence
        Worker(link, runner, scheduler, clock_us, fencing).run(early)
    finally:
        if fencing is not None:
            fencing.close()
        if scheduler.snapshots is not None:
            scheduler.snapshots.close()
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
