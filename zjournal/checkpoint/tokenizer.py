"""Text to token ids and back, from the vocabulary that the GGUF carries.

Byte-level BPE by the `tokenizers` library. Control tokens are kept out of its vocabulary, so no text can
ever become one: whoever wants a control token must name it (`control`, `encode_trusted`). Text is not normalised
and nothing is added, so decoding gives back the text that was encoded, byte for byte; except for bytes that the
vocabulary lacks (SmolLM2's has no U+0004, for one), which leave no token, here as in every other implementation.
"""

from __future__ import annotations

import codecs
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Pieces

from zjournal.checkpoint.gguf import Header
from zjournal.errors import ModelFault

VOCABULARY_MAX = 1 << 20
CACHE_TOKENS_MAX = 1 << 19  # encoded pieces that are kept: 12 bytes a token and the text
CACHED_CHARACTERS_MIN = 16  # shorter pieces cost less than the book-keeping

_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# How a model cuts text into words, by the name in `tokenizer.ggml.pre`. The patterns are the models' published ones.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
# These names mean GPT-2's own pattern, which the library has built in; smollm cuts digits apart first.
_GPT2 = {"gpt-2": False, "default": False, "smollm": True}

# Ends of a turn that some files do not declare; counted only where they are control tokens.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>")
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class Encoded(msgspec.Struct, frozen=True):
    """A piece of text as tokens: ids and, for each, where its text starts and ends, in characters."""

    ids: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    dropped: int = 0  # bytes of the text that no token stands for


