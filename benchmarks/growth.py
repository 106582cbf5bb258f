"""How the journal grows under an agent that resends its whole history each turn, beside what it could cost at best.

One session over Chat: a system prompt, tools and a task, then turns of an answer and a tool's result, from about
10,000 to about 150,000 tokens. The texts are real: this repository's pages and the standard library's sources. The
requests go through the real desk, tokenizer and template into a real journal; only the engine is a script. Measured
beside it: one zstd frame (level 3) over all distinct messages, and a naive journal that keeps each turn's whole body
and prompt.

    python benchmarks/growth.py [TURNS] [TOKENS PER COMMIT]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from zjournal.api import chat
from zjournal.api.metrics import Metrics
from zjournal.api.recorded import DECODERS
from zjournal.api.running import Runs
from zjournal.api.snapshots import Snapshots
from zjournal.api.submit import Desk
from zjournal.ask import Ended, TextDelta
from zjournal.config import load
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.link import wire
from zjournal.sessions.served import Served, choose

TURNS = 200
FIRST_TOKENS, LAST_TOKENS = 10_000, 150_000
SAMPLED = 0.25  # of the tokens that a turn adds
BATCH_TOKENS = 64  # in one fact, the most that promise 3 allows
CHARACTERS_PER_TOKEN = 4.0
ROOT = Path(__file__).parents[1]


class Growth(NamedTuple):
    """What a session cost, in bytes unless it says otherwise."""

    turns: int
    prompt: int  # tokens of the last turn
    slowest_s: float  # acceptance
    plain: int  # of the unique content as it is
    unique: int  # of the same as one zstd frame
    empty: int  # of the journal before the session
    added: int  # by the session
    naive: int
    tables: tuple[tuple[str, int], ...]  # the largest

    @property
    def ratio(self) -> float:
        return self.added / self.unique


class Texts:
    """Slices of real text, none of them twice."""

    def __init__(self, files: list[Path], rng: random.Random) -> None:
        rng.shuffle(files)
        self._text = "".join(file.read_text(errors="replace") for file in files)
        self._at = 0

    def take(self, tokens: int) -> str:
        """The next text of about so many tokens, cut at a line's end."""
        end = self._text.find("\n", self._at + int(tokens * CHARACTERS_PER_TOKEN))
        assert end > 0, "there is not enough text"
        text, self._at = self._text[self._at : end], end + 1
        return text


