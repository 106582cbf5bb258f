"""From rows of logits to tokens on the device: mask, temperature, top-k, top-p, min-p, and noise by counter.

    logits       [rows, vocab] fp32 or bf16; rows may stand apart
    mask         [rows, words] uint32 or int32: bit id % 32 of word id / 32 is set where a token may come; or None
    temperature, top_p, min_p  [rows] fp32;  top_k, index  [rows] int32;  seed  [rows] int64
    returns      [rows] int32; -1 where nothing may come or a logit is NaN or +inf, masked or not

A token's rank is by its logit, best first, equals by id. With s = (logit - best) / temperature and w = e^s: top-k keeps
k ranks; top-p keeps those of them before whom less than p of their sum stands; min-p keeps w >= min_p. Of these the
token with the greatest s + g is drawn, g = -log(-log(1 - u)) (Gumbel): that is a draw from w over its sum. u belongs
to (seed, index, token): the token-th number of the SplitMix64 stream whose state is mix(mix(seed) xor index).
Temperature 0, or k = 1, takes the best one.

Nothing is sorted. The noise of a token does not change, so a token that was drawn from too many and is not among the
kept ones may be crossed out with all ranks behind it, and the greatest of the rest be taken: the same token as if
all were known at once. So top-p needs one pass more in most draws. k ranks are found by their digits, four passes.

Every sum is one of integers (a weight is floor(w 2^44)), and every maximum has one answer, so neither the size of a
part nor the rows beside it change a bit. Bytes: vocab * 4 per pass, from memory once, then from L2: two passes
without settings, three with top-p, seven with both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zjournal.kernels.build import NUMERICS, Build

VOCAB_MAX = (1 << 19) - 1  # so that a sum of weights stays below 2^63
_PART, _WARPS = 4096, 8  # tokens of a program, where a row is spread over programs
_TILE, _TILE_WARPS = 4096, 16  # at once, where one program has a row for itself
_TILE_REGISTERS = 128  # all that so many threads can have: ptxas would rather spill two than leave no room for another
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def sample(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token of each row. A setting of None is one that no row has; in a row, top_k 0 or vocab, top_p 1 and min_p 0
    are off. `scratch`: int64 [rows, scratch_words(vocab)] if the caller holds it, as a CUDA graph must."""
    rows, vocab = logits.shape
    assert 0 < vocab <= VOCAB_MAX and logits.stride(1) == 1, (logits.shape, logits.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16), logits.dtype
    _check(rows, temperature=(temperature, torch.float32), seed=(seed, torch.int64), index=(index, torch.int32))
    _check(rows, top_k=(top_k, torch.int32), top_p=(top_p, torch.float32), min_p=(min_p, torch.float32))
    if mask is not None:
        assert mask.dtype in (torch.uint32, torch.int32) and mask.stride(1) == 1, (mask.dtype, mask.stride())
        assert mask.shape[0] == rows and mask.shape[1] * 32 >= vocab, mask.shape
        mask = mask.view(torch.int32)
    out = logits.new_empty(rows, dtype=torch.int32) if out is None else out
    _check(rows, out=(out, torch.int32))
    if scratch is None:
        scratch = logits.new_empty(rows, scratch_words(vocab), dtype=torch.int64)
    assert scratch.shape == (rows, scratch_words(vocab)) and scratch.is_contiguous(), scratch.shape
    if rows == 0:
        return out
    parts = triton.cdiv(vocab, _PART)
    given = logits, mask, vocab, logits.stride(0), 0 if mask is None else mask.stride(0)
    padded = triton.next_power_of_2(parts)
    spread = {"PART": _PART, "num_warps": _WARPS, **NUMERICS}
    alone = {"PARTS": padded, "TILE": _TILE, "num_warps": _TILE_WARPS, "maxnreg": _TILE_REGISTERS, **NUMERICS}
    _peak[(rows, parts)](*given, scratch, parts, **spread)
    if top_k is not None:
        _select[(rows,)](*given, temperature, top_k, scratch, parts, **alone)
    _draw[(rows, parts)](*given, temperature, top_k, min_p, seed, index, scratch, parts, PARTS=padded, **spread)
    _finish[(rows,)](*given, temperature, top_k, top_p, seed, index, scratch, out, parts, **alone)
    return out


def scratch_words(vocab: int) -> int:
    """64-bit words of scratch for a row: three for each part, two for the row."""
    return 3 * triton.cdiv(vocab, _PART) + 2


def _check(rows: int, **vectors: tuple[torch.Tensor | None, torch.dtype]) -> None:
    for name, (vector, dtype) in vectors.items():
        if vector is not None:
            assert vector.shape == (rows,) and vector.dtype == dtype and vector.is_contiguous(), (name, vector)


