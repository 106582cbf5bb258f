"""Weights that stay quantised in device memory: how a GGUF matrix is laid out anew, and how a kernel reads a tile.

A matrix [n, k] is cut along k into steps of 128 values (64 where 128 does not divide k; k is padded with weights of
0). Every array has the step first, then the output, then what that output has of the step: a tile of neighbouring
outputs is one run of bytes, and matrices that share k are joined along n.

    low     [steps, n, step * b / 8]   codes, b = 4 or 8 bits; with 4 bits byte j holds values j and j + step / 2
    high    [steps, n, step * b / 8]   1 or 2 more bits of each code, spread in the same way; not every kind
    scales  [steps, n, step / group]   one of each 32 (Q6_K: 16) values
    mins    [steps, n, step / 32]      likewise; not every kind
    supers  [k / 256, n, 2]            K-quants: what scales and mins are multiples of; fp16

    weight = (code - offset) * scale + min

The product is exact in fp32, so there is one rounding, the sum's, as in the `gguf` package: the fp32 values are equal
bit for bit. For the tensor cores they are rounded once more, to bf16. INT8 is other: one fp32 scale per output,
applied to the finished sum; its codes are exact in bf16.

| kind | bits per weight here | in the file |
|---|---|---|
| Q4_0, Q4_1 | 4.5, 5 | 4.5, 5 |
| Q5_0, Q5_1 | 5.5, 6 | 5.5, 6 |
| Q8_0, INT8 | 8.5, 8 | 8.5, none |
| Q4_K, Q5_K, Q6_K | 4.63, 5.63, 6.63 | 4.5, 5.5, 6.56 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SUPER = 256  # values of a K-quant's block
SMALL = 32  # values of the other blocks
CODES_AT_ONCE = 1 << 26  # packing holds so many codes, a byte each, beside the matrix


@dataclass(frozen=True)
class Kind:
    """How a kind's codes look. `group`: values that share a scale, 0: all of an output. `block`: bytes in the file."""

    low_bits: int
    high_bits: int
    offset: int
    group: int
    mins: bool
    supers: bool
    block: int

    @property
    def values(self) -> int:
        """Values of one block of the file."""
        return SUPER if self.supers else SMALL


KINDS = {
    "Q4_0": Kind(4, 0, 8, 32, False, False, 18),
    "Q4_1": Kind(4, 0, 0, 32, True, False, 20),
    "Q5_0": Kind(4, 1, 16, 32, False, False, 22),
    "Q5_1": Kind(4, 1, 0, 32, True, False, 24),
    "Q8_0": Kind(8, 0, 0, 32, False, False, 34),
    "Q4_K": Kind(4, 0, 0, 32, True, True, 144),
    "Q5_K": Kind(4, 1, 0, 32, True, True, 176),
    "Q6_K": Kind(4, 2, 32, 16, False, True, 210),
    "INT8": Kind(8, 0, 0, 0, False, False, 0),
}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [n, k] in the layout above; all arrays on one device. `step`: values of k in a step."""

    kind: str
    n: int
    k: int
    step: int
    low: torch.Tensor
    scales: torch.Tensor
    high: torch.Tensor | None = None
    mins: torch.Tensor | None = None
    supers: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for array in self.arrays:
            assert array.is_contiguous() and array.device == self.low.device
        assert self.low.shape[:2] == (self.steps, self.n), (self.low.shape, self.steps, self.n)
        assert self.steps * self.n < 1 << 31, (self.n, self.k)

    @property
    def steps(self) -> int:
        return -(-self.k // self.step)

    @property
    def spec(self) -> Kind:
        return KINDS[self.kind]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """What is there of low, scales, high, mins, supers."""
        return tuple(a for a in (self.low, self.scales, self.high, self.mins, self.supers) if a is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(array.numel() * array.element_size() for array in self.arrays)

    @property
    def device(self) -> torch.device:
        return self.low.device

    def to(self, device: torch.device | str) -> Packed:
        """The same on another device."""
        high, mins, supers = (None if a is None else a.to(device) for a in (self.high, self.mins, self.supers))
        low, scales = self.low.to(device), self.scales.to(device)
        return Packed(self.kind, self.n, self.k, self.step, low, scales, high, mins, supers)


def step_of(k: int) -> int:
    """Values of k in one step."""
    return 128 if k % 128 == 0 else 64


def pack(kind: str, blocks: torch.Tensor, n: int, k: int) -> Packed:
    """Lays out a matrix stored as GGUF blocks, uint8 [n, k / values * block bytes], on the device where they lie."""
    spec = KINDS[kind]
    assert spec.block and k % spec.values == 0, (kind, k)
    assert blocks.dtype == torch.uint8 and blocks.numel() == n * k // spec.values * spec.block, (
        kind,
        blocks.shape,
        n,
        k,
    )
    rows = blocks.reshape(n, k // spec.values, spec.block)
    at_once = max(1, CODES_AT_ONCE // k)
    return concat([_pack_rows(kind, rows[at : at + at_once], k) for at in range(0, n, at_once)])


def quantise_int8(values: torch.Tensor) -> Packed:
    """INT8 of values [n, k]: codes from -127 to 127, an output's scale its largest magnitude / 127."""
    n, k = values.shape
    values = values.float()
    scales = values.abs().amax(1) / 127
    codes = torch.round(values / torch.where(scales > 0, scales, 1.0)[:, None]).clamp(-127, 127).to(torch.int8)
    step = step_of(k)
    return Packed("INT8", n, k, step, _spread(codes, 8, step), scales)


