"""A long session after kill -9, against its own cold start, and against llama-server with a slot restored by hand.

Ours is killed with both processes when its state is on disk; the next turn finds it by itself and checks every block.
The peer saves its slot to a file, is killed, and restores it by a call that names the file; that call and the first
token of its turn count together. Both start again on files that may lie in the page cache.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from parts import turns
from parts.table import Line
from tests.serving import Server
from tests.smollm2 import path as model_path
from zjournal.journal import snapshots
from zjournal.journal.reader import Reader

COLD_MUST, PEER_MUST = 0.10, 1.0
QUICK_CHARACTERS = 2_000
WRITTEN_S_MAX = 60.0
OUTPUT = 16


def lines(folder: Path, quick: bool) -> list[Line]:
    """Measures whole servers with the default model."""
    characters = QUICK_CHARACTERS if quick else turns.RESIDENT_CHARACTERS
    text = (turns.ROOT / "docs" / "journal.md").read_text()[:characters]
    messages = [{"role": "user", "content": f"Notes of the day:\n{text}\nWhat is this about?"}]
    cold, restored, prompt = _ours(folder, messages)
    peer = _peer(folder, messages)
    told = f"llama-server, slot restored: {sum(peer):.2f} s ({peer[0]:.2f} + {peer[1]:.2f})" if peer else ""
    ratio = restored / sum(peer) if peer else None
    return [
        Line(
            f"TTFT after kill -9, {prompt:,} tokens, against cold",
            f"{restored:.2f} s",
            f"ours, cold: {cold:.2f} s",
            restored / cold,
            f"at most {COLD_MUST:g}",
            restored / cold <= COLD_MUST,
        ),
        Line(
            "the same, against the peer",
            f"{restored:.2f} s",
            told,
            ratio,
            f"at most {PEER_MUST:g}",
            None if ratio is None else ratio <= PEER_MUST,
        ),
    ]


def _more(messages: list[dict], said: str) -> list[dict]:
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": turns.ADDED}]


def _ours(folder: Path, messages: list[dict]) -> tuple[float, float, int]:
    """Seconds to the first text of the cold turn, and of the next one after kill -9; tokens of the first prompt."""
    with Server(folder / "data") as server:
        base = f"http://127.0.0.1:{server.port}"
        cold, said, prompt, _ = turns._ask(base, messages, OUTPUT)
        _wait_written(server.data_dir, prompt)
        server.restart()
        restored, _, _, _ = turns._ask(base, _more(messages, said), OUTPUT)
    return cold, restored, prompt


def _wait_written(data_dir: Path, tokens: int) -> None:
    until = time.monotonic() + WRITTEN_S_MAX
    while time.monotonic() < until:
        with Reader.open(data_dir) as reader:
            if sum(row.tokens for page in snapshots.chunks(reader) for row in page) >= tokens:
                return
        time.sleep(0.05)
    raise AssertionError("the state is not on disk")


def _peer(folder: Path, messages: list[dict]) -> tuple[float, float] | None:
    """Seconds that the restore takes, and to the first text of the turn after it; None without a peer."""
    binary = turns.peer_binary()
    if not binary:
        return None
    slots = folder / "slots"
    slots.mkdir()
    extra = ("--slot-save-path", slots)
    sizes = {"threads": 2, "slots": 1, "context": 8192, "extra": extra}
    try:
        with turns._running(binary, model_path(), **sizes) as base:
            _, said, _, _ = turns._ask(base, messages, OUTPUT)
            httpx.post(f"{base}/slots/0?action=save", json={"filename": "one"}, timeout=60).raise_for_status()
        with turns._running(binary, model_path(), **sizes) as base:
            began = time.perf_counter()
            httpx.post(f"{base}/slots/0?action=restore", json={"filename": "one"}, timeout=60).raise_for_status()
            took = time.perf_counter() - began
            first, _, _, _ = turns._ask(base, _more(messages, said), OUTPUT)
        return took, first
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        print(f"llama-server gave no figures: {error}")
        return None
