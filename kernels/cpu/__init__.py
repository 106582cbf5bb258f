"""The C kernels of the CPU path: the library, if the install could build it, and its functions over torch tensors.

The library is plain C behind a C ABI (zjcpu.c), compiled for AVX-512, AVX2 and any machine, chosen at run time; all
three give the same bits. Without it the caller takes the torch operators of `reference`. Nothing here
knows a model file: matrices come as addresses of GGUF rows and are packed once, values unchanged.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path

import torch

LANES = 16
BLOCK_TOKENS = 16
HEAD_DIM_MAX = 256
SILU, GELU_TANH = 0, 1  # of the feed-forward
QUERIES_MAX = 64  # query heads that share one kv head
NUMERICS = "c-fma-korder-1"  # changes whenever a kernel's bits change
LAYOUT = "block.layer.head.kt16.v16.f32-1"  # of the KV pages

# The kinds of GGUF rows that the kernels read as they are, in the order of zjcpu.h.
PACKED = ("F32", "Q4_1", "Q8_0", "F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# A row's length is a multiple of so many values.
BLOCK_VALUES = {kind: 256 if kind.endswith("_K") else 32 if kind.startswith("Q") else 1 for kind in PACKED}
_LIBRARY = "_zjcpu"


class MatrixStruct(ctypes.Structure):
    """zj_matrix of zjcpu.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER_NORMS = ("attn_norm", "ffn_norm")
LAYER_OPTIONAL = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "post_attn_norm", "post_ffn_norm")


class LayerStruct(ctypes.Structure):
    """zj_layer of zjcpu.h: fp32 vectors by address; None or 0 leaves an optional step out."""

    _fields_ = (
        *((name, MatrixStruct) for name in LAYER_MATRICES),
        *((name, ctypes.c_void_p) for name in (*LAYER_NORMS, *LAYER_OPTIONAL)),
        ("window", ctypes.c_int32),
        ("local", ctypes.c_int32),
    )


_MODEL_INTS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "rope_dim", "activation")


class ModelStruct(ctypes.Structure):
    """zj_model of zjcpu.h. `activation`: SILU or GELU_TANH; a scale or address of 0 is one that is not there."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _MODEL_INTS),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("out_norm", ctypes.c_void_p),
        ("embed", MatrixStruct),
        ("head", MatrixStruct),
        ("layer", ctypes.POINTER(LayerStruct)),
        ("cos_local", ctypes.c_void_p),
        ("sin_local", ctypes.c_void_p),
        ("embed_scale", ctypes.c_float),
        ("logit_scale", ctypes.c_float),
    )


_BATCH_INTS = ("rows", "wanted", "table_stride", "unused")
_BATCH_POINTERS = ("token", "position", "sequence", "table", "want", "kv", "logits")


class BatchStruct(ctypes.Structure):
    """zj_batch of zjcpu.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _BATCH_INTS),
        *((name, ctypes.c_void_p) for name in _BATCH_POINTERS),
    )


class Packed:
    """A matrix [n, k] in the kernels' layout. Owns the memory that `struct` points to."""

    def __init__(self, struct: MatrixStruct, data: torch.Tensor) -> None:
        self.struct = struct
        self.data = data

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.n, self.struct.k


def open_library(folder: Path = Path(__file__).parent) -> tuple[ctypes.CDLL | None, str]:
    """Returns the library and "", or None and why there is none."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{_LIBRARY}{suffix}"
        if path.exists():
            try:
                return _declare(ctypes.CDLL(str(path))), ""
            except (OSError, AttributeError) as error:
                return None, f"the C kernels do not load: {error}"
    return None, "no C kernels in this install"


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple] = {
        "zj_open": (pointer, integer, ctypes.c_char_p),
        "zj_close": (None, pointer),
        "zj_isa_name": (ctypes.c_char_p, pointer),
        "zj_packed_bytes": (ctypes.c_int64, integer, integer, integer),
        "zj_pack": (None, pointer, integer, pointer, integer, integer, pointer),
        "zj_forward": (integer, pointer, pointer, pointer),
        "zj_linear": (integer, pointer, pointer, pointer, integer, pointer, integer),
        "zj_unpack": (None, pointer, pointer, pointer),
        "zj_norm": (None, pointer, pointer, pointer, ctypes.c_float, integer, integer, pointer),
        "zj_gate_mul": (None, pointer, integer, pointer, pointer, integer),
        "zj_rotate_store": (None, pointer, pointer, pointer, integer, pointer),
        "zj_attend": (integer, pointer, pointer, pointer, integer, pointer, pointer),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """The address of a contiguous CPU tensor; None stays a null pointer."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()


