"""The decoder over the C kernels. Its layers stand in zjcpu.c, in the order in which plain.py has them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from zjournal.checkpoint.checkpoint import Checkpoint
from zjournal.checkpoint.decoder import Model
from zjournal.engine.models import rope
from zjournal.engine.models.decoder import BLOCK_TOKENS, Batch, Progress
from zjournal.engine.models.weights import Weights
from zjournal.kernels import cpu

_ACTIVATIONS = {"silu": cpu.SILU, "gelu_tanh": cpu.GELU_TANH}


class NativeDecoder:
    """A model on the C kernels. Matrices stay as the file stores them where the kernels can hold that, else fp32."""

    numerics = cpu.NUMERICS
    layout = cpu.LAYOUT

    def __init__(
        self, checkpoint: Checkpoint, model: Model, context: int, kernels: cpu.Kernels, mode: str, progress: Progress
    ) -> None:
        """`mode`: file or fp32. The logits are the same bits. Raises ModelFault."""
        self._kernels = kernels
        self._kept: list[cpu.Packed | torch.Tensor] = []  # what the structs point to
        self._keep_types: tuple[str, ...] = cpu.PACKED if mode == "file" else ()
        self.shape = model.decoder
        self.name = f"c {kernels.name}"
        self._layers = (cpu.LayerStruct * self.shape.layers)()
        with Weights(checkpoint, model) as read:
            for index, layer in enumerate(self._layers):
                self._fill(read, model, index, layer)
                progress((index + 1) / (self.shape.layers + 1))
            self._model = self._struct(read, model, context)

    def _fill(self, read: Weights, model: Model, index: int, layer: cpu.LayerStruct) -> None:
        """Packs one layer's tensors."""
        shape = model.decoder
        for part in shape.parts():
            if part in cpu.LAYER_MATRICES:
                keep = self._keeps(read, model.spelling.of(index, part))
                setattr(layer, part, self._packed(read.rows(part, index, keep)))
            else:
                setattr(layer, part, self._address(read.values(part, index)))
        layer.window = shape.window(index)
        layer.local = int(shape.is_local(index))

    def _struct(self, read: Weights, model: Model, context: int) -> cpu.ModelStruct:
        """The rest of the model; also what the kernels' functions are handed."""
        shape, spelling = model.decoder, model.spelling
        embed = self._packed(read.matrix(spelling.embed, self._keeps(read, spelling.embed)))
        name = read.head()
        head = embed if name is None else self._packed(read.matrix(name, self._keeps(read, name)))
        cos, sin = rope.tables(shape.rope, context, read.rope_factors())
        sizes = (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.head_dim, shape.rope.dim)
        pointers = (self._address(cos), self._address(sin), self._address(read.out_norm()), embed, head)
        first = ctypes.cast(self._layers, ctypes.POINTER(cpu.LayerStruct))
        made = cpu.ModelStruct(*sizes, _ACTIVATIONS[shape.activation], shape.eps, shape.scale, *pointers, first)
        if shape.rope_local is not None:
            cos, sin = rope.tables(shape.rope_local, context)
            made.cos_local, made.sin_local = self._address(cos), self._address(sin)
        made.embed_scale = 0.0 if shape.embed_scale == 1 else shape.embed_scale
        return made

    def _keeps(self, read: Weights, name: str) -> bool:
        info = read.info(name)
        return info.type in self._keep_types and info.shape[-1] % cpu.BLOCK_VALUES[info.type] == 0

    def _packed(self, matrix: tuple) -> cpu.MatrixStruct:
        kind, rows, size = matrix
        packed = self._kernels.pack(kind, rows.ctypes.data, *size)
        self._kept.append(packed)
        return packed.struct

    def _address(self, values: torch.Tensor) -> int:
        self._kept.append(values)
        return values.data_ptr()

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks, untouched: the system gives it when it is first written."""
        shape = self.shape
        return torch.empty(blocks, shape.layers, shape.kv_heads, 2, shape.head_dim * BLOCK_TOKENS)

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in the bytes of a block the KV of all positions behind its first `tokens`. For any thread."""
        shape = self.shape
        values = np.frombuffer(memory, np.float32).reshape(-1, 2, shape.head_dim * BLOCK_TOKENS)
        for keys, rows in values:  # of a head, each contiguous
            keys.reshape(shape.head_dim, BLOCK_TOKENS)[:, tokens:] = 0
            rows.reshape(BLOCK_TOKENS, shape.head_dim)[tokens:] = 0

    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab]."""
        logits = torch.empty(batch.want.shape[0], self.shape.vocab)
        tensors = {name: getattr(batch, name) for name in Batch.__struct_fields__}
        self._kernels.forward(self._model, cpu.batch_struct(**tensors, kv=pages, logits=logits))
        return logits

    def close(self) -> None:
        """Ends the kernels' threads."""
        self._kernels.close()
