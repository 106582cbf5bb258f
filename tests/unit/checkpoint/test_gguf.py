"""The GGUF header reader: what it reads, and that damaged files are named."""

from __future__ import annotations

import re
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from tests import gguf_writer as w
from tests import smollm2
from zjournal.checkpoint.gguf import TENSOR_TYPES, TensorFile, read_header
from zjournal.errors import ModelFault


def test_reads_every_kind_of_value(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(w.small())
    header = read_header(path)
    assert header.version == 3
    assert header.keys() == ["general.architecture", "llama.block_count", "eps", "flag", "words", "numbers"]
    assert header.get("words") == ["a", "", "日本"]
    assert header.get("numbers") == [1, -2, 3]
    assert header.value("llama.block_count", int) == 2
    assert header.value("llama.block_count", float) == 2.0
    assert header.value("eps", float) == 0.5
    assert header.get("flag") is True
    assert header.get("missing") is None
    assert header.value("missing", int, 7) == 7
    assert header.tensors["w"].shape == (2, 32)
    assert header.tensors["w"].type == "Q4_1"
    with TensorFile(header) as tensors:
        assert bytes(tensors.data(header.tensors["w"])) == bytes(range(40))
        assert np.frombuffer(tensors.data(header.tensors["b"]), "<f4").tolist() == [1, 2, 3, 4]


def test_typed_access_names_the_key(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(w.small())
    header = read_header(path)
    for call in (
        lambda: header.value("missing.key", int),
        lambda: header.value("eps", int),
        lambda: header.value("flag", int),
        lambda: header.array("numbers", str),
        lambda: header.array("eps", float),
    ):
        with pytest.raises(ModelFault, match=re.escape(str(path))):
            call()


def test_version_2_and_own_alignment(tmp_path):
    path = tmp_path / "m.gguf"
    fields = [w.field("general.alignment", "u32", 64)]
    path.write_bytes(w.gguf(fields, [w.tensor("t", (4,), 0, 0)], struct.pack("<4f", 1, 2, 3, 4), version=2, align=64))
    header = read_header(path)
    assert (header.version, header.alignment, header.data_offset) == (2, 64, 128)


DAMAGED = {
    "empty": (b"", "not a GGUF"),
    "text": (b"hello, I am no model at all", "not a GGUF"),
    "magic only": (b"GGUF", "cut"),
    "version 1": (w.gguf([], version=1), "version 1"),
    "big-endian": (w.gguf([], version=3 << 24), "version"),
    "too many keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60) + bytes(64), "limits"),
    "too many tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(64), "limits"),
    "long string": (w.gguf([struct.pack("<Q", 1 << 62) + b"x"]), "cut or damaged"),
    "long array": (w.gguf([w.string("k") + struct.pack("<IIQ", 9, 4, 1 << 61)]), "cut or damaged"),
    "long text array": (w.gguf([w.string("k") + struct.pack("<IIQ", 9, 8, 1 << 61)]), "cut or damaged"),
    "text past the end": (w.gguf([w.string("k") + struct.pack("<IIQQQ", 9, 8, 2, 1 << 63, 0)]), "cut or damaged"),
    "nested array": (w.gguf([w.string("k") + struct.pack("<IIQ", 9, 9, 1)]), "kind of array element 9"),
    "unknown kind": (w.gguf([w.string("k") + struct.pack("<I", 77)]), "kind of value 77"),
    "key twice": (w.gguf([w.field("k", "u8", 1), w.field("k", "u8", 1)]), "twice"),
    "key not UTF-8": (w.gguf([struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1)]), "not UTF-8"),
    "bad alignment": (w.gguf([w.field("general.alignment", "u32", 48)]), "power of two"),
    "zero alignment": (w.gguf([w.field("general.alignment", "u32", 0)]), "power of two"),
    "unknown type": (w.gguf([], [w.tensor("t.weight", (4,), 99, 0)], bytes(64)), "t.weight has the unknown type 99"),
    "five dimensions": (w.gguf([], [w.tensor("t", (1,) * 5, 0, 0)], bytes(64)), "5 dimensions"),
    "no elements": (w.gguf([], [w.tensor("t", (0, 4), 0, 0)], bytes(64)), "impossible shape"),
    "part of a block": (w.gguf([], [w.tensor("t", (33,), 3, 0)], bytes(64)), "impossible shape"),
    "unaligned": (w.gguf([], [w.tensor("t", (4,), 0, 4)], bytes(64)), "not aligned"),
    "tensor twice": (w.gguf([], [w.tensor("t", (4,), 0, 0)] * 2, bytes(64)), "twice"),
    "overlap": (w.gguf([], [w.tensor("t", (16,), 0, 0), w.tensor("u", (4,), 0, 32)], bytes(64)), "t and u overlap"),
    "data cut": (w.gguf([], [w.tensor("t", (64,), 0, 0)], bytes(255)), "t ends at"),
    "huge tensor": (w.gguf([], [w.tensor("t", (1 << 63, 1 << 63), 0, 0)], bytes(64)), "t ends at"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line_with_path_and_reason(case, tmp_path):
    data, reason = DAMAGED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFault) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_every_cut_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "m.gguf"
    whole = w.small()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFault):
            read_header(path)


def test_missing_file_and_folder_are_named(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFault, match=re.escape(str(path))):
            read_header(path)


def test_a_file_that_changed_after_its_header_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(w.small())
    header = read_header(path)
    path.write_bytes(w.small()[:-1])
    with pytest.raises(ModelFault, match="changed"):
        TensorFile(header)


def test_type_table_agrees_with_the_gguf_package():
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.bytes)


def test_the_default_model():
    header = smollm2.header()
    assert header.value("general.architecture", str) == "llama"
    assert len(header.tensors) == 272
    assert header.tensors["token_embd.weight"].shape == (49152, 576)
    assert header.tensors["token_embd.weight"].offset == 1785664
    assert len(header.array("tokenizer.ggml.tokens", str)) == 49152
    info = header.tensors["blk.0.ffn_down.weight"]
    with TensorFile(header) as tensors:
        values = gguf.quants.dequantize(
            np.frombuffer(tensors.data(info), np.uint8).reshape(info.shape[0], -1), gguf.GGMLQuantizationType.Q4_1
        )
    assert values.shape == info.shape
    assert 0.01 < float(values.std()) < 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_reading_config_is_lean():
    """Header, tokenizer and template of the default model, in a fresh process: far below GGUFReader's 160 MiB."""
    script = (
        "import re, sys\n"
        "from zjournal.checkpoint.gguf import read_header\n"
        "from zjournal.checkpoint.tokenizer import Tokenizer\n"
        "from zjournal.checkpoint.template import Template\n"
        "header = read_header(sys.argv[1])\n"
        "Template.from_header(header, Tokenizer.from_header(header).special_texts)\n"
        "assert not {'torch', 'gguf', 'numpy'} & set(sys.modules)\n"
        "print(re.search('VmHWM:(.*)kB', open('/proc/self/status').read())[1])\n"
    )
    command = [sys.executable, "-c", script, str(smollm2.path())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 90 * 1024
