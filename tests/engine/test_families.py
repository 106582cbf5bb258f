"""Each family in both forms of files against transformers, and the promises of bits within each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM

from tests import native
from tests.engine import families
from zjournal.checkpoint.checkpoint import check_tensors, open_checkpoint
from zjournal.engine.models.decoder import Batch, Decoder
from zjournal.engine.models.native import NativeDecoder
from zjournal.engine.models.plain import PlainDecoder
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS
from zjournal.errors import EngineStartFault, ModelFault
from zjournal.link import wire

LENGTH = 150  # over the window, several blocks and segments
DECODED = 6
TOLERANCE = 2e-4  # of logits of the size of 10


def ids(length: int = LENGTH, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, families.VOCAB, length).tolist()


def load(path: Path, engine: str, mode: str = "file") -> Decoder:
    """`engine`: an instruction set, "" for the best, or torch."""
    checkpoint = open_checkpoint(path)
    model = checkpoint.model()
    check_tensors(checkpoint, model)
    if engine == "torch":
        return PlainDecoder(checkpoint, model, families.CONTEXT, "a test", lambda _: None)
    return NativeDecoder(checkpoint, model, families.CONTEXT, native.kernels(engine), mode, lambda _: None)


class Run:
    """One sequence in pages of its own, computed in steps of any size."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pages = decoder.new_pages(families.CONTEXT // BLOCK_TOKENS)
        self._at = 0

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each of the tokens."""
        rows = len(tokens)
        position = torch.arange(self._at, self._at + rows)
        self._at += rows
        table = torch.arange(families.CONTEXT // BLOCK_TOKENS).flip(0)[None].contiguous()
        made = (torch.tensor(tokens), position, torch.zeros(rows), table, torch.arange(rows))
        return self._decoder.forward(Batch(*(values.int() for values in made)), self._pages).clone()


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Name, folder, GGUF, and transformers' logits [LENGTH, vocab]."""
    name = request.param
    model = families.make(name)
    root = tmp_path_factory.mktemp("family")
    with torch.inference_mode():
        expected = model(torch.tensor([ids()])).logits[0]
    folder = families.write_folder(model, root / "folder", shard="200KB")
    return name, folder, families.write_gguf(name, model, root / "model.gguf"), expected


@pytest.mark.parametrize("engine", ["", "portable", "torch"])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_logits_are_those_of_transformers(family, form: str, engine: str) -> None:
    _, folder, file, expected = family
    decoder = load(folder if form == "folder" else file, engine)
    whole = Run(decoder).step(ids())
    assert expected.abs().max() > 3
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    other = Run(decoder)
    start = LENGTH - DECODED
    parts = [other.step(ids()[a:b]) for a, b in ((0, 7), (7, 63), (63, start))]
    parts += [other.step([token]) for token in ids()[start:]]
    assert torch.equal(torch.cat(parts), whole), "chunks and decoding"
    decoder.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_packed_rows_are_put_in_order_and_give_the_bits_of_fp32(tmp_path: Path, name: str, kind: str) -> None:
    file = families.write_gguf(name, families.make(name), tmp_path / "model.gguf", kind)
    found = []
    for mode in ("file", "fp32"):
        decoder = load(file, "", mode)
        found.append(Run(decoder).step(ids()))
        decoder.close()
    assert torch.equal(*found)
    plain = Run(load(file, "torch")).step(ids(40))
    torch.testing.assert_close(found[0][:40], plain, rtol=0, atol=TOLERANCE * plain.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Gemma's embedding scale is rounded to the type of the weights, as transformers has it."""
    folder = families.write_folder(families.make("gemma3"), tmp_path / "folder", dtype)
    model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scale = model.model.embed_tokens.embed_scale
    scale.copy_(torch.tensor(families._SIZES["hidden_size"] ** 0.5).to(dtype).float())
    with torch.inference_mode():
        expected = model(torch.tensor([ids()])).logits[0]
    for engine in ("", "torch"):
        decoder = load(folder, engine)
        whole = Run(decoder).step(ids())
        torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
        decoder.close()


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = families.make("qwen2 yarn")
    folder = families.write_folder(model, tmp_path / "folder")
    state = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in state
    embed = state["model.embed_tokens.weight"]
    save_file(state | {"lm_head.weight": embed.clone()}, folder / "model.safetensors")
    load(folder, "").close()
    save_file(state | {"lm_head.weight": embed + 1}, folder / "model.safetensors")
    with pytest.raises(ModelFault, match=r"lm_head\.weight differs"):
        load(folder, "")


def test_the_runner_tells_what_a_folder_is_made_of(tmp_path: Path) -> None:
    folder = families.write_folder(families.make("qwen3"), tmp_path / "folder")

    def told(**changed) -> Runner:
        start = wire.Start(model=str(folder), threads=1, kv_bytes=1 << 22, cache_dir=str(tmp_path / "cache"), **changed)
        runner = Runner.load(start, lambda _: None)
        runner.close()
        return runner

    first, linear = told(), told(rope="linear:2")
    assert (first.context, linear.context) == (families.CONTEXT, 2 * families.CONTEXT)
    assert linear.fingerprint != first.fingerprint == told().fingerprint
    assert {key for key in first.parts if first.parts[key] != linear.parts[key]} == {"rope"}
    assert told(rope="base:20000", context=4 * families.CONTEXT).context == 4 * families.CONTEXT
    with pytest.raises(EngineStartFault, match=r"1025 tokens is over the model's own, 1024"):
        told(rope="linear:2", context=1025)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    other = told()
    assert (other.parts, other.fingerprint == first.fingerprint) == (first.parts, False)
