"""Attention, norm, activations and rotation: near the torch reference, and the same bits in any company."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests import native
from zjournal.kernels import cpu
from zjournal.kernels.cpu import reference

LAYERS = 2
EPS = 1e-6


class Case:
    """A model's sizes with rotation tables, pages, and sequences whose blocks lie anywhere.

    `full`: its last layer has biases, norms of heads, and angles of its own.
    """

    def __init__(
        self,
        head_dim: int,
        share: int,
        lengths: tuple[int, ...],
        *,
        kv_heads: int = 2,
        window: int = 0,
        full: bool = False,
        rope_dim: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(head_dim + share)
        self.heads, self.kv_heads, self.head_dim, self.window = kv_heads * share, kv_heads, head_dim, window
        self.rope_dim = rope_dim or head_dim // 2
        angles = torch.rand(2, max(lengths), self.rope_dim // 2, generator=random) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.scale = 0.9 * head_dim**-0.5
        width = -(-max(lengths) // cpu.BLOCK_TOKENS)
        blocks = torch.randperm(len(lengths) * width, generator=random)
        self.table = blocks.view(len(lengths), width).to(torch.int32)
        # What was never written must never be read.
        self.pages = torch.full((len(blocks), LAYERS, kv_heads, 2, head_dim * cpu.BLOCK_TOKENS), torch.nan)
        total = (self.heads + 2 * kv_heads) * head_dim
        self.qkv = [torch.randn(length, total, generator=random) for length in lengths]
        self.parts = (self.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.bias = torch.randn(total, generator=random) if full else torch.zeros(total)
        self.norms = torch.rand(2, head_dim, generator=random) + 0.5 if full else None
        self.local = int(full)
        self.layers = (cpu.LayerStruct * LAYERS)()
        self.model = self._struct()

    def _struct(self) -> cpu.ModelStruct:
        layer = self.layers[1]
        layer.window, layer.local = self.window, self.local
        if self.norms is not None:
            addresses = [part.data_ptr() for part in (*self.bias.split(self.parts), *self.norms)]
            for name, address in zip(("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"), addresses, strict=True):
                setattr(layer, name, address)
        model = cpu.ModelStruct(LAYERS, 0, 0, self.heads, self.kv_heads, self.head_dim, self.rope_dim, 0, EPS)
        model.scale = self.scale
        model.cos, model.cos_local = (table.data_ptr() for table in self.cos)
        model.sin, model.sin_local = (table.data_ptr() for table in self.sin)
        model.layer = ctypes.cast(self.layers, ctypes.POINTER(cpu.LayerStruct))
        return model

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

    def prepared(self, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k, v of a whole sequence as attention sees them, [positions, heads, head_dim], by the references."""
        length = len(self.qkv[number])
        qkv = (self.qkv[number].to(dtype) + self.bias.to(dtype)).view(length, -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.norms is not None:
            q, k = (reference.norm(x, weight.to(dtype), EPS) for x, weight in zip((q, k), self.norms, strict=True))
        cos, sin = (table[self.local, :length].to(dtype) for table in (self.cos, self.sin))
        return reference.rotate(q, cos, sin), reference.rotate(k, cos, sin), v

    def expected(self, number: int) -> torch.Tensor:
        """The whole sequence in float64, without pages, segments or tiles."""
        q, k, v = self.prepared(number, torch.float64)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        position = torch.arange(len(q))
        hidden = position > position[:, None]
        if self.window:
            hidden |= position <= position[:, None] - self.window
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


@pytest.fixture(params=native.ISAS)
def kernels(request: pytest.FixtureRequest):
    opened = native.kernels(request.param, threads=3)
    yield opened
    opened.close()


HEADS = [(16, 1), (32, 3), (64, 3), (80, 4), (96, 8), (128, 2), (256, 4), (64, 64)]
CUTS = ((0, 200), (0, 63, 64, 65, 128, 199, 200), (0, 16, 23, 150, 200), (0, 120, 124, 132, 139, 200))


def pieces(again: Case, kernels: cpu.Kernels, number: int, cuts: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([again.run(kernels, [(number, *cut)])[0] for cut in itertools.pairwise(cuts)])


@pytest.mark.parametrize(("head_dim", "share"), HEADS)
def test_attention_is_near_float64_and_blind_to_company(kernels: cpu.Kernels, head_dim: int, share: int) -> None:
    lengths = (1, 17, 64, 65, 200)
    case = Case(head_dim, share, lengths)
    whole = case.run(kernels, [(number, 0, length) for number, length in enumerate(lengths)])
    for number in range(len(lengths)):
        torch.testing.assert_close(whole[number].double(), case.expected(number), rtol=1e-5, atol=3e-6)
    longest = len(lengths) - 1
    for cuts in CUTS:
        assert torch.equal(pieces(Case(head_dim, share, lengths), kernels, longest, cuts), whole[longest])
    # Few rows over a long context are split over the threads; many rows of one step are not.
    last = case.run(kernels, [(number, length - 1, length) for number, length in enumerate(lengths)])
    assert all(torch.equal(one[0], all_rows[-1]) for one, all_rows in zip(last, whole, strict=True))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 70, 128, 199, 200, 1000])
