"""Which device a model runs on, settled once at the start, and said in one line with the reason."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zjournal.checkpoint.checkpoint import Checkpoint
from zjournal.config import about_size
from zjournal.engine import device_memory, loading, reach
from zjournal.engine.device_memory import KV_DTYPES, RESERVE_BYTES
from zjournal.engine.models.decoder import BLOCK_TOKENS
from zjournal.engine.runner import Runner
from zjournal.errors import EngineStartFault
from zjournal.link import wire

if TYPE_CHECKING:  # triton, which an engine on the CPU does not need
    from zjournal.engine.device_runner import DeviceRunner

DEVICES = ("auto", "cpu", "cuda")
HANGS_EXIT_CODE = 70  # EX_SOFTWARE: the server starts another engine
VOCAB_MAX, HIDDEN_MAX = (1 << 19) - 1, 1 << 14  # of the kernels
FP8_CAPABILITY_MIN = (8, 9)
KV_TOKENS_MIN = 4096  # a card that holds less beside the weights is left alone by `auto`

log = logging.getLogger("zjournal.engine")


class Card(NamedTuple):
    """A card that the kernels run on. `free` bytes."""

    name: str
    free: int
    capability: tuple[int, int]


def load(start: wire.Start, progress: Callable[[float], None]) -> Runner | DeviceRunner:
    """Loads the model on the device that `start` names. Raises a Fault."""
    if start.device not in DEVICES:
        raise EngineStartFault(f"The device {start.device} is none of {', '.join(DEVICES)}.")
    if start.kv_dtype not in KV_DTYPES:
        raise EngineStartFault(f"kv_dtype={start.kv_dtype} is none of {', '.join(KV_DTYPES)}.")
    if start.device == "cpu":
        return _on_cpu(start, progress, "that is what device = cpu asks for")
    card = look()
    why = card if isinstance(card, str) else refusal(card, start, loading.opened(start))
    if why and start.device == "cuda":
        raise EngineStartFault(f"The device cuda cannot be used: {why}.")
    if not why:
        try:
            return _on_cuda(start, progress)
        except EngineStartFault as fault:
            if start.device == "cuda":
                raise
            why = str(fault).removesuffix(".")
        _leave_cuda()
    return _on_cpu(start, progress, why)


def look() -> Card | str:
    """The first card, or why there is none that can be used."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch sees no CUDA device{reach.first_line(reach.failure(torch.cuda.init))}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from zjournal.engine.device import CAPABILITY_MIN

    try:
        name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        free = torch.cuda.mem_get_info(0)[0]  # the first that needs a context: a card may be there and not be ours
    except RuntimeError as error:
        return f"the card cannot be used{reach.first_line(error)}"
    if capability < CAPABILITY_MIN:
        found, least = (".".join(map(str, one)) for one in (capability, CAPABILITY_MIN))
        return f"{name} has compute capability {found}, and the kernels need {least}"
    return reach.without_triton() or Card(name, free, capability)


def refusal(card: Card, start: wire.Start, found: loading.Opened) -> str:
    """Why the model does not run on the card; "" if it does."""
    shape = found.model.decoder
    for what, value, most in (("vocabulary", shape.vocab, VOCAB_MAX), ("hidden size", shape.hidden, HIDDEN_MAX)):
        if value > most:
            return f"the model's {what} is {value:,}, and the kernels take up to {most:,}"
    if start.kv_dtype == "fp8" and card.capability < FP8_CAPABILITY_MIN:
        return f"{card.name} has no fp8 (kv_dtype), which needs compute capability 8.9"
    need = _need(start, found)
    if need > card.free:
        return f"{card.name} has {about_size(card.free)} free, and the model needs {about_size(need)}"
    return ""


def _need(start: wire.Start, found: loading.Opened) -> int:
    """Bytes of a card that the model takes at least."""
    shape = found.model.decoder
    block = loading.block_bytes(shape, KV_DTYPES[start.kv_dtype].itemsize)
    kv = start.kv_bytes or block * (-(-min(KV_TOKENS_MIN, found.context) // BLOCK_TOKENS))
    weights = weight_bytes(found.checkpoint, packed=start.weights == "file")
    return weights + kv + RESERVE_BYTES + device_memory.staging_bytes(block)


def weight_bytes(checkpoint: Checkpoint, *, packed: bool) -> int:
    """About what a checkpoint's weights take on a card: as stored, or two bytes each."""
    total = 0
    for info in checkpoint.tensors.values():
        values = math.prod(info.shape)
        total += min(info.bytes, 2 * values) if packed else 2 * values
    return total


def _on_cpu(start: wire.Start, progress: Callable[[float], None], why: str) -> Runner:
    if start.fast:
        raise EngineStartFault(f"fast is for a CUDA device, and the model would run on the CPU: {why}.")
    if start.kv_dtype != "auto":
        told = f"kv_dtype={start.kv_dtype} is for a CUDA device, and on the CPU KV is fp32"
        raise EngineStartFault(f"{told}; the model would run there: {why}.")
    if start.device != "cpu":
        log.info("the model runs on the CPU: %s", why)
    return Runner.load(msgspec.structs.replace(start, device="cpu"), progress)


def _leave_cuda() -> None:
    """Gives the card back what a start that has failed took of it."""
    import torch

    gc.collect()
    with contextlib.suppress(RuntimeError):  # a card that a kernel has broken answers everything with that
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _on_cuda(start: wire.Start, progress: Callable[[float], None]) -> DeviceRunner:
    import torch

    from zjournal.engine.device import Cuda
    from zjournal.engine.device_runner import DeviceRunner, Kernels
    from zjournal.kernels.blocks import gather, scatter
    from zjournal.kernels.sample import sample

    torch.set_num_threads(start.threads or 1)  # there is little to do for them, and they would wait actively
    try:
        device = Cuda()
    except RuntimeError as error:
        raise EngineStartFault(f"The card cannot be used{reach.first_line(error)}.") from error
    log.info("the model runs on %s", device.name)
    runner = DeviceRunner.load(start, device, Kernels(gather, scatter, sample), progress)
    runner.watch(lambda: os._exit(HANGS_EXIT_CODE))  # nothing else ends a process that waits for a kernel
    return runner
