"""How near the engine is to the weights in the file: argmax and perplexity over 10,000 teacher-forced tokens.

The judge is transformers in fp32 on the file's dequantised weights. Beside it llama.cpp's own: llama-perplexity of the
file against that of the same weights in F32 (from LLAMA_PERPLEXITY, from beside LLAMA_BENCH, or from the PATH).

    python benchmarks/fidelity.py [MODEL.gguf]
"""

from __future__ import annotations

import inspect
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import ast
import asyncio.base_events
import dataclasses
import typing

import gguf

from tests.engine import oracle
from zjournal.checkpoint.gguf import TensorFile, read_header
from zjournal.checkpoint.locate import locate
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine.models import weights
from zjournal.engine.models.decoder import Batch
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Slice
from zjournal.link import wire

SOURCES: tuple[ModuleType, ...] = (argparse, typing, asyncio.base_events, dataclasses, ast)
WINDOW = 2000  # tokens of each source
STEP = 500
ARGMAX_MUST, PERPLEXITY_MUST = 0.995, 0.002
TIMEOUT_S = 1200


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else locate(None, Path(tempfile.gettempdir())).path
    tokenizer = Tokenizer.from_header(read_header(path))
    windows = [list(tokenizer.encode(inspect.getsource(source))[:WINDOW]) for source in SOURCES]
    assert all(len(window) == WINDOW for window in windows)
    runner = Runner.load(wire.Start(model=str(path), kv_bytes=1 << 29), lambda _: None)
    judge = oracle.load(path)
    same = total = 0
    ours_loss = judges_loss = 0.0
    for window in windows:
        with torch.inference_mode():
            want = judge(torch.tensor([window])).logits[0]
        found = _logits(runner, window)
        same += int((found.argmax(-1) == want.argmax(-1)).sum())
        total += len(window)
        ours_loss += _loss(found, window)
        judges_loss += _loss(want, window)
    scored = total - len(windows)
    ours, judges = (math.exp(loss / scored) for loss in (ours_loss, judges_loss))
    print(f"{path.name}, {runner.kernels}, {total} tokens in {len(windows)} windows")
    _row("argmax as the judge has it", same / total, same / total >= ARGMAX_MUST, f"at least {ARGMAX_MUST}")
    off = abs(ours / judges - 1)
    _row(
        f"perplexity {ours:.4f}, the judge's {judges:.4f}, off by",
        off,
        off <= PERPLEXITY_MUST,
        f"at most {PERPLEXITY_MUST}",
    )
    runner.close()
    _peer(path, tokenizer, windows)


def _row(what: str, value: float, reached: bool, asked: str) -> None:
    print(f"{what:<64} {value:.6f}   {asked}: {'reached' if reached else 'MISSED'}")


def _logits(runner: Runner, ids: list[int]) -> torch.Tensor:
    """fp32 [tokens, vocab], computed in steps."""
    table = list(range(-(-len(ids) // BLOCK_TOKENS)))
    rows = []
    for start in range(0, len(ids), STEP):
        part = Slice("0", ids[start : start + STEP], start, table, None, 0)
        batch = runner._batch([part])
        want = torch.arange(len(part.tokens), dtype=torch.int32)
        rows.append(
            runner._model.forward(Batch(batch.token, batch.position, batch.sequence, batch.table, want), runner._pages)
        )
    return torch.cat(rows)


def _loss(logits: torch.Tensor, ids: list[int]) -> float:
    """Sum over all tokens but the first, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]), reduction="sum"))


# --- llama.cpp ------------------------------------------------------------------------------------------


def _peer(path: Path, tokenizer: Tokenizer, windows: list[list[int]]) -> None:
    beside = os.environ.get("LLAMA_BENCH")
    binary = (
        os.environ.get("LLAMA_PERPLEXITY")
        or (beside and shutil.which(str(Path(beside).with_name("llama-perplexity"))))
        or shutil.which("llama-perplexity")
    )
    if not binary:
        print("llama-perplexity is not there: no figures of llama.cpp")
        return
    with tempfile.TemporaryDirectory() as folder:
        exact, text, base = (Path(folder) / name for name in ("exact.gguf", "text", "base"))
        _expand(path, exact)
        text.write_text("".join(tokenizer.decode(window) for window in windows))
        command = [binary, "-f", str(text), "-c", str(2048), "-t", str(len(os.sched_getaffinity(0)))]
        try:
            _run([*command, "-m", str(exact), "--kl-divergence-base", str(base)])
            told = _run([*command, "-m", str(path), "--kl-divergence-base", str(base), "--kl-divergence"])
        except subprocess.SubprocessError as error:
            print(f"llama-perplexity gave no figures: {error}")
            return
    print("llama.cpp, the file against the same weights in F32 (it scores the second half of each 2,048 tokens):")
    for line in told.splitlines():
        if re.match(r"\s*(Mean PPL|Same top p|Mean\s+KLD)", line):
            print(f"  {' '.join(line.split())}")


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout


def _expand(path: Path, target: Path) -> None:
    """Writes the same model with every tensor in F32."""
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    with TensorFile(header) as file:
        for info in header.tensors.values():
            writer.add_tensor(info.name, weights.expand(file, info))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
