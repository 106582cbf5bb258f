"""Qwen2, Qwen2.5 and Qwen3 (dense): biases of q, k and v in the first two, norms of query and key heads in the last."""

from __future__ import annotations

from typing import Any

from zjournal.checkpoint.decoder import LAYERS_MAX, Decoder, Model, check
from zjournal.checkpoint.families import common
from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import HfConfig

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_BASE = 10_000.0
_QWEN3_HEAD = 128  # Qwen3Config's head_dim where the file has none


def _flags(family: str) -> dict[str, Any]:
    return {"qkv_bias": family == "qwen2", "head_norms": family == "qwen3"}


def from_gguf(header: Header) -> Model:
    """From GGUF metadata of `qwen2` or `qwen3`. Raises ModelFault."""
    family = header.value("general.architecture", str)
    sizes = common.gguf_sizes(header, family)
    window = f"{family}.attention.sliding_window"
    common.refuse_unless_neutral(header, window, header.get(window))
    rope = common.gguf_rope(header, family, sizes["head_dim"], _ROPE_BASE)
    decoder = check(Decoder(**sizes, **_flags(family), rope=rope), header.path)
    return Model(decoder, common.gguf_spelling(half_split=True))


def from_config(config: HfConfig) -> Model:
    """From config.json of model type `qwen2` or `qwen3`. Raises ModelFault."""
    family = config.value("model_type", str)
    sizes = common.hf_sizes(config, family, _CLASSES[family])
    if family == "qwen3":
        sizes["head_dim"] = config.value("head_dim", int, _QWEN3_HEAD)
        sizes["scale"] = common.score_scale(sizes["head_dim"])
    common.hf_activation(config, ("hidden_act",), "silu")
    rope = common.hf_rope(config, sizes["head_dim"], _ROPE_BASE)
    sizes["context"] = common.yarn_context(sizes["context"], rope)
    sliding = config.value("use_sliding_window", bool, False)
    first = config.value("max_window_layers", int, 28)
    window = config.value("sliding_window", int, 4096) if sliding else 0
    layers = min(sizes["layers"], LAYERS_MAX)  # more are refused below
    windows = common.hf_windows(config, layers, window, [sliding and layer >= first for layer in range(layers)])
    decoder = check(Decoder(**sizes, **_flags(family), rope=rope, windows=windows), config.path)
    return Model(decoder, common.hf_spelling(decoder.layers, rope.dim))
