"""The decoder on a toy GGUF: near transformers, and bitwise blind to company, chunks, copies and instruction sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import native
from tests.engine import oracle, toy
from zjournal.checkpoint.checkpoint import check_tensors, open_checkpoint
from zjournal.checkpoint.gguf import TensorFile, read_header
from zjournal.engine.models import weights
from zjournal.engine.models.decoder import Decoder
from zjournal.engine.models.native import NativeDecoder
from zjournal.engine.models.plain import PlainDecoder
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import ModelFault
from zjournal.kernels import cpu
from zjournal.link import wire

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
WIDTH = toy.CONTEXT // BLOCK_TOKENS
SEQUENCES = 6
ENGINES = (*native.ISAS, "torch")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


def open_runner(path: Path, engine: str, mode: str = "file", threads: int = 2) -> Runner:
    checkpoint = open_checkpoint(path)
    described = checkpoint.model()
    check_tensors(checkpoint, described)
    context = described.decoder.context

    def progress(_: float) -> None:
        pass

    model: Decoder
    if engine == "torch":
        model = PlainDecoder(checkpoint, described, context, "a test", progress)
    else:
        model = NativeDecoder(checkpoint, described, context, native.kernels(engine, threads), mode, progress)
    return Runner(model, context, SEQUENCES * WIDTH, "test")


@pytest.fixture(scope="module", params=ENGINES)
def runner(request: pytest.FixtureRequest, path: Path):
    opened = open_runner(path, request.param)
    yield opened
    opened.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, toy.VOCAB, length).tolist()


def table(sequence: int) -> list[int]:
    """Blocks that lie apart: sequence 1 has 1, 7, 13, …"""
    return list(range(sequence, SEQUENCES * WIDTH, SEQUENCES))


def part(ids: list[int], start: int, end: int, sequence: int, wanted: bool = True) -> Slice:
    return Slice(str(sequence), ids[start:end], start, table(sequence), GREEDY if wanted else None, 0)


def cold(runner: Runner, ids: list[int], sequence: int = 0) -> torch.Tensor:
    return runner.logits([part(ids, 0, len(ids), sequence)])[0].clone()


@pytest.mark.parametrize("own_head", [False, True])
def test_logits_are_near_transformers(tmp_path: Path, own_head: bool) -> None:
    path = toy.write(tmp_path / "toy.gguf", toy.tensors("Q4_1", own_head))
    judge = oracle.load(path)
    ids = prompt(150)
    with torch.inference_mode():
        expected = judge(torch.tensor([ids])).logits[0]
    for engine in ENGINES:
        opened = open_runner(path, engine)
        for length in (1, 15, 64, 150):
            torch.testing.assert_close(cold(opened, ids[:length]), expected[length - 1], rtol=1e-4, atol=1e-4)
        opened.close()


def test_chunks_company_and_place_do_not_change_a_bit(runner: Runner) -> None:
    ids = prompt(300)
    expected = {length: cold(runner, ids[:length]) for length in (1, 2, 16, 63, 64, 65, 129, 150, 299, 300)}
    chunked = [
        [150, 299, 300],
        [1, 2, 16, 63, 64, 65, 129, 300],
        [129, 150, 300],
    ]
    for sequence, ends in enumerate(chunked, start=1):
        start = 0
        for end in ends:
            company = [part(prompt(40, seed), 0, 40, seed, wanted=seed % 2 == 0) for seed in (4, 5)]
            at = sequence % 3
            company.insert(at, part(ids, start, end, sequence))
            wanted = [other.request for other in company if other.sampling is not None]
            found = runner.logits(company)[wanted.index(str(sequence))]
            assert torch.equal(found, expected[end]), (sequence, end)
            start = end


def test_decoding_in_a_batch_is_decoding_alone(runner: Runner) -> None:
    prompts = [prompt(length, length) for length in (5, 64, 90, 130, 17)]
    for sequence, ids in enumerate(prompts):
        cold(runner, ids, sequence)
    together = []
    for step in range(4):
        grown = [ids + [7 + step] * (step + 1) for ids in prompts]
        together.append(runner.logits([part(ids, len(ids) - 1, len(ids), i) for i, ids in enumerate(grown)]).clone())
    for sequence, ids in enumerate(prompts):
        cold(runner, ids, 5)
        for step in range(4):
            grown = ids + [7 + step] * (step + 1)
            alone = runner.logits([part(grown, len(grown) - 1, len(grown), 5)])[0]
            assert torch.equal(alone, together[step][sequence])


def test_a_copied_block_continues_bit_for_bit(runner: Runner) -> None:
    ids = prompt(200)
    expected = cold(runner, ids)
    for shared in (1, 15, 16, 70, 199):
        own = table(1)
        mixed = table(0)[: shared // BLOCK_TOKENS] + own[shared // BLOCK_TOKENS :]
        if shared % BLOCK_TOKENS:
            runner.copy_block(table(0)[shared // BLOCK_TOKENS], own[shared // BLOCK_TOKENS], shared % BLOCK_TOKENS)
        found = runner.logits([Slice("copy", ids[shared:], shared, mixed, GREEDY, 0)])[0]
        assert torch.equal(found, expected)


def test_instruction_sets_threads_and_held_weights_give_the_same_bits(path: Path) -> None:
    ids, results = prompt(200), []
    for engine in native.ISAS:
        for mode, threads in (("file", 1), ("file", 3), ("fp32", 2)):
            try:
                opened = open_runner(path, engine, mode, threads)
            except pytest.skip.Exception:  # this CPU lacks it
                continue
            grown = [*ids, 3]
            results.append(torch.stack((cold(opened, ids), opened.logits([part(grown, 200, 201, 0)])[0])))
            opened.close()
    assert len(results) >= 3
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_stored_types_run(tmp_path: Path, kind: str) -> None:
    path = toy.write(tmp_path / "toy.gguf", toy.tensors(kind))
    ids = prompt(30)
    with torch.inference_mode():
        expected = oracle.load(path)(torch.tensor([ids])).logits[0, -1]
    for engine in ("portable", "torch"):
        opened = open_runner(path, engine)
        torch.testing.assert_close(cold(opened, ids), expected, rtol=1e-4, atol=1e-4)
        opened.close()


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
def test_superblocks_are_expanded_exactly(tmp_path: Path, kind: str, size: int) -> None:
    import gguf

    raw = np.random.default_rng(3).integers(0, 256, (4, 2 * size), dtype=np.uint8)
    for block in range(2):  # the scales are halves; random bytes could be infinite
        at = block * size + (0 if kind == "Q4_K" else size - 2)
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        if kind == "Q4_K":
            raw[:, at + 2 : at + 4] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    header = read_header(tmp_path / "k.gguf")
    with TensorFile(header) as file:
        values = weights.expand(file, header.tensors["t"])
    assert values.shape == (4, 512)
    assert np.array_equal(values, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, toy.HEAD_DIM // 2).astype(np.float32)
    path = toy.write(tmp_path / "toy.gguf", toy.tensors() | {"rope_freqs.weight": (factors, "F32")})
    ids = prompt(40)
    judge = oracle.load(path)
    judge.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    with torch.inference_mode():
        expected = judge(torch.tensor([ids])).logits[0, -1]
    opened = open_runner(path, "portable")
    torch.testing.assert_close(cold(opened, ids), expected, rtol=1e-4, atol=1e-4)
    opened.close()


def _without(name: str):
    made = toy.tensors()
    del made[name]
    return made


FAULTS = {
    "architecture gpt2": ({"architecture": "gpt2"}, "architecture gpt2"),
    "experts": ({"changed": {"llama.expert_count": 8}}, "expert_count"),
    "scaled RoPE": ({"changed": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
    "no key heads": ({"changed": {"llama.attention.head_count_kv": 0}}, "key heads"),
    "odd key heads": ({"changed": {"llama.attention.head_count_kv": 4}}, "multiple of 4"),
    "absurd layers": ({"changed": {"llama.block_count": 1 << 30}}, "layers"),
    "width of text": ({"changed": {"llama.embedding_length": "wide"}}, "embedding_length"),
    "other width": ({"changed": {"llama.feed_forward_length": 192}}, "blk.0.ffn_gate.weight has the shape"),
    "missing": ({"content": _without("blk.1.attn_k.weight")}, "blk.1.attn_k.weight is missing"),
    "bias": ({"content": toy.tensors() | {"blk.0.attn_q.bias": (np.zeros(192), "F32")}}, "blk.0.attn_q.bias is none"),
    "type": ({"content": toy.tensors("MXFP4")}, "type MXFP4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_run_is_a_fault_with_path_and_reason(tmp_path: Path, name: str) -> None:
    arguments, reason = FAULTS[name]
    path = toy.write(tmp_path / "toy.gguf", **arguments)
    with pytest.raises(ModelFault) as caught:
        Runner.load(wire.Start(model=str(path)), lambda _: None)
    assert str(path) in caught.value.message
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_without_the_library_torch_takes_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "open_library", lambda: (None, "none here"))
    threads = torch.get_num_threads()
    try:
        opened = Runner.load(wire.Start(model=str(path), threads=threads, kv_bytes=1 << 22), lambda _: None)
    finally:
        torch.set_num_threads(threads)
    assert opened.kernels == "torch (none here)"
    assert opened.step([Slice("a", prompt(20), 0, [0, 1], GREEDY, 0)])[0] == Sampled(
        (int(cold(opened, prompt(20)).argmax()),)
    )