class Tokenizer:
    """Byte-level BPE without special tokens, and the control tokens beside it."""

    def __init__(
        self,
        tokens: list[str],
        kinds: Sequence[int],
        merges: list[str],
        pre: str,
        ends: Iterable[int] = (),
        specials: dict[str, int] | None = None,
    ) -> None:
        """`tokens[id]` in GPT-2's byte alphabet (control tokens as they are), `merges` as `left right`.

        `ends` are ids that end a turn, `specials` the roles bos, eos, … Raises ModelFault with a reason only.
        """
        if len(tokens) > VOCABULARY_MAX or len(kinds) != len(tokens):
            raise ModelFault(f"a vocabulary of {len(tokens)} tokens with {len(kinds)} kinds is impossible")
        self.vocab_size = len(tokens)
        special = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED) and tokens[i]]
        self.control = {tokens[i]: i for i in special}
        self._literals = {i: text for text, i in self.control.items()}
        found = re.compile("|".join(re.escape(text) for text in sorted(self.control, key=len, reverse=True)) or r"(?!)")
        self.control_pattern = found
        ends = {*ends, *(self.control[text] for text in _TURN_ENDS if text in self.control)}
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < len(tokens)))
        specials = specials or {}
        self.special_texts = {role: tokens[i] for role, i in specials.items() if 0 <= i < len(tokens)}
        self._pieces = _pieces(tokens, kinds, merges, pre)
        self._bytes, self._starts = _token_bytes(tokens, self._literals)
        alone = {self.token_bytes(i) for i, kind in enumerate(kinds) if kind == _NORMAL and len(tokens[i]) == 1}
        self._lacking = [byte for byte in range(256) if bytes([byte]) not in alone and byte not in _NEVER_IN_UTF8]
        lengths = (self._starts[i + 1] - self._starts[i] for i in range(len(tokens)) if i not in self._literals)
        self.longest = max(lengths, default=1)  # bytes of the longest token: n bytes of text are n / longest or more
        self._cache: OrderedDict[str, Encoded] = OrderedDict()
        self._cached_tokens = 0
        self._lock = threading.Lock()

    @classmethod
    def from_header(cls, header: Header) -> Tokenizer:
        """Builds the tokenizer that the GGUF describes. Raises ModelFault if it is of a kind we do not know."""
        kind = header.value("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ModelFault(f"{header.path}: the tokenizer model {kind} is not supported, only gpt2 (byte-level BPE)")
        tokens = header.array("tokenizer.ggml.tokens", str)
        kinds = header.array("tokenizer.ggml.token_type", int)
        merges = header.array("tokenizer.ggml.merges", str)
        ends = [i for key in _END_KEYS if type(i := header.get(key)) is int]
        roles = {role: header.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
        specials = {role: i for role, i in roles.items() if type(i) is int}
        try:
            return cls(tokens, kinds, merges, header.value("tokenizer.ggml.pre", str, "default"), ends, specials)
        except ModelFault as fault:
            raise ModelFault(f"{header.path}: {fault.message}") from fault

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; never a control token, whatever the text is."""
        return list(self.encode_with_offsets(text).ids)

    def encode_with_offsets(self, text: str) -> Encoded:
        """The ids of `text` and where each one's text lies. Long pieces are remembered, for histories come again."""
        with self._lock:
            found = self._cache.get(text)
            if found is not None:
                self._cache.move_to_end(text)
                return found
        encoding = self._pieces.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        starts, ends = array("I", [start for start, _ in offsets]), array("I", [end for _, end in offsets])
        encoded = Encoded(array("I", encoding.ids), starts, ends, self._dropped(text, encoding.ids))
        if len(text) >= CACHED_CHARACTERS_MIN and len(encoded.ids) <= CACHE_TOKENS_MAX // 2:
            self._remember(text, encoded)
        return encoded

    def _dropped(self, text: str, ids: Sequence[int]) -> int:
        """How many bytes of `text` are in no token. Counted only where the text has a byte that may be dropped."""
        data = text.encode()
        if not any(byte in data for byte in self._lacking):
            return 0
        return len(data) - sum(self._starts[i + 1] - self._starts[i] for i in ids)

    def _remember(self, text: str, encoded: Encoded) -> None:
        with self._lock:  # prompts are assembled in several threads
            if text in self._cache:
                return
            self._cache[text] = encoded
            self._cached_tokens += len(encoded.ids)
            while self._cached_tokens > CACHE_TOKENS_MAX:
                _, oldest = self._cache.popitem(last=False)
                self._cached_tokens -= len(oldest.ids)

    def encode_trusted(self, text: str) -> list[int]:
        """As encode, but control literals become their ids. Only for text that no client wrote."""
        ids: list[int] = []
        at = 0
        for match in self.control_pattern.finditer(text):
            if match.start() > at:
                ids += self.encode(text[at : match.start()])
            ids.append(self.control[match.group()])
            at = match.end()
        return ids + self.encode(text[at:]) if at < len(text) else ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for; a control token's literal."""
        return self._bytes[self._starts[token] : self._starts[token + 1]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def decoder(self) -> Decoder:
        """A decoder for ids that come one after another."""
        return Decoder(self)


class Decoder:
    """Streaming decode: a character that is not complete yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def end(self) -> str:
        """The stream is over: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


def _pieces(tokens: list[str], kinds: Sequence[int], merges: list[str], pre: str) -> Pieces:
    """The BPE machine, over ordinary tokens only."""
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _NORMAL}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in _GPT2)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if pre in _PATTERNS:
        steps.insert(0, pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"))
    elif pre not in _GPT2:
        known = ", ".join(sorted({*_PATTERNS, *_GPT2}))
        raise ModelFault(f"the pre-tokenizer {pre} is not supported, only {known}")
    elif _GPT2[pre]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    try:
        pieces = Pieces(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises a bare Exception
        raise ModelFault(f"the vocabulary is damaged: {error}") from error
    pieces.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return pieces


def _alphabet() -> dict[int, int]:
    """GPT-2's byte alphabet, from the character that stands for a byte to the byte.

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: byte for byte in plain} | {0x100 + n: byte for n, byte in enumerate(others)}


def _token_bytes(tokens: list[str], literals: dict[int, str]) -> tuple[bytes, array[int]]:
    """All tokens' bytes in one run, and where each starts (one more entry at the end): a tenth of a list's memory."""
    alphabet = _alphabet()
    run = bytearray()
    starts = array("I", [0])
    for i, text in enumerate(tokens):
        if i in literals:
            run += text.encode()
        else:
            try:
                run += text.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                run += text.encode()  # an unused entry outside the alphabet
        starts.append(len(run))
    return bytes(run), starts
