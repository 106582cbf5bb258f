"""A llama of two small layers, written as a real GGUF: seeded weights, so that tests need no download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 96, 160, 6, 2, 32, 131, 512
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
METADATA: dict[str, int | float | str] = {
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}

_TYPES = gguf.GGMLQuantizationType


def tensors(kind: str = "Q4_1", own_head: bool = False) -> dict[str, tuple[np.ndarray, str]]:
    """Name -> (values, type): matrices of `kind`, the embedding in Q8_0, norms in F32."""
    rng = np.random.default_rng(7)

    def matrix(shape: tuple[int, int]) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(1.5 / shape[1] ** 0.5)

    made: dict[str, tuple[np.ndarray, str]] = {"token_embd.weight": (matrix((VOCAB, HIDDEN)) * 8, "Q8_0")}
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            made[f"blk.{layer}.{name}.weight"] = matrix(shape), kind
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32), "F32"
    made["output_norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32), "F32"
    if own_head:
        made["output.weight"] = matrix((VOCAB, HIDDEN)) * 8, "F16"
    return made


def write(
    path: Path,
    content: Mapping[str, tuple[np.ndarray, str]] | None = None,
    changed: Mapping[str, int | float | str] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes the file; `changed` metadata replaces or joins the default's."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | dict(changed or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for name, (values, kind) in (content if content is not None else tensors()).items():
        if kind in ("F32", "F16"):
            writer.add_tensor(name, values.astype(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(name, quantize(values, _TYPES[kind]), raw_dtype=_TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
