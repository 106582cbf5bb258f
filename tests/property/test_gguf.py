"""A damaged GGUF file is a ModelFault and nothing else, and costs no more memory than the file has bytes."""

from __future__ import annotations

import tracemalloc

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import gguf_writer as w
from zjournal.checkpoint.gguf import TensorFile, read_header
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.errors import ModelFault

TOKENIZER = [
    w.field("tokenizer.ggml.model", "str", "gpt2"),
    w.field("tokenizer.ggml.pre", "str", "smollm"),
    w.field("tokenizer.ggml.tokens", "[str]", ["<s>", "a", "b", "ab"]),
    w.field("tokenizer.ggml.token_type", "[i32]", [3, 1, 1, 1]),
    w.field("tokenizer.ggml.merges", "[str]", ["a b"]),
    w.field("tokenizer.ggml.eos_token_id", "u32", 0),
    w.field("tokenizer.chat_template", "str", "{% for m in messages %}{{ m.content }}{% endfor %}"),
]
FILES = (w.small(), w.gguf(TOKENIZER, [w.tensor("w", (32, 2), 3, 0)], bytes(64)))
BYTES_MAX = 4 << 20

EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8))), max_size=4
)


def _use(path) -> None:
    """All that the program does with a header."""
    header = read_header(path)
    assert len([header.get(key) for key in list(header.keys())]) == len(header.keys())
    with TensorFile(header) as tensors:
        for info in header.tensors.values():
            assert len(tensors.data(info)) == info.bytes
    tokenizer = Tokenizer.from_header(header)
    Template.from_header(header, tokenizer.special_texts)
    assert isinstance(tokenizer.encode("ab"), list)


@given(st.sampled_from(FILES), EDITS, st.integers(0, 1 << 16))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_damage_raises_only_model_faults(tmp_path, whole, edits, cut):
    data = bytearray(whole)
    for at, new in edits:
        at %= len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    path = tmp_path / "m.gguf"
    path.write_bytes(data[: len(data) - cut % len(data)] if cut % 3 == 0 else data)
    tracemalloc.start()
    try:
        _use(path)
    except ModelFault as fault:
        assert str(path) in fault.message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < BYTES_MAX


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_any_bytes_after_a_valid_start(tmp_path, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + data)
    try:
        _use(path)
    except ModelFault as fault:
        assert str(path) in fault.message
