"""The real model: every weight exact, near transformers on the same weights, the same bits however it is computed."""

from __future__ import annotations

import argparse
import inspect

import numpy as np
import pytest
import torch

from tests import native, smollm2
from tests.engine import oracle
from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.checkpoint.gguf import TensorFile, read_header
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine import steps
from zjournal.engine.models import weights
from zjournal.engine.models.decoder import Batch
from zjournal.engine.models.native import NativeDecoder
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Slice
from zjournal.kernels import cpu
from zjournal.link import wire

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
BLOCKS = 640
LENGTHS = (20, 500, 2000)
OUTPUT = 8
FORCED = 1000  # teacher-forced tokens whose argmax is compared


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    """Real text, and longer than any prompt here: a module of the standard library."""
    ids = Tokenizer.from_header(read_header(smollm2.path())).encode(inspect.getsource(argparse))
    assert len(ids) > max(LENGTHS)
    return list(ids[: max(LENGTHS)])


@pytest.fixture(scope="module")
def judge():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield oracle.load(smollm2.path())
    torch.set_num_threads(before)


def open_runner(mode: str = "file") -> Runner:
    checkpoint = open_checkpoint(smollm2.path())
    model = checkpoint.model()
    context = model.decoder.context
    decoder = NativeDecoder(checkpoint, model, context, native.kernels(""), mode, lambda _: None)
    return Runner(decoder, context, BLOCKS, "test")


@pytest.fixture(scope="module")
def runner():
    opened = open_runner()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def seen() -> dict[int, torch.Tensor]:
    """Logits of the last token of the first so many ids, cold: what one test has found, others compare with."""
    return {}


def table(sequence: int) -> list[int]:
    return list(range(sequence, BLOCKS, 4))


def part(ids: list[int], start: int, sequence: int = 0) -> Slice:
    return Slice(str(sequence), ids[start:], start, table(sequence), GREEDY, 0)


def all_logits(runner: Runner, ids: list[int], last: int) -> torch.Tensor:
    """Logits after each of the last tokens, from one step."""
    batch = steps.batch([part(ids, 0)], runner.context, runner.vocab_size, runner.block_count)
    want = torch.arange(len(ids) - last, len(ids), dtype=torch.int32)
    return runner._model.forward(
        Batch(*(want if name == "want" else getattr(batch, name) for name in batch.__struct_fields__)),
        runner._pages,
    )


def greedy(runner: Runner, ids: list[int], first: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """OUTPUT tokens and the logits that each was taken from; `first` are those of `ids`, just computed."""
    ids, rows = [*ids, int(first.argmax())], [first]
    for _ in range(OUTPUT - 1):
        rows.append(runner.logits([part(ids, len(ids) - 1)])[0].clone())
        ids.append(int(rows[-1].argmax()))
    return ids[-OUTPUT:], rows


def test_every_weight_is_the_dequantised_one() -> None:
    header, kernels = read_header(smollm2.path()), native.kernels("")
    seen = 0
    with TensorFile(header) as file:
        for info in header.tensors.values():
            if info.type not in ("Q4_1", "Q8_0"):
                continue
            packed = kernels.pack(info.type, weights.stored(file, info).ctypes.data, *info.shape)
            assert np.array_equal(kernels.unpack(packed).numpy(), weights.expand(file, info)), info.name
            seen += 1
    kernels.close()
    assert seen == 211


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_and_logits_are_those_of_transformers(
    runner: Runner, judge, text_ids: list[int], seen: dict[int, torch.Tensor], length: int
) -> None:
    prompt = text_ids[:length]
    forced = FORCED if length > FORCED else 0
    if forced:
        *found, first = all_logits(runner, prompt, forced + 1).clone()
    else:
        first = runner.logits([part(prompt, 0)])[0].clone()
    seen[length] = first
    tokens, rows = greedy(runner, prompt, first)
    with torch.inference_mode():
        expected = judge(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=forced + OUTPUT).logits[0]
    torch.testing.assert_close(torch.stack(rows), expected[-OUTPUT:], rtol=0, atol=1e-3)
    assert tokens == expected[-OUTPUT:].argmax(-1).tolist()
    if forced:
        forward = torch.stack(found)
        torch.testing.assert_close(forward, expected[:forced], rtol=0, atol=1e-3)
        agreement = (forward.argmax(-1) == expected[:forced].argmax(-1)).float().mean().item()
        assert agreement >= 0.99


def test_cold_warm_chunked_and_in_a_batch_are_the_same_bits(
    runner: Runner, text_ids: list[int], seen: dict[int, torch.Tensor]
) -> None:
    for length in LENGTHS:
        prompt = text_ids[:length]
        cold = runner.logits([part(prompt, 0)])[0].clone()
        assert torch.equal(seen.setdefault(length, cold), cold), "one of many rows"
        assert torch.equal(runner.logits([part(prompt, length * 3 // 4)])[0], cold), "warm"
        for start in range(0, length, 237):
            chunk = Slice("1", prompt[start : start + 237], start, table(1), GREEDY, 0)
            chunked = runner.logits([chunk])[0]
        assert torch.equal(chunked, cold), "chunked"
        prompts = [text_ids[300:337], text_ids[100:164], prompt, text_ids[7:19]]
        together = runner.logits([part(ids, 0, sequence) for sequence, ids in enumerate(prompts)])
        assert torch.equal(together[2], cold), "batch"


def test_weights_in_fp32_give_the_same_bits(runner: Runner, text_ids: list[int], seen: dict[int, torch.Tensor]) -> None:
    expanded = open_runner("fp32")
    for length in (1, 3, *LENGTHS):  # what is shown of one is so shown of the other, prefill and decode
        prompt = [part(text_ids[:length], 0)]
        packed = seen[length] if length in seen else runner.logits(prompt)[0]
        assert torch.equal(expanded.logits(prompt)[0], packed)
    expanded.close()


def test_without_the_library_torch_keeps_the_promise_too(judge, text_ids: list[int], monkeypatch) -> None:
    monkeypatch.setattr(cpu, "open_library", lambda: (None, "a test"))
    fallback = Runner.load(wire.Start(model=str(smollm2.path()), threads=2, kv_bytes=1 << 28), lambda _: None)
    prompt, blocks = text_ids[:40], list(range(40 // BLOCK_TOKENS + 1))
    cold = fallback.logits([Slice("0", prompt, 0, blocks, GREEDY, 0)])[0]
    with torch.inference_mode():
        torch.testing.assert_close(cold, judge(torch.tensor([prompt])).logits[0, -1], rtol=0, atol=1e-3)
    other = [block + 8 for block in blocks]
    for start, end in ((0, 7), (7, 39), (39, 40)):
        pieces = fallback.logits([Slice("1", prompt[start:end], start, other, GREEDY, 0)])[0]
    assert torch.equal(pieces, cold)
