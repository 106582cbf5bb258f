"""Llama and what is built like it: SmolLM2, Llama 3, their GGUFs and folders."""

from __future__ import annotations

from zjournal.checkpoint.decoder import Decoder, Model, check
from zjournal.checkpoint.families import common
from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import HfConfig

ARCHITECTURE = "llama"


def from_gguf(header: Header) -> Model:
    """From GGUF metadata; the converter has permuted q and k for neighbours already. Raises ModelFault."""
    sizes = common.gguf_sizes(header, ARCHITECTURE)
    rope = common.gguf_rope(header, ARCHITECTURE, sizes["head_dim"], 10_000.0)
    return Model(check(Decoder(**sizes, rope=rope), header.path), common.gguf_spelling(half_split=False))


def from_config(config: HfConfig) -> Model:
    """From config.json. Raises ModelFault."""
    sizes = common.hf_sizes(config, ARCHITECTURE, "LlamaForCausalLM")
    common.hf_activation(config, ("hidden_act",), "silu")
    rope = common.hf_rope(config, sizes["head_dim"], 10_000.0)
    sizes["context"] = common.yarn_context(sizes["context"], rope)
    decoder = check(Decoder(**sizes, rope=rope), config.path)
    return Model(decoder, common.hf_spelling(decoder.layers, rope.dim))
