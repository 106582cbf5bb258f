"""For any text: encoding is lossless, never makes a control token, decodes the same however it is cut, and takes no
fewer tokens than was said before.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import unicodedata
from collections import defaultdict
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pieces
from tokenizers import models, normalizers, pre_tokenizers

from tests import smollm2
from zjournal.checkpoint.tokenizer import COMPOSED_MAX, Tokenizer
from zjournal.checkpoint.words import SPACE, sentencepiece

# Characters whose bytes the vocabulary lacks are left out.
ABSENT = "\x04\x06\x13\x14\x16\x1d"
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters=ABSENT, max_codepoint=0x3FFFF)
SPECIAL = st.sampled_from([*smollm2.tokenizer().control, "\n", "  ", "<|", "é"])
TEXTS = st.lists(st.text(CHARACTERS, max_size=20) | SPECIAL).map("".join)


@given(TEXTS)
def test_round_trip(text):
    tokenizer = smollm2.tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.control.values())


@given(TEXTS)
def test_offsets_cover_the_text(text):
    encoded = smollm2.tokenizer().encode_with_offsets(text)
    assert len(encoded.ids) == len(encoded.starts) == len(encoded.ends)
    covered = 0
    for start, end in zip(encoded.starts, encoded.ends, strict=True):
        assert covered - 1 <= start <= covered  # tokens of one character share its offsets
        assert end > start
        covered = end
    assert covered == len(text)


@given(TEXTS, st.randoms(use_true_random=False))
def test_streaming_decode_is_decode(text, random):
    tokenizer = smollm2.tokenizer()
    ids = tokenizer.encode(text)
    if ids and random.random() < 0.5:
        ids.pop(random.randrange(len(ids)))  # perhaps no UTF-8 any more
    decoder = tokenizer.decoder()
    shown = ""
    at = 0
    while at < len(ids):
        step = random.randint(1, 5)
        shown += decoder.feed(ids[at : at + step])
        at += step
    assert shown + decoder.end() == tokenizer.decode(ids)


# --- how many tokens there are at least ---------------------------------------------------------------

BYTES = pre_tokenizers.ByteLevel.alphabet()
# What composes, what is composed already, what is longer than what it means, and what SentencePiece takes for a space.
COMPOSING = "e\u0301\u0323\u0308u\u0344\u1112\u1161\u11ab\u212a\u2126\u0345\u1fef\u1f82\u00e9K<\u0338"
ANYTHING = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from(COMPOSING + SPACE + ABSENT + "a "))


@functools.cache
def by_bytes(lacking: str = "") -> Tokenizer:
    """A token for each byte but those `lacking`, behind NFC: no estimate of it is too low by chance."""
    pieces = Pieces(models.BPE({letter: i for i, letter in enumerate(sorted({*BYTES} - {*lacking}))}, []))
    pieces.normalizer = normalizers.NFC()
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with tempfile.TemporaryDirectory() as folder:
        pieces.save(f"{folder}/tokenizer.json")
        return Tokenizer.from_folder(Path(folder), 256)


@functools.cache
def by_characters() -> Tokenizer:
    """SentencePiece with a token for a, for a space, and else for bytes."""
    texts = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", SPACE]
    return Tokenizer(sentencepiece(texts, [6] * 256 + [1, 1], [0.0] * 258))


@given(ANYTHING)
@example("\u212a" * 9)
@example("u\u0308\u0301" * 9)
@example("\u1112\u1161\u11ab" * 9)
@example(SPACE * 9)
@example(ABSENT * 9)
@example("e\u0301" * 9 + "eee")
def test_no_text_has_fewer_tokens_than_was_said(text: str) -> None:
    for tokenizer in (smollm2.tokenizer(), by_bytes(), by_bytes("aK"), by_characters()):
        assert tokenizer.at_least(text) <= len(tokenizer.encode(text)), tokenizer.longest


def test_what_is_said_is_no_less_than_it_must_be() -> None:
    assert by_bytes().at_least("plain text") == len(by_bytes().encode("plain text")) == 10
    assert by_bytes("a").at_least("a banana") == len(by_bytes("a").encode("a banana")) == 4
    for text in ("\u212a" * 90, "\u1112\u1161\u11ab" * 90):
        assert by_bytes().at_least(text) > 0.7 * len(by_bytes().encode(text))
    assert by_characters().at_least(f"aa{SPACE} ") == len(by_characters().encode(f"aa{SPACE} ")) == 4
    words = "word " * 10_000
    assert smollm2.tokenizer().at_least(words) == -(-len(words) // smollm2.tokenizer().longest)


def test_composing_takes_no_more_than_is_allowed_for() -> None:
    """For each composed character the longest text that means the same, built of all that decompose to parts of it."""
    meaning = defaultdict(int)  # decomposed text -> UTF-8 bytes of the longest character that it is
    composed = {}
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            parts = unicodedata.normalize("NFD", chr(code))
            meaning[parts] = max(meaning[parts], len(chr(code).encode()))
            if unicodedata.is_normalized("NFC", chr(code)):
                composed[chr(code)] = parts
    worst = 0.0
    for character, parts in composed.items():
        if len(parts) == 1 and meaning[parts] == len(character.encode()):
            continue
        longest = [0, *[-1] * len(parts)]
        for end in range(1, len(parts) + 1):
            found = [longest[at] + meaning[parts[at:end]] for at in range(end) if parts[at:end] in meaning]
            longest[end] = max(found)
        worst = max(worst, longest[-1] / len(character.encode()))
        assert sum(part.isascii() for part in parts) <= 1, character
    assert 3 < worst <= COMPOSED_MAX
