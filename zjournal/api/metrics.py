"""What is counted, under names that stay: the numbers of `/metrics` in Prometheus text format.

Each server has its own registry, so two in one process do not share numbers. The edge counts requests, the desk
counts what their answers cost; nothing here reads the journal's facts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from zjournal.ask import Broke, Ended
from zjournal.link import wire
from zjournal.sessions.forks import Cause

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
# Of wire.Gauges: what an engine counts since its start.
ENGINE_COUNTS = (
    *("preemptions", "recomputed", "drafted", "accepted", "backups_lost"),
    *("fenced", "fences_compiled", "fence_compile_us", "fence_masks", "fence_mask_us"),
)
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The counters, gauges and histograms of one server. Thread-safe; no method blocks."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine_counts: dict[str, int] = {}  # as the engine told them last
        self._of_answers(registry)
        self._of_fences(registry)
        self._of_engine(registry)
        self._of_snapshots(registry)

    def _of_answers(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "zj_requests_total", "HTTP requests answered, by API and status.", ("api", "status"), registry=registry
        )
        self._responses = Counter(
            "zj_responses_total", "Accepted requests that ended, by outcome.", ("outcome",), registry=registry
        )
        self._prompt_tokens = Counter(
            "zj_prompt_tokens_total", "Prompt tokens, by where their KV came from.", ("source",), registry=registry
        )
        self._forks = Counter(
            "zj_prefix_forks_total",
            "Prompts that parted from what was kept of them, by cause.",
            ("cause",),
            registry=registry,
        )
        for cause in get_args(Cause):
            self._forks.labels(cause)  # it is there, as 0, before the first
        self._output_tokens = Counter("zj_output_tokens_total", "Tokens sampled.", registry=registry)
        self._ttft = Histogram(
            "zj_ttft_seconds",
            "Time from acceptance to the first token.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._calls = Counter("zj_tool_calls_total", "Whole tool calls told.", ("outcome",), registry=registry)
        self._loops = Counter(
            "zj_loops_total",
            "What the guard did about loops, by kind and action.",
            ("kind", "action"),
            registry=registry,
        )

        self._sockets = Gauge("zj_websockets", "WebSocket connections that are open.", registry=registry)
        self._cut = Counter("zj_readers_cut_total", "Clients cut because they did not read.", registry=registry)
        self._limited = Counter(
            "zj_limited_total", "Requests refused for the limits of their key, by limit.", ("limit",), registry=registry
        )

    def _of_fences(self, registry: CollectorRegistry) -> None:
        self._fenced = Counter("zj_fenced_requests_total", "Requests whose answers had a fence.", registry=registry)
        self._fences_compiled = Counter("zj_fences_compiled_total", "Fences that were compiled.", registry=registry)
        self._fence_compile_s = Counter(
            "zj_fence_compile_seconds_total", "Time that fences took to compile.", registry=registry
        )
        self._fence_masks = Counter(
            "zj_fence_masks_total", "Times that the legal tokens of a request were computed.", registry=registry
        )
        self._fence_mask_s = Counter(
            "zj_fence_mask_seconds_total", "Time that this took, beside the model's.", registry=registry
        )

    def _of_engine(self, registry: CollectorRegistry) -> None:
        self._crashes = Counter("zj_engine_crashes_total", "Times the engine process ended unasked.", registry=registry)
        self._accepted = Gauge("zj_accepted", "Requests accepted and not ended.", registry=registry)
        self._running = Gauge("zj_running", "Requests in the engine's batch.", registry=registry)
        self._waiting = Gauge("zj_waiting", "Requests that wait for the engine.", registry=registry)
        self._kv_blocks = Gauge("zj_kv_blocks", "KV blocks in the pool.", registry=registry)
        self._kv_blocks_free = Gauge("zj_kv_blocks_free", "KV blocks that hold nothing.", registry=registry)
        self._file_bytes = Gauge("zj_journal_bytes", "Size of the journal's file, without its log.", registry=registry)
        self._log_bytes = Gauge("zj_journal_wal_bytes", "Size of the journal's write-ahead log.", registry=registry)
        self._log_blocker = Gauge(
            "zj_journal_blocking_reader_pid",
            "Process whose read transaction keeps the write-ahead log from being emptied; 0: none.",
            registry=registry,
        )
        self._preemptions = Counter(
            "zj_preemptions_total", "Times that a running request gave its memory to another one.", registry=registry
        )
        self._recomputed_tokens = Counter(
            "zj_recomputed_tokens_total", "Tokens computed again after a preemption.", registry=registry
        )
        self._draft_tokens = Counter(
            "zj_draft_tokens_total", "Tokens that were guessed ahead, by outcome.", ("outcome",), registry=registry
        )
        self._states = Gauge("zj_resident_states", "Terminal states resident in device memory.", registry=registry)

    def _of_snapshots(self, registry: CollectorRegistry) -> None:
        self._backups_lost = Counter(
            "zj_snapshot_backups_lost_total",
            "States given up before all of them was on disk: no room, or memory was needed first.",
            registry=registry,
        )
        self._snapshot_bytes = Gauge("zj_snapshot_bytes", "Bytes of KV on disk.", registry=registry)
        self._snapshots = Gauge("zj_snapshots", "States that can be restored from disk.", registry=registry)
        self._snapshot_chunks = Gauge("zj_snapshot_chunks", "Chunks of KV on disk.", registry=registry)
        self._host_bytes = Gauge(
            "zj_host_cache_bytes", "Bytes of KV in memory in front of the disk.", registry=registry
        )
        self._backups_off = Gauge(
            "zj_snapshot_backups_off", "1 while nothing is backed up: a full disk, or an error.", registry=registry
        )
        self._evictions = Counter(
            "zj_snapshot_evictions_total",
            "Chunks on disk that were given up, by cause.",
            ("reason",),
            registry=registry,
        )

    def request(self, api: str, status: int) -> None:
        """An HTTP request got its status line; refused ones are counted here and nowhere else."""
        self._requests.labels(api, str(status)).inc()

    def socket(self) -> AbstractContextManager[None]:
        """Counts a WebSocket for as long as it is open."""
        return self._sockets.track_inprogress()

    def reader_cut(self) -> None:
        """A client did not read and was cut."""
        self._cut.inc()

    def limited(self, limit: str) -> None:
        """A request was refused for a limit of its key: `requests`, `tokens` or `streams`."""
        self._limited.labels(limit).inc()

    def matched(self, matched: wire.Matched) -> None:
        """A request was admitted: where the KV of its prompt's tokens came from."""
        self._prompt_tokens.labels("vram").inc(matched.cached - matched.restored)
        self._prompt_tokens.labels("host").inc(matched.restored_host)
        self._prompt_tokens.labels("ssd").inc(matched.restored - matched.restored_host)
        self._prompt_tokens.labels("computed").inc(matched.prompt - matched.cached)

    def forked(self, cause: Cause) -> None:
        """A prompt parted from what was kept of its conversation, or of another one."""
        self._forks.labels(cause).inc()

    def purged(self, cause: str, chunks: int) -> None:
        """So many chunks on disk were given up."""
        self._evictions.labels(cause).inc(chunks)

    def backups(self, on: bool) -> None:
        """States are backed up from now on, or not any more."""
        self._backups_off.set(0 if on else 1)

    def ttft(self, seconds: float) -> None:
        """A response's first token arrived `seconds` after its request was accepted."""
        self._ttft.observe(seconds)

    def ended(self, end: Ended | Broke) -> None:
        """A response ended, with its output tokens as its usage tells them."""
        self._responses.labels(end.reason if isinstance(end, Ended) else "failed").inc()
        self._output_tokens.inc(end.usage.output)

    def called(self, outcome: str) -> None:
        """An answer holds a whole tool call: `whole`, or `faulty` if something was wrong with its form."""
        self._calls.labels(outcome).inc()

    def looped(self, message: wire.Looped) -> None:
        """The guard did something about a loop."""
        self._loops.labels(message.kind, message.action).inc()

    def running(self, count: int) -> None:
        """`count` requests are accepted and not ended. With none, the engine has none either."""
        self._accepted.set(count)
        if count == 0:
            self._running.set(0)
            self._waiting.set(0)

    def gauges(self, gauges: wire.Gauges) -> None:
        """The engine told its state."""
        self._running.set(gauges.running)
        self._waiting.set(gauges.waiting)
        self._kv_blocks.set(gauges.kv_blocks)
        self._kv_blocks_free.set(gauges.kv_blocks_free)
        self._states.set(gauges.states)
        self._snapshot_bytes.set(gauges.snapshot_bytes)
        self._snapshots.set(gauges.snapshots)
        self._snapshot_chunks.set(gauges.snapshot_chunks)
        self._host_bytes.set(gauges.host_bytes)
        self._backups_off.set(int(gauges.backups_off))
        counts = {name: getattr(gauges, name) for name in ENGINE_COUNTS}
        preemptions, recomputed, drafted, accepted, lost, fenced, compiled, compile_us, masks, mask_us = (
            count - self._engine_counts.get(name, 0) for name, count in counts.items()
        )
        self._engine_counts = counts
        self._backups_lost.inc(lost)
        self._preemptions.inc(preemptions)
        self._recomputed_tokens.inc(recomputed)
        self._draft_tokens.labels("accepted").inc(accepted)
        self._draft_tokens.labels("rejected").inc(drafted - accepted)
        self._fenced.inc(fenced)
        self._fences_compiled.inc(compiled)
        self._fence_compile_s.inc(compile_us / 1e6)
        self._fence_masks.inc(masks)
        self._fence_mask_s.inc(mask_us / 1e6)

    def journal(
        self, log_bytes: Callable[[], int], blocker_pid: Callable[[], int], file_bytes: Callable[[], int]
    ) -> None:
        """Sets where the numbers of the journal come from; they are asked for at each `render`."""
        self._file_bytes.set_function(file_bytes)
        self._log_bytes.set_function(log_bytes)
        self._log_blocker.set_function(blocker_pid)

    def engine_crashed(self) -> None:
        """The engine process ended unasked; what it ran and held is gone."""
        self._crashes.inc()
        self._engine_counts = {}
        held = (self._running, self._waiting, self._kv_blocks, self._kv_blocks_free, self._states, self._host_bytes)
        for gauge in (*held, self._backups_off):
            gauge.set(0)

    def render(self) -> bytes:
        """All numbers in Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
