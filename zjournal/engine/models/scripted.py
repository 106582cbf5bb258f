"""The scripted model: a runner that emits what a JSON file says, with a real tokenizer and no tensors.

Process, scheduler, cache and journal are the real ones; only the numerics are missing. In place of KV each block
records the tokens that were "computed" into it, and each step proves that the block table it was given spells the
request's tokens so far. So a wrong reuse ends the process instead of going unnoticed. docs/scripted.md shows the file.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.checkpoint.script import Script, Turn, read_script
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import EngineFailed, Fault, ModelFault
from zjournal.link import wire

TOKEN_KV_BYTES = 1024  # what a token counts against the KV memory: 1 GiB holds 1,048,576
KV_BYTES = 2 << 30  # where nothing is asked for
WHEN_CHARACTERS = 4000  # how far back in the prompt `when` looks
PART_HEX = 16  # of a digest in `parts`
BLOCK_BYTES = 4 * BLOCK_TOKENS
LOAD_S_MAX = 3600.0  # that a script may hold its loading
LOAD_POLL_S = 0.01
_FORGET = -1  # a place in a block that was never written


class _Playing:
    """One request's turn, the tokens it emits, and the tokens of the request so far."""

    def __init__(self, turn: Turn, emits: Sequence[int], prompt: Sequence[int]) -> None:
        self.turn = turn
        self.emits = emits
        self.ids = array("i", prompt)

    def next(self, index: int, drafts: Sequence[int]) -> list[int] | Fault:
        """Returns output token `index`, and one more for each draft that is right, as one by one they would come.

        After the turn's own tokens its last one, the end token, comes again and again.
        """
        if self.turn.die_after is not None and index >= self.turn.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.turn.fail_after is not None and index >= self.turn.fail_after:
            return EngineFailed(f"The script fails this request after {self.turn.fail_after} tokens.")
        breaks = [after for after in (self.turn.die_after, self.turn.fail_after) if after is not None]
        tokens = [self._token(index)]
        for draft in drafts:
            if draft != tokens[-1] or index + len(tokens) in breaks:
                break
            tokens.append(self._token(index + len(tokens)))
        return tokens

    def _token(self, index: int) -> int:
        return self.emits[min(index, len(self.emits) - 1)]


