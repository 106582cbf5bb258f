"""What a decoder computes, whatever file describes it: sizes, flags of each layer, RoPE; and where its tensors lie.

One file per family (families/) makes a `Model` from GGUF metadata or from a config.json. Whoever builds a
decoder reads only what is here. Nothing of a file is passed over in silence: what would change the result
and is not computed is a ModelFault that names file, key and value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from zjournal.errors import ConfigFault, ModelFault

LAYERS_MAX = 1024
WIDTH_MAX = 1 << 17
VOCAB_MAX = 1 << 20
CONTEXT_MAX = 1 << 22
HEAD_DIM_MAX = 256
SHARE_MAX = 64  # query heads that share one key head
LANES = 16  # widths are multiples of it
ROPE_FACTOR_MAX = 1024.0
ROPE_BASE_MAX = 1e12
ROTATIONS_MIN, ROTATIONS_MAX = 1e-3, 1e6  # YaRN's beta_slow and beta_fast; usual are 1 and 32
AMPLITUDE_MAX = 100.0  # YaRN's attention_factor

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "ffn_norm")
BIASES = ("q_bias", "k_bias", "v_bias")
HEAD_NORMS = ("q_norm", "k_norm")
POST_NORMS = ("post_attn_norm", "post_ffn_norm")

Shape = tuple[int, ...]
Scaling = Literal["default", "linear", "llama3", "yarn"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """One rotation: dimensions, base, and how its frequencies are scaled.

    `original` is the context before scaling (llama3, yarn). `amplitude` multiplies cos and sin; None is YaRN's own
    rule, 0.1 ln(factor) + 1. Meaning as in transformers' modeling_rope_utils.
    """

    dim: int
    base: float
    kind: Scaling = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0  # llama3: low_freq_factor
    high: float = 4.0  # llama3: high_freq_factor
    beta_fast: float = 32.0  # yarn, as the next
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float | None = None


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and flags. `context` is what the model was made for, in tokens; `window` 0 sees all positions."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    rope: Rope
    rope_local: Rope | None = None  # of the layers in `local`
    windows: tuple[int, ...] = ()  # per layer; (): none has one
    local: tuple[bool, ...] = ()  # per layer; (): all use `rope`
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    scale: float  # of attention scores
    qkv_bias: bool = False
    head_norms: bool = False  # RMSNorm of each query and key head before the rotation
    post_norms: bool = False  # RMSNorm of what attention and FFN add
    tied: bool = True  # the head is the embedding
    context_limit: int = 0  # what `context` may be raised to; 0: not at all

    def window(self, layer: int) -> int:
        """How many positions a row of this layer sees, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_local(self, layer: int) -> bool:
        """Whether this layer rotates by `rope_local`."""
        return bool(self.local) and self.local[layer]

    def parts(self) -> dict[str, Shape]:
        """The tensors of one layer and their shapes; linear layers are (out, in)."""
        q, kv, hidden, ffn = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.ffn
        made: dict[str, Shape] = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        made |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        made |= dict.fromkeys(NORMS, (hidden,))
        if self.qkv_bias:
            made |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.head_norms:
            made |= dict.fromkeys(HEAD_NORMS, (self.head_dim,))
        if self.post_norms:
            made |= dict.fromkeys(POST_NORMS, (hidden,))
        return made


class Spelling(msgspec.Struct, frozen=True, kw_only=True):
    """How a file spells a decoder: the names of its tensors, and what has to be undone when they are read.

    `half_split`: q and k are stored for rotation of a head's halves against each other, not of neighbours.
    `norm_offset` is added to the weights of all norms. `may` are names that are known and not used.
    """

    embed: str
    out_norm: str
    head: str
    layer: Mapping[str, str]  # part -> name, {} stands for the layer's number
    rope_factors: str = ""  # divisors of the frequencies; read where the file has them
    may: Mapping[str, Shape] = {}
    half_split: bool = False
    norm_offset: float = 0.0

    def of(self, layer: int, part: str) -> str:
        """The name of a layer's tensor."""
        return self.layer[part].format(layer)