def reference(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """The same in torch: sorted, in fp64, row by row."""
    rows, vocab = logits.shape
    token = torch.arange(vocab, device=logits.device)
    found = []
    for row in range(rows):
        value = logits[row].double()
        numbers = not bool((value.isnan() | (value == float("inf"))).any())
        if mask is not None:
            words = mask[row].view(torch.int32)
            value = value.masked_fill((words[token >> 5] >> (token & 31)) & 1 == 0, float("-inf"))
        best = value.max()
        if not numbers or best == float("-inf"):
            found.append(-1)
            continue
        order = torch.sort(value, descending=True, stable=True).indices
        if temperature[row] == 0:
            found.append(int(order[0]))
            continue
        scaled = (value[order] - best) / temperature[row].double().clamp(min=1e-30)
        weight = scaled.exp()
        kept = weight > 0
        if top_k is not None and 0 < top_k[row] < vocab:
            kept &= token < top_k[row]
        if top_p is not None and top_p[row] < 1:
            before = (weight * kept).cumsum(0) - weight * kept
            kept &= (before < top_p[row].double() * (weight * kept).sum()) | (token == 0)
        if min_p is not None:
            kept &= weight >= min_p[row].double()
        score = scaled + noise_reference(int(seed[row]), int(index[row]), order)
        score[~kept] = float("-inf")
        found.append(int(order[score.argmax()]))
    return torch.tensor(found, dtype=torch.int32, device=logits.device)


def noise_reference(seed: int, index: int, token: torch.Tensor) -> torch.Tensor:
    """The Gumbel noise fp64 of `token` int64 [any]. Integers of torch are signed and wrap, as these should."""

    def signed(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    def shifted(state: torch.Tensor, by: int) -> torch.Tensor:
        return state ^ ((state >> by) & ((1 << (64 - by)) - 1))

    def mix(state: torch.Tensor) -> torch.Tensor:
        state = shifted(state, 30) * signed(0xBF58476D1CE4E5B9)
        return shifted(shifted(state, 27) * signed(0x94D049BB133111EB), 31)

    golden = signed(0x9E3779B97F4A7C15)
    key = mix(mix(torch.full_like(token, signed(seed)) + golden) ^ index)
    drawn = mix(key + (token + 1) * golden).double()
    u = (torch.where(drawn < 0, drawn + 2.0**64, drawn) + 0.5) * 2.0**-64
    return -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-25)))


# Scratch of a row, in 64-bit words: `parts` peaks, `parts` draws, `parts` sums of weights, the threshold of top-k, and
# the last id that may stand at it. A peak or a draw is a value and its id in one word: the value in the upper half as
# an integer of the same order, the id in the lower one as its complement. So the greatest word is the greatest value,
# and of equals the lowest id. -1 in place of a peak: a logit is not a number.


@triton.jit
def _order(value):
    """fp32 as int32 of the same order, with -0 as 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The fp32 of _order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pair(value, token):
    """A value and its token in one int64."""
    return (_order(value).to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _token(pair):
    return (pair & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _logits(logits_ptr, mask_ptr, row, token, vocab, logits_row, mask_row):
    """(as they came, what may come: the others -inf) of `token` in `row` as fp32."""
    inside = token < vocab
    raw = tl.load(logits_ptr + row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    value = raw
    if mask_ptr is not None:
        word = tl.load(mask_ptr + row * mask_row + (token >> 5), mask=inside, other=0)
        value = tl.where(((word >> (token & 31)) & 1) != 0, raw, float("-inf"))
    return raw, value


@triton.jit
def _mix(state):
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _gumbel(seed, index, token):
    """Standard Gumbel noise fp32 that belongs to (seed, index, token)."""
    state = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) ^ index.to(tl.uint64))
    drawn = _mix(state + (token + 1).to(tl.uint64) * _GOLDEN)
    # A float near 0 keeps its relative precision: of 100,000 equal tokens the one with the least u is drawn. 2^-65 is
    # half a step: never 0.
    u = drawn.to(tl.float32) * 5.421010862427522e-20 + 2.710505431213761e-20
    # -log(1 - u). The logarithm of a GPU has an absolute error, so near 1 the series: its 7th term is below 2^-24.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    waited = tl.where(u < 0.0625, series, -tl.log(tl.maximum(1.0 - u, 2.9802322e-08)))
    return -tl.log(waited)


@triton.jit
def _scaled(value, best, temperature):
    """s = (value - best) / temperature. Below 1e-30 a temperature leaves nothing but the best ones, as 0 does."""
    return (value - best) / tl.maximum(temperature, 1e-30)


@triton.jit
def _weight(scaled):
    """floor(e^s 2^44), an integer."""
    return (tl.exp(scaled) * 17592186044416.0).to(tl.int64)


@triton.jit
def _best(scratch, parts, PARTS: tl.constexpr):
    """The row's greatest (logit, id); -1 in any part is one for the row."""
    part = tl.arange(0, PARTS)
    peaks = tl.load(scratch + part, mask=part < parts, other=-(1 << 63))
    bad = tl.max((peaks == -1).to(tl.int32), axis=0)
    return tl.where(bad != 0, -1, tl.max(peaks, axis=0))


