"""How fast the model runs on this CPU: prefill, decode, batches; beside llama-bench of the same file in the same run.

The peer is taken from LLAMA_BENCH or the PATH; without it the ratios stay empty. Prefill and decode are measured at the
runner, sampling included, sockets not. The memory limit of decode is the bytes of one step (weights and KV) over
the bandwidth that the same threads reach by reading.

    python benchmarks/engine.py [MODEL.gguf]

Then speculation: a file is repeated with changes, with and without guesses in turn (parts/echo.py). Last the whole
server beside llama-server: a warm turn, and streams together (parts/turns.py).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts import echo, turns

from zjournal.checkpoint.locate import locate
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Slice
from zjournal.link import wire

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
PREFILLS = (512, 2048)
STEP_TOKENS = 512  # as the scheduler cuts a prompt
CONTEXTS = (128, 2048)
BATCHES = (2, 4, 8)
DECODED = 32
GUESSES = (3, 5, 7)
# The least ratio to the peer in the same run, and the least tokens per second where there is none.
PREFILL_MUST = {512: (1.0, 150.0), 2048: (2.0, 150.0)}
DECODE_MUST = {128: (0.8, 18.0), 2048: (0.8, 18.0)}
TRIES = 3
PEER_TIMEOUT_S = 600
READ_BYTES = 1 << 28


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else locate(None, Path(tempfile.gettempdir())).path
    threads = len(os.sched_getaffinity(0))
    started = time.perf_counter()
    runner = Runner.load(wire.Start(model=str(path), threads=threads, kv_bytes=1 << 30), lambda _: None)
    loaded_s = time.perf_counter() - started
    prefills = {tokens: _best(lambda tokens=tokens: _prefill(runner, tokens)) for tokens in PREFILLS}
    decodes = {context: _best(lambda context=context: _decode(runner, context, 1)) for context in CONTEXTS}
    batches = {rows: _best(lambda rows=rows: _decode(runner, CONTEXTS[0], rows)) for rows in BATCHES}
    peer = _peer(path, threads)
    bandwidth = _read_bandwidth(threads)
    print(f"{path.name}, {runner.kernels}, {threads} threads")
    print(f"loaded in {loaded_s:.2f} s; memory reads {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':32}{'tok/s':>10}{'llama-bench':>14}{'ratio':>8}{'of memory limit':>18}   must reach")
    for tokens, rate in prefills.items():
        _row(f"prefill of {tokens}", rate, peer.get(("prefill", tokens)), None, PREFILL_MUST.get(tokens))
    for context, rate in decodes.items():
        step_bytes = path.stat().st_size + context * _position_bytes(runner)
        must = DECODE_MUST.get(context)
        _row(f"decode at {context}", rate, peer.get(("decode", context)), rate * step_bytes / bandwidth, must)
    for rows, rate in batches.items():
        _row(f"decode at {CONTEXTS[0]}, {rows} sequences", rate, None, None, None)
    echo.lines(runner, path, GUESSES)
    runner.close()
    turns.lines(path, threads)


def _row(what: str, rate: float, peer: float | None, limit: float | None, must: tuple[float, float] | None) -> None:
    """`must`: the least ratio to the peer, and the least rate where there is no peer."""
    peer_text, ratio = (f"{peer:,.1f}", f"{rate / peer:.2f}") if peer else ("", "")
    of_limit = f"{limit:.2f}" if limit else ""
    print(f"{what:32}{rate:>10,.1f}{peer_text:>14}{ratio:>8}{of_limit:>18}{_verdict(rate, peer, must)}")


def _verdict(rate: float, peer: float | None, must: tuple[float, float] | None) -> str:
    if must is None:
        return ""
    reached = rate / peer >= must[0] if peer else rate >= must[1]
    asked = f"{must[0]} times the peer" if peer else f"{must[1]:g} tok/s"
    return f"   {asked}: {'reached' if reached else 'MISSED'}"


def _best(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(TRIES))


def _ids(count: int) -> list[int]:
    return [1000 + 37 * i % 20_000 for i in range(count)]


def _table(runner: Runner, sequence: int, tokens: int) -> list[int]:
    width = -(-tokens // BLOCK_TOKENS)
    assert (sequence + 1) * width <= runner.block_count
    return list(range(sequence * width, (sequence + 1) * width))


def _prefill(runner: Runner, tokens: int) -> float:
    ids, table = _ids(tokens), _table(runner, 0, tokens)
    started = time.perf_counter()
    for start in range(0, tokens, STEP_TOKENS):
        last = start + STEP_TOKENS >= tokens
        runner.step([Slice("0", ids[start : start + STEP_TOKENS], start, table, GREEDY if last else None, 0)])
    return tokens / (time.perf_counter() - started)


def _decode(runner: Runner, context: int, rows: int) -> float:
    """Tokens of all rows together per second, by the median step."""
    tables = [_table(runner, row, context + DECODED) for row in range(rows)]
    for row, table in enumerate(tables):
        runner.step([Slice(str(row), _ids(context), 0, table, None, 0)])
    steps_s = []
    for step in range(DECODED):
        slices = [
            Slice(str(row), [1000 + step], context + step, table, GREEDY, step) for row, table in enumerate(tables)
        ]
        started = time.perf_counter()
        runner.step(slices)
        steps_s.append(time.perf_counter() - started)
    return rows / statistics.median(steps_s)


def _position_bytes(runner: Runner) -> int:
    return runner._pages[0].numel() * runner._pages.element_size() // BLOCK_TOKENS


def _read_bandwidth(threads: int) -> float:
    """Bytes per second that a sum over a large array reaches."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)

    def once() -> float:
        started = time.perf_counter()
        data.sum()
        return READ_BYTES / (time.perf_counter() - started)

    best = _best(once)
    torch.set_num_threads(before)
    return best


def _peer(path: Path, threads: int) -> dict[tuple[str, int], float]:
    """Tokens per second of llama-bench; empty if there is none or it fails."""
    binary = os.environ.get("LLAMA_BENCH") or shutil.which("llama-bench")
    if not binary:
        return {}
    prompts = ",".join(map(str, PREFILLS))
    depths = ",".join(map(str, CONTEXTS))
    found: dict[tuple[str, int], float] = {}
    for flags in (["-p", prompts, "-n", "0"], ["-p", "0", "-n", str(DECODED), "-d", depths]):
        command = [binary, "-m", str(path), "-t", str(threads), "-r", str(TRIES), "-o", "json", *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=True)
            results = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            print(f"llama-bench gave no figures: {error}")
            return found
        for result in results:
            kind, size = ("prefill", result["n_prompt"]) if result["n_prompt"] else ("decode", result.get("n_depth", 0))
            found[kind, size] = max(result["samples_ts"])
    return found


if __name__ == "__main__":
    main()