class Model(msgspec.Struct, frozen=True):
    """A decoder and how its file spells it."""

    decoder: Decoder
    spelling: Spelling

    def expected(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Names and shapes of the tensors that must be there, and of those that may."""
        decoder, spelling = self.decoder, self.spelling
        must: dict[str, Shape] = {spelling.embed: (decoder.vocab, decoder.hidden), spelling.out_norm: (decoder.hidden,)}
        may = dict(spelling.may)
        (may if decoder.tied else must)[spelling.head] = (decoder.vocab, decoder.hidden)
        for layer in range(decoder.layers):
            must |= {spelling.of(layer, part): shape for part, shape in decoder.parts().items()}
        if spelling.rope_factors:
            may[spelling.rope_factors] = (decoder.rope.dim // 2,)
        return must, may


def refuse(path: Path, key: str, value: object, why: str) -> NoReturn:
    """Raises the ModelFault for a value that is not computed here."""
    raise ModelFault(f"{path}: {key} is {value!r}: {why}")


def check(decoder: Decoder, path: Path) -> Decoder:
    """Returns the decoder. Raises ModelFault for sizes that cannot be, or that the kernels do not compute."""
    limits = (
        ("the number of layers", decoder.layers, LAYERS_MAX),
        ("the hidden size", decoder.hidden, WIDTH_MAX),
        ("the FFN size", decoder.ffn, WIDTH_MAX),
        ("the number of heads", decoder.heads, WIDTH_MAX),
        ("the number of key heads", decoder.kv_heads, decoder.heads),
        ("the head size", decoder.head_dim, HEAD_DIM_MAX),
        ("the rotated part of a head", decoder.rope.dim, decoder.head_dim),
        ("the vocabulary", decoder.vocab, VOCAB_MAX),
        ("the context", decoder.context, CONTEXT_MAX),
    )
    for what, value, most in limits:
        if not 0 < value <= most:
            raise ModelFault(f"{path}: {what} is {value}, not between 1 and {most}")
    multiples = (
        ("the number of heads", decoder.heads, decoder.kv_heads),
        ("the head size", decoder.head_dim, LANES),
        ("the hidden size", decoder.hidden, LANES),
        ("the FFN size", decoder.ffn, LANES),
        ("the rotated part of a head", decoder.rope.dim, 2),
    )
    for what, value, multiple in multiples:
        if value % multiple:
            raise ModelFault(f"{path}: {what}, {value}, is not a multiple of {multiple}")
    if decoder.heads // decoder.kv_heads > SHARE_MAX:
        raise ModelFault(f"{path}: more than {SHARE_MAX} query heads share a key head")
    if not (0 < decoder.eps < 1 and 0 < decoder.scale <= 1):
        raise ModelFault(f"{path}: the epsilon {decoder.eps} or the attention scale {decoder.scale} is impossible")
    for rope in (decoder.rope, decoder.rope_local or decoder.rope):
        _check_rope(rope, path)
    if any(window < 0 for window in decoder.windows):
        raise ModelFault(f"{path}: a sliding window of {min(decoder.windows)} is impossible")
    return decoder


def _check_rope(rope: Rope, path: Path) -> None:
    if not 1 < rope.base <= ROPE_BASE_MAX:
        raise ModelFault(f"{path}: the RoPE base {rope.base} is not between 1 and {ROPE_BASE_MAX:g}")
    if not 1 <= rope.factor <= ROPE_FACTOR_MAX:
        raise ModelFault(f"{path}: the RoPE factor {rope.factor} is not between 1 and {ROPE_FACTOR_MAX:g}")
    if rope.kind in ("llama3", "yarn") and not 1 <= rope.original <= CONTEXT_MAX:
        raise ModelFault(
            f"{path}: RoPE scaling {rope.kind} has the original context {rope.original}, not 1 to {CONTEXT_MAX}"
        )
    if rope.kind == "llama3" and not 0 < rope.low < rope.high:
        raise ModelFault(f"{path}: RoPE's low_freq_factor {rope.low} is not below high_freq_factor {rope.high}")
    if rope.kind == "yarn" and not 0 < rope.beta_slow <= rope.beta_fast:
        raise ModelFault(f"{path}: RoPE's beta_slow {rope.beta_slow} is over beta_fast {rope.beta_fast}")
    if rope.kind == "yarn" and not (rope.beta_slow >= ROTATIONS_MIN and rope.beta_fast <= ROTATIONS_MAX):
        found = f"{rope.beta_slow:g} and {rope.beta_fast:g}"
        raise ModelFault(
            f"{path}: RoPE's beta_slow and beta_fast are {found}, not {ROTATIONS_MIN:g} to {ROTATIONS_MAX:g}"
        )
    if rope.amplitude is not None and not 0 < rope.amplitude <= AMPLITUDE_MAX:
        raise ModelFault(f"{path}: RoPE's attention_factor is {rope.amplitude:g}, not between 0 and {AMPLITUDE_MAX:g}")


# --- the override -------------------------------------------------------------------------------------

_TERM = re.compile(r"(linear|yarn|base):([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)")
ROPE_SYNTAX = "linear:FACTOR, yarn:FACTOR or base:NUMBER, or one of the first two and base, with a comma between"


def override(model: Model, text: str) -> Model:
    """The model with the rotation that `text` tells, in place of its own scaling.

    `linear:F` and `yarn:F` make the context F times the model's; `base:B` changes the base and lets the context be
    raised as wanted. What is not named stays as the model has it, without scaling. Local layers keep theirs.
    "" changes nothing. Raises ConfigFault.
    """
    if not text:
        return model
    base, kind, factor = _parse(text)
    decoder, spelling, own = model.decoder, model.spelling, model.decoder.rope
    original = own.original if own.kind in ("llama3", "yarn") else decoder.context
    rope = Rope(dim=own.dim, base=base or own.base, kind=kind, factor=factor, original=original)
    context = decoder.context if kind == "default" else min(int(original * factor), CONTEXT_MAX)
    limit = CONTEXT_MAX if base else context
    if spelling.rope_factors:  # a scaling as well: it may be there and is not used
        unused = {**spelling.may, spelling.rope_factors: (own.dim // 2,)}
        spelling = msgspec.structs.replace(spelling, rope_factors="", may=unused)
    return Model(msgspec.structs.replace(decoder, rope=rope, context=context, context_limit=limit), spelling)


def _parse(text: str) -> tuple[float, Scaling, float]:
    """Base (0: not told), kind and factor of an override."""
    told: dict[str, float] = {}
    for term in text.split(","):
        found = _TERM.fullmatch(term.strip())
        if found is None or found[1] in told:
            raise ConfigFault(f"rope {text!r} is not {ROPE_SYNTAX}", param="rope")
        told[found[1]] = float(found[2])
    if "linear" in told and "yarn" in told:
        raise ConfigFault(f"rope {text!r} is not {ROPE_SYNTAX}", param="rope")
    base = told.get("base", 0.0)
    kind: Scaling = "linear" if "linear" in told else "yarn" if "yarn" in told else "default"
    factor = told.get(kind, 1.0)
    if not 1 <= factor <= ROPE_FACTOR_MAX or not (base == 0 or 1 < base <= ROPE_BASE_MAX) or told.get("base") == 0:
        limits = f"a factor is from 1 to {ROPE_FACTOR_MAX:g}, a base from 1 to {ROPE_BASE_MAX:g}"
        raise ConfigFault(f"rope {text!r}: {limits}", param="rope")
    return base, kind, factor


def context_limit(decoder: Decoder) -> int:
    """The longest context that may be asked for, in tokens."""
    return max(decoder.context, decoder.context_limit)
