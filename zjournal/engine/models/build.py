"""From a checkpoint to a decoder: on the C kernels, or on torch where the install has none."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch

from zjournal.checkpoint.checkpoint import Checkpoint, Identity
from zjournal.checkpoint.decoder import Model
from zjournal.engine.models.decoder import BLOCK_TOKENS, Decoder, Progress
from zjournal.engine.models.native import NativeDecoder
from zjournal.engine.models.plain import PlainDecoder
from zjournal.kernels import cpu

PART_HEX = 16  # of a digest in `parts`
_OF_ROPE = ("rope", "rope_local")
_OF_LIMITS = ("context", "context_limit")


def build(checkpoint: Checkpoint, model: Model, context: int, threads: int, mode: str, progress: Progress) -> Decoder:
    """Loads the weights. `mode`: file or fp32. Raises ModelFault."""
    library, why = cpu.open_library()
    if library is None:
        torch.set_num_threads(threads)
        return PlainDecoder(checkpoint, model, context, why, progress)
    torch.set_num_threads(1)  # its threads would wait actively beside ours
    return NativeDecoder(checkpoint, model, context, cpu.Kernels(library, threads), mode, progress)


def parts(model: Model, decoder: Decoder, identity: Identity, device: str) -> dict[str, str]:
    """What a fingerprint is made of, each by a short digest or a name, so that two can be told apart.

    Tokenizer and template are in `rest` too, but compared apart, by those who keep them.
    """
    shape = msgspec.structs.asdict(model.decoder)
    rope = {key: shape.pop(key) for key in _OF_ROPE}
    for key in _OF_LIMITS:
        del shape[key]
    return {
        "weights": identity.weights[:PART_HEX],
        "architecture": _short(shape, model.spelling.half_split, model.spelling.norm_offset),
        "rope": _short(rope, bool(model.spelling.rope_factors)),
        "kernels": decoder.numerics,
        "kv": f"{decoder.layout} {BLOCK_TOKENS}",
        "device": device,
    }


def fingerprint(told: Mapping[str, str], identity: Identity) -> str:
    """Names everything that a KV block's bits depend on, and tokenizer and template; 64 hex digits.

    How the weights are held (`file` or `fp32`) is not in it: the bits are the same.
    """
    return hashlib.sha256("\0".join(("kv", identity.weights, identity.rest, *told.values())).encode()).hexdigest()


def _short(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:PART_HEX]
