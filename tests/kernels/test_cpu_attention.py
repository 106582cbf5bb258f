"""Attention, norm, SiLU and rotation: near the torch reference, and the same bits in any company."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests import native
from zjournal.kernels import cpu
from zjournal.kernels.cpu import reference

LAYERS, KV_HEADS = 2, 2


class Case:
    """A model's sizes with rotation tables, pages, and sequences whose blocks lie anywhere."""

    def __init__(self, head_dim: int, share: int, lengths: tuple[int, ...]) -> None:
        random = torch.Generator().manual_seed(head_dim + share)
        self.heads, self.head_dim, self.rope_dim = KV_HEADS * share, head_dim, head_dim // 2
        angles = torch.rand(max(lengths), self.rope_dim // 2, generator=random) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        sizes = (LAYERS, 0, 0, self.heads, KV_HEADS, head_dim, self.rope_dim, 0)
        self.model = cpu.ModelStruct(*sizes, 0.0, head_dim**-0.5, self.cos.data_ptr(), self.sin.data_ptr())
        width = -(-max(lengths) // cpu.BLOCK_TOKENS)
        blocks = torch.randperm(len(lengths) * width, generator=random)
        self.table = blocks.view(len(lengths), width).to(torch.int32)
        # What was never written must never be read.
        self.pages = torch.full((len(blocks), LAYERS, KV_HEADS, 2, head_dim * cpu.BLOCK_TOKENS), torch.nan)
        total = (self.heads + 2 * KV_HEADS) * head_dim
        self.qkv = [torch.randn(length, total, generator=random) for length in lengths]

    def batch(self, spans: list[tuple[int, int, int]]) -> tuple[cpu.BatchStruct, list[torch.Tensor]]:
        """Rows from `start` to `end` of each named sequence; the tensors to keep."""
        position = torch.cat([torch.arange(start, end) for _, start, end in spans]).to(torch.int32)
        sequence = torch.cat([torch.full((end - start,), number) for number, start, end in spans]).to(torch.int32)
        none = torch.zeros(0, dtype=torch.int32)
        kept = [position, sequence, none]
        struct = cpu.batch_struct(
            token=position,
            position=position,
            sequence=sequence,
            table=self.table,
            want=none,
            kv=self.pages,
            logits=None,
        )
        return struct, kept

    def run(self, kernels: cpu.Kernels, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Stores and attends in one step; the result by span, [rows, heads * head_dim]."""
        struct, _kept = self.batch(spans)
        qkv = torch.cat([self.qkv[number][start:end] for number, start, end in spans])
        kernels.rotate_store(self.model, struct, 1, qkv)
        q = qkv[:, : self.heads * self.head_dim].contiguous()
        return list(kernels.attend(self.model, struct, 1, q).split([end - start for _, start, end in spans]))

    def expected(self, number: int) -> torch.Tensor:
        """The whole sequence in float64, without pages, segments or tiles."""
        heads, dim = self.heads, self.head_dim
        length = len(self.qkv[number])
        q, k, v = self.qkv[number].double().view(length, -1, dim).split([heads, KV_HEADS, KV_HEADS], 1)
        cos, sin = self.cos[:length].double(), self.sin[:length].double()
        q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
        k, v = (part.repeat_interleave(heads // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


@pytest.fixture(params=native.ISAS)
def kernels(request: pytest.FixtureRequest):
    opened = native.kernels(request.param, threads=3)
    yield opened
    opened.close()


@pytest.mark.parametrize(("head_dim", "share"), [(16, 1), (32, 3), (64, 3), (80, 4), (128, 2)])
def test_attention_is_near_float64_and_blind_to_company(kernels: cpu.Kernels, head_dim: int, share: int) -> None:
    lengths = (1, 17, 64, 65, 200)
    case = Case(head_dim, share, lengths)
    whole = case.run(kernels, [(number, 0, length) for number, length in enumerate(lengths)])
    for number in range(len(lengths)):
        torch.testing.assert_close(whole[number].double(), case.expected(number), rtol=1e-5, atol=2e-6)
    longest = len(lengths) - 1
    for cuts in ((0, 200), (0, 63, 64, 65, 128, 199, 200), (0, 16, 23, 150, 200)):
        again = Case(head_dim, share, lengths)
        pieces = [again.run(kernels, [(longest, *cut)])[0] for cut in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), whole[longest])
    # One row over a long context is split over the threads; several rows of one step are not.
    last = case.run(kernels, [(number, length - 1, length) for number, length in enumerate(lengths)])
    assert all(torch.equal(one[0], all_rows[-1]) for one, all_rows in zip(last, whole, strict=True))


def test_instruction_sets_and_thread_counts_give_the_same_bits() -> None:
    results = []
    for isa in native.ISAS:
        for threads in (1, 4):
            try:
                kernels = cpu.Kernels(native.library(), threads, isa)
            except ValueError:  # this CPU lacks it
                continue
            case = Case(64, 3, (300,))
            rows = [case.run(kernels, [(0, 0, 150)])[0]] + [
                case.run(kernels, [(0, i, i + 1)])[0] for i in range(150, 300)
            ]
            results.append(torch.cat(rows))
            kernels.close()
    assert len(results) >= 2
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_norm_and_silu_are_near_the_reference_and_equal_everywhere() -> None:
    x, weight = torch.randn(5, 96) * 30, torch.randn(96)
    wide = torch.linspace(-110, 110, 1024)
    edge = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1000.0, -1000.0, 87.0, -87.0, 88.0, -88.0] + [0.0] * 6)
    gate = torch.cat((wide, edge))
    up = torch.randn(gate.shape)
    norms, silus = [], []
    for isa in native.ISAS:
        try:
            kernels = cpu.Kernels(native.library(), 1, isa)
        except ValueError:  # this CPU lacks it
            continue
        norms.append(kernels.norm(x, weight, 1e-5))
        silus.append(kernels.silu_mul(gate, up))
        kernels.close()
    torch.testing.assert_close(norms[0], reference.norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silus[0].double(), expected, rtol=1e-6, atol=1e-30)
    assert all(torch.equal(norms[0], other) for other in norms)
    assert all(torch.equal(silus[0], other) for other in silus)


@pytest.mark.parametrize("first", [0, 100, 255, 256])
def test_reference_attention_is_near_float64(first: int) -> None:
    case = Case(32, 3, (300,))
    q, k, v = case.qkv[0].view(300, -1, 32).split([case.heads, KV_HEADS, KV_HEADS], 1)
    q, k = reference.rotate(q, case.cos, case.sin), reference.rotate(k, case.cos, case.sin)
    found = reference.attend(q[first:], k, v, first).flatten(1)
    torch.testing.assert_close(found.double(), case.expected(0)[first:], rtol=1e-5, atol=2e-6)


def test_structs_match_the_library() -> None:
    assert ctypes.sizeof(cpu.MatrixStruct) == 24
    assert ctypes.sizeof(cpu.LayerStruct) == 7 * 24 + 16
    assert ctypes.sizeof(cpu.BatchStruct) == 16 + 7 * 8
