"""Text to token ids and back, from the vocabulary that comes with a model (words.py).

No text can ever become a control token: whoever wants one must name it (`control`, `encode_trusted`). Nothing is added
and nothing changed, so decoding gives back the text that was encoded, byte for byte; except for bytes that the
vocabulary lacks (SmolLM2's has no U+0004, for one), which leave no token, here as in every other implementation, and
for a tokenizer.json that composes characters (NFC, as Qwen's does).
"""

from __future__ import annotations

import codecs
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from zjournal.checkpoint import words
from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import read_object
from zjournal.checkpoint.words import Words
from zjournal.errors import ModelFault

CACHE_TOKENS_MAX = 1 << 19  # encoded pieces that are kept: 12 bytes a token and the text
CACHE_PIECES_MAX = 2_048  # for short ones cost mostly what holds them
CONTROL_CHARACTERS_MAX = 128  # of a control token; those of known models have up to 40
SHORT_CHARACTERS = 16  # what stands between the texts of a conversation is shorter, and the same again and again
SHORT_PIECES_MAX = 1_024  # of those that are kept beside the others
COMPOSED_MAX = 4  # times that NFC makes UTF-8 shorter, or less: U+212A to K 3 times, U+1FBE U+0308 U+0301 3.5 times

_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE"}

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
    """A vocabulary without special tokens, and the control tokens beside it."""

    def __init__(self, words: Words, ends: Iterable[int] = (), specials: Mapping[str, int] | None = None) -> None:
        """`ends` are ids that end a turn, `specials` the roles bos, eos, … Raises ModelFault with a reason only."""
        self.vocab_size = len(words.texts)
        self.control = words.control
        longest = max(map(len, self.control), default=0)
        if longest > CONTROL_CHARACTERS_MAX:
            raise ModelFault(f"a control token has {longest} characters, more than {CONTROL_CHARACTERS_MAX}")
        self.control_pattern = re.compile(_alternatives(self.control))
        ends = {*ends, *(self.control[text] for text in _TURN_ENDS if text in self.control)}
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < self.vocab_size))
        told = {role: i for role, i in (specials or {}).items() if 0 <= i < self.vocab_size}
        self.special_texts = {role: words.texts[i].decode("utf-8", "replace") for role, i in told.items()}
        self._pieces = words.pieces
        self._bytes = b"".join(words.texts)
        self._starts = array("I", accumulate(map(len, words.texts), initial=0))  # a tenth of a list's memory
        self._lacking = words.lacking
        self._composes = words.composes
        literals = set(self.control.values())
        lengths = (len(text) for i, text in enumerate(words.texts) if i not in literals)
        self.longest = max(lengths, default=1) or 1  # bytes of the longest token: n bytes are n / longest or more
        self._cache: OrderedDict[str, Encoded] = OrderedDict()
        self._cached_tokens = 0
        self._short: dict[str, Encoded] = {}
        self._lock = threading.Lock()

    @classmethod
    def byte_level(
        cls,
        tokens: Sequence[str],
        kinds: Sequence[int],
        merges: Sequence[str],
        pre: str,
        ends: Iterable[int] = (),
        specials: Mapping[str, int] | None = None,
    ) -> Tokenizer:
        """Byte-level BPE, see words.byte_level. Raises ModelFault with a reason only."""
        return cls(words.byte_level(tokens, kinds, merges, pre), ends, specials)

    @classmethod
    def from_header(cls, header: Header) -> Tokenizer:
        """Builds the tokenizer that the GGUF describes. Raises ModelFault if it is of a kind we do not know."""
        kind = header.value("tokenizer.ggml.model", str)
        if kind not in _KINDS:
            known = " and ".join(f"{name} ({what})" for name, what in _KINDS.items())
            raise ModelFault(f"{header.path}: the tokenizer model {kind} is not supported, only {known}")
        tokens = header.array("tokenizer.ggml.tokens", str)
        kinds = header.array("tokenizer.ggml.token_type", int)
        ends = [i for key in _END_KEYS if type(i := header.get(key)) is int]
        roles = {role: header.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
        specials = {role: i for role, i in roles.items() if type(i) is int}
        try:
            if kind == "gpt2":
                merges = header.array("tokenizer.ggml.merges", str)
                made = words.byte_level(tokens, kinds, merges, header.value("tokenizer.ggml.pre", str, "default"))
            else:
                if header.value("tokenizer.ggml.add_space_prefix", bool, True):
                    raise ModelFault("tokenizer.ggml.add_space_prefix is true, and that is not supported")
                made = words.sentencepiece(tokens, kinds, header.array("tokenizer.ggml.scores", float))
            return cls(made, ends, specials)
        except ModelFault as fault:
            named = fault.message.startswith(str(header.path))
            raise ModelFault(fault.message if named else f"{header.path}: {fault.message}") from fault

    @classmethod
    def from_folder(cls, folder: Path, size: int) -> Tokenizer:
        """Builds the tokenizer of a Hugging Face folder for a model of `size` ids. Raises ModelFault."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelFault(f"{path}: no such file; a vocabulary in another form is not supported")
        made = words.from_json(path, size)
        named = _named(folder / "tokenizer_config.json")
        ids = {text: i for i, text in enumerate(made.texts)} if named else {}
        specials = {role: i for role, text in named.items() if (i := ids.get(text.encode())) is not None}
        ends = [i for name in ("generation_config.json", "config.json") for i in _end_ids(folder / name)]
        try:
            return cls(made, [*ends, *(specials[role] for role in ("eos",) if role in specials)], specials)
        except ModelFault as fault:
            raise ModelFault(f"{path}: {fault.message}") from fault

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; never a control token, whatever the text is."""
        return list(self.encode_with_offsets(text).ids)

    def encode_unkept(self, text: str) -> list[int]:
        """As encode, and nothing of the text is remembered here."""
        return self._pieces.encode(text, add_special_tokens=False).ids

    def at_least(self, text: str) -> int:
        """So many ids `encode` gives for sure, or more; at the speed of memory, for texts that are too long for it.

        No token stands for more than `longest` bytes, and every byte of the text is in one, but for those that the
        vocabulary lacks and for what composing takes away: of what is not ASCII all but a quarter, and the
        letter of ASCII before it. A U+2581 counts as a space, which it is to a SentencePiece.
        """
        data = text.encode()
        plain = data if text.isascii() else text.encode("ascii", "ignore")
        lacking = [bytes((byte,)) for byte in self._lacking]
        if self._composes and len(plain) < len(data):
            sure = max(len(plain) - (len(text) - len(plain)) - sum(map(plain.count, lacking)), 0)
            sure += 0 if lacking else (len(data) - len(plain)) // COMPOSED_MAX
        else:
            sure = len(data) - sum(map(data.count, lacking)) - (len(words.SPACE.encode()) - 1) * text.count(words.SPACE)
        return -(-sure // self.longest)

    def encode_with_offsets(self, text: str) -> Encoded:
        """The ids of `text` and where each one's text lies. Pieces are remembered, for histories come again."""
        short = len(text) < SHORT_CHARACTERS
        with self._lock:
            found = (self._short if short else self._cache).get(text)
            if found is not None:
                if not short:
                    self._cache.move_to_end(text)
                return found
        encoding = self._pieces.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        starts, ends = array("I", [start for start, _ in offsets]), array("I", [end for _, end in offsets])
        encoded = Encoded(array("I", encoding.ids), starts, ends, self._dropped(text, encoding.ids))
        if short:
            self._remember_short(text, encoded)
        elif len(encoded.ids) <= CACHE_TOKENS_MAX // 2:
            self._remember(text, encoded)
        return encoded

    def _dropped(self, text: str, ids: Sequence[int]) -> int:
        """How many bytes of `text` are in no token. Counted only where the text has a byte that may be dropped."""
        data = text.encode()
        if not any(byte in data for byte in self._lacking):
            return 0
        return len(data) - sum(self._starts[i + 1] - self._starts[i] for i in ids)

    def _remember_short(self, text: str, encoded: Encoded) -> None:
        with self._lock:
            if len(self._short) >= SHORT_PIECES_MAX:
                self._short.clear()  # what comes again comes back soon
            self._short[text] = encoded

    def _remember(self, text: str, encoded: Encoded) -> None:
        with self._lock:  # prompts are assembled in several threads
            if text in self._cache:
                return
            self._cache[text] = encoded
            self._cached_tokens += len(encoded.ids)
            while self._cached_tokens > CACHE_TOKENS_MAX or len(self._cache) > CACHE_PIECES_MAX:
                _, oldest = self._cache.popitem(last=False)
                self._cached_tokens -= len(oldest.ids)

    def forget(self) -> None:
        """Drops every text that is remembered, as after one was erased: which of them it was cannot be told."""
        with self._lock:
            self._cache.clear()
            self._short.clear()
            self._cached_tokens = 0
        clear = getattr(self._pieces.model, "_clear_cache", None)  # the library remembers words of up to 256 characters
        if clear is not None:
            clear()

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


def _named(path: Path) -> dict[str, str]:
    """The texts of the roles bos and eos in a tokenizer_config.json."""
    told = read_object(path) if path.exists() else {}
    found = {}
    for role in ("bos", "eos"):
        value = told.get(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found


def _end_ids(path: Path) -> list[int]:
    told = read_object(path).get("eos_token_id") if path.exists() else None
    ids = told if isinstance(told, list) else [told]
    return [i for i in ids if type(i) is int]


def _alternatives(literals: Iterable[str]) -> str:
    """A pattern that matches any of the literals, the longest first; a tree, for Gemma has 6,000 that start alike."""
    tree: dict[str, dict] = {}
    for text in literals:
        at = tree
        for character in text:
            at = at.setdefault(character, {})
        at[""] = {}

    def write(node: dict[str, dict]) -> str:
        branches = [re.escape(character) + write(below) for character, below in node.items() if character]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{joined})?" if "" in node else joined

    return write(tree) or r"(?!)"
