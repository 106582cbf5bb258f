"""Paged attention in Triton, interpreted: near float64, and a row's bits are the same however it is computed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.attention_case import LAYER, LAYERS, Case
from zjournal.kernels import attention
from zjournal.kernels.attention import BLOCK_TOKENS, SPLIT
from zjournal.kernels.attention_decode import _records, decode, scratch_bytes
from zjournal.kernels.attention_prefill import prefill

ROOT = Path(__file__).resolve().parent.parent.parent
# heads, kv_heads, head_dim
SHAPES = [(9, 3, 64), (8, 1, 64), (2, 2, 80), (4, 2, 96), (4, 1, 128), (2, 1, 256), (64, 1, 16)]
BF16_NEAR = {"rtol": 2e-2, "atol": 2e-2}  # p and the result are rounded to 8 bits; queries are twice as large as usual
FP32_NEAR = {"rtol": 2e-5, "atol": 5e-6}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_both_kernels_are_near_float64_and_have_the_same_bits(heads: int, kv_heads: int, head_dim: int) -> None:
    case = Case(heads, kv_heads, head_dim, (1, 19))
    whole = case.prefill([(0, 0, 1), (1, 0, 19)])
    near = case.expected([(0, 0, 1), (1, 0, 19)])
    torch.testing.assert_close(torch.cat(whole).double(), near, **BF16_NEAR)
    ends = [(1, 19), (0, 1), (1, 17)]
    alone = case.decode(ends)
    for row, (number, length) in zip(alone, ends, strict=True):
        assert torch.equal(row, whole[number][length - 1])


@pytest.mark.parametrize("window", [0, 1, 64, 513])
def test_float32_over_several_splits(window: int) -> None:
    case = Case(2, 1, 32, (1100,), dtype=torch.float32, window=window)
    rows = [(0, 510, 515), (0, 1097, 1100)]
    for span in rows:
        found = case.prefill([span])[0]
        torch.testing.assert_close(found.double(), case.expected([span]), **FP32_NEAR)
        last = case.decode([(0, span[2]), (0, span[1] + 1)])
        assert torch.equal(last, found[[-1, 0]])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_tiles_of_each_machine(capability: int, head_dim: int) -> None:
    """Rows of a product, and columns of a block of threads, change no bit: so decode may have fewer than prefill."""
    case = Case(2, 1, head_dim, (515,))
    decode_tiles, prefill_tiles = case.tiles(capability)
    assert decode_tiles.kv == prefill_tiles.kv
    rows = case.prefill([(0, 505, 515)], prefill_tiles)[0]
    torch.testing.assert_close(rows.double(), case.expected([(0, 505, 515)]), **BF16_NEAR)
    alone = case.decode([(0, 506), (0, 514)], tiles=decode_tiles)
    assert torch.equal(alone, rows[[0, 8]])


def test_any_cut_of_a_prompt_and_any_company() -> None:
    """Cuts at edges of blocks, tiles and splits, and elsewhere; sequences of no rows, and of one."""
    case = Case(4, 1, 64, (550, 90, 1))
    first = 490
    whole = case.prefill([(0, first, 550), (1, 0, 90), (2, 0, 1)])
    for cuts in ((first, 550), (first, 491, 496, 511, 512, 513, 550), (first, 507, 550)):
        parts = [case.prefill([(0, *cut)])[0] for cut in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole[0]), cuts
    mixed = case.prefill([(1, 33, 33), (2, 0, 1), (1, 33, 34), (0, 500, 530), (2, 1, 1), (1, 3, 70)])
    expected = [whole[1][33:33], whole[2], whole[1][33:34], whole[0][10:40], whole[2][1:], whole[1][3:70]]
    assert all(torch.equal(found, same) for found, same in zip(mixed, expected, strict=True))


@pytest.mark.parametrize("window", [0, 520])
def test_decode_alone_in_a_batch_and_on_any_number_of_programs(window: int) -> None:
    case = Case(4, 2, 32, (1027, 512, 3), window=window)
    ends = [(0, 1027), (1, 512), (2, 3), (1, 511), (2, 1)]
    together = case.decode(ends)
    assert torch.equal(case.decode(ends, programs=50), together)
    assert torch.equal(case.decode(ends[1:], programs=1), together[1:])
    order = [4, 1, 3, 2]
    assert torch.equal(case.decode([ends[at] for at in order]), together[order])
    for at in (0, 2, 3):
        assert torch.equal(case.decode([ends[at]]), together[at : at + 1])
        number, length = ends[at]
        assert torch.equal(case.prefill([(number, length - 1, length)])[0], together[at : at + 1])


@pytest.mark.parametrize("window", [1, 16, 64, 65])
def test_a_window_hides_what_is_before_it_and_does_not_read_it(window: int) -> None:
    case = Case(3, 1, 32, (150,), window=window)
    first = 140
    gone = (first + 1 - window) // BLOCK_TOKENS
    case.pages[case.table[0, :gone].long()] = torch.nan
    case.table[0, :gone] = 2**31 - 1
    rows = case.prefill([(0, first, 150)])[0]
    torch.testing.assert_close(rows.double(), case.expected([(0, first, 150)]), **BF16_NEAR)
    pieces = [case.prefill([(0, *cut)])[0] for cut in ((first, 141), (141, 147), (147, 150))]
    assert torch.equal(torch.cat(pieces), rows)
    assert torch.equal(case.decode([(0, 141), (0, 150), (0, 144)]), rows[[0, 9, 3]])


def test_a_window_as_long_as_the_context_changes_no_bit() -> None:
    case, windowed = Case(2, 1, 64, (530,)), Case(2, 1, 64, (530,), window=530)
    assert torch.equal(case.prefill([(0, 500, 530)])[0], windowed.prefill([(0, 500, 530)])[0])
    assert torch.equal(case.decode([(0, 530)]), windowed.decode([(0, 530)]))


def test_no_rows_and_rows_without_positions() -> None:
    case = Case(4, 2, 64, (20,))
    assert case.decode([]).shape == (0, 4, 64)
    assert case.prefill([])[:0] == []
    q = case.queries([(0, 19, 20)] * 3)
    table = torch.cat((torch.full_like(case.table, -1), case.table, torch.full_like(case.table, -1)))
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    decode(q, case.pages, LAYER, table, torch.tensor([0, 20, 0], dtype=torch.int32), case.scale, out=out)
    assert torch.equal(out[1:2], case.decode([(0, 20)]))
    assert not out[[0, 2]].any()
    starts, position = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2, 3], [-1, 19, -1]))
    out.fill_(torch.nan)
    prefill(q, case.pages, LAYER, table, starts, position, case.scale, out=out)
    assert torch.equal(out[1:2], case.decode([(0, 20)]))
    assert not out[[0, 2]].any()


def test_a_row_that_is_longer_than_its_table_is_not_a_number() -> None:
    case = Case(4, 2, 64, (20, 30))
    q = case.queries([(0, 19, 20), (1, 29, 30)])
    lengths = torch.tensor([20, 16 * case.table.shape[1] + 1], dtype=torch.int32)
    found = decode(q, case.pages, LAYER, case.table, lengths, case.scale)
    assert torch.equal(found[:1], case.decode([(0, 20)]))
    assert found[1].isnan().all()


def test_results_go_into_a_part_of_wider_rows() -> None:
    case = Case(4, 2, 64, (20,))
    wide = torch.full((1, 7, 64), torch.nan, dtype=torch.bfloat16)
    q, lengths = case.queries([(0, 19, 20)]), torch.tensor([20], dtype=torch.int32)
    decode(q, case.pages, LAYER, case.table, lengths, case.scale, out=wide[:, 2:6])
    assert torch.equal(wide[:, 2:6], case.decode([(0, 20)]))
    assert wide[:, [0, 1, 6]].isnan().all()


@pytest.mark.parametrize("head_dim", [64])
def test_pages_of_float8(head_dim: int) -> None:
    case = Case(4, 2, head_dim, (70,), pages=torch.float8_e4m3fn)
    rows = case.prefill([(0, 60, 70)])[0]
    torch.testing.assert_close(rows.double(), case.expected([(0, 60, 70)]), **BF16_NEAR)
    assert torch.equal(case.decode([(0, 70), (0, 61)]), rows[[-1, 0]])


def test_pools_that_pass_two_to_the_31_elements(sparse: Callable[[int], torch.Tensor]) -> None:
    case = Case(4, 2, 64, (40,))
    shape = (1, *case.pages.shape[1:])
    per_block = case.pages[0].numel()
    blocks = 2**31 // per_block + 40
    far = sparse(blocks * per_block * 2).view(torch.bfloat16).view(blocks, *shape[1:])
    last = torch.arange(blocks - 3, blocks)
    far[last] = case.pages[case.table[0, :3].long()]
    expected = case.decode([(0, 40)]), case.prefill([(0, 30, 40)])[0]
    case.pages, case.table = far, case.table.clone()
    case.table[0, :3] = last.to(torch.int32)
    assert torch.equal(case.decode([(0, 40)]), expected[0])
    assert torch.equal(case.prefill([(0, 30, 40)])[0], expected[1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_records_begin_where_the_kernels_were_compiled_for(rows: int) -> None:
    records = _records(torch.empty(rows, 9, 64), 33)
    assert [each.shape for each in records] == [(rows, 2, 9), (rows, 2, 9), (rows, 2, 9, 64)]
    assert all(each.data_ptr() % 16 == 0 and each.is_contiguous() for each in records)
    assert records[0].untyped_storage().nbytes() == scratch_bytes(rows, 9, 64, 33)


def test_constants_of_builds_are_those_of_launches() -> None:
    for served in attention.SERVED:
        pages = torch.empty(1, served.layers, 2, served.kv_heads, BLOCK_TOKENS, served.head_dim, dtype=torch.bfloat16)
        q = torch.empty(1, served.heads, served.head_dim, dtype=torch.bfloat16)
        assert attention.constants(q, pages, 0, None)[0] == served.sizes()
        assert (pages.stride(0), pages.stride(1)) == (served.sizes()["BLOCK_STRIDE"], served.sizes()["LAYER_STRIDE"])
    assert LAYERS > LAYER > 0
    assert scratch_bytes(2, 4, 64, SPLIT // BLOCK_TOKENS + 1) == 4 * 2 * 4 * 66 * 2


INSTRUCTIONS = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from zjournal.kernels import attention_decode, attention_prefill, build
builds = {each.name: each for module in (attention_decode, attention_prefill) for each in module.builds()}
found = {}
for model, capability in (("smollm2-135m", 80), ("llama3-8b", 90), ("smollm2-135m", 100)):
    for part in ("decode", "prefill"):
        each = builds[f"attention_{part}.{model}.{capability}"]
        target = GPUTarget("cuda", capability, 32)
        text = triton.compile(build.source(each), target=target, options=build.options(each)).asm["ptx"]
        names = set(re.findall(r"(?:wgmma\\.mma_async|mma\\.sync|tcgen05\\.mma)\\S*", text))
        found.setdefault(str(capability), {})[part] = sorted(names)
print(json.dumps(found))
"""
SHAPES = {"80": r"mma\.sync\.aligned\.m16n8k16\.", "90": r"wgmma\.\S*\.m64n\d+k16\.", "100": r"tcgen05\.mma\."}


def test_both_kernels_multiply_with_one_kind_of_instruction() -> None:
    """What makes decode's bits those of prefill on a real GPU, beside the order: see the docstring of attention.py."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", INSTRUCTIONS]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == set(SHAPES)
    for capability, parts in found.items():
        names = parts["decode"] + parts["prefill"]
        assert parts["decode"] and parts["prefill"]
        assert all(re.match(SHAPES[capability], each) for each in names), (capability, parts)
        assert len({re.sub(r"n\d+k16", "k16", each) for each in names}) == 1, (capability, parts)
