"""What fences and the guard cost: masks at two widths of the vocabulary, compiling, and decode with and without them.

Masks are measured as the engine asks for them, token by token along calls that the dialects write, the first visit of
each place included; taking the token is counted apart. Both are time of the one core that works, as nothing is waited
for. Decode is measured at the demo model, step by step with and without a fence in turn, so that whatever else
the machine does falls on both. How fast calls are parsed and histories spliced: benchmarks/dialects.py.

    python benchmarks/fences.py [WINDOWS]
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from parts.table import Line, head, quantiles, text
from parts.wide import Wide

from tests import fenced
from zjournal import ask, loops
from zjournal.engine.decoding.fence import Compiled, State
from zjournal.engine.decoding.guard import Guard
from zjournal.engine.decoding.vocabulary import Vocabulary
from zjournal.link import wire
from zjournal.sessions.fences import Fences

MASK_P50_US, MASK_MEAN_US = 60.0, 250.0
COMPILE_MS, CACHED_MS = 250.0, 1.0
DECODE_RATIO = 0.97
TOOLS_MANY = 50
WINDOWS = 8
WINDOW_TOKENS = 64
BATCHES = (1, 8)
SOURCE = Path(json.__file__).read_text()
GUARD = wire.Guard(*loops.limits("on"))

VALUES = (
    ("read_file", {"path": "src/engine/decoding/fence.py", "head": 200}),
    ("write_file", {"path": "src/json/__init__.py", "content": SOURCE[:390]}),
    (
        "edit_file",
        {
            "path": "a.py",
            "edits": [{"oldText": 'x = {"a": 1}\n', "newText": 'x = {"a": 2, "é": "漢字"}\n'}],
            "dryRun": True,
        },
    ),
    ("grep", {"pattern": "def [a-z_]+\\(", "glob": "*.py", "output_mode": "content", "-A": 3, "-i": False}),
    ("create_issue", {"owner": "ada", "repo": "engine", "title": "It stops", "labels": ["bug", "p1"], "milestone": 4}),
    (
        "create_event",
        {"title": "Review", "start": "2026-11-30T10:00:00Z", "end": "2026-11-30T11:00:00Z", "recurrence": None},
    ),
)


def main() -> None:
    windows = int(sys.argv[1]) if len(sys.argv) > 1 else WINDOWS
    print(head())
    missed = False
    for line in itertools.chain(masks(), compiling(), guarding(), decode(windows)):
        print(text(line), flush=True)
        missed = missed or line.reached is False
    sys.exit(missed)


# --- masks ------------------------------------------------------------------------------------------------


def masks() -> Iterator[Line]:
    """Each dialect's own calls, at the demo model's vocabulary and at one of the width of large models.

    Strings have no longest length, as in most public schemas; one line has those that the test's tools have.
    """
    for width, make in (("49k", _narrow), ("129k", _wide)):
        vocabulary = make()
        every: list[float] = []
        short: list[float] = []
        for voice in _voices():
            mask_us, feed_us = _along(voice, vocabulary, _specs())
            short += _along(voice, vocabulary, _specs(short=True))[0]
            every += mask_us
            p50, p99 = quantiles(mask_us)
            what = f"mask, {width}, {voice.name}: p50, mean"
            yield Line(what, f"{p50:,.0f}, {statistics.mean(mask_us):,.0f} us", _beside(p99, feed_us))
        p50, mean = statistics.median(every), statistics.mean(every)
        yield _under(f"mask, {width}, all dialects: p50", p50, MASK_P50_US, "us")
        yield _under(f"mask, {width}, all dialects: mean", mean, MASK_MEAN_US, "us")
        p50, mean = statistics.median(short), statistics.mean(short)
        yield Line(f"mask, {width}, all, with maxLength: p50, mean", f"{p50:,.0f}, {mean:,.0f} us")


def _beside(p99: float, feed_us: Sequence[float]) -> str:
    return f"p99 {p99:,.0f} us; taking a token {statistics.median(feed_us):,.1f} us"


def _under(what: str, value: float, most: float, unit: str) -> Line:
    return Line(what, f"{value:,.1f} {unit}", target=f"under {most:g} {unit}", reached=value < most)


def _voices() -> list[fenced.Voice]:
    return [fenced.Voice(name, tags) for name, tags in fenced.SPOKEN]


def _specs(count: int | None = None, *, short: bool = False) -> tuple[ask.ToolSpec, ...]:
    """The tools of VALUES; or `count` of them all, again under other names where there are not so many.

    `short`: with the longest length of each string that the tests have, so that what a hot model writes has an end.
    """
    if count is None:
        tools = [(tool["name"], tool) for tool in fenced.TOOLS if tool["name"] in dict(VALUES)]
    else:
        many = len(fenced.TOOLS)
        chosen = ((at, fenced.TOOLS[at % many]) for at in range(count))
        tools = [(f"{tool['name']}{'_' * (at // many)}", tool) for at, tool in chosen]
    return tuple(
        ask.ToolSpec(
            name, tool["description"], json.dumps(_lengths(tool["parameters"], short)).encode(), f"tools[{at}]"
        )
        for at, (name, tool) in enumerate(tools)
    )


def _lengths(schema: Any, short: bool) -> Any:
    if isinstance(schema, list):
        return [_lengths(part, short) for part in schema]
    if not isinstance(schema, dict) or short:
        return schema
    return {name: _lengths(part, short) for name, part in schema.items() if name != "maxLength"}


def _request(tools: Sequence[ask.ToolSpec], mode: str = "required") -> ask.Ask:
    message = ask.Message("user", (ask.Text("Go on."),))
    choice = ask.ToolChoice(mode)  # type: ignore[arg-type]
    return ask.Ask(protocol="chat", model="m", items=(message,), tools=tuple(tools), choice=choice)


def _narrow() -> Vocabulary:
    words = fenced.tokenizer(True)
    tokens = [words.token_bytes(token) for token in range(words.vocab_size)]
    return Vocabulary(tokens, words.control.values(), len(tokens), words.encode_unkept)


def _wide() -> Vocabulary:
    words = fenced.tokenizer(True)
    wide = Wide(words)
    return Vocabulary(wide.tokens, words.control.values(), len(wide.tokens), wide.encode)


def _along(
    voice: fenced.Voice, vocabulary: Vocabulary, tools: Sequence[ask.ToolSpec]
) -> tuple[list[float], list[float]]:
    """Microseconds of each mask and of each token taken, along an answer of calls that the dialect renders.

    Of the tokens that the rest begins with, the longest legal one is taken: so any way to cut the text is right.
    """
    fence = voice.fences.of(_request(tools)).fence
    assert fence is not None
    calls = [ask.Call(f"c{at}", name, json.dumps(value, ensure_ascii=False)) for at, (name, value) in enumerate(VALUES)]
    calls = calls[:1] if voice.dialect.name == "llama3" else calls
    text = "".join(piece.text for piece in voice.dialect.calls([], calls))
    state = State(Compiled(vocabulary, fence), ())
    mask_us, feed_us = [], []
    for part in _parts(text, voice):
        rest = part.encode() if isinstance(part, str) else vocabulary.tokens[part]
        while rest:
            begun = time.thread_time_ns()
            legal = state.legal()
            asked = time.thread_time_ns()
            fits = [part] if isinstance(part, int) else vocabulary.within(rest)
            fits = [i for i in fits if rest.startswith(vocabulary.tokens[i]) and legal.allows(i)]
            if not fits and not mask_us and rest[:1].isspace():
                rest = rest[1:]  # layout before the first call, which the prompt's end has
                continue
            assert fits, f"{voice.name}: refused at {rest[:80]!r}"
            token = max(fits, key=lambda i: len(vocabulary.tokens[i]))
            fed = time.thread_time_ns()
            state.feed(token)
            feed_us.append((time.thread_time_ns() - fed) / 1000)
            mask_us.append((asked - begun) / 1000)
            rest = rest[len(vocabulary.tokens[token]) :]
    return mask_us, feed_us


def _parts(text: str, voice: fenced.Voice) -> list[str | int]:
    """A text cut at the tags that are tokens."""
    parts: list[str | int] = [text]
    for tag, ids in voice.dialect.literals.items():
        if len(ids) == 1 and tag in voice.tokenizer.control:
            parts = [bit for part in parts for bit in (_cut(part, tag, ids[0]) if isinstance(part, str) else [part])]
    return [part for part in parts if part != ""]


def _cut(text: str, tag: str, token: int) -> list[str | int]:
    first, *others = text.split(tag)
    return [first, *(bit for other in others for bit in (token, other))]


# --- compiling --------------------------------------------------------------------------------------------


def compiling() -> Iterator[Line]:
    """What the first request with fifty tools waits for, and what the next one does."""
    vocabulary = _narrow()
    for name, tags in (("chatml", False), ("glm-4.7", True), ("dsml-v4", True), ("qwen-xml", True)):
        voice = fenced.Voice(name, tags)
        request = _request(_specs(TOOLS_MANY), "auto")
        first, cached = [], []
        for _ in range(5):
            fences = Fences(voice.dialect, voice.tokenizer.control)
            begun = time.thread_time()
            fence = fences.of(request).fence
            written = time.thread_time()
            assert fence is not None
            compiled = Compiled(vocabulary, fence)
            first.append((time.thread_time() - begun, written - begun))
            begun = time.thread_time()
            assert fences.of(msgspec.structs.replace(request, max_tokens=5)).fence is fence
            State(compiled, ()).legal()
            cached.append(time.thread_time() - begun)
        whole, written = min(first)
        what = f"{TOOLS_MANY} tools, {voice.name}: grammar and compile"
        line = _under(what, whole * 1000, COMPILE_MS, "ms")
        yield line._replace(peer=f"of which the grammar {written * 1000:.1f} ms")
        yield _under(f"{TOOLS_MANY} tools, {voice.name}: again", min(cached) * 1000, CACHED_MS, "ms")


# --- decode -----------------------------------------------------------------------------------------------


def guarding() -> Iterator[Line]:
    """The guard's part of a token, along a text."""
    ids = fenced.tokenizer(False).encode(SOURCE * 3)
    best = 0.0
    for _ in range(3):
        guard = Guard(GUARD)
        begun = time.perf_counter()
        for token in ids:
            guard.push(token)
            guard.banned()
        best = max(best, len(ids) / (time.perf_counter() - begun))
    yield Line("guard: a token taken and asked for the next", f"{1e6 / best:,.1f} us")


