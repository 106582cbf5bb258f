"""Whole servers beside each other: the warm turn of a long conversation, and streams together; ours and llama-server.

Both serve the same file on the same threads over Chat Completions on loopback, one after the other in the same run.
Ours makes no guesses here: a greedy model that may not end repeats itself, and guessing would flatter us. The peer is
taken from LLAMA_SERVER, from beside LLAMA_BENCH, or from the PATH; without it the ratios stay empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.serving import Server

ROOT = Path(__file__).resolve().parent.parent.parent
RESIDENT_CHARACTERS = 14_600  # about 4,700 tokens of this text
ADDED = "Thank you. Now tell me in one short sentence which of these entries you would read again first, and say why."
TURNS = 3
STREAMS = (1, 4, 8)
OUTPUT = 128  # tokens of each stream
END_TOKENS = (0, 2)  # never sampled here, so that each stream is as long as it should be
START_S_MAX = 60.0
WARM_OF_COLD_MUST, WARM_OF_PEER_MUST, EIGHT_MUST = 0.06, 0.6, 2.0


def lines(path: Path, threads: int) -> None:
    """Measures and prints."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(
            Path(folder) / "data",
            "--model",
            str(path),
            "--threads",
            str(threads),
            "--max-running",
            "8",
            "--speculation",
            "0",
        ) as server,
    ):
        base = f"http://127.0.0.1:{server.port}"
        ours_turns = [_turn(base, number) for number in range(TURNS)]
        ours_rates = {count: _together(base, count) for count in STREAMS}
    peer_turns, peer_rates = _peer(path, threads)
    print()
    print(f"{'whole servers over HTTP':44}{'ours':>10}{'llama-server':>14}{'ratio':>8}   must reach")
    tokens = ours_turns[0][2]
    cold, warm = (statistics.median(turn[at] for turn in ours_turns) for at in (0, 1))
    peer_cold, peer_warm = (statistics.median(turn[at] for turn in peer_turns) if peer_turns else None for at in (0, 1))
    _row(f"TTFT of {tokens} cold tokens, s", cold, peer_cold, None)
    _row("TTFT of 40 tokens more, s", warm, peer_warm, ("at most", WARM_OF_PEER_MUST))
    reached = "reached" if warm / cold <= WARM_OF_COLD_MUST else "MISSED"
    print(f"{'warm turn of the cold one':44}{warm / cold:>10.3f}{'':>25}at most {WARM_OF_COLD_MUST:g}: {reached}")
    for count in STREAMS:
        must = ("at least", EIGHT_MUST) if count == max(STREAMS) else None
        _row(f"{count} streams together, tok/s", ours_rates[count], peer_rates.get(count), must)


def _row(what: str, ours: float, peer: float | None, must: tuple[str, float] | None) -> None:
    peer_text, ratio = (f"{peer:,.2f}", f"{ours / peer:.2f}") if peer else ("", "")
    verdict = ""
    if must and peer:
        good = ours / peer <= must[1] if must[0] == "at most" else ours / peer >= must[1]
        verdict = f"   {must[0]} {must[1]:g}: {'reached' if good else 'MISSED'}"
    print(f"{what:44}{ours:>10,.2f}{peer_text:>14}{ratio:>8}{verdict}")


def _turn(base: str, number: int) -> tuple[float, float, int]:
    """Seconds to the first text of a cold conversation and of its second turn; tokens of the cold prompt."""
    text = (ROOT / "docs" / "journal.md").read_text()[:RESIDENT_CHARACTERS]
    messages = [{"role": "user", "content": f"Notes of day {number}:\n{text}\nWhat is this about?"}]
    cold, said, prompt, _ = _ask(base, messages, 16)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ADDED}]
    warm, _, _, _ = _ask(base, messages, 16)
    return cold, warm, prompt


def _together(base: str, count: int) -> float:
    """Output tokens per second of `count` streams that start together, their short prompts included."""
    asks = [f"Count the ships of harbour {count}.{at} and name each." for at in range(count)]
    prompts = [[{"role": "user", "content": ask}] for ask in asks]
    with ThreadPoolExecutor(count) as pool:
        began = time.perf_counter()
        done = list(pool.map(lambda messages: _ask(base, messages, OUTPUT), prompts))
        took = time.perf_counter() - began
    assert all(output == OUTPUT for *_, output in done), "a stream ended early"
    return count * OUTPUT / took


def _ask(base: str, messages: list[dict], output: int) -> tuple[float, str, int, int]:
    """Seconds to the first text, the text, prompt tokens, output tokens."""
    body = {
        "model": "default",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": output,
        "logit_bias": {str(token): -100 for token in END_TOKENS},
    }
    first, said, usage = 0.0, [], {}
    began = time.perf_counter()
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter() - began
                said.append(text)
    assert first, "the answer has no text; another prompt is needed"
    return first, "".join(said), usage["prompt_tokens"], usage["completion_tokens"]


# --- the peer -------------------------------------------------------------------------------------------


def peer_binary() -> str | None:
    """The llama-server to compare with, if there is one."""
    beside = os.environ.get("LLAMA_BENCH")
    return (
        os.environ.get("LLAMA_SERVER")
        or (beside and shutil.which(str(Path(beside).with_name("llama-server"))))
        or shutil.which("llama-server")
    )


def _peer(path: Path, threads: int) -> tuple[list[tuple[float, float, int]], dict[int, float]]:
    binary = peer_binary()
    if not binary:
        return [], {}
    try:
        with _running(binary, path, threads, slots=1, context=8192) as base:
            turns = [_turn(base, number) for number in range(TURNS)]
        with _running(binary, path, threads, slots=max(STREAMS), context=1024 * max(STREAMS)) as base:
            return turns, {count: _together(base, count) for count in STREAMS}
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        print(f"llama-server gave no figures: {error}")
        return [], {}


@contextlib.contextmanager
def _running(
    binary: str, path: Path, threads: int, slots: int, context: int, extra: Sequence[object] = ()
) -> Iterator[str]:
    """A llama-server with one slot per stream and `extra` flags; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ("-t", threads, "-tb", threads, "-np", slots, "-c", context)
    command = [binary, "-m", path, "--host", "127.0.0.1", "--port", port, *sizes, "--no-webui", *extra]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + START_S_MAX
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("it does not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False
