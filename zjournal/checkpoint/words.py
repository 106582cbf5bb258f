"""Vocabularies: from what a file says about its tokens to the machine that cuts text into them.

Two kinds are known. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) spells each byte as a printable character.
SentencePiece BPE with bytes for a character that it lacks (Gemma) spells a space as U+2581, so that a U+2581 in a text
is taken for a space, here as in every other implementation. Both come from GGUF metadata or a tokenizer.json.
Control tokens are kept out of the machine, so that no text can ever become one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pieces

from zjournal.checkpoint.hfconfig import read_object
from zjournal.errors import ModelFault

VOCABULARY_MAX = 1 << 20
TOKEN_CHARACTERS_MAX = 1024  # of one that SentencePiece joins: every way to cut it is looked at
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of a GGUF
SPACE = "\u2581"

# How a model cuts text into words, by the name in `tokenizer.ggml.pre`. The patterns are the models' published ones.
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": _CUT % r"\p{N}{1,3}", "qwen2": _CUT % r"\p{N}", "deepseek-r1-qwen": _CUT % r"\p{N}"}
# These names mean GPT-2's own pattern, which the library has built in; smollm cuts digits apart first.
_GPT2 = {"gpt-2": False, "default": False, "smollm": True}
_STEPS = ("ByteLevel", "Split", "Digits", "NFC")  # of a tokenizer.json, besides the one for spaces
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


class Words(msgspec.Struct, frozen=True):
    """The machine, what each id stands for, the control tokens, and the bytes that no token stands for.

    `composes`: characters are composed (NFC) before they are cut.
    """

    pieces: Any
    texts: list[bytes]  # by id; of a control token its literal
    control: dict[str, int]
    lacking: frozenset[int] = frozenset()
    composes: bool = False


def byte_level(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], pre: str) -> Words:
    """Byte-level BPE: `tokens[id]` in GPT-2's alphabet (control tokens as they are), `merges` as `left right`.

    User-defined tokens count as control tokens: what models of this kind have of them is written by templates. Raises
    ModelFault with a reason only.
    """
    _check_size(tokens, kinds)
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == NORMAL}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in _GPT2)]
    if pre in _PATTERNS:
        steps.insert(0, pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"))
    elif pre not in _GPT2:
        known = ", ".join(sorted({*_PATTERNS, *_GPT2}))
        raise ModelFault(f"the pre-tokenizer {pre} is not supported, only {known}")
    elif _GPT2[pre]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    pieces = _machine(lambda: models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    pieces.pre_tokenizer = pre_tokenizers.Sequence(steps)
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED) and tokens[i]}
    return _byte_level_words(pieces, tokens, control, set(vocabulary))


def _byte_level_words(pieces: Pieces, tokens: Sequence[str], control: dict[str, int], normal: set[str]) -> Words:
    alphabet = _alphabet()
    literals = set(control.values())
    texts = []
    for i, text in enumerate(tokens):
        try:
            texts.append(text.encode() if i in literals else text.translate(alphabet).encode("latin-1"))
        except UnicodeEncodeError:
            texts.append(text.encode())  # an unused entry outside the alphabet
    alone = {alphabet[ord(text)] for text in normal if len(text) == 1 and ord(text) in alphabet}
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in no UTF-8
    return Words(pieces, texts, control, frozenset(set(range(256)) - alone - never))


def sentencepiece(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> Words:
    """SentencePiece BPE: of two neighbours that make a token, those that make the one of the highest score join first.

    User-defined tokens are found in the text first, the longest at each place. Raises ModelFault with a reason only.
    """
    _check_size(tokens, kinds)
    if len(scores) != len(tokens):
        raise ModelFault(f"a vocabulary of {len(tokens)} tokens with {len(scores)} scores is impossible")
    reachable = (NORMAL, BYTE, USER_DEFINED)
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in reachable}
    vocabulary.pop("", None)
    whole = {text: i for text, i in vocabulary.items() if kinds[i] == NORMAL}
    longest = max(map(len, whole), default=0)
    if longest > TOKEN_CHARACTERS_MAX:
        raise ModelFault(f"a token has {longest} characters, more than {TOKEN_CHARACTERS_MAX}")
    ranked = []
    for text, i in whole.items():
        for at in range(1, len(text)):
            left, right = whole.get(text[:at]), whole.get(text[at:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, text[:at], text[at:]))
    ranked.sort()
    pairs = [(left, right) for *_, left, right in ranked]
    pieces = _machine(lambda: models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True))
    pieces.normalizer = normalizers.Replace(" ", SPACE)
    defined = [text for text, i in vocabulary.items() if kinds[i] == USER_DEFINED]
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i]}
    pieces.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])  # ids as they have them
    return _sentencepiece_words(pieces, tokens, control, vocabulary)


def _sentencepiece_words(
    pieces: Pieces, tokens: Sequence[str], control: dict[str, int], reachable: Container[str]
) -> Words:
    literals = set(control.values())
    texts, bytes_found = [], set()
    for i, text in enumerate(tokens):
        named = _BYTE_NAME.fullmatch(text)
        if named and text in reachable:
            bytes_found.add(int(named[1], 16))
            texts.append(bytes([int(named[1], 16)]))
        else:
            texts.append(text.encode() if i in literals else text.replace(SPACE, " ").encode())
    if len(bytes_found) != 256:
        raise ModelFault(f"the vocabulary has tokens for {len(bytes_found)} bytes, not 256")
    return Words(pieces, texts, control)


def _check_size(tokens: Sequence[str], kinds: Sequence[int]) -> None:
    if len(tokens) > VOCABULARY_MAX or len(kinds) != len(tokens):
        raise ModelFault(f"a vocabulary of {len(tokens)} tokens with {len(kinds)} kinds is impossible")


def _machine(model: Callable[[], Any]) -> Pieces:
    try:
        return Pieces(model())
    except Exception as error:  # the library raises a bare Exception
        raise ModelFault(f"the vocabulary is damaged: {error}") from error


def _alphabet() -> dict[int, int]:
    """GPT-2's byte alphabet, from the character that stands for a byte to the byte.

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: byte for byte in plain} | {0x100 + n: byte for n, byte in enumerate(others)}