@triton.jit
def _drawing(best, temperature, top_k):
    """Whether a row is drawn at all: numbers, a token that may come, and more than the best one to choose from."""
    return (best != -1) & (_value((best >> 32).to(tl.int32)) > float("-inf")) & (temperature > 0.0) & (top_k != 1)


@triton.jit
def _peak(logits_ptr, mask_ptr, vocab, logits_row, mask_row, scratch_ptr, parts, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    raw, value = _logits(logits_ptr, mask_ptr, row, token, vocab, logits_row, mask_row)
    bad = tl.max(((raw != raw) | (raw == float("inf"))).to(tl.int32), axis=0)
    best = tl.max(_pair(value, token), axis=0)
    tl.store(scratch_ptr + row * (3 * parts + 2) + part, tl.where(bad != 0, -1, best))


@triton.jit
def _draw(
    logits_ptr,
    mask_ptr,
    vocab,
    logits_row,
    mask_row,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    seed_ptr,
    index_ptr,
    scratch_ptr,
    parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """A part's draw from what top-k and min-p keep, and its sum of weights of what top-k keeps."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scratch = scratch_ptr + row * (3 * parts + 2)
    temperature = tl.load(temperature_ptr + row)
    top_k = 0 if top_k_ptr is None else tl.load(top_k_ptr + row)
    best = _best(scratch, parts, PARTS)
    if _drawing(best, temperature, top_k):
        token = part * PART + tl.arange(0, PART)
        _, value = _logits(logits_ptr, mask_ptr, row, token, vocab, logits_row, mask_row)
        scaled = _scaled(value, _value((best >> 32).to(tl.int32)), temperature)
        kept = value > float("-inf")
        if top_k_ptr is not None:
            threshold = tl.load(scratch + 3 * parts).to(tl.int32)
            last = tl.load(scratch + 3 * parts + 1).to(tl.int32)
            order = _order(value)
            kept = kept & ((order > threshold) | ((order == threshold) & (token <= last)))
        tl.store(scratch + 2 * parts + part, tl.sum(tl.where(kept, _weight(scaled), 0), axis=0))
        if min_p_ptr is not None:
            kept = kept & (tl.exp(scaled) >= tl.minimum(tl.load(min_p_ptr + row), 1.0))
        score = scaled + _gumbel(tl.load(seed_ptr + row), tl.load(index_ptr + row), token)
        tl.store(scratch + parts + part, tl.max(_pair(tl.where(kept, score, float("-inf")), token), axis=0))


@triton.jit
def _finish(
    logits_ptr,
    mask_ptr,
    vocab,
    logits_row,
    mask_row,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    index_ptr,
    scratch_ptr,
    out_ptr,
    parts,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token: the best one, or the greatest draw. One that top-p does not keep is crossed out with all behind it."""
    row = tl.program_id(0).to(tl.int64)
    scratch = scratch_ptr + row * (3 * parts + 2)
    temperature = tl.load(temperature_ptr + row)
    top_k = 0 if top_k_ptr is None else tl.load(top_k_ptr + row)
    best = _best(scratch, parts, PARTS)
    greatest = _value((best >> 32).to(tl.int32))
    token = tl.where((best == -1) | (greatest == float("-inf")), -1, _token(best))
    if _drawing(best, temperature, top_k):
        part = tl.arange(0, PARTS)
        token = _token(tl.max(tl.load(scratch + parts + part, mask=part < parts, other=-(1 << 63)), axis=0))
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + row)
            total = tl.sum(tl.load(scratch + 2 * parts + part, mask=part < parts, other=0), axis=0)
            enough = top_p.to(tl.float64) * total.to(tl.float64)
            seed = tl.load(seed_ptr + row)
            index = tl.load(index_ptr + row)
            going = top_p < 1.0
            while going:
                drawn = _order(tl.load(logits_ptr + row * logits_row + token).to(tl.float32))
                before = tl.zeros((), dtype=tl.int64)
                following = tl.full((), -(1 << 63), tl.int64)
                for start in range(0, vocab, TILE):
                    other = start + tl.arange(0, TILE)
                    _, value = _logits(logits_ptr, mask_ptr, row, other, vocab, logits_row, mask_row)
                    order = _order(value)
                    ahead = (order > drawn) | ((order == drawn) & (other < token))
                    if tl.max(ahead.to(tl.int32), axis=0) != 0:  # few stand ahead: most parts need no noise
                        scaled = _scaled(value, greatest, temperature)
                        before += tl.sum(tl.where(ahead, _weight(scaled), 0), axis=0)
                        score = tl.where(ahead, scaled + _gumbel(seed, index, other), float("-inf"))
                        following = tl.maximum(following, tl.max(_pair(score, other), axis=0))
                going = (before > 0) & (before.to(tl.float64) >= enough)
                token = tl.where(going, _token(following), token)
    tl.store(out_ptr + row, token)


@triton.jit
def _select(
    logits_ptr,
    mask_ptr,
    vocab,
    logits_row,
    mask_row,
    temperature_ptr,
    top_k_ptr,
    scratch_ptr,
    parts,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logit of rank k as its _order, and the last id at it: digit by digit, then among equals by id."""
    row = tl.program_id(0).to(tl.int64)
    scratch = scratch_ptr + row * (3 * parts + 2)
    left = tl.load(top_k_ptr + row)
    threshold = tl.full((), -(1 << 31), tl.int32)
    last = tl.full((), (1 << 31) - 1, tl.int32)
    best = _best(scratch, parts, PARTS)
    if _drawing(best, tl.load(temperature_ptr + row), left) & (left > 1) & (left < vocab):
        digits = tl.arange(0, 256)
        found = tl.zeros((), dtype=tl.uint32)  # the digits so far
        equal = tl.zeros((), dtype=tl.int32)
        for shift in tl.static_range(24, -1, -8):
            counts = tl.zeros((256,), dtype=tl.int32)
            for start in range(0, vocab, TILE):
                token = start + tl.arange(0, TILE)
                _, value = _logits(logits_ptr, mask_ptr, row, token, vocab, logits_row, mask_row)
                order = _order(value).to(tl.uint32, bitcast=True) ^ 0x80000000
                among = token < vocab
                if shift < 24:
                    among = among & ((order >> (shift + 8)) == found)
                counts += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=among)
            at_least = tl.cumsum(counts, axis=0, reverse=True)
            digit = tl.max(tl.where(at_least >= left, digits, 0), axis=0)
            equal = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
            left -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
            found = (found << 8) | digit.to(tl.uint32)
        threshold = (found ^ 0x80000000).to(tl.int32, bitcast=True)
        if equal > left:
            last = tl.zeros((), dtype=tl.int32)
            seen = tl.zeros((), dtype=tl.int32)
            for start in range(0, vocab, TILE):
                token = start + tl.arange(0, TILE)
                _, value = _logits(logits_ptr, mask_ptr, row, token, vocab, logits_row, mask_row)
                same = ((token < vocab) & (_order(value) == threshold)).to(tl.int32)
                kept = (same != 0) & (seen + tl.cumsum(same, axis=0) <= left)
                last = tl.maximum(last, tl.max(tl.where(kept, token, 0), axis=0))
                seen += tl.sum(same, axis=0)
    tl.store(scratch + 3 * parts, threshold.to(tl.int64))
    tl.store(scratch + 3 * parts + 1, last.to(tl.int64))


def builds() -> list[Build]:
    """Every setting with a mask, and none of them, for vocabularies of 128k; odd ones, in bf16, in the sweep."""
    common = {"logits_ptr": "*fp32", "vocab": "i32:16", "logits_row": "i32:16", "mask_row": "i32:16"}
    common |= {"scratch_ptr": "*i64", "parts": "i32", "temperature_ptr": "*fp32"}
    common |= {"seed_ptr": "*i64", "index_ptr": "*i32", "out_ptr": "*i32"}
    every = common | {"mask_ptr": "*i32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    odd = every | {"logits_ptr": "*bf16:1", "vocab": "i32", "logits_row": "i32", "mask_row": "i32"}
    found = []
    for name, given, sweep in (("all", every, False), ("plain", common, False), ("odd", odd, True)):
        for kernel in (_peak, _select, _draw, _finish):
            if kernel is _select and "top_k_ptr" not in given:
                continue
            wanted = kernel.arg_names
            signature = {each: given[each] for each in wanted if each in given}
            sizes = {"PART": _PART, "TILE": _TILE, "PARTS": 32}
            constexprs = {each: sizes.get(each) for each in wanted if each not in given}
            step = kernel.__name__.removeprefix("_")
            warps, registers = (_TILE_WARPS, _TILE_REGISTERS) if "TILE" in constexprs else (_WARPS, None)
            made = Build(f"sample.{step}.{name}", kernel, signature, constexprs, warps, sweep=sweep, maxnreg=registers)
            found.append(made)
    return found