def test_a_window_hides_what_is_before_it(kernels: cpu.Kernels, window: int) -> None:
    lengths = (40, 200)
    case = Case(32, 3, lengths, kv_heads=1, window=window)
    whole = case.run(kernels, [(number, 0, length) for number, length in enumerate(lengths)])
    for number in range(len(lengths)):
        torch.testing.assert_close(whole[number].double(), case.expected(number), rtol=1e-5, atol=3e-6)
    for cuts in CUTS:
        again = Case(32, 3, lengths, kv_heads=1, window=window)
        assert torch.equal(pieces(again, kernels, 1, cuts), whole[1])
    if window >= max(lengths):
        assert torch.equal(Case(32, 3, lengths, kv_heads=1).run(kernels, [(1, 0, 200)])[0], whole[1])


def test_what_a_window_has_left_is_not_read(kernels: cpu.Kernels) -> None:
    case = Case(32, 2, (300,), window=50)
    first = case.run(kernels, [(0, 0, 300)])[0]
    case.pages[case.table[0, : (293 + 1 - 50) // cpu.BLOCK_TOKENS].long()] = torch.nan
    assert torch.equal(case.run(kernels, [(0, 293, 300)])[0], first[293:])


@pytest.mark.parametrize("window", [0, 100])
def test_biases_head_norms_and_local_angles(kernels: cpu.Kernels, window: int) -> None:
    case = Case(48, 2, (130,), window=window, full=True, rope_dim=48)
    whole = case.run(kernels, [(0, 0, 130)])[0]
    torch.testing.assert_close(whole.double(), case.expected(0), rtol=1e-5, atol=3e-6)
    again = Case(48, 2, (130,), window=window, full=True, rope_dim=48)
    assert torch.equal(pieces(again, kernels, 0, (0, 1, 9, 100, 130)), whole)


def test_rows_of_one_sequence_that_are_split_over_threads_keep_their_bits(kernels: cpu.Kernels) -> None:
    """Drafts of a few rows behind a long context: cut into runs of segments, then folded in order."""
    for window in (0, 150):
        case = Case(64, 3, (600, 70), window=window)
        whole = case.run(kernels, [(0, 0, 600), (1, 0, 70)])
        for rows in (2, 4, 5, 8, 9, 20):
            spans = [(0, 600 - rows, 600), (1, 70 - rows, 70)]
            together = case.run(kernels, spans)
            assert all(torch.equal(part, full[-rows:]) for part, full in zip(together, whole, strict=True))


def test_instruction_sets_and_thread_counts_give_the_same_bits() -> None:
    results = []
    for isa in native.ISAS:
        for threads in (1, 4):
            try:
                kernels = cpu.Kernels(native.library(), threads, isa)
            except ValueError:  # this CPU lacks it
                continue
            case = Case(64, 3, (300,), window=200, full=True)
            rows = [case.run(kernels, [(0, 0, 150)])[0], case.run(kernels, [(0, 150, 157)])[0]] + [
                case.run(kernels, [(0, i, i + 1)])[0] for i in range(157, 300)
            ]
            results.append(torch.cat(rows))
            kernels.close()
    assert len(results) >= 2
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_norm_and_activations_are_near_the_reference_and_equal_everywhere() -> None:
    x, weight = torch.randn(5, 96) * 30, torch.randn(96)
    wide = torch.linspace(-110, 110, 1024)
    edge = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1000.0, -1000.0, 87.0, -87.0, 88.0, -88.0, 1e20, -1e20] + [0.0] * 4)
    gate = torch.cat((wide, wide / 20, edge))
    up = torch.randn(gate.shape)
    norms, silus, gelus = [], [], []
    for isa in native.ISAS:
        try:
            kernels = cpu.Kernels(native.library(), 1, isa)
        except ValueError:  # this CPU lacks it
            continue
        norms.append(kernels.norm(x, weight, 1e-5))
        silus.append(kernels.gate_mul(cpu.SILU, gate, up))
        gelus.append(kernels.gate_mul(cpu.GELU_TANH, gate, up))
        kernels.close()
    torch.testing.assert_close(norms[0], reference.norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silus[0].double(), expected, rtol=1e-6, atol=1e-17)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    # In float32 the exponent 2u is itself rounded: the relative error grows with it while the value falls to nothing.
    torch.testing.assert_close(gelus[0].double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(reference.gelu_mul(gate, up).double(), expected, rtol=1e-5, atol=1e-7)
    for results in (norms, silus, gelus):
        assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("window", [0, 1, 30, 256, 299])
@pytest.mark.parametrize("first", [0, 100, 255, 256])
def test_reference_attention_is_near_float64(first: int, window: int) -> None:
    case = Case(32, 3, (300,), window=window, full=True)
    q, k, v = case.prepared(0, torch.float32)
    found = reference.attend(q[first:], k, v, first, case.scale, window).flatten(1)
    torch.testing.assert_close(found.double(), case.expected(0)[first:], rtol=1e-5, atol=3e-6)
    for cut in (1, 16, 20):  # a row's bits do not depend on where a step begins
        again = reference.attend(q[first + cut :], k, v, first + cut, case.scale, window).flatten(1)
        assert torch.equal(again, found[cut:])


def test_structs_match_the_library() -> None:
    assert ctypes.sizeof(cpu.MatrixStruct) == 24
    assert ctypes.sizeof(cpu.LayerStruct) == 7 * 24 + 9 * 8 + 8
    assert ctypes.sizeof(cpu.ModelStruct) == 8 * 4 + 2 * 4 + 3 * 8 + 2 * 24 + 3 * 8 + 2 * 4
    assert ctypes.sizeof(cpu.BatchStruct) == 16 + 7 * 8
