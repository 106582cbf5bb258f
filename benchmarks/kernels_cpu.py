"""How fast the C kernels of the CPU path are, one by one: linear layers by format, attention by rows and window.

A linear layer of one row is bound by the bytes of its weights; what the same threads reach by reading memory stands
beside it, measured in the same run. The ratio to another engine is that of whole models: benchmarks/engine.py.

    python benchmarks/kernels_cpu.py [--threads N] [--isa avx512|avx2|portable] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zjournal.kernels import cpu

K = 2048
ROWS = (1, 2, 4, 8, 16, 64, 512)
CONTEXTS = (128, 2048, 8192)
QUERY_ROWS = (1, 2, 4, 8, 40)
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # of SmolLM2-135M
# Blocks of each kind: (values, bytes, where its halves stand).
BLOCKS = {
    "F32": (1, 4, ()),
    "F16": (1, 2, (0,)),
    "BF16": (1, 2, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="")
    parser.add_argument("--quick", action="store_true", help="small matrices and few tries: does it run at all")
    options = parser.parse_args()
    library, why = cpu.open_library()
    if library is None:
        sys.exit(why)
    kernels = cpu.Kernels(library, options.threads, options.isa)
    megabytes, tries = (4, 2) if options.quick else (96, 5)
    bandwidth = _read_bandwidth(options.threads, megabytes << 20, tries)
    print(f"{kernels.name}, {options.threads} threads; memory reads {bandwidth / 1e9:.1f} GB/s")
    _linear_table(kernels, bandwidth, megabytes << 20, tries)
    _attention_table(kernels, tries * (2 if options.quick else 8))
    kernels.close()


def _best(measure: Callable[[], object], tries: int) -> float:
    """Seconds of the best try."""
    taken = []
    for _ in range(tries):
        started = time.perf_counter()
        measure()
        taken.append(time.perf_counter() - started)
    return min(taken)


def _read_bandwidth(threads: int, size: int, tries: int) -> float:
    """Bytes per second that a sum over a large array reaches."""
    torch.set_num_threads(threads)
    data = torch.ones(size // 8, dtype=torch.int64)
    best = _best(data.sum, tries)
    torch.set_num_threads(1)  # its threads would wait actively beside ours
    return size / best


def _matrix(kernels: cpu.Kernels, kind: str, size: int) -> cpu.Packed:
    """A matrix of about `size` packed bytes and k = K, with finite values."""
    values, block, halves = BLOCKS[kind]
    n = max(size // (K // values * block) // cpu.LANES, 1) * cpu.LANES
    if kind == "F32":
        raw = torch.full((n * K,), 0.5).view(torch.uint8)
    else:
        raw = torch.randint(0, 256, (n * K // values, block), dtype=torch.uint8)
        half = torch.tensor([0.0123], dtype=torch.bfloat16 if kind == "BF16" else torch.float16).view(torch.uint8)
        for at in halves:
            raw[:, at : at + 2] = half
    return kernels.pack(kind, raw.data_ptr(), n, K)


def _linear_table(kernels: cpu.Kernels, bandwidth: float, size: int, tries: int) -> None:
    print(f"\nlinear, k = {K}, {size >> 20} MiB of weights; rows/s as rows of 1e9 weights (GMAC/s)")
    print(f"{'':8}{'bits':>6}{'GB/s':>8}{'of reads':>10}" + "".join(f"{f'{rows} rows':>10}" for rows in ROWS))
    for kind in cpu.PACKED:
        matrix = _matrix(kernels, kind, size)
        weights = matrix.struct.n * K
        rates = []
        for rows in ROWS:
            x, y = torch.randn(rows, K), torch.zeros(rows, matrix.struct.n)
            used = tries if rows < 64 else max(tries // 2, 1)
            rates.append(rows / _best(partial(kernels.linear, matrix, x, add_to=y), used))
        read = matrix.data.numel() * rates[0]
        print(
            f"{kind:8}{8 * matrix.data.numel() / weights:>6.2f}{read / 1e9:>8.1f}{read / bandwidth:>10.2f}"
            + "".join(f"{rate * weights / 1e9:>10.1f}" for rate in rates)
        )


def _attention_table(kernels: cpu.Kernels, tries: int) -> None:
    shape = f"{HEADS} heads over {KV_HEADS}, head size {HEAD_DIM}"
    print(f"\nattention of one sequence, {shape}: microseconds (times one row)")
    print(f"{'':24}" + "".join(f"{f'{rows} rows':>16}" for rows in QUERY_ROWS))
    for context in CONTEXTS:
        for window in (0, 512):
            if window > context:
                continue
            taken = [_attention(kernels, context, rows, window, tries) for rows in QUERY_ROWS]
            name = f"at {context}" + (f", window {window}" if window else "")
            cells = (f"{1e6 * seconds:,.0f} ({seconds / taken[0]:.2f})" for seconds in taken)
            print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells))


def _attention(kernels: cpu.Kernels, context: int, rows: int, window: int, tries: int) -> float:
    """Seconds of one call whose last row stands at `context` - 1. Layers take turns, so that KV is not in a cache."""
    layers = max((64 << 20) // (context * KV_HEADS * HEAD_DIM * 8), 1)
    blocks = -(-context // cpu.BLOCK_TOKENS)
    structs = (cpu.LayerStruct * layers)()
    for layer in structs:
        layer.window = window
    model = cpu.ModelStruct(layers, 0, 0, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, 0, 1e-5, HEAD_DIM**-0.5)
    model.layer = ctypes.cast(structs, ctypes.POINTER(cpu.LayerStruct))
    pages = torch.randn(blocks, layers, KV_HEADS, 2, HEAD_DIM * cpu.BLOCK_TOKENS)
    position = torch.arange(context - rows, context, dtype=torch.int32)
    none = torch.zeros(rows, dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32).view(1, -1)
    want = none[:0]
    batch = cpu.batch_struct(
        token=none, position=position, sequence=none, table=table, want=want, kv=pages, logits=None
    )
    q = torch.randn(rows, HEADS * HEAD_DIM)
    turn = iter(range(1 << 30))
    return _best(lambda: kernels.attend(model, batch, next(turn) % layers, q), max(tries, 2 * layers))


if __name__ == "__main__":
    main()
