"""An engine without a socket whose requests may have fences, over a small random model with a vocabulary made here.

The vocabulary has what fences stumble over: tags as tokens and as text, tokens that begin or end inside a tag, tokens
that hold a whole one and more, and ids that the logits have and the tokenizer has not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.engine import toy
from zjournal.engine.decoding.speculation import PromptLookup
from zjournal.engine.decoding.steering import Fences
from zjournal.engine.decoding.vocabulary import Vocabulary
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import BLOCK_TOKENS
from zjournal.link import wire

BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 4
LETTERS = [bytes([byte]) for byte in range(0x20, 0x7F)] + [b"\n"]
MERGED = [
    b"<tool",
    b"_call>",
    b".<",
    b"=list",
    b"<function=",
    b"<CALL>x",
    b"a<call>",
    b'">',
    b"ing",
    b"</think>\n",
    b"think>",
]
CONTROL = [
    b"<think>",
    b"</think>",
    b"<tool_call>",
    b"</tool_call>",
    b"<|user|>",
    b"<|end|>",
    b"<|stop|>",
    b"\xe2\x97\x86DSML",
]
TOKENS = [*LETTERS, *MERGED, *CONTROL]
ID = {token: i for i, token in enumerate(TOKENS)}
THINK, CLOSE, CALL, CALLED, USER, END, STOP, MARK = (ID[token] for token in CONTROL)
ENDS = (END, STOP)
assert len(TOKENS) < toy.VOCAB, "some ids are padding"


def encode(text: str) -> list[int]:
    """Letter by letter, but for merged tokens, the longest first; never a control token."""
    ids: list[int] = []
    data = text.encode()
    while data:
        found = next((token for token in sorted(MERGED, key=len, reverse=True) if data.startswith(token)), data[:1])
        ids.append(ID[found])
        data = data[len(found) :]
    return ids


def say(*parts: str | int) -> list[int]:
    """Token ids of texts and of single tokens."""
    return [token for part in parts for token in (encode(part) if isinstance(part, str) else [part])]


def letters(text: str) -> list[int]:
    """Token ids of a text, a token for each letter."""
    return [ID[letter.encode()] for letter in text]


def text(ids: Iterable[int]) -> str:
    """What token ids say."""
    return b"".join(TOKENS[i] for i in ids).decode()


def vocabulary() -> Vocabulary:
    """The tokens above under logits that are wider."""
    return Vocabulary(TOKENS, [ID[token] for token in CONTROL], toy.VOCAB, encode)


class Engine:
    """A worker without a socket. `hold`: nothing is compiled before it is set."""

    def __init__(
        self,
        path: Path,
        *,
        blocks: int = 64,
        max_running: int = 8,
        step_tokens: int = 64,
        drafts_max: int = 0,
        hold: threading.Event | None = None,
    ) -> None:
        start = wire.Start(model=str(path), threads=2, kv_bytes=blocks * BLOCK_BYTES)
        self.runner = Runner.load(start, lambda _: None)
        drafter = PromptLookup(drafts_max) if drafts_max else None
        limits = Limits(toy.CONTEXT, max_running, step_tokens, 100, drafts_max)
        self.scheduler = Scheduler(limits, blocks, lambda token: TOKENS[token] if token < len(TOKENS) else b"", drafter)
        self.hold = hold
        self.fences = Fences(self._vocabulary)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}  # reason, or code of the fault
        self.looped: list[wire.Looped] = []

    def _vocabulary(self) -> Vocabulary:
        if self.hold is not None:
            assert self.hold.wait(60)
        return vocabulary()

    def submit(self, ask: wire.Generate) -> None:
        self.tokens[ask.request] = []
        self.tell(self.scheduler.submit(ask, 0, self.fences.open(ask)))

    def compiled(self) -> None:
        """Waits until all that was asked to be compiled is."""
        for future in self.fences._compiled.values():
            future.exception(timeout=60)

    def step(self) -> None:
        plan = self.scheduler.plan(0)
        for copy in plan.copies:
            self.runner.copy_block(copy.source, copy.target, copy.count)
        self.tell(plan.events)
        if plan.slices:
            self.tell(self.scheduler.apply(plan, self.runner.step(plan.slices), 0))
        self.scheduler.check()

    def cancel(self, request: str) -> None:
        self.tell(self.scheduler.cancel(request, 0))

    def tell(self, events: Sequence[wire.FromEngine]) -> None:
        for event in events:
            match event:
                case wire.Tokens():
                    assert event.position == len(self.tokens[event.request])
                    self.tokens[event.request] += wire.unpack_ids(event.ids)
                case wire.Finished():
                    assert event.output == len(self.tokens[event.request])
                    self.ends[event.request] = event.reason
                case wire.Failed():
                    self.ends[event.request] = event.code
                case wire.Looped():
                    self.looped.append(event)

    def run(self) -> None:
        self.compiled()
        while not self.scheduler.idle:
            self.step()

    def close(self) -> None:
        self.fences.close()
        self.runner.close()


def ask(
    request: str,
    fence: wire.Fence | None,
    *,
    prompt: Sequence[int] = (3, 1, 4, 1, 5),
    max_tokens: int = 60,
    seed: int = 0,
    temperature: float = 8.0,
    **changed: object,
) -> wire.Generate:
    """A request; `changed` are settings of its sampling, and its guard."""
    guard = changed.pop("guard", None)
    stop = changed.pop("stop", ())
    return wire.Generate(
        request=request,
        tokens=wire.pack_ids(prompt),
        namespace="n",
        sampling=wire.Sampling(temperature, 1.0, 0, seed, **changed),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        end_tokens=ENDS,
        stop=stop,  # type: ignore[arg-type]
        fence=fence,
        guard=guard,  # type: ignore[arg-type]
    )
