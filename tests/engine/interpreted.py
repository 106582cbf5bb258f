"""A runner for a device, over kernels that Triton interprets on the processor: small, so that it takes seconds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from tests.engine import toy
from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.engine import loading
from zjournal.engine.device import Host
from zjournal.engine.device_runner import DeviceRunner, Kernels
from zjournal.engine.models.triton import TritonDecoder
from zjournal.engine.sequence import BLOCK_TOKENS
from zjournal.kernels.blocks import gather, scatter
from zjournal.kernels.sample import sample
from zjournal.link import wire

BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 2
CONTEXT = 128
ROWS_MAX = 2  # of the largest graph


def kernels() -> Kernels:
    """Those of the runner itself."""
    return Kernels(gather, scatter, sample)


def start(path: Path, **changed: Any) -> wire.Start:
    """What a server would ask for."""
    told = {"context": CONTEXT, "max_running": 1, "prefill_tokens": 32, "device": "cuda", **changed}
    return wire.Start(model=str(path), **told)


@functools.cache
def decoder(path: Path, mode: str = "fp32", fast: bool = False, kv: torch.dtype = torch.bfloat16) -> TritonDecoder:
    """A loaded model, which keeps nothing of what it computes."""
    checkpoint = open_checkpoint(path)
    where = torch.device("cpu")
    parts = (checkpoint, checkpoint.model(), CONTEXT, where, lambda _: None)
    return TritonDecoder(*parts, mode=mode, fast=fast, kv=kv)


def load(path: Path, blocks: int = 24, kv: torch.dtype = torch.bfloat16) -> DeviceRunner:
    """The runner without the start that compiles everything; that is for one test."""
    asked = start(path)
    device = Host()
    model, made = loading.load(asked, loading.opened(asked), device.part, lambda: decoder(path, kv=kv))
    return DeviceRunner(device, kernels(), model, CONTEXT, blocks, ROWS_MAX, *made, step_tokens=0)
