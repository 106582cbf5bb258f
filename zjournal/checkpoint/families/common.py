"""What the families share: reading sizes and RoPE out of GGUF metadata and config.json, and the usual tensor names.

Sources: the GGUF specification and gguf's tables of keys and tensor names; transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zjournal.checkpoint.decoder import (
    CONTEXT_MAX,
    HEAD_DIM_MAX,
    ROPE_FACTOR_MAX,
    VOCAB_MAX,
    WIDTH_MAX,
    Rope,
    Shape,
    Spelling,
    refuse,
)
from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import HfConfig
from zjournal.errors import ModelFault

GGUF_LAYER = {
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "post_attn_norm": "blk.{}.post_attention_norm.weight",
    "post_ffn_norm": "blk.{}.post_ffw_norm.weight",
}
GGUF_EMBED = "token_embd.weight"
HF_LAYER = {
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}
_NEUTRAL = (None, False, 0, 0.0)


def root(hidden: int) -> float:
    """The square root of a hidden size; of the nearest possible one where decoder.check will refuse it."""
    return min(max(hidden, 1), WIDTH_MAX) ** 0.5


def score_scale(head_dim: int) -> float:
    """What attention scores are multiplied by, as `root` for sizes that cannot be."""
    return min(max(head_dim, 1), HEAD_DIM_MAX) ** -0.5


# --- GGUF ---------------------------------------------------------------------------------------------


def gguf_spelling(half_split: bool) -> Spelling:
    """The names in a GGUF."""
    return Spelling(
        embed=GGUF_EMBED,
        out_norm="output_norm.weight",
        head="output.weight",
        layer=GGUF_LAYER,
        rope_factors="rope_freqs.weight",
        half_split=half_split,
    )


def gguf_sizes(header: Header, arch: str) -> dict[str, Any]:
    """The fields of Decoder that every architecture's metadata has. Raises ModelFault."""
    for key in ("expert_count", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale"):
        refuse_unless_neutral(header, f"{arch}.{key}", header.get(f"{arch}.{key}"))
    for key in ("embedding_scale", "residual_scale", "attention.clamp_kqv", "attention.max_alibi_bias"):
        refuse_unless_neutral(header, f"{arch}.{key}", header.get(f"{arch}.{key}"))
    if header.get(f"{arch}.attention.causal", True) is not True:
        refuse(header.path, f"{arch}.attention.causal", False, "only causal models are supported")

    def size(key: str, default: int | None = None) -> int:
        return header.value(f"{arch}.{key}", int, default)

    hidden, heads = size("embedding_length"), size("attention.head_count")
    if heads < 1:
        refuse(header.path, f"{arch}.attention.head_count", heads, "a decoder has heads")
    embed = header.tensors.get(GGUF_EMBED)
    if embed is None or len(embed.shape) != 2 or embed.shape[0] > VOCAB_MAX:
        raise ModelFault(f"{header.path}: the tensor {GGUF_EMBED} is missing or has an impossible shape")
    head_dim = size("attention.key_length", hidden // heads)
    if (values := size("attention.value_length", head_dim)) != head_dim:
        refuse(header.path, f"{arch}.attention.value_length", values, f"it must be the size of keys, {head_dim}")
    return {
        "family": arch,
        "layers": size("block_count"),
        "hidden": hidden,
        "ffn": size("feed_forward_length"),
        "heads": heads,
        "kv_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab": embed.shape[0],
        "context": size("context_length"),
        "eps": header.value(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "scale": header.value(f"{arch}.attention.scale", float, 0.0) or score_scale(head_dim),
        "tied": "output.weight" not in header.tensors,
    }


def gguf_rope(header: Header, arch: str, head_dim: int, base: float) -> Rope:
    """The rotation that the metadata tells; `base` is the default. Raises ModelFault for a scaling not computed."""
    dim = header.value(f"{arch}.rope.dimension_count", int, head_dim)
    base = header.value(f"{arch}.rope.freq_base", float, base)
    key = f"{arch}.rope.scaling"
    kind = header.value(f"{key}.type", str, "none")
    factor = header.value(f"{key}.factor", float, header.value(f"{arch}.rope.scale_linear", float, 1.0)) or 1.0
    if kind == "none":
        if factor != 1:
            refuse(header.path, f"{key}.factor", factor, f"without {key}.type")
        return Rope(dim=dim, base=base)
    if kind == "linear":
        return Rope(dim=dim, base=base, kind="linear", factor=factor)
    if kind != "yarn":
        refuse(header.path, f"{key}.type", kind, "this RoPE scaling is not supported, only linear and yarn")
    for name in ("yarn_ext_factor", "yarn_log_multiplier"):
        value = header.value(f"{key}.{name}", float, 0.0)
        if value not in (0.0, 1.0 if name == "yarn_ext_factor" else 0.0, -1.0):
            refuse(header.path, f"{key}.{name}", value, "is not supported")
    attention = header.value(f"{key}.yarn_attn_factor", float, 1.0) * header.value(f"{key}.attn_factor", float, 1.0)
    rope = Rope(
        dim=dim,
        base=base,
        kind="yarn",
        factor=factor,
        original=header.value(f"{key}.original_context_length", int),
        beta_fast=header.value(f"{key}.yarn_beta_fast", float, 32.0),
        beta_slow=header.value(f"{key}.yarn_beta_slow", float, 1.0),
    )
    if attention != 1:
        refuse(header.path, f"{key}.yarn_attn_factor", attention, "only 1 is supported")
    return rope


def refuse_unless_neutral(source: Header | HfConfig, key: str, value: object) -> None:
    """Raises ModelFault if `value` would change what is computed."""
    if value not in _NEUTRAL:
        refuse(source.path, key, value, "this is not supported")


# --- config.json --------------------------------------------------------------------------------------

_NOT_COMPUTED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "residual_multiplier",
    "logits_scaling",
)


def hf_spelling(layers: int, rope_dim: int, layer: Mapping[str, str] = HF_LAYER, norm_offset: float = 0.0) -> Spelling:
    """The names in a folder's safetensors; q and k are always stored for half-split rotation there."""
    buffers: dict[str, Shape] = {
        f"model.layers.{number}.self_attn.rotary_emb.inv_freq": (rope_dim // 2,) for number in range(layers)
    }
    return Spelling(
        embed="model.embed_tokens.weight",
        out_norm="model.norm.weight",
        head="lm_head.weight",
        layer=layer,
        may=buffers,  # left there by old versions of transformers
        half_split=True,
        norm_offset=norm_offset,
    )


def hf_sizes(config: HfConfig, family: str, architecture: str, tied: bool = False) -> dict[str, Any]:
    """The fields of Decoder that every config has; `tied` is the family's default. Raises ModelFault."""
    named = config.get("architectures")
    if named is not None and named != [architecture]:
        refuse(config.path, "architectures", named, f"only {architecture} of this family is supported")
    for key in _NOT_COMPUTED:
        refuse_unless_neutral(config, key, config.get(key))
    hidden, heads = config.value("hidden_size", int), config.value("num_attention_heads", int)
    if heads < 1:
        refuse(config.path, "num_attention_heads", heads, "a decoder has heads")
    head_dim = config.value("head_dim", int, hidden // heads)
    return {
        "family": family,
        "layers": config.value("num_hidden_layers", int),
        "hidden": hidden,
        "ffn": config.value("intermediate_size", int),
        "heads": heads,
        "kv_heads": config.value("num_key_value_heads", int, heads),
        "head_dim": head_dim,
        "vocab": config.value("vocab_size", int),
        "context": config.value("max_position_embeddings", int),
        "eps": config.value("rms_norm_eps", float, 1e-6),
        "scale": score_scale(head_dim),
        "tied": config.value("tie_word_embeddings", bool, tied),
    }


def hf_activation(config: HfConfig, keys: Iterable[str], wanted: str) -> None:
    """Raises ModelFault unless the activation is the family's."""
    for key in keys:
        if (found := config.get(key)) not in (None, wanted):
            refuse(config.path, key, found, f"only {wanted} is supported")


def hf_rope(config: HfConfig, head_dim: int, base: float, layer_type: str | None = None) -> Rope:
    """The rotation in `rope_parameters`, or in the older `rope_theta` and `rope_scaling`. Raises ModelFault.

    `base` is the family's default. `layer_type` picks one of the parameters that are kept per type of layer.
    """
    key, told = "rope_parameters", config.get("rope_parameters")
    if isinstance(told, dict) and layer_type is not None and layer_type in told:
        key, told = f"rope_parameters.{layer_type}", told[layer_type]
    if told is None:
        key, told = "rope_scaling", config.get("rope_scaling")
    if told is None:
        told = {}
    if not isinstance(told, dict):
        refuse(config.path, key, told, "it is not an object")
    part = HfConfig(config.path, told, f"{key}.")
    if part.value("partial_rotary_factor", float, config.value("partial_rotary_factor", float, 1.0)) != 1:
        refuse(config.path, "partial_rotary_factor", part.get("partial_rotary_factor"), "only 1 is supported")
    base = part.value("rope_theta", float, config.value("rope_theta", float, base))
    kind = part.value("rope_type", str, part.value("type", str, "default"))
    if kind == "default":
        return Rope(dim=head_dim, base=base)
    if kind == "dynamic":
        refuse(config.path, f"{key}.rope_type", kind, "its angles depend on the length, so no prefix could be reused")
    factor = part.value("factor", float)
    if kind == "linear":
        return Rope(dim=head_dim, base=base, kind="linear", factor=factor)
    context = config.value("max_position_embeddings", int)
    original = part.value("original_max_position_embeddings", int, context)
    if kind == "llama3":
        low, high = part.value("low_freq_factor", float), part.value("high_freq_factor", float)
        return Rope(dim=head_dim, base=base, kind="llama3", factor=factor, original=original, low=low, high=high)
    if kind != "yarn":
        refuse(config.path, f"{key}.rope_type", kind, "this RoPE scaling is not supported")
    for name in ("mscale", "mscale_all_dim"):
        refuse_unless_neutral(config, f"{key}.{name}", part.get(name))
    return Rope(
        dim=head_dim,
        base=base,
        kind="yarn",
        factor=factor,
        original=original,
        beta_fast=part.value("beta_fast", float, 32.0),
        beta_slow=part.value("beta_slow", float, 1.0),
        truncate=part.value("truncate", bool, True),
        amplitude=part.value("attention_factor", float, 0.0) or None,
    )


def yarn_context(context: int, rope: Rope) -> int:
    """A config with YaRN may still tell the context before it (Qwen's does)."""
    possible = rope.original <= CONTEXT_MAX and rope.factor <= ROPE_FACTOR_MAX  # decoder.check refuses the others
    return max(context, int(rope.original * rope.factor)) if rope.kind == "yarn" and possible else context


def hf_windows(config: HfConfig, layers: int, window: int, sliding: Iterable[bool]) -> tuple[int, ...]:
    """The window of each layer: by `layer_types` where the config has them, else by the family's rule `sliding`."""
    types = config.get("layer_types")
    if types is None:
        flags = list(sliding)
    else:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != layers or not all(name in known for name in types):
            refuse(config.path, "layer_types", types, f"it does not name {layers} layers as {' or '.join(known)}")
        flags = [known[name] for name in types]
    if any(flags) and window < 1:
        refuse(config.path, "sliding_window", window, "layers use it")
    return tuple(window if flag else 0 for flag in flags) if any(flags) else ()
