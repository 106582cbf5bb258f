"""Gemma 3, text: five layers with a sliding window to one without, two rotations, norms before and after each part.

A folder stores the weights of norms less 1, a GGUF as they are multiplied. The embedding is scaled by sqrt(hidden):
rounded to the type of the stored embedding in a folder, as transformers does, exact in a GGUF, as llama.cpp does.
"""

from __future__ import annotations

import struct

from zjournal.checkpoint.decoder import LAYERS_MAX, Decoder, Model, check, refuse
from zjournal.checkpoint.families import common
from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import HfConfig

ARCHITECTURE = "gemma3"
_PATTERN = 6  # every sixth layer sees everything
_BASE, _BASE_LOCAL = 1_000_000.0, 10_000.0
_LAYERS_27B = 62  # the one size whose scale is not that of its heads
_LAYER = common.HF_LAYER | {
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}


def from_gguf(header: Header) -> Model:
    """From GGUF metadata. Raises ModelFault."""
    sizes = common.gguf_sizes(header, ARCHITECTURE)
    layers = min(sizes["layers"], LAYERS_MAX)
    if sizes["layers"] == _LAYERS_27B and f"{ARCHITECTURE}.attention.scale" not in header:
        sizes["scale"] = (max(sizes["hidden"], 1) / sizes["heads"]) ** -0.5
    rope = common.gguf_rope(header, ARCHITECTURE, sizes["head_dim"], _BASE)
    base = header.value(f"{ARCHITECTURE}.rope.freq_base_swa", float, _BASE_LOCAL)
    window = header.value(f"{ARCHITECTURE}.attention.sliding_window", int)
    sliding = _pattern(header, layers)
    decoder = Decoder(
        **sizes,
        rope=rope,
        rope_local=common.Rope(dim=rope.dim, base=base),
        windows=tuple(window if flag else 0 for flag in sliding),
        local=tuple(sliding),
        activation="gelu_tanh",
        embed_scale=_float32(common.root(sizes["hidden"])),
        head_norms=True,
        post_norms=True,
    )
    return Model(check(decoder, header.path), common.gguf_spelling(half_split=True))


def _pattern(header: Header, layers: int) -> list[bool]:
    key = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    told = header.get(key, _PATTERN)
    if isinstance(told, list):
        if len(told) != layers or not all(type(flag) is bool for flag in told):
            refuse(header.path, key, told, f"it does not tell {layers} layers")
        return [bool(flag) for flag in told]
    if type(told) is not int or told < 1:
        refuse(header.path, key, told, "it is not the distance between two layers")
    return [(layer + 1) % told != 0 for layer in range(layers)]


def from_config(config: HfConfig, embed_type: str = "F32") -> Model:
    """From config.json of model type `gemma3_text`. `embed_type`: how the embedding is stored. Raises ModelFault."""
    sizes = common.hf_sizes(config, ARCHITECTURE, "Gemma3ForCausalLM", tied=True)
    common.hf_activation(config, ("hidden_activation", "hidden_act"), "gelu_pytorch_tanh")
    layers = min(sizes["layers"], LAYERS_MAX)
    sizes["head_dim"] = config.value("head_dim", int, 256)
    scalar = config.value("query_pre_attn_scalar", float, 256.0)
    if not scalar > 0:
        refuse(config.path, "query_pre_attn_scalar", scalar, "it must be positive")
    pattern = config.value("sliding_window_pattern", int, config.value("_sliding_window_pattern", int, _PATTERN))
    if pattern < 1:
        refuse(config.path, "sliding_window_pattern", pattern, "it is not the distance between two layers")
    window = config.value("sliding_window", int, 4096)
    windows = common.hf_windows(config, layers, window, [(layer + 1) % pattern != 0 for layer in range(layers)])
    rope = common.hf_rope(config, sizes["head_dim"], _BASE, "full_attention")
    sizes["scale"] = scalar**-0.5
    decoder = Decoder(
        **sizes,
        rope=rope,
        rope_local=_local(config, sizes["head_dim"]),
        windows=windows,
        local=tuple(window > 0 for window in windows),
        activation="gelu_tanh",
        embed_scale=_rounded(common.root(sizes["hidden"]), embed_type),
        head_norms=True,
        post_norms=True,
    )
    spelling = common.hf_spelling(layers, rope.dim, _LAYER, norm_offset=1.0)
    return Model(check(decoder, config.path), spelling)


def _local(config: HfConfig, head_dim: int) -> common.Rope:
    """The rotation of layers with a window: in newer files beside the other one, in older ones a base alone."""
    told = config.get("rope_parameters")
    if isinstance(told, dict) and "sliding_attention" in told:
        return common.hf_rope(config, head_dim, _BASE_LOCAL, "sliding_attention")
    return common.Rope(dim=head_dim, base=config.value("rope_local_base_freq", float, _BASE_LOCAL))


def _float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _rounded(value: float, kind: str) -> float:
    """`value` in a storage type, to nearest and to even."""
    if kind == "F16":
        return struct.unpack("<e", struct.pack("<e", value))[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if kind == "BF16":
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]
