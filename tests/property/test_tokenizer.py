"""For any text: encoding is lossless, never makes a control token, and decodes the same however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests import smollm2

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
