"""What every runner does before it has a model: the checkpoint is opened and checked, context and memory settled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from zjournal.checkpoint import decoder as described
from zjournal.checkpoint.checkpoint import Checkpoint, check_tensors, identify, open_checkpoint
from zjournal.engine.models import build
from zjournal.engine.models.decoder import Decoder
from zjournal.engine.sequence import BLOCK_TOKENS
from zjournal.errors import EngineStartFault
from zjournal.link import wire

WEIGHTS = ("file", "fp32")
T = TypeVar("T", bound=Decoder)


class Opened(NamedTuple):
    """A model that can be run, with the context that it is run with, in tokens."""

    checkpoint: Checkpoint
    model: described.Model
    context: int


class Made(NamedTuple):
    """What the fingerprint of a loaded model covers, and its digest."""

    fingerprint: str
    parts: dict[str, str]


def opened(start: wire.Start) -> Opened:
    """Raises ModelFault for a file that cannot be run, EngineStartFault for limits that cannot be met."""
    if start.weights not in WEIGHTS:
        raise EngineStartFault(f"weights={start.weights} is none of {', '.join(WEIGHTS)}.")
    checkpoint = open_checkpoint(start.model)
    model = described.override(checkpoint.model(), start.rope)
    check_tensors(checkpoint, model)
    context = start.context or model.decoder.context
    longest = described.context_limit(model.decoder)
    if context > longest:
        raise EngineStartFault(f"The context of {context} tokens is over the model's own, {longest}.")
    return Opened(checkpoint, model, context)


def block_bytes(shape: described.Decoder, element_bytes: int) -> int:
    """Bytes of a block's KV in all layers."""
    return BLOCK_TOKENS * shape.layers * 2 * shape.kv_heads * shape.head_dim * element_bytes


def blocks(kv_bytes: int, block: int) -> int:
    """How many blocks so many bytes hold. Raises EngineStartFault where that is none."""
    if kv_bytes < block:
        raise EngineStartFault(f"{kv_bytes} bytes of KV memory do not hold one block of {block} bytes.")
    return kv_bytes // block


def load(start: wire.Start, found: Opened, device: str, make: Callable[[], T]) -> tuple[T, Made]:
    """Makes the decoder, and its fingerprint meanwhile: reading a file twice costs less when it is done at once.

    `device`: the part of the fingerprint. Raises what `make` raises, and EngineStartFault where memory is short.
    """
    cache_dir = Path(start.cache_dir) if start.cache_dir else None
    with ThreadPoolExecutor(1) as beside:
        identified = beside.submit(identify, found.checkpoint, cache_dir)
        try:
            decoder = make()
        except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
            raise EngineStartFault(f"The model does not fit into memory: {error}") from error
        identity = identified.result()
    parts = build.parts(found.model, decoder, identity, device)
    return decoder, Made(build.fingerprint(parts, identity), parts)
