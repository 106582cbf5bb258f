"""The decoder over torch operators of fixed shapes, all weights in fp32: what runs where there are no C kernels."""

from __future__ import annotations

import numpy as np
import torch

from zjournal.checkpoint.checkpoint import Checkpoint
from zjournal.checkpoint.decoder import Model
from zjournal.engine.models import rope
from zjournal.engine.models.decoder import BLOCK_TOKENS, Batch, Progress
from zjournal.engine.models.weights import Weights
from zjournal.kernels.cpu import reference

Angles = tuple[torch.Tensor, torch.Tensor]


class PlainDecoder:
    """A model in torch. What a row gets depends on its own sequence alone, bit for bit, as with the C kernels."""

    layout = reference.LAYOUT

    def __init__(self, checkpoint: Checkpoint, model: Model, context: int, why: str, progress: Progress) -> None:
        """`why`: what to tell people about the missing C kernels. Raises ModelFault."""
        shape = self.shape = model.decoder
        self.name = f"torch ({why})"
        self.numerics = f"{reference.NUMERICS}.{torch.get_num_threads()}"
        with Weights(checkpoint, model) as read:
            self._layers: list[dict[str, torch.Tensor]] = []
            parts = shape.parts()
            for index in range(shape.layers):
                self._layers.append({part: self._tensor(read, part, index, size) for part, size in parts.items()})
                progress((index + 1) / (shape.layers + 1))
            self._embed = read.expanded(model.spelling.embed)
            name = read.head()
            self._head = self._embed if name is None else read.expanded(name)
            self._out_norm = read.out_norm()
            self._angles = rope.tables(shape.rope, context, read.rope_factors())
            self._angles_local = rope.tables(shape.rope_local, context) if shape.rope_local else self._angles

    @staticmethod
    def _tensor(read: Weights, part: str, layer: int, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return read.values(part, layer)
        _, rows, _ = read.rows(part, layer, keep=False)
        return torch.from_numpy(rows.reshape(size).copy())

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks, untouched: the system gives it when it is first written."""
        shape = self.shape
        return torch.empty(blocks, shape.layers, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in the bytes of a block the KV of all positions behind its first `tokens`. For any thread."""
        np.frombuffer(memory, np.float32).reshape(-1, BLOCK_TOKENS, self.shape.head_dim)[:, tokens:] = 0

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab]."""
        shape, position = self.shape, batch.position.long()
        wide = (self._angles[0][position], self._angles[1][position])
        near = (self._angles_local[0][position], self._angles_local[1][position])
        x = self._embed[batch.token.long()]
        if shape.embed_scale != 1:
            x = x * torch.tensor(shape.embed_scale, dtype=torch.float32)
        for index, layer in enumerate(self._layers):
            mixed = self._mix(batch, pages[:, index], layer, x, index, near if shape.is_local(index) else wide)
            x = x + self._after(layer, "post_attn_norm", reference.linear(mixed, layer["o"]))
            normed = reference.norm(x, layer["ffn_norm"], shape.eps)
            gate, up = (reference.linear(normed, layer[part]) for part in ("gate", "up"))
            joined = reference.gelu_mul(gate, up) if shape.activation == "gelu_tanh" else reference.silu_mul(gate, up)
            x = x + self._after(layer, "post_ffn_norm", reference.linear(joined, layer["down"]))
        return reference.linear(reference.norm(x[batch.want.long()], self._out_norm, shape.eps), self._head)

    def _after(self, layer: dict[str, torch.Tensor], part: str, added: torch.Tensor) -> torch.Tensor:
        return reference.norm(added, layer[part], self.shape.eps) if part in layer else added

    def _mix(
        self,
        batch: Batch,
        pages: torch.Tensor,
        layer: dict[str, torch.Tensor],
        x: torch.Tensor,
        index: int,
        angles: Angles,
    ) -> torch.Tensor:
        """Attention without its output projection. pages: [blocks, 2, kv_heads, 16, head_dim]."""
        shape = self.shape
        normed = reference.norm(x, layer["attn_norm"], shape.eps)
        linear = {part: reference.linear(normed, layer[part], layer.get(f"{part}_bias")) for part in ("q", "k", "v")}
        q, k, v = (part.view(part.shape[0], -1, shape.head_dim) for part in linear.values())
        if shape.head_norms:
            q, k = (reference.norm(part, layer[name], shape.eps) for part, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = reference.rotate(q, *angles), reference.rotate(k, *angles)
        position, sequence = batch.position.long(), batch.sequence.long()
        block = batch.table[sequence, position // BLOCK_TOKENS].long()
        pages[block, 0, :, position % BLOCK_TOKENS] = k
        pages[block, 1, :, position % BLOCK_TOKENS] = v
        out = []
        for number in sequence.unique_consecutive().tolist():
            rows = sequence == number
            first, last = int(position[rows][0]), int(position[rows][-1])
            table = batch.table[number, : last // BLOCK_TOKENS + 1].long()
            kept = pages[table].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : last + 1]  # [2, positions, kv_heads, dim]
            out.append(reference.attend(q[rows], kept[0], kept[1], first, shape.scale, shape.window(index)))
        return torch.cat(out).flatten(1)

    def close(self) -> None:
        """Nothing to end."""
