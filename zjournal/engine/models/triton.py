"""The decoder over the Triton kernels: a checkpoint's weights on a device, bf16, packed ones as the file has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from zjournal.checkpoint.checkpoint import Checkpoint
from zjournal.checkpoint.decoder import Model
from zjournal.engine.models import forward as passes
from zjournal.engine.models import rope
from zjournal.engine.models.decoder import BLOCK_TOKENS, Batch, Progress
from zjournal.engine.models.forward import Layer, Linear, Loaded, Matrix
from zjournal.engine.models.weights import Weights
from zjournal.kernels import matmul, packed
from zjournal.kernels.attention import ARITHMETIC

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class TritonDecoder:
    """A model on one device. Heads are rotated by halves; a block's KV of all layers is one piece, bf16 or fp8."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Model,
        context: int,
        device: torch.device,
        progress: Progress,
        *,
        mode: str = "file",
        fast: bool = False,
        kv: torch.dtype = torch.bfloat16,
    ) -> None:
        """`mode`: file keeps the types that the kernels can hold, fp32 expands all to bf16. The logits are the same
        bits. `fast` takes torch's library for the matrix products. `kv`: bfloat16 or float8_e4m3fn, unscaled.
        Raises ModelFault."""
        import triton

        self.shape = model.decoder
        self.device = device
        self._kv = kv
        self.layout = f"block.layer.kv.head.16.{str(kv).removeprefix('torch.')}.halves-1"
        self._keep = mode == "file"
        way = "fast" if fast else "exact"
        self.name = f"triton {way}"
        numbers = passes.FAST_NUMERICS + f" torch {torch.__version__}" if fast else passes.EXACT_NUMERICS
        # The compiler decides the order within a tile.
        self.numerics = f"{numbers} {ARITHMETIC} triton {triton.__version__}"
        ops = passes.fast() if fast else passes.exact()
        with Weights(checkpoint, model, by_halves=True) as read:
            layers = []
            for index in range(self.shape.layers):
                layers.append(self._layer(read, index))
                progress((index + 1) / (self.shape.layers + 1))
            spelling = model.spelling
            embed = self._matrix(*read.matrix(spelling.embed, self._keeps(read, [spelling.embed])))
            name = read.head()
            head = embed if name is None else self._matrix(*read.matrix(name, self._keeps(read, [name])))
            angles = self._angles(rope.tables(self.shape.rope, context, read.rope_factors()))
            local = self.shape.rope_local
            angles_local = self._angles(rope.tables(local, context)) if local is not None else angles
            out_norm = read.out_norm().to(device)
        self.loaded = Loaded(
            self.shape,
            ops,
            embed,
            layers,
            out_norm,
            Linear((head,), (self.shape.vocab,)),
            angles,
            angles_local,
        )

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks."""
        shape = self.shape
        size = (blocks, shape.layers, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)
        return torch.empty(size, dtype=self._kv, device=self.device)

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in the bytes of a block the KV of all positions behind its first `tokens`. For any thread."""
        np.frombuffer(memory, np.uint8).reshape(-1, BLOCK_TOKENS, self.shape.head_dim * self._kv.itemsize)[
            :, tokens:
        ] = 0

    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab], on the device."""
        sizes, numbers = passes.pack(batch.token, batch.position, batch.sequence, batch.table, batch.want)
        return passes.forward(self.loaded, passes.unpack(sizes, numbers.to(self.device)), pages)

    def tiles(self, rows: int, wanted: int) -> set[tuple[object, matmul.Tile]]:
        """What the matrix products of a step of so many rows and rows of logits need compiled: each tile of each kind
        of product, for a bias, a width or a distance of rows of its own is a compilation of its own."""
        loaded = self.loaded
        linears = [one for layer in loaded.layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        parts = {_form(part, one, "bf16"): (part, rows) for one in linears for part in one.parts}
        if wanted:
            parts |= {_form(part, loaded.head, "fp32"): (part, wanted) for part in loaded.head.parts}
        return {(form, tile) for form, (part, count) in parts.items() for tile in matmul.tiles_taken(count, part)}

    def close(self) -> None:
        """Nothing to end."""

    # --- loading -----------------------------------------------------------------------------------------

    def _layer(self, read: Weights, index: int) -> Layer:
        parts = self.shape.parts()

        def norm(part: str) -> torch.Tensor | None:
            return read.values(part, index).to(self.device) if part in parts else None

        def needed(part: str) -> torch.Tensor:
            found = norm(part)
            assert found is not None, part
            return found

        biases = [read.values(f"{part}_bias", index) for part in "qkv" if f"{part}_bias" in parts]
        bias = torch.cat(biases).to(self.device) if biases else None
        q_norm, k_norm = norm("q_norm"), norm("k_norm")
        return Layer(
            attn_norm=needed("attn_norm"),
            qkv=self._linear(read, index, _FUSED["qkv"], bias),
            o=self._linear(read, index, ("o",)),
            ffn_norm=needed("ffn_norm"),
            gate_up=self._linear(read, index, _FUSED["gate_up"]),
            down=self._linear(read, index, ("down",)),
            head_norms=(q_norm, k_norm) if q_norm is not None and k_norm is not None else None,
            post_attn_norm=norm("post_attn_norm"),
            post_ffn_norm=norm("post_ffn_norm"),
        )

    def _linear(self, read: Weights, index: int, parts: Sequence[str], bias: torch.Tensor | None = None) -> Linear:
        """The matrices of these parts, in one piece where their rows are of one type."""
        names = [read.name(part, index) for part in parts]
        widths = [read.info(name).shape[0] for name in names]
        if len({read.info(name).type for name in names}) > 1 and any(self._keeps(read, [name]) for name in names):
            keeps = [self._keeps(read, [name]) for name in names]
            each = [read.rows(part, index, keep) for part, keep in zip(parts, keeps, strict=True)]
            return Linear([self._matrix(*one) for one in each], widths, bias)
        keep = self._keeps(read, names)
        found = [read.rows(part, index, keep) for part in parts]
        rows = np.concatenate([np.asarray(raw).reshape(size[0], -1) for _, raw, size in found])
        kind, _, (_, width) = found[0]
        return Linear((self._matrix(kind, rows, (rows.shape[0], width)),), (sum(widths),), bias)

    def _keeps(self, read: Weights, names: Sequence[str]) -> bool:
        """Whether these matrices stay as they are stored; bf16 always does."""
        kinds = {read.info(name).type for name in names}
        if kinds == {"BF16"}:
            return True
        return self._keep and len(kinds) == 1 and kinds <= set(packed.KINDS)

    def _matrix(self, kind: str, rows: np.ndarray, size: tuple[int, int]) -> Matrix:
        """One matrix on the device: bf16, or packed as it is stored."""
        out, width = size
        if kind == "F32":
            values = torch.from_numpy(np.array(rows, dtype=np.float32).reshape(size))
            return values.to(torch.bfloat16).to(self.device)
        raw = torch.from_numpy(np.array(rows, dtype=np.uint8).reshape(out, -1))
        if kind == "BF16":
            return raw.view(torch.bfloat16).to(self.device)
        return packed.pack(kind, raw.to(self.device), out, width)

    def _angles(self, tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables
        return cos.to(self.device), sin.to(self.device)


def _form(part: Matrix, whole: Linear, out: str) -> tuple[object, ...]:
    """What makes a product with this matrix another compilation than others, beside its tile."""
    kind, (n, k) = (part.kind, (part.n, part.k)) if isinstance(part, packed.Packed) else ("", part.shape)
    return kind, n, k, sum(whole.widths), whole.bias is not None, out