class Kernels:
    """The kernels on `threads` threads. Not for use by two threads at once. Tensors are fp32, ids int32."""

    def __init__(self, library: ctypes.CDLL, threads: int, isa: str = "") -> None:
        """`isa`: avx512, avx2, portable, or "" for the best. Raises ValueError if this CPU lacks it."""
        self._library = library
        self._context = library.zj_open(threads, isa.encode())
        if not self._context:
            raise ValueError(f"instruction set {isa!r} is not available")
        self.name: str = library.zj_isa_name(self._context).decode()

    def close(self) -> None:
        """Ends the threads. Nothing may be called after it."""
        self._library.zj_close(self._context)
        self._context = None

    def pack(self, kind: str, rows: int, n: int, k: int) -> Packed:
        """Packs [n, k] values stored as GGUF rows of type `kind` (one of PACKED) at address `rows`."""
        assert k % BLOCK_VALUES[kind] == 0, (kind, k)
        form = PACKED.index(kind)
        data = torch.zeros(self._library.zj_packed_bytes(form, n, k), dtype=torch.uint8)  # 64-byte aligned by torch
        self._library.zj_pack(self._context, form, rows, n, k, data.data_ptr())
        return Packed(MatrixStruct(form, n, k, 0, data.data_ptr()), data)

    def unpack(self, matrix: Packed) -> torch.Tensor:
        """The values of a packed matrix, fp32 [n, k]."""
        out = torch.empty(matrix.shape)
        self._library.zj_unpack(self._context, ctypes.byref(matrix.struct), out.data_ptr())
        return out

    def linear(self, matrix: Packed, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, k] times the matrix transposed, [rows, n]; added in place to `add_to` if that is given."""
        assert x.shape[1] == matrix.struct.k
        y = torch.empty(x.shape[0], matrix.struct.n) if add_to is None else add_to
        assert y.shape == (x.shape[0], matrix.struct.n)
        pointers = address(x, torch.float32), x.shape[0], address(y, torch.float32), int(add_to is not None)
        self._check(self._library.zj_linear(self._context, ctypes.byref(matrix.struct), *pointers))
        return y

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of the rows of x [rows, width]; width is a multiple of 16."""
        y = torch.empty_like(x)
        rows, width = x.shape
        assert width % LANES == 0
        f32 = torch.float32
        self._library.zj_norm(self._context, address(x, f32), address(weight, f32), eps, rows, width, address(y, f32))
        return y

    def gate_mul(self, activation: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """SILU or GELU_TANH of gate, times up, element by element; the number of elements is a multiple of 16."""
        y = gate.clone()
        assert y.numel() % LANES == 0
        assert up.shape == gate.shape
        assert activation in (SILU, GELU_TANH)
        f32 = torch.float32
        self._library.zj_gate_mul(self._context, activation, address(y, f32), address(up, f32), y.numel())
        return y

    def rotate_store(self, model: ModelStruct, batch: BatchStruct, layer: int, qkv: torch.Tensor) -> None:
        """Adds biases to `qkv` [rows, q + k + v], norms and rotates q and k, all in place as the model's `layer` says,
        and stores k and v in the pages of that layer."""
        pointers = ctypes.byref(model), ctypes.byref(batch), layer, address(qkv, torch.float32)
        self._library.zj_rotate_store(self._context, *pointers)

    def attend(self, model: ModelStruct, batch: BatchStruct, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Causal attention of the rotated q [rows, heads * head_dim] over the pages of `layer`, within its window; the
        same shape."""
        out = torch.empty_like(q)
        pointers = ctypes.byref(model), ctypes.byref(batch), layer, address(q, torch.float32), out.data_ptr()
        self._check(self._library.zj_attend(self._context, *pointers))
        return out

    def forward(self, model: ModelStruct, batch: BatchStruct) -> None:
        """One step: fills the batch's pages and logits. Raises MemoryError."""
        self._check(self._library.zj_forward(self._context, ctypes.byref(model), ctypes.byref(batch)))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise MemoryError("no memory for the step's activations")


def batch_struct(
    *,
    token: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    table: torch.Tensor,
    want: torch.Tensor,
    kv: torch.Tensor,
    logits: torch.Tensor | None,
) -> BatchStruct:
    """A step's arguments; the tensors must outlive it. Shapes: [rows] three times, [sequences, width], [wanted]."""
    ids = torch.int32
    assert token.shape == position.shape == sequence.shape
    assert logits is None or logits.shape[0] == want.shape[0]
    return BatchStruct(
        token.shape[0],
        want.shape[0],
        table.shape[1],
        0,
        *(address(tensor, ids) for tensor in (token, position, sequence, table, want)),
        address(kv, torch.float32),
        address(logits, torch.float32),
    )
