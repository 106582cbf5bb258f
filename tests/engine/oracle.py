"""The independent implementation: transformers' Llama over the weights of a GGUF, dequantised by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from zjournal.checkpoint.checkpoint import GgufCheckpoint
from zjournal.checkpoint.gguf import TensorFile

_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores q and k for interleaved rotation; transformers rotates halves of a head against each other."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def load(path: str | Path) -> LlamaForCausalLM:
    """The model in fp32 with tied or own head, ready for inference."""
    checkpoint = GgufCheckpoint(Path(path))
    header, model = checkpoint.header, checkpoint.model()
    shape = model.decoder
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.base},
        tie_word_embeddings="output.weight" not in header.tensors,
    )
    with TensorFile(header) as file:

        def values(name: str) -> np.ndarray:
            info = header.tensors[name]
            raw = np.frombuffer(file.data(info), dtype=np.uint8).reshape(*info.shape[:-1], -1)
            return np.array(dequantize(raw, GGMLQuantizationType[info.type]), dtype=np.float32).reshape(info.shape)

        state = {
            "model.embed_tokens.weight": values("token_embd.weight"),
            "model.norm.weight": values("output_norm.weight"),
        }
        state["lm_head.weight"] = (
            values("output.weight") if "output.weight" in header.tensors else state["model.embed_tokens.weight"]
        )
        for layer in range(shape.layers):
            for part, name in _NAMES.items():
                weight = values(model.spelling.of(layer, part))
                if part in ("q", "k"):
                    weight = half_split(weight, shape.heads if part == "q" else shape.kv_heads)
                state[f"model.layers.{layer}.{name}.weight"] = weight
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made.load_state_dict({name: torch.from_numpy(weight) for name, weight in state.items()}, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # its buffers are no weights: made anew off "meta"
    return made.eval()
