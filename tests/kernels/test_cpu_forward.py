"""A whole step of the C decoder against the same decoder in float64, with every optional part and with none."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests import native
from zjournal.kernels import cpu
from zjournal.kernels.cpu import reference

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 64, 96, 4, 2, 32, 45, 160
EPS, SCALE, WINDOW = 1e-6, 0.2, 40
SIZES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
VECTORS = {
    "attn_norm": HIDDEN,
    "ffn_norm": HIDDEN,
    "q_bias": HEADS * HEAD_DIM,
    "k_bias": KV_HEADS * HEAD_DIM,
    "v_bias": KV_HEADS * HEAD_DIM,
    "q_norm": HEAD_DIM,
    "k_norm": HEAD_DIM,
    "post_attn_norm": HIDDEN,
    "post_ffn_norm": HIDDEN,
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Decoder:
    """Two layers of random weights in plain formats, as structs and as tensors. The first layer has the window and the
    local angles."""

    def __init__(self, kernels: cpu.Kernels, *, full: bool) -> None:
        random = torch.Generator().manual_seed(5)
        self.kernels, self.full, self.kept = kernels, full, []
        self.layers: list[dict[str, torch.Tensor]] = []
        self.structs = (cpu.LayerStruct * 2)()
        kinds = itertools.cycle(DTYPES)
        for index, struct in enumerate(self.structs):
            parts = {}
            for name, size in SIZES.items():
                struct_part, parts[name] = self._matrix(
                    torch.randn(size, generator=random) / size[1] ** 0.5, next(kinds)
                )
                setattr(struct, name, struct_part)
            for name, width in VECTORS.items():
                if full or name in cpu.LAYER_NORMS:
                    parts[name] = torch.rand(width, generator=random) + (0.5 if "norm" in name else -0.5)
                    setattr(struct, name, parts[name].data_ptr())
            if full and index == 0:
                struct.window, struct.local = WINDOW, 1
            self.layers.append(parts)
        embed, self.embed = self._matrix(torch.randn(VOCAB, HIDDEN, generator=random), "F16")
        head, self.head = self._matrix(torch.randn(VOCAB, HIDDEN, generator=random) / 8, "BF16")
        self.out_norm = torch.rand(HIDDEN, generator=random) + 0.5
        angles = torch.rand(2, CONTEXT, HEAD_DIM // 2, generator=random) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        sizes = (2, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, cpu.GELU_TANH if full else cpu.SILU)
        pointers = (self.cos.data_ptr(), self.sin.data_ptr(), self.out_norm.data_ptr(), embed, head)
        self.model = cpu.ModelStruct(*sizes, EPS, SCALE, *pointers)
        self.model.layer = ctypes.cast(self.structs, ctypes.POINTER(cpu.LayerStruct))
        if full:
            self.model.cos_local, self.model.sin_local = self.cos[1].data_ptr(), self.sin[1].data_ptr()
            self.model.embed_scale, self.model.logit_scale = 3.0, 0.25
        self.pages = torch.full((CONTEXT // 16, 2, KV_HEADS, 2, HEAD_DIM * 16), torch.nan)

    def _matrix(self, values: torch.Tensor, kind: str) -> tuple[cpu.MatrixStruct, torch.Tensor]:
        stored = values.to(DTYPES[kind])
        packed = self.kernels.pack(kind, stored.data_ptr(), *stored.shape)
        self.kept.append(packed)
        return packed.struct, stored.float()

    def run(self, tokens: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
        """Logits of every row, the tokens given in the steps between `cuts`."""
        logits = []
        table = torch.arange(CONTEXT // 16, dtype=torch.int32).flip(0).view(1, -1).contiguous()
        for start, end in itertools.pairwise(cuts):
            out = torch.empty(end - start, VOCAB)
            rows = torch.arange(start, end, dtype=torch.int32)
            tensors = {  # the struct has their addresses only
                "token": tokens[start:end].contiguous(),
                "position": rows,
                "sequence": torch.zeros_like(rows),
                "table": table,
                "want": rows - start,
            }
            self.kernels.forward(self.model, cpu.batch_struct(**tensors, kv=self.pages, logits=out))
            logits.append(out)
        return torch.cat(logits)

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        """The whole sequence in float64."""
        x = self.embed[tokens.long()].double() * (3.0 if self.full else 1.0)
        for index, parts in enumerate(self.layers):
            layer = {name: part.double() for name, part in parts.items()}
            near = int(self.full and index == 0)
            added = self._attention(layer, reference.norm(x, layer["attn_norm"], EPS), near, WINDOW if near else 0)
            x = x + self._after(layer, "post_attn_norm", added)
            normed = reference.norm(x, layer["ffn_norm"], EPS)
            gate, up = normed @ layer["gate"].T, normed @ layer["up"].T
            joined = reference.gelu_mul(gate, up) if self.full else reference.silu_mul(gate, up)
            x = x + self._after(layer, "post_ffn_norm", joined @ layer["down"].T)
        logits = reference.norm(x, self.out_norm.double(), EPS) @ self.head.double().T
        return logits * (0.25 if self.full else 1.0)

    @staticmethod
    def _after(layer: dict[str, torch.Tensor], name: str, added: torch.Tensor) -> torch.Tensor:
        return reference.norm(added, layer[name], EPS) if name in layer else added

    def _attention(self, layer: dict[str, torch.Tensor], x: torch.Tensor, near: int, window: int) -> torch.Tensor:
        heads = {}
        for name in ("q", "k", "v"):
            part = x @ layer[name].T + layer.get(f"{name}_bias", torch.zeros(1))
            part = part.view(len(x), -1, HEAD_DIM)
            heads[name] = reference.norm(part, layer[f"{name}_norm"], EPS) if f"{name}_norm" in layer else part
        cos, sin = self.cos[near, : len(x)].double(), self.sin[near, : len(x)].double()
        q, k = reference.rotate(heads["q"], cos, sin), reference.rotate(heads["k"], cos, sin)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, heads["v"]))
        position = torch.arange(len(x))
        hidden = position > position[:, None]
        if window:
            hidden |= position <= position[:, None] - window
        scores = (torch.einsum("ihd,jhd->hij", q, k) * SCALE).masked_fill(hidden, -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ layer["o"].T


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("full", [False, True])
def test_a_step_is_near_float64_however_it_is_cut(isa: str, full: bool) -> None:
    kernels = native.kernels(isa, threads=2)
    tokens = torch.randint(0, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    decoder = Decoder(kernels, full=full)
    whole = decoder.run(tokens, (0, CONTEXT))
    torch.testing.assert_close(whole.double(), decoder.expected(tokens), rtol=1e-4, atol=1e-4)
    for cuts in ((0, 1, 2, 10, 100, 104, 112, CONTEXT), (0, 64, 65, 128, 159, CONTEXT), (0, 41, 80, 120, CONTEXT)):
        assert torch.equal(Decoder(kernels, full=full).run(tokens, cuts), whole)
    kernels.close()


def test_every_optional_part_changes_the_result() -> None:
    """So that the test above cannot pass over a part that is not computed."""
    kernels = native.kernels("", threads=1)
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    whole = Decoder(kernels, full=True).run(tokens, (0, 60))
    for name in (*cpu.LAYER_OPTIONAL, "window", "local"):
        decoder = Decoder(kernels, full=True)
        setattr(decoder.structs[0], name, None if name in cpu.LAYER_OPTIONAL else 0)
        assert not torch.equal(decoder.run(tokens, (0, 60)), whole), name
    for name in ("activation", "embed_scale", "logit_scale"):
        decoder = Decoder(kernels, full=True)
        setattr(decoder.model, name, 0)
        assert not torch.equal(decoder.run(tokens, (0, 60)), whole), name
    kernels.close()
