"""Small random checkpoints of each family: made by transformers, written as a Hugging Face folder and as a GGUF.

The GGUF's names come from gguf's own table, so that nothing of ours is on both sides of a comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, CONTEXT, WINDOW = 131, 512, 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GEMMA = {"num_key_value_heads": 1, "query_pre_attn_scalar": 48, "sliding_window": WINDOW, "layer_types": None}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e3,
}
_TYPES = ("sliding_attention", "sliding_attention", "full_attention")
_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# name: (config class, model class, GGUF architecture, what differs from the sizes above)
FAMILIES: dict[str, tuple[type, type, str, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, "LLAMA", {"rope_parameters": {"rope_theta": 5e3}}),
    "llama3": (LlamaConfig, LlamaForCausalLM, "LLAMA", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama linear": (
        LlamaConfig,
        LlamaForCausalLM,
        "LLAMA",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, "QWEN2", {"num_key_value_heads": 3}),
    "qwen2 yarn": (Qwen2Config, Qwen2ForCausalLM, "QWEN2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "QWEN3", {"head_dim": 48}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, "GEMMA3", {**_GEMMA, "layer_types": list(_TYPES)}),
    "gemma3 linear": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        "GEMMA3",
        {**_GEMMA, "layer_types": list(_TYPES), "rope_parameters": _TWO_ROPES, "head_dim": 64},
    ),
}


def make(name: str, seed: int = 3, **sizes: Any) -> PreTrainedModel:
    """The model of a family in fp32, its weights random and large enough to matter: biases and norms too."""
    config_class, model_class, _, changed = FAMILIES[name]
    config = config_class(**(_SIZES | changed | sizes))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    draw = torch.Generator().manual_seed(seed)
    is_gemma = name.startswith("gemma")
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 2:
                value.copy_(torch.randn(value.shape, generator=draw) * 1.5 / value.shape[1] ** 0.5)
            elif key.endswith("bias"):
                value.copy_(torch.randn(value.shape, generator=draw) * 0.5)
            else:
                value.copy_(torch.rand(value.shape, generator=draw) + (-0.5 if is_gemma else 0.5))
        if not is_gemma:
            model.get_input_embeddings().weight.mul_(8)
    return model


def write_folder(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Saves the model as a Hugging Face folder."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    model.float()
    return folder


def write_gguf(name: str, model: PreTrainedModel, path: Path, kind: str = "F32") -> Path:
    """Saves the model as a GGUF, matrices of type `kind`, as llama.cpp's converter has it."""
    arch = gguf.MODEL_ARCH[FAMILIES[name][2]]
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _metadata(writer, name, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for key, values in state.items():
        if arch == gguf.MODEL_ARCH.LLAMA and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if arch == gguf.MODEL_ARCH.GEMMA3 and key.endswith("norm.weight"):
            values = values + np.float32(1)
        told = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert told is not None, key
        if values.ndim == 2 and kind == "F16":
            writer.add_tensor(told, values.astype(np.float16))
        elif values.ndim == 2 and kind != "F32":
            form = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(told, quantize(np.ascontiguousarray(values), form), raw_dtype=form)
        else:
            writer.add_tensor(told, np.ascontiguousarray(values, dtype=np.float32))
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if name.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", [True, True, False])
        writer.add_float32(f"{writer.arch}.attention.scale", config.query_pre_attn_scalar**-0.5)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(config: Any) -> np.ndarray:
    """rope_freqs.weight: plain frequencies over scaled ones, as the converter computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = config.head_dim
    plain = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    return (plain / scaled).numpy()
