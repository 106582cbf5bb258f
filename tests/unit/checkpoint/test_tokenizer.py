"""The tokenizer against other implementations, and the promise that text never makes a control token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import gguf_writer as w
from tests import smollm2
from zjournal.checkpoint import tokenizer as module
from zjournal.checkpoint.gguf import read_header
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.errors import ModelFault

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tokenizer_smollm2.json").read_text())["texts"]


def test_ids_are_those_of_llama_cpp():
    tokenizer = smollm2.tokenizer()
    assert len(GOLDEN) > 150
    for row in GOLDEN:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]


def test_ids_are_those_of_transformers():
    """Its GGUF conversion forgets that smollm cuts digits apart and makes control tokens of text: leave both out."""
    transformers = pytest.importorskip("transformers")
    path = smollm2.path()
    other = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = {re.sub(r"<\||[0-9\u0660-\u0669½²①Ⅷ१२३४५৪𝟘𝟙]|<\w+>", "", row["text"]) for row in GOLDEN}
    assert len(texts) > 140
    for text in texts:
        assert smollm2.tokenizer().encode(text) == other.encode(text, add_special_tokens=False), text


def test_vocabulary_and_ends():
    tokenizer = smollm2.tokenizer()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.control["<|im_start|>"] == 1
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.special_texts == {"bos": "<|im_start|>", "eos": "<|im_end|>"}
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_text_never_becomes_a_control_token():
    tokenizer = smollm2.tokenizer()
    for literal, i in tokenizer.control.items():
        for text in (literal, f"a{literal}b", f" {literal}\n{literal}"):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.control.values())
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode_trusted(literal) == [i]
    assert tokenizer.encode_trusted("x<|im_end|>\ny") == [*tokenizer.encode("x"), 2, *tokenizer.encode("\ny")]


def test_every_token_has_its_bytes():
    tokenizer = smollm2.tokenizer()
    single = {data for i in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(i)) == 1}
    absent = {byte for byte in range(256) if bytes([byte]) not in single}
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert absent == never_in_utf8 | {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # the model never saw these
    assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))


def test_bytes_without_a_token_leave_none():
    tokenizer = smollm2.tokenizer()
    assert tokenizer.encode("a\x04b") == [*tokenizer.encode("a"), *tokenizer.encode("b")]


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("", 0),
        ("plain text, \u00e9, \u4e2d and \U0001f600\n\t\x7f", 0),
        ("a\x04b", 1),
        ("\x04\x06\x13 between \x14\x16\x1d", 6),
        ("\x05\x04\x04\u00e9", 2),
        ("an unassigned character \U00050000", 1),
    ],
)
def test_bytes_without_a_token_are_counted(text, dropped):
    encoded = smollm2.tokenizer().encode_with_offsets(text)
    assert encoded.dropped == dropped
    assert sum(len(smollm2.tokenizer().token_bytes(i)) for i in encoded.ids) == len(text.encode()) - dropped


def test_streaming_decoder_holds_back_half_characters():
    tokenizer = smollm2.tokenizer()
    text = "naïve 你好 👩‍👩‍👧 end"
    ids = tokenizer.encode(text)
    decoder = tokenizer.decoder()
    shown = [decoder.feed([i]) for i in ids]
    assert "".join(shown) + decoder.end() == text
    assert "\ufffd" not in "".join(shown)
    assert "" in shown
    cut = tokenizer.decoder()
    assert cut.feed(tokenizer.encode("🙂")[:1]) == ""
    assert cut.end() == "\ufffd"


def test_remembered_texts_can_be_forgotten():
    words = Tokenizer.from_header(smollm2.header())
    text = "a secret that somebody deletes " * 20
    ids = words.encode(text)
    assert text in words._cache
    words.forget()
    assert (len(words._cache), words._cached_tokens) == (0, 0)
    assert words.encode(text) == ids


def test_remembered_pieces_are_bounded(monkeypatch):
    tokenizer = Tokenizer.from_header(smollm2.header())
    monkeypatch.setattr(module, "CACHE_TOKENS_MAX", 100)
    for n in range(200):
        tokenizer.encode(f"some words that are a piece {n}")
        assert tokenizer._cached_tokens <= 100
        assert tokenizer._cached_tokens == sum(len(encoded.ids) for encoded in tokenizer._cache.values())
    assert 0 < len(tokenizer._cache) < 20
    tokenizer.encode("word " * 200)
    assert "word " * 200 not in tokenizer._cache
    monkeypatch.setattr(module, "CACHE_PIECES_MAX", 3)
    tokenizer.encode("one more piece of some words")
    assert len(tokenizer._cache) == 3


def test_short_pieces_are_remembered_apart_and_bounded(monkeypatch):
    tokenizer = Tokenizer.from_header(smollm2.header())
    monkeypatch.setattr(module, "SHORT_PIECES_MAX", 8)
    pieces = [f"w {n}\n" for n in range(30)]
    first = [tokenizer.encode(piece) for piece in pieces]
    assert [tokenizer.encode(piece) for piece in pieces] == first
    assert first == [tokenizer.encode_unkept(piece) for piece in pieces]
    assert 0 < len(tokenizer._short) <= 8
    assert not tokenizer._cache
    tokenizer.forget()
    assert not tokenizer._short


TOKENS = ["<s>", "<e>", "a", "b", "ab", "Ġ", "1", "11", "Ċ"]
KINDS = [3, 3, 1, 1, 1, 1, 1, 1, 1]
MERGES = ["a b", "1 1"]


@pytest.mark.parametrize(
    ("pre", "ids"),
    [("smollm", [4, 5, 6, 6, 6]), ("gpt-2", [4, 5, 7, 6]), ("llama-bpe", [4, 5, 7, 6]), ("qwen2", [4, 5, 6, 6, 6])],
)
def test_pre_tokenizers_cut_digits_their_own_way(pre, ids):
    tokenizer = Tokenizer.byte_level(TOKENS, KINDS, MERGES, pre, [1])
    assert tokenizer.encode("ab 111") == ids
    assert tokenizer.encode("<s>") == []  # the toy vocabulary has none of these bytes
    assert tokenizer.eos_ids == (1,)


def _file(tmp_path, **changes):
    fields = {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "smollm"),
        "tokenizer.ggml.tokens": ("[str]", TOKENS),
        "tokenizer.ggml.token_type": ("[i32]", KINDS),
        "tokenizer.ggml.merges": ("[str]", MERGES),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
    }
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf([w.field(key, *value) for key, value in fields.items() if value is not None]))
    return read_header(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": ("str", "bert")}, "tokenizer model bert is not supported"),
        ({"pre": ("str", "deepseek-v3")}, "pre-tokenizer deepseek-v3 is not supported"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": ("[i32]", [1])}, "not an array of str"),
        ({"token_type": ("[i32]", [1])}, "impossible"),
        ({"merges": ("[str]", ["a nothing"])}, "damaged"),
        ({"merges": ("[str]", ["ab"])}, "damaged"),
    ],
)
def test_what_cannot_be_used_is_named(changes, reason, tmp_path):
    with pytest.raises(ModelFault) as caught:
        Tokenizer.from_header(_file(tmp_path, **changes))
    assert reason in caught.value.message
    assert caught.value.message.startswith(str(tmp_path))
    assert "\n" not in caught.value.message


def test_a_whole_file_works(tmp_path):
    tokenizer = Tokenizer.from_header(_file(tmp_path))
    assert tokenizer.decode(tokenizer.encode("ab 11\n")) == "ab 11\n"