class ScriptedRunner:
    """The runner's interface over a script. `block_count` blocks of 16 recorded tokens stand for the KV."""

    kernels = "scripted"
    layout = "tokens.int32-1"
    block_bytes = BLOCK_BYTES
    stages = None
    step_tokens = 0

    def __init__(self, script: Script, tokenizer: Tokenizer, start: wire.Start, digest: str) -> None:
        self._path = start.model
        self._script = script
        self.tokenizer = tokenizer
        self.fingerprint = f"scripted:{digest}"
        self.parts: Mapping[str, str] = {"weights": digest[:PART_HEX], "kernels": self.kernels}
        self.context = min(start.context, script.context) if start.context else script.context
        self.block_count = (start.kv_bytes or KV_BYTES) // (TOKEN_KV_BYTES * BLOCK_TOKENS)
        self.vocab_size = tokenizer.vocab_size
        self._end = _end_token(tokenizer, start.end_tokens)
        self._emits = [self._tokens_of(turn, at) for at, turn in enumerate(script.turns)]
        self._used = [False] * len(script.turns)
        self._blocks: dict[int, array[int]] = {}
        self._playing: dict[str, _Playing] = {}
        if self.block_count < 1:
            raise ModelFault(f"{start.kv_bytes} bytes of KV memory do not hold a block of {BLOCK_TOKENS} tokens.")

    @classmethod
    def load(cls, start: wire.Start, progress: Callable[[float], None]) -> ScriptedRunner:
        """Reads the script and the tokenizer. Raises ModelFault."""
        path = Path(start.model)
        script = read_script(path)
        if not start.tokenizer:
            raise ModelFault(f"{path}: a scripted model needs the tokenizer of a model")
        progress(0.5)
        if script.load_when is not None:
            _wait_for(path.parent / script.load_when)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(script, open_checkpoint(start.tokenizer).tokenizer(), start, digest)

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        """Chooses the request's turn by what stands at the end of its prompt, and uses it up."""
        assert request not in self._playing, request
        # A character is at most four bytes, and a token at least one.
        tail = self.tokenizer.decode(prompt[-4 * WHEN_CHARACTERS :])[-WHEN_CHARACTERS:]
        at = self._choose(tail)
        self._used[at] = True
        self._playing[request] = _Playing(self._script.turns[at], self._emits[at], prompt)

    def end(self, request: str) -> None:
        """Forgets the request."""
        del self._playing[request]

    def copy_block(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of a block; the others of `target` become unknown."""
        assert 0 < count <= BLOCK_TOKENS
        assert _FORGET not in self._blocks[source][:count], "copied what was never computed"
        self._blocks[target] = self._blocks[source][:count] + _blank(BLOCK_TOKENS - count)

    def block_memory(self, block: int) -> memoryview:
        """The tokens that are recorded in a block, 32 bits each; writable."""
        return memoryview(self._blocks.setdefault(block, _blank(BLOCK_TOKENS))).cast("B")

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in a copy of a block's bytes what lies behind its first `tokens` tokens."""
        memory[4 * tokens :] = bytes(len(memory) - 4 * tokens)

    def step(self, slices: Sequence[Slice]) -> list[Sampled | Fault]:
        """Records the tokens, proves every table, waits as the script says; one result per slice that samples."""
        results: list[Sampled | Fault] = []
        for part in slices:
            self._write(part)
        for part in slices:
            self._prove(part)
        time.sleep(self._delay_ms(slices) / 1000)
        for part in slices:
            if part.sampling is not None:
                playing = self._playing[part.request]
                result = playing.next(part.index, part.tokens[len(part.tokens) - part.drafts :])
                if not isinstance(result, Fault):
                    playing.ids.extend(result)
                results.append(result if isinstance(result, Fault) else _sampled(result, part.sampling))
        time.sleep(self._guessed_ms(slices, results) / 1000)
        return results

    def _choose(self, tail: str) -> int:
        unused = [(at, turn) for at, turn in enumerate(self._script.turns) if not self._used[at]]
        for at, turn in unused:
            if turn.when is not None and turn.when in tail:
                return at
        for at, turn in unused:
            if turn.when is None:
                return at
        return len(self._script.turns) - 1

    def _tokens_of(self, turn: Turn, at: int) -> list[int]:
        if turn.tokens is not None:
            for place, token in enumerate(turn.tokens):
                if token >= self.vocab_size:
                    where = f"`$.turns[{at}].tokens[{place}]`"
                    raise ModelFault(f"{self._path}: {token} is no token of the tokenizer - at {where}")
            return [*turn.tokens, self._end]
        assert turn.text is not None
        return [*self.tokenizer.encode_trusted(turn.text), self._end]

    def _write(self, part: Slice) -> None:
        for place, token in enumerate(part.tokens, part.start):
            block = part.table[place // BLOCK_TOKENS]
            if place % BLOCK_TOKENS == 0:
                self._blocks[block] = _blank(BLOCK_TOKENS)  # what another request left is gone
            self._blocks.setdefault(block, _blank(BLOCK_TOKENS))[place % BLOCK_TOKENS] = token

    def _prove(self, part: Slice) -> None:
        ids = self._playing[part.request].ids
        end = part.start + len(part.tokens)
        used = part.table[: -(-end // BLOCK_TOKENS)]
        spelled = b"".join(self._blocks[block].tobytes() for block in used)
        drafts = array("i", part.tokens[len(part.tokens) - part.drafts :])
        wanted = (ids[: end - part.drafts] + drafts).tobytes()
        assert spelled[: len(wanted)] == wanted, f"the block table of {part.request} does not spell its tokens"
        assert (part.sampling is not None) == (end - part.drafts == len(ids)), "samples when all tokens are computed"

    def _delay_ms(self, slices: Sequence[Slice]) -> float:
        """A batch takes as long as its slowest token, and its prompts one after another."""
        token = prefill = 0.0
        for part in slices:
            turn = self._playing[part.request].turn
            if part.sampling is not None:
                token = max(token, self._token_ms(turn))
            read = len(part.tokens) - part.drafts
            if read > 1 or part.index == 0:
                prefill += turn.prefill_ms_per_1k * read / 1000
        return token + prefill

    def _guessed_ms(self, slices: Sequence[Slice], results: Sequence[Sampled | Fault]) -> float:
        """Tokens that were guessed right take their time as well: a script says how long each of its tokens takes."""
        sampling = [part for part in slices if part.sampling is not None]
        return max(
            (
                self._token_ms(self._playing[part.request].turn) * (len(result.tokens) - 1)
                for part, result in zip(sampling, results, strict=True)
                if isinstance(result, Sampled)
            ),
            default=0.0,
        )

    def _token_ms(self, turn: Turn) -> float:
        return self._script.delay_ms if turn.delay_ms is None else turn.delay_ms


def _wait_for(file: Path) -> None:
    """Returns once the file is there. Raises ModelFault after LOAD_S_MAX."""
    until = time.monotonic() + LOAD_S_MAX
    while not file.exists():
        if time.monotonic() > until:
            raise ModelFault(f"{file}: the script waits for this file, and it did not come in {LOAD_S_MAX:g} s.")
        time.sleep(LOAD_POLL_S)


def _sampled(tokens: Sequence[int], sampling: wire.Sampling) -> Sampled:
    """A script is sure of each token: its logprob is 0, and there is no alternative but itself."""
    told = [wire.pack_logprobs(0.0, [(token, 0.0)][: sampling.logprobs]) for token in tokens]
    return Sampled(tuple(tokens), b"".join(told) if sampling.logprobs >= 0 else b"")


def _blank(tokens: int) -> array[int]:
    return array("i", [_FORGET]) * tokens


def _end_token(tokenizer: Tokenizer, given: Sequence[int]) -> int:
    if given:
        return given[0]
    named = tokenizer.control.get(tokenizer.special_texts.get("eos", ""))
    if named is not None:
        return named
    if not tokenizer.eos_ids:
        raise ModelFault("the tokenizer names no end token")
    return tokenizer.eos_ids[0]