class _Timed(fenced.Engine):
    """An engine with a model of its own that takes its time step by step."""

    def __init__(self, batch: int) -> None:
        self._loaded = fenced.runner()
        super().__init__(self._loaded, False, batch=batch)

    def submit(self, asks: Sequence[wire.Generate]) -> None:
        self._answers = {one.request: fenced.Answer([]) for one in asks}
        for one in asks:
            self._tell(self.scheduler.submit(one, 0, self.fences.open(one)), self._answers)

    def timed(self) -> tuple[float, list[int]]:
        """Seconds of one step, and how many tokens each request had in it."""
        begun = time.perf_counter()
        slices = self.step(self._answers)
        return time.perf_counter() - begun, slices

    def close(self) -> None:
        super().close()
        self._loaded.close()


def decode(windows: int) -> Iterator[Line]:
    """Steps with a fence beside steps without, both with the guard, as it is by default; and what the guard costs.

    Two engines stand side by side and take turns, step by step (A B B A); what counts is the median of the pairs.
    """
    voice = fenced.Voice("chatml", False)
    lines = {"type": "array", "items": {"type": "string"}, "minItems": 2 * WINDOW_TOKENS}  # so that none ends early
    schema = {"type": "object", "properties": {"lines": lines}, "required": ["lines"]}
    tool = ask.ToolSpec("write", "Write a text.", json.dumps(schema).encode(), "tools[0]")
    fence = voice.fences.of(_request([tool])).fence
    assert fence is not None
    for batch in BATCHES:
        engines = _Timed(batch), _Timed(batch)
        for what, changed, plain in (
            ("a fence", {"fence": fence, "guard": GUARD}, {"guard": GUARD}),
            ("the guard", {"guard": GUARD}, {}),
        ):
            pairs: list[tuple[float, float]] = []
            for at in range(windows + 1):
                for engine, more in zip(engines, (changed, plain), strict=True):
                    engine.submit([_long(voice, f"{what} {at} {row} {len(more)}", more) for row in range(batch)])
                pairs += _pairs(engines, batch) if at else _pairs(engines, batch)[:0]  # the first one warms up
            ratio = statistics.median(without / with_s for with_s, without in pairs)
            rates = [batch / statistics.median(took) for took in zip(*pairs, strict=True)]
            peer = f"without {rates[1]:,.1f} tok/s"
            target = f"{DECODE_RATIO}", ratio >= DECODE_RATIO
            yield Line(f"decode, {batch} rows, with {what}", f"{rates[0]:,.1f} tok/s", peer, ratio, *target)
        for engine in engines:
            engine.close()


def _pairs(engines: Sequence[_Timed], batch: int) -> list[tuple[float, float]]:
    """Seconds of the steps in which every row decoded, of both engines; until both are done."""
    found: list[list[float]] = [[], []]
    turn = 0
    while not all(engine.scheduler.idle for engine in engines):
        for number in (0, 1) if turn % 2 else (1, 0):
            if not engines[number].scheduler.idle:
                took, slices = engines[number].timed()
                if slices == [1] * batch:
                    found[number].append(took)
        turn += 1
    assert min(map(len, found)) >= WINDOW_TOKENS // 2, [len(one) for one in found]
    return list(zip(*found, strict=False))


def _long(voice: fenced.Voice, name: str, changed: dict) -> wire.Generate:
    """A request that says WINDOW_TOKENS tokens, whatever they are."""
    return wire.Generate(
        request=name,
        tokens=wire.pack_ids(voice.tokenizer.encode("Write me a text. " * 16)),
        namespace="n",
        sampling=wire.Sampling(0.9, 1.0, 0, hash(name) & 0xFFFF),
        max_tokens=WINDOW_TOKENS,
        end_tokens=(),
        **changed,
    )


if __name__ == "__main__":
    main()