def concat(parts: Sequence[Packed]) -> Packed:
    """Matrices of one kind and one k, one after the other along n."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all((p.kind, p.k, p.step) == (first.kind, first.k, first.step) for p in parts), [p.kind for p in parts]

    def joined(arrays: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        there = [array for array in arrays if array is not None]
        return torch.cat(there, 1) if there else None

    return Packed(
        first.kind,
        sum(part.n for part in parts),
        first.k,
        first.step,
        torch.cat([part.low for part in parts], 1),
        torch.cat([part.scales for part in parts], 1 if first.spec.group else 0),
        joined([part.high for part in parts]),
        joined([part.mins for part in parts]),
        joined([part.supers for part in parts]),
    )


def unpack(weight: Packed) -> torch.Tensor:
    """The values, fp32 [n, k]: those of the file, bit for bit."""
    spec, shape = weight.spec, (weight.n, weight.steps * weight.step)
    codes = _gather(weight.low, spec.low_bits).float()
    if weight.high is not None:
        codes += _gather(weight.high, spec.high_bits).float() * (1 << spec.low_bits)
    if not spec.group:
        return (codes * weight.scales[:, None])[:, : weight.k]
    scales = _by_output(weight.scales).float()
    mins = None if weight.mins is None else _by_output(weight.mins).float()
    if weight.supers is not None:
        supers = weight.supers.permute(1, 0, 2).float()  # [n, k / 256, 2]
        scales *= supers[..., 0].repeat_interleave(SUPER // spec.group, 1)
        if mins is not None:
            mins *= supers[..., 1].repeat_interleave(SUPER // spec.group, 1)
    values = (codes - spec.offset).view(weight.n, -1, spec.group) * scales[..., None]
    if mins is not None:
        values += mins[..., None]
    return values.reshape(shape)[:, : weight.k].contiguous()


def _pack_rows(kind: str, blocks: torch.Tensor, k: int) -> Packed:
    """Blocks uint8 [n, blocks of a row, bytes]."""
    spec, n, step = KINDS[kind], blocks.shape[0], step_of(k)
    codes, scales, mins, supers = _READERS[kind](blocks)
    codes = codes.reshape(n, k)
    if spec.low_bits == 8:
        return Packed(kind, n, k, step, _spread(codes, 8, step), _stepped(scales.reshape(n, -1), step // spec.group))
    return Packed(
        kind,
        n,
        k,
        step,
        _spread(codes & 15, 4, step),
        _stepped(scales.reshape(n, -1), step // spec.group),
        _spread(codes >> 4, spec.high_bits, step) if spec.high_bits else None,
        None if mins is None else _stepped(mins.reshape(n, -1), step // spec.group),
        None if supers is None else supers.permute(1, 0, 2).contiguous(),
    )


def _spread(codes: torch.Tensor, bits: int, step: int) -> torch.Tensor:
    """Codes [n, k] of `bits` bits as [steps, n, step * bits / 8]: byte j has the values j, j + width, …"""
    n, k = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -k % step))
    parts = padded.view(n, -1, 8 // bits, step * bits // 8)
    packed = parts[:, :, 0].clone()
    for at in range(1, 8 // bits):
        packed |= parts[:, :, at] << bits * at
    return packed.permute(1, 0, 2).contiguous()


def _gather(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of _spread, but padded: [n, steps * step]."""
    if bits == 8:
        return _by_output(packed)
    parts = [packed >> bits * at & (1 << bits) - 1 for at in range(8 // bits)]
    return _by_output(torch.stack(parts, 2).flatten(2))


def _stepped(values: torch.Tensor, per_step: int) -> torch.Tensor:
    """[n, groups] as [steps, n, per_step], padded with 0."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_step))
    return padded.view(values.shape[0], -1, per_step).permute(1, 0, 2).contiguous()


def _by_output(stepped: torch.Tensor) -> torch.Tensor:
    """[steps, n, width] as [n, steps * width]."""
    return stepped.permute(1, 0, 2).reshape(stepped.shape[1], -1)


# --- GGUF blocks, ggml's structures: codes [n, blocks, values], scales, minimums, and what both are multiples of ---

Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte `at` of each block, [n, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _bits(bytes_: torch.Tensor) -> torch.Tensor:
    """Bits of [..., m] bytes, least first, [..., 8 * m]."""
    return (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8, device=bytes_.device) & 1).flatten(-2)


def _q4_0(b: torch.Tensor) -> Read:
    return _nibbles(b[..., 2:18]), _half(b, 0), None, None


def _q4_1(b: torch.Tensor) -> Read:
    return _nibbles(b[..., 4:20]), _half(b, 0), _half(b, 2), None


def _q5_0(b: torch.Tensor) -> Read:
    return _nibbles(b[..., 6:22]) | _bits(b[..., 2:6]) << 4, _half(b, 0), None, None


def _q5_1(b: torch.Tensor) -> Read:
    return _nibbles(b[..., 8:24]) | _bits(b[..., 4:8]) << 4, _half(b, 0), _half(b, 2), None


def _q8_0(b: torch.Tensor) -> Read:
    return b[..., 2:34].contiguous().view(torch.int8), _half(b, 0), None, None


def _k_supers(b: torch.Tensor) -> torch.Tensor:
    """Q4_K, Q5_K: scale and minimum of a block; the file's minimum is subtracted, ours is added."""
    return torch.cat((_half(b, 0), -_half(b, 2)), -1)


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K, Q5_K: 8 scales and 8 minimums of 6 bits in 12 bytes."""
    a, m, mixed = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((a & 63, mixed & 15 | a >> 6 << 4), -1)
    return scales, torch.cat((m & 63, mixed >> 4 | m >> 6 << 4), -1)


def _k_nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """128 bytes: of each 32 the low nibbles are one run of 32, the high ones the next."""
    return _nibbles(bytes_.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(b: torch.Tensor) -> Read:
    return _k_nibbles(b[..., 16:144]), *_k_scales(b), _k_supers(b)


def _q5_k(b: torch.Tensor) -> Read:
    run = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = (b[..., None, 16:48] >> run & 1).flatten(-2)  # bit s of byte l: value l of run s
    return _k_nibbles(b[..., 48:176]) | fifth << 4, *_k_scales(b), _k_supers(b)


def _q6_k(b: torch.Tensor) -> Read:
    """Two halves of 128 values: 64 bytes of nibbles, the low ones first; 32 bytes of pairs of bits, run by run."""
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    run = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[..., 128:192].unflatten(-1, (2, 1, 32)) >> run & 3).flatten(-3)
    scales = b[..., 192:208].contiguous().view(torch.int8)
    return low | high << 4, scales, None, torch.nn.functional.pad(_half(b, 208), (0, 1))


_READERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# --- in a kernel ---


def signature(kind: str) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the five arrays for a build, and those that are not there."""
    spec = KINDS[kind]
    scales = "*fp32" if not spec.group else "*fp16" if not spec.supers else "*u8" if spec.mins else "*i8"
    types = {"low_ptr": "*i8" if spec.low_bits == 8 else "*u8", "scales_ptr": scales}
    there = {"high_ptr": ("*u8", spec.high_bits), "mins_ptr": (scales, spec.mins), "supers_ptr": ("*fp16", spec.supers)}
    types |= {name: kind for name, (kind, is_there) in there.items() if is_there}
    return types, {name: None for name, (_, is_there) in there.items() if not is_there}


@triton.jit
def spread_codes(plane, BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """A tile of packed codes, uint8 [ROWS, STEP * BITS / 8] or int8 [ROWS, STEP], as [ROWS, STEP], k in order."""
    if BITS == 8:
        parts = plane
    elif BITS == 4:
        parts = tl.join(plane & 15, plane >> 4)
    elif BITS == 2:
        even = tl.join(plane & 3, plane >> 4 & 3)
        odd = tl.join(plane >> 2 & 3, plane >> 6)
        parts = tl.join(even, odd)
    else:
        even = tl.join(tl.join(plane & 1, plane >> 4 & 1), tl.join(plane >> 2 & 1, plane >> 6 & 1))
        odd = tl.join(tl.join(plane >> 1 & 1, plane >> 5 & 1), tl.join(plane >> 3 & 1, plane >> 7))
        parts = tl.join(even, odd)
    if BITS < 8:
        parts = parts.reshape(ROWS, STEP * BITS // 8, 8 // BITS).trans(0, 2, 1).reshape(ROWS, STEP)
    return parts


@triton.jit
def array_tile(pointer, rows, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] of an array [.., n, WIDTH] whose (step, output) pairs are counted by `rows`."""
    return tl.load(pointer + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def weight_tile(
    low_ptr,
    high_ptr,
    scales_ptr,
    mins_ptr,
    supers_ptr,
    step,
    rows,
    n,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of outputs `rows` (int64 [ROWS]) in one step of k, fp32 [ROWS, STEP]; of INT8 the codes."""
    at = rows + step * n  # int64 as rows is; step * n alone is below 2^31 (Packed)
    codes = spread_codes(array_tile(low_ptr, at, STEP * LOW_BITS // 8), LOW_BITS, ROWS, STEP)
    if HIGH_BITS:
        codes |= spread_codes(array_tile(high_ptr, at, STEP * HIGH_BITS // 8), HIGH_BITS, ROWS, STEP) << 4
    values = codes.to(tl.float32)
    if GROUP:
        scales = array_tile(scales_ptr, at, STEP // GROUP).to(tl.float32)
        if mins_ptr is not None:
            mins = array_tile(mins_ptr, at, STEP // GROUP).to(tl.float32)
        if supers_ptr is not None:
            supers = array_tile(supers_ptr, rows + step // (256 // STEP) * n, 2).to(tl.float32)
            scale, minimum = tl.split(supers)
            scales *= scale[:, None]
            if mins_ptr is not None:
                mins *= minimum[:, None]
        values = (values - OFFSET).reshape(ROWS, STEP // GROUP, GROUP) * scales[:, :, None]
        if mins_ptr is not None:
            values += mins[:, :, None]
        values = values.reshape(ROWS, STEP)
    return values