class Engine:
    """Answers with the tokens it was given, in batches, and speaks of its cache as the real one does."""

    def __init__(self, served: Served, runs: Runs, batch: int) -> None:
        self._served, self._runs, self._batch = served, runs, batch
        self.answer: list[int] = []
        self.prompt = b""
        self._before = ("", 0)
        self._fact = 0
        self.cached = 0

    def generate(self, message: wire.Generate) -> None:
        self.prompt, prompt = message.tokens, len(message.tokens) // 4
        say = self._runs.engine_said
        say(wire.Matched(message.request, tier="device" if self.cached else "none", cached=self.cached, prompt=prompt))
        ids = [*self.answer, *sorted(self._served.end_tokens)[:1]]
        for at in range(0, len(ids), self._batch):
            say(wire.Tokens(message.request, at, wire.pack_ids(ids[at : at + self._batch])))
            self._runs._flush(self._runs._running[message.request])  # as the timer does
        times = {"queue_us": 120, "prefill_us": 34_567, "decode_us": 20_000 * len(ids)}
        say(wire.Finished(request=message.request, reason="stop", output=len(ids), **times))
        self.cached = prompt + len(ids) - 1
        self._change("admit", message.request, message.namespace, self.cached)
        if self._before[0]:
            self._change("evict", self._before[0], message.namespace, self._before[1])
        self._before = message.request, self.cached

    def _change(self, change: str, request: str, namespace: str, tokens: int) -> None:
        self._fact += 1
        self._runs.engine_said(wire.CacheChanged(self._fact, change, namespace, request, tokens, (tokens + 15) // 16))

    def committed(self, fact: int) -> None:
        pass

    def cancel(self, response: str) -> None:
        pass


class Agent:
    """The client: it keeps the conversation and resends all of it."""

    def __init__(self, served: Served, turns: int) -> None:
        rng = random.Random(7)
        library = Path(sysconfig.get_path("stdlib"))
        self._sources = Texts(sorted(library.glob("*.py")), rng)
        self._prose = Texts(sorted((library / "email").glob("*.py")) + sorted((library / "asyncio").glob("*.py")), rng)
        self._rng = rng
        self._per_turn = (LAST_TOKENS - FIRST_TOKENS) / TURNS
        self._served = served
        pages = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
        self.tools = [_tool(name) for name in ("read_file", "write_file", "run", "search", "list_files", "patch")]
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": pages[: int(6_000 * CHARACTERS_PER_TOKEN)]},
            {"role": "user", "content": self._sources.take(3_000)},
        ]

    def body(self) -> bytes:
        request = {
            "model": "smollm2",
            "messages": self.messages,
            "tools": self.tools,
            "stream": True,
            "temperature": 0.7,
            "max_completion_tokens": 8192,
            "prompt_cache_key": "agent-1",
        }
        return json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode()

    def next_answer(self) -> list[int]:
        text = self._prose.take(int(self._per_turn * SAMPLED * self._rng.uniform(0.4, 1.6)))
        return self._served.tokenizer.encode(text)

    def take(self, answer: str) -> None:
        """Appends the answer and what the tool gave for it."""
        self.messages.append({"role": "assistant", "content": answer})
        result = self._sources.take(int(self._per_turn * (1 - SAMPLED) * self._rng.uniform(0.2, 1.8)))
        call = f"call_{self._rng.getrandbits(96):024x}"
        self.messages.append({"role": "tool", "tool_call_id": call, "content": result})

    def unique(self) -> bytes:
        """All distinct messages and tools, one after another."""
        texts = [json.dumps(self.tools), *(message["content"] for message in self.messages)]
        return "\n".join(dict.fromkeys(texts)).encode()


def _tool(name: str) -> dict[str, Any]:
    path = {"type": "string", "description": f"The path that {name} works on, relative to the workspace."}
    parameters = {"type": "object", "properties": {"path": path, "limit": {"type": "integer"}}, "required": ["path"]}
    function = {"name": name, "description": f"Use {name} when the task asks for it.", "parameters": parameters}
    return {"type": "function", "function": function}


async def _session(
    journal: Journal, served: Served, turns: int, batch: int, naive: sqlite3.Connection | None
) -> tuple[Agent, int, float]:
    """Plays the session; returns the agent, the tokens of the last prompt, and the slowest acceptance in seconds."""
    metrics = Metrics()
    runs = Runs(journal, metrics, 3600.0, Snapshots(journal, metrics, journal.path.parent, on=False))
    desk = Desk(journal, runs, metrics, None, DECODERS)
    engine = Engine(served, runs, batch)
    desk.serve(served)
    runs.serve(served, engine)  # type: ignore[arg-type]
    runs.engine_ready(wire.Ready(fingerprint="f" * 32, kernels="k", context=1 << 20, kv_tokens=1 << 20), 1)
    while runs.ready is None:
        await asyncio.sleep(0.01)
    agent = Agent(served, turns)
    tenant = desk.tenant_of(None)
    slowest = 0.0
    prompt = 0
    for number in range(turns):
        raw = agent.body()
        engine.answer = agent.next_answer()
        began = time.perf_counter()
        turn = await desk.submit(chat.decode(raw, {}), raw, tenant, chat.ENCODER_VERSION)
        slowest = max(slowest, time.perf_counter() - began)
        text = ""
        async for step in desk.follow(turn):
            if isinstance(step, TextDelta):
                text += step.text
            elif isinstance(step, Ended):
                prompt = step.usage.prompt
        assert naive is not None
        naive.execute("INSERT INTO turn VALUES (?, ?, ?)", (number, raw, engine.prompt))
        agent.take(text)
    await asyncio.to_thread(journal.run(lambda tx: None).result)
    return agent, prompt, slowest


def _by_table(db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """Bytes in the file by table and index, the largest first; nothing where this SQLite cannot say."""
    with contextlib.suppress(sqlite3.OperationalError):
        yield from db.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC LIMIT 6")


def measure(folder: Path, turns: int = TURNS, batch: int = BATCH_TOKENS) -> Growth:
    """Plays the session into `folder`/data, and into `folder`/naive.db beside it. Both stay there."""
    config = load({}, {}, Path.cwd())
    served = Served.load(choose(config.model, config.cache_dir))
    with Journal.open(folder / "empty") as journal:
        asyncio.run(_session(journal, served, 0, batch, None))
    naive = sqlite3.connect(folder / "naive.db", isolation_level=None)
    naive.execute("CREATE TABLE turn (number INTEGER PRIMARY KEY, body BLOB, prompt BLOB)")
    with Journal.open(folder / "data") as journal:
        agent, prompt, slowest_s = asyncio.run(_session(journal, served, turns, batch, naive))
    naive.close()
    report = verify(folder / "data")
    assert report.clean, report.fault
    db = sqlite3.connect(folder / "data" / "journal.db")
    tables = tuple(_by_table(db))
    db.close()
    empty = (folder / "empty" / "journal.db").stat().st_size
    unique = agent.unique()
    return Growth(
        turns=turns,
        prompt=prompt,
        slowest_s=slowest_s,
        plain=len(unique),
        unique=len(zstandard.ZstdCompressor(level=3).compress(unique)),
        empty=empty,
        added=(folder / "data" / "journal.db").stat().st_size - empty,
        naive=(folder / "naive.db").stat().st_size,
        tables=tables,
    )


def main() -> None:
    """Measures and prints."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else BATCH_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        grown = measure(Path(folder), turns, batch)
    slowest = f"slowest acceptance {grown.slowest_s * 1000:.0f} ms"
    print(f"{turns} turns, last prompt {grown.prompt:,} tokens, {slowest}")
    for name, part in grown.tables:
        print(f"{name:<40}{part:>12,}")
    rows = [
        ("unique content, plain", grown.plain),
        ("unique content, one zstd frame", grown.unique),
        ("journal before the session", grown.empty),
        ("journal, what the session added", grown.added),
        ("naive journal", grown.naive),
    ]
    for name, part in rows:
        print(f"{name:<40}{part:>12,}{part / grown.unique:>9.2f}")
    print(f"journal bytes per turn: {grown.added / turns:,.0f}; ratio to unique content {grown.ratio:.2f}")


if __name__ == "__main__":
    main()
