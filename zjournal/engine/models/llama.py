"""The llama family: its shape as a GGUF tells it, its tensors, and the decoder over C kernels or torch.

Both decoders take the same `Batch` and keep KV in pages of 16 tokens; what a row gets depends on that row's own
sequence alone, bit for bit. The C decoder's layers stand in zjcpu.c, in the order in which TorchLlama has
them here. Source of names and metadata: the GGUF specification and its `llama` architecture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from zjournal.checkpoint.gguf import Header, TensorFile
from zjournal.engine.models import weights
from zjournal.errors import ModelFault
from zjournal.kernels import cpu
from zjournal.kernels.cpu import reference

ARCHITECTURE = "llama"
BLOCK_TOKENS = cpu.BLOCK_TOKENS
LAYERS_MAX = 1024
WIDTH_MAX = 1 << 17
VOCAB_MAX = 1 << 20
CONTEXT_MAX = 1 << 22

_LAYER_TENSORS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
_EMBED, _OUT_NORM, _HEAD, _ROPE_FACTORS = (
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    "rope_freqs.weight",
)

Progress = Callable[[float], None]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that the metadata gives. `context` is what the model was trained for."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    vocab: int
    context: int
    eps: float


class Batch(msgspec.Struct, frozen=True):
    """One step. Row i is `token[i]` at `position[i]` of sequence `sequence[i]`; rows of a sequence stand together,
    at consecutive positions. `table` [sequences, width] holds block numbers. Logits are for rows `want`. All int32."""

    token: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    table: torch.Tensor
    want: torch.Tensor


def read_shape(header: Header) -> Shape:
    """Reads and checks the metadata. Raises ModelFault for what is missing, impossible or not computed here."""
    name = header.value("general.architecture", str)
    if name != ARCHITECTURE:
        raise ModelFault(f"{header.path}: the architecture {name} is not supported, only {ARCHITECTURE}")
    if header.get("llama.expert_count", 0):
        raise ModelFault(f"{header.path}: mixtures of experts are not supported")
    scaling = header.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFault(f"{header.path}: RoPE scaling {scaling} is not supported")

    def size(key: str, most: int, default: int | None = None) -> int:
        value = header.value(f"llama.{key}", int, default)
        if not 0 < value <= most:
            raise ModelFault(f"{header.path}: llama.{key} is {value}, not between 1 and {most}")
        return value

    hidden, heads = size("embedding_length", WIDTH_MAX), size("attention.head_count", WIDTH_MAX)
    head_dim = size("attention.key_length", WIDTH_MAX, hidden // heads or None)
    embed = header.tensors.get(_EMBED)
    if embed is None or len(embed.shape) != 2 or embed.shape[0] > VOCAB_MAX:
        raise ModelFault(f"{header.path}: the tensor {_EMBED} is missing or has an impossible shape")
    shape = Shape(
        layers=size("block_count", LAYERS_MAX),
        hidden=hidden,
        ffn=size("feed_forward_length", WIDTH_MAX),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads, heads),
        head_dim=head_dim,
        rope_dim=size("rope.dimension_count", head_dim, head_dim),
        rope_base=header.value("llama.rope.freq_base", float, 10000.0),
        vocab=embed.shape[0],
        context=size("context_length", CONTEXT_MAX),
        eps=header.value("llama.attention.layer_norm_rms_epsilon", float),
    )
    _check_shape(header, shape)
    return shape


def _check_shape(header: Header, shape: Shape) -> None:
    lanes = cpu.LANES
    for what, value, multiple in (
        ("head_count", shape.heads, shape.kv_heads),
        ("head size", shape.head_dim, lanes),
        ("embedding_length", shape.hidden, lanes),
        ("feed_forward_length", shape.ffn, lanes),
        ("rope.dimension_count", shape.rope_dim, 2),
    ):
        if value % multiple:
            raise ModelFault(f"{header.path}: {what} {value} is not a multiple of {multiple}")
    if shape.heads // shape.kv_heads > cpu.QUERIES_MAX:
        raise ModelFault(f"{header.path}: more than {cpu.QUERIES_MAX} query heads share a key head")
    if not (shape.rope_base > 0 and 0 < shape.eps < 1):
        raise ModelFault(f"{header.path}: RoPE base {shape.rope_base} or epsilon {shape.eps} is impossible")


def expected_tensors(shape: Shape) -> tuple[dict[str, weights.Shape], dict[str, weights.Shape]]:
    """Names and shapes of the tensors that must be there, and of those that may."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, ffn = shape.hidden, shape.ffn
    of_layer: dict[str, weights.Shape] = {
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    must: dict[str, weights.Shape] = {_EMBED: (shape.vocab, hidden), _OUT_NORM: (hidden,)}
    for layer in range(shape.layers):
        must |= {layer_tensor(layer, part): size for part, size in of_layer.items()}
    return must, {_HEAD: (shape.vocab, hidden), _ROPE_FACTORS: (shape.rope_dim // 2,)}


def layer_tensor(layer: int, part: str) -> str:
    """The GGUF name of a layer's tensor: layer_tensor(0, "q") is blk.0.attn_q.weight."""
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def rope_tables(shape: Shape, context: int, factors: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position's angles, fp32 [context, rope_dim / 2].

    Frequencies and angles are rounded to fp32 as the reference implementations have them; the rest is float64, so
    that no library's fp32 cosine enters the numerics. `factors` divide the frequencies (rope_freqs.weight).
    """
    exponents = np.arange(0, shape.rope_dim, 2, dtype=np.float64) / shape.rope_dim
    frequencies = (1.0 / shape.rope_base**exponents).astype(np.float32)
    if factors is not None:
        frequencies = frequencies / factors
    angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def _tables(shape: Shape, header: Header, file: TensorFile, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    info = header.tensors.get(_ROPE_FACTORS)
    return rope_tables(shape, context, weights.expand(file, info) if info else None)


class NativeLlama:
    """The decoder over the C kernels. Matrices stay as the file stores them (Q4_1, Q8_0) or become fp32."""

    numerics = cpu.NUMERICS
    layout = cpu.LAYOUT

    def __init__(self, shape: Shape, header: Header, context: int, kernels: cpu.Kernels, mode: str, progress: Progress):
        """`mode`: file or fp32. The logits are the same bits. Raises ModelFault."""
        self._kernels = kernels
        self._kept: list[cpu.Packed | torch.Tensor] = []  # what the structs point to
        self._layers = (cpu.LayerStruct * shape.layers)()
        self.shape = shape
        self.name = f"c {kernels.name}"
        with TensorFile(header) as file:

            def matrix(name: str) -> cpu.MatrixStruct:
                info = header.tensors[name]
                keep = mode == "file" and info.type in ("Q4_1", "Q8_0")
                rows = weights.stored(file, info) if keep else weights.expand(file, info)
                packed = kernels.pack(info.type if keep else "F32", rows.ctypes.data, *info.shape)
                self._kept.append(packed)
                return packed.struct

            def vector(name: str) -> int:
                values = weights.expand_tensor(file, header.tensors[name])
                self._kept.append(values)
                return values.data_ptr()

            for index, layer in enumerate(self._layers):
                for part in cpu.LAYER_MATRICES:
                    setattr(layer, part, matrix(layer_tensor(index, part)))
                for part in cpu.LAYER_NORMS:
                    setattr(layer, part, vector(layer_tensor(index, part)))
                progress((index + 1) / (shape.layers + 1))
            embed = matrix(_EMBED)
            head = matrix(_HEAD) if _HEAD in header.tensors else embed
            cos, sin = _tables(shape, header, file, context)
            self._kept += [cos, sin]
            sizes = (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.head_dim, shape.rope_dim)
            pointers = (cos.data_ptr(), sin.data_ptr(), vector(_OUT_NORM), embed, head)
            first = ctypes.cast(self._layers, ctypes.POINTER(cpu.LayerStruct))
            self._model = cpu.ModelStruct(*sizes, 0, shape.eps, shape.head_dim**-0.5, *pointers, first)

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks, untouched: the system gives it when it is first written."""
        shape = self.shape
        return torch.empty(blocks, shape.layers, shape.kv_heads, 2, shape.head_dim * BLOCK_TOKENS)

    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab]."""
        logits = torch.empty(batch.want.shape[0], self.shape.vocab)
        tensors = {name: getattr(batch, name) for name in Batch.__struct_fields__}
        self._kernels.forward(self._model, cpu.batch_struct(**tensors, kv=pages, logits=logits))
        return logits

    def close(self) -> None:
        """Ends the kernels' threads."""
        self._kernels.close()


class TorchLlama:
    """The decoder over torch operators of fixed shapes, all weights in fp32."""

    layout = reference.LAYOUT

    def __init__(self, shape: Shape, header: Header, context: int, why: str, progress: Progress) -> None:
        """`why`: what to tell people about the missing C kernels. Raises ModelFault."""
        self.shape = shape
        self.name = f"torch ({why})"
        self.numerics = f"{reference.NUMERICS}.{torch.get_num_threads()}"
        with TensorFile(header) as file:

            def tensor(name: str) -> torch.Tensor:
                return weights.expand_tensor(file, header.tensors[name])

            self._layers = []
            for index in range(shape.layers):
                self._layers.append({part: tensor(layer_tensor(index, part)) for part in _LAYER_TENSORS})
                progress((index + 1) / (shape.layers + 1))
            self._embed = tensor(_EMBED)
            self._head = tensor(_HEAD) if _HEAD in header.tensors else self._embed
            self._out_norm = tensor(_OUT_NORM)
            self._cos, self._sin = _tables(shape, header, file, context)

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks, untouched: the system gives it when it is first written."""
        shape = self.shape
        return torch.empty(blocks, shape.layers, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab]."""
        eps, position = self.shape.eps, batch.position.long()
        angles = self._cos[position], self._sin[position]
        x = self._embed[batch.token.long()]
        for index, layer in enumerate(self._layers):
            normed = reference.norm(x, layer["attn_norm"], eps)
            q, k, v = (reference.linear(normed, layer[part]) for part in ("q", "k", "v"))
            mixed = self._attention(batch, pages[:, index], (q, k, v), angles)
            x = x + reference.linear(mixed, layer["o"])
            normed = reference.norm(x, layer["ffn_norm"], eps)
            wide = reference.silu_mul(*(reference.linear(normed, layer[part]) for part in ("gate", "up")))
            x = x + reference.linear(wide, layer["down"])
        return reference.linear(reference.norm(x[batch.want.long()], self._out_norm, eps), self._head)

    def _attention(
        self,
        batch: Batch,
        pages: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Stores k and v, then attends, sequence by sequence. pages: [blocks, 2, kv_heads, 16, head_dim]."""
        q, k, v = (part.view(part.shape[0], -1, self.shape.head_dim) for part in qkv)
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
            out.append(reference.attend(q[rows], kept[0], kept[1], first))
        return torch.cat(out).flatten(1)

    def close(self) -> None:
        """Nothing to end."""


Llama = NativeLlama | TorchLlama


def load(header: Header, shape: Shape, context: int, threads: int, mode: str, progress: Progress) -> Llama:
    """Loads the model on the C kernels, or on torch where the install has none. Raises ModelFault."""
    weights.check_tensors(header, *expected_tensors(shape))
    library, why = cpu.open_library()
    if library is None:
        torch.set_num_threads(threads)
        return TorchLlama(shape, header, context, why, progress)
    torch.set_num_threads(1)  # its threads would wait actively beside ours
    return NativeLlama(shape, header, context, cpu.Kernels(library, threads), mode, progress)