# --- tokenizer.json -----------------------------------------------------------------------------------


def from_json(path: Path, size: int) -> Words:
    """The vocabulary of a tokenizer.json. `size`: ids that the model has; those without a token stand for nothing.

    Raises ModelFault for what is damaged, and for steps of another kind than the two above.
    """
    told = read_object(path)
    model = told.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ModelFault(f"{path}: model is not a BPE")
    if model.get("dropout"):
        raise ModelFault(f"{path}: model.dropout is {model['dropout']}, and a prompt must always give the same tokens")
    added = told.get("added_tokens") or []
    try:
        steps = _steps(told.get("normalizer")) + _steps(told.get("pre_tokenizer"))
        kind = _kind(path, model, steps)
        tokens = _ids(path, model["vocab"], added, size)
        control = {t["content"]: t["id"] for t in added if t["content"] and (kind == "byte" or t.get("special"))}
        _take_out(told, model, control, added if kind == "spm" else [])
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFault(f"{path}: it is malformed: {error!r}") from error
    try:
        pieces = Pieces.from_str(json.dumps(told))
    except Exception as error:  # the library raises a bare Exception
        raise ModelFault(f"{path}: the vocabulary is damaged: {error}") from error
    try:
        if kind == "byte":
            made = _byte_level_words(pieces, tokens, control, set(model["vocab"]))
        else:
            made = _sentencepiece_words(pieces, tokens, control, model["vocab"])
        return msgspec.structs.replace(made, composes=any(step["type"] == "NFC" for step in steps))
    except ModelFault as fault:
        raise ModelFault(f"{path}: {fault.message}") from fault


def _steps(told: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of steps."""
    if told is None:
        return []
    inner = told.get("normalizers", told.get("pretokenizers")) if told["type"] == "Sequence" else None
    return [told] if inner is None else [step for part in inner for step in _steps(part)]


def _kind(path: Path, model: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> str:
    """`byte` or `spm`. Raises ModelFault for a step that would change the text or is not known."""
    found = "spm"
    for step in steps:
        name = step["type"]
        spaces = name == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE
        if name == "ByteLevel":
            found = "byte"
        if step.get("add_prefix_space") or (name not in _STEPS and not spaces):
            raise ModelFault(f"{path}: the step {name} changes the text or is not known: {json.dumps(step)[:200]}")
    if found == "spm" and not model.get("byte_fallback"):
        raise ModelFault(f"{path}: neither byte-level nor with byte_fallback, so it has no tokens for some texts")
    return found


def _ids(path: Path, vocabulary: Mapping[str, int], added: Iterable[Mapping[str, Any]], size: int) -> list[str]:
    """The token of each id."""
    pairs = [*vocabulary.items(), *((token["content"], token["id"]) for token in added)]
    top = max((i for _, i in pairs), default=-1)
    if not all(isinstance(i, int) and i >= 0 for _, i in pairs) or not 0 <= top < min(size, VOCABULARY_MAX):
        raise ModelFault(f"{path}: the ids reach {top}, the model has {size}")
    tokens = [""] * size
    for text, i in pairs:
        if not isinstance(text, str):
            raise TypeError(f"the token {i} is {text!r}")
        tokens[i] = text
    return tokens


def _take_out(
    told: dict[str, Any], model: dict[str, Any], control: Mapping[str, int], added: Iterable[Mapping[str, Any]]
) -> None:
    """Leaves in a tokenizer.json what text may become: no control tokens, no templates, no cutting."""
    vocabulary = {text: i for text, i in model["vocab"].items() if text not in control}
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    model["merges"] = [list(pair) for pair in pairs if not ({"".join(pair), *pair} & control.keys())]
    model["vocab"], model["unk_token"] = vocabulary, None
    told["added_tokens"] = [token for token in added if token["content"] not in control]
    told |= dict.fromkeys(("post_processor", "truncation", "padding", "decoder"))
