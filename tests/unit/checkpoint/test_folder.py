"""Hugging Face folders: headers of safetensors, config.json, tokenizer.json, templates, identity; and bad ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Pieces
from tokenizers import models, normalizers

from tests.unit.checkpoint.toy_tokenizer import CORPUS, SPECIALS, byte_level
from zjournal.checkpoint import checkpoint as module
from zjournal.checkpoint.checkpoint import FolderCheckpoint, check_tensors, identify, open_checkpoint
from zjournal.checkpoint.locate import locate
from zjournal.checkpoint.safetensors import INDEX
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.errors import ModelFault
from zjournal.sessions.served import Served, choose

VOCAB, HIDDEN, FFN, LAYERS = 400, 32, 48, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
}


def shapes() -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        made |= {f"{at}.self_attn.{name}_proj.weight": (32, HIDDEN) for name in "qo"}
        made |= {f"{at}.self_attn.{name}_proj.weight": (16, HIDDEN) for name in "kv"}
        made |= {f"{at}.mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        made[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        made |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return made


def safetensors(tensors: dict[str, tuple[int, ...]], kind: str = "F32", width: int = 4) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = width
        for extent in shape:
            size *= extent
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "toy-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(safetensors(shapes()))
    byte_level().save(str(path / "tokenizer.json"))
    told = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    (path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


def change(folder: Path, **changes: Any) -> None:
    told = CONFIG | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value != "absent"}))


def test_a_folder_is_served_as_a_file_is(folder: Path, tmp_path: Path) -> None:
    found = locate(str(folder), tmp_path)
    assert (found.name, found.accepts("TOY-model"), found.accepts("default")) == ("toy-model", True, True)
    choice = choose(str(folder), tmp_path)
    assert choice.context == 128
    served = Served.load(choice)
    assert served.tokenizer.vocab_size == VOCAB
    assert served.end_tokens == {1, 2}
    assert served.template.render([{"role": "user", "content": "hi"}]) == "<|start|>hi"
    assert choose(str(folder), tmp_path, "linear:3").context == 384


def test_tokens_are_those_of_the_library_and_never_control_tokens(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder, VOCAB), byte_level()
    for text in [*CORPUS, "", " ", "x  y\n\n\n", "e\u0301", "🙂 12", "\x00\x7f"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
    for literal in SPECIALS:
        assert not {*ours.encode(f"a{literal}b")} & {0, 1, 2}
        assert ours.decode(ours.encode(f"a{literal}b")) == f"a{literal}b"
        assert ours.encode_trusted(f"a{literal}") == [*ours.encode("a"), SPECIALS.index(literal)]
    assert ours.special_texts == {"bos": "<|start|>", "eos": "<|end|>"}
    assert ours.token_bytes(VOCAB - 1) == b""


def spm() -> tuple[Pieces, list[str], list[int], list[float]]:
    """A SentencePiece vocabulary as Gemma's: bytes, user-defined runs, pieces in the order of their scores."""
    words = ["▁t", "in", "▁a", "he", "▁the", "at", "▁c", "▁cat", "an", "▁an", "▁▁", "▁sat", "s", "▁s"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,:()+=▁"]
    defined = ["\n", "\n\n", "\n\n\n", "<h1>", "  ", "   "]
    control = ["<pad>", "<eos>", "<bos>", "<start_of_turn>"]
    named = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = dict.fromkeys([*words, *letters])
    tokens = [*control, *defined, *named, *pieces]
    kinds = [3] * len(control) + [4] * len(defined) + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * (len(control) + len(defined) + 256) + [-float(i) for i in range(len(pieces))]
    order = {text: i for i, text in enumerate(tokens)}
    merges = [
        (text[:at], text[at:]) for text in words for at in range(1, len(text)) if {text[:at], text[at:]} <= {*pieces}
    ]
    machine = Pieces(models.BPE(order, merges, byte_fallback=True, fuse_unk=True, unk_token="<pad>"))
    machine.normalizer = normalizers.Replace(" ", "▁")
    machine.add_special_tokens(control)
    machine.add_tokens(defined)
    return machine, tokens, kinds, scores


TEXTS = ["the cat sat", "  a\n\n\n\nb", "x   y  z", "<h1>the</h1>\n", "naïve 日本 🙂", "an the  the cat.", "\t\x00"]


def test_a_folder_of_the_other_kind(tmp_path: Path) -> None:
    machine, tokens, _, _ = spm()
    machine.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path, len(tokens))
    for text in TEXTS:
        assert ours.encode(text) == machine.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_trusted("<start_of_turn>a")[0] == 3
    assert 3 not in ours.encode("<start_of_turn>a")


def test_sentencepiece_of_a_gguf_is_the_same() -> None:
    from zjournal.checkpoint.words import sentencepiece

    machine, tokens, kinds, scores = spm()
    ours = Tokenizer(sentencepiece(tokens, kinds, scores), [1])
    for text in TEXTS:
        assert ours.encode(text) == machine.encode(text, add_special_tokens=False).ids, text
        encoded = ours.encode_with_offsets(text)
        assert (encoded.starts[0], encoded.ends[-1]) == (0, len(text))
    with pytest.raises(ModelFault, match="255 bytes, not 256"):
        sentencepiece(
            tokens, [5 if text == "<0x41>" else kind for text, kind in zip(tokens, kinds, strict=True)], scores
        )


def _edited(folder: Path, **changes: Any) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        (told["model"] if key in ("type", "dropout") else told)[key] = value
    (folder / "tokenizer.json").write_text(json.dumps(told))


def test_an_empty_list_of_steps_is_none(folder: Path) -> None:
    """As DeepSeek's own tokenizer.json has it."""
    text = "a cat, 12"
    plain = Tokenizer.from_folder(folder, VOCAB).encode(text)
    _edited(folder, normalizer={"type": "Sequence", "normalizers": []})
    assert Tokenizer.from_folder(folder, VOCAB).encode(text) == plain


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "Unigram"}, "not a BPE"),
        ({"dropout": 0.1}, "dropout"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase changes the text"),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, "Prepend"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "ByteLevel"),
        ({"pre_tokenizer": None}, "neither byte-level"),
        ({"added_tokens": [{"id": VOCAB, "content": "<x>", "special": True}]}, "ids reach 400"),
        ({"added_tokens": [{"content": "<x>"}]}, "malformed"),
        ({"added_tokens": [{"id": 7, "content": 5}]}, "malformed"),
        ({"added_tokens": [{"id": 7, "content": "<" + "x" * 5000, "special": True}]}, "has 5001 characters"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(folder: Path, changes: dict, reason: str) -> None:
    _edited(folder, **changes)
    with pytest.raises(ModelFault) as caught:
        Tokenizer.from_folder(folder, VOCAB)
    assert reason in caught.value.message
    assert caught.value.message.startswith(str(folder / "tokenizer.json"))


YARN = {"type": "yarn", "factor": 2.0}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
}
CONFIGS = {
    "no type": ({"model_type": "absent"}, "model_type is missing"),
    "other type": ({"model_type": "mamba"}, "model_type is 'mamba'"),
    "other class": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "no prefix could be reused"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "text for size": ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "layers": ({"num_hidden_layers": 1 << 30}, "number of layers"),
    "vocabulary": ({"vocab_size": 401}, "shape (400, 32), not (401, 32)"),
    "a number beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    "a head beyond floats": ({"head_dim": 10**400}, "the head size is 1000"),
    "yarn beyond floats": ({"rope_scaling": YARN | {"factor": 1e308}}, "RoPE factor 1e+308"),
    "an endless original": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 10**400}},
        "the original context 1000",
    ),
    "beta_slow": ({"rope_scaling": YARN | {"beta_slow": 1e-300}}, "beta_slow and beta_fast are 1e-300 and 32"),
    "beta_fast": ({"rope_scaling": YARN | {"beta_fast": 1e308}}, "beta_slow and beta_fast are 1 and 1e+308"),
    "attention_factor": ({"rope_scaling": YARN | {"attention_factor": 1e308}}, "attention_factor is 1e+308"),
    "gemma, negative": (GEMMA | {"hidden_size": -5}, "the hidden size is -5"),
    "gemma, beyond floats": (GEMMA | {"hidden_size": 10**400}, "the hidden size is 1000"),
    "untied": ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    "more layers": ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    "fewer layers": ({"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight is none"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_run_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    changes, reason = CONFIGS[name]
    change(folder, **changes)
    with pytest.raises(ModelFault) as caught:
        choose(str(folder), tmp_path)
    assert reason in caught.value.message
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


GOOD = safetensors({"a": (2, 3)})
SHARDS = {
    "empty": b"",
    "cut": GOOD[:-1],
    "more": GOOD + b"x",
    "short header": struct.pack("<Q", 1 << 40) + GOOD[8:],
    "no JSON": struct.pack("<Q", 4) + b"nope",
    "float8": safetensors({"a": (2, 3)}, "F8_E4M3", 1),
    "wrong size": GOOD.replace(b"[2, 3]", b"[2, 4]"),
    "nothing in it": GOOD.replace(b"[2, 3]", b"[0, 3]"),
    "negative": GOOD.replace(b"[0, 24]", b"[-9, 9]"),
    "nested": struct.pack("<Q", 200_006) + b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_damaged_file_of_weights_is_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").write_bytes(SHARDS[name])
    with pytest.raises(ModelFault, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_shards_are_those_of_the_index(folder: Path) -> None:
    whole = shapes()
    names = list(whole)
    half = len(names) // 2
    parts = {"one.safetensors": names[:half], "two.safetensors": names[half:]}
    for file, mine in parts.items():
        (folder / file).write_bytes(safetensors({name: whole[name] for name in mine}, "BF16", 2))
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file for file in parts for name in parts[file]}}))
    found = open_checkpoint(folder)
    check_tensors(found, found.model())
    assert {info.type for info in found.tensors.values()} == {"BF16"}
    with found.open() as data:
        assert len(data.data(found.tensors[names[-1]])) == found.tensors[names[-1]].bytes
    for bad, reason in (
        ({"x": "../two.safetensors"}, "leads out"),
        ({"x": "three.safetensors"}, "no such file"),
        ({"x": "x" * 300}, "no such file"),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(ModelFault, match=reason):
            open_checkpoint(folder)


def test_o15_identity_follows_content_and_not_times(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = identify(open_checkpoint(folder), cache)
    for file in folder.iterdir():
        os.utime(file, ns=(5, 5))
    assert identify(open_checkpoint(folder), cache) == first == identify(open_checkpoint(folder), None)
    moved = folder.rename(tmp_path / "moved")
    assert identify(open_checkpoint(moved), cache) == first
    weights = moved / "model.safetensors"
    before = os.stat(weights)
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = identify(open_checkpoint(moved), cache)
    assert (other.weights != first.weights, other.rest) == (True, first.rest)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        text = (moved / name).read_text()
        (moved / name).write_text(text + " ")
        changed = identify(open_checkpoint(moved), cache)
        assert (changed.weights, changed.rest != other.rest) == (other.weights, True), name
        (moved / name).write_text(text)
    assert identify(open_checkpoint(moved), cache) == other


def test_templates_stand_in_either_place(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    for told in (
        "one {{ eos_token }}",
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "one e"}],
    ):
        config.write_text(json.dumps({"chat_template": told}))
        assert Template.from_folder(folder, {"eos": "e"}).render([]) == "one e"
    config.write_text("{}")
    with pytest.raises(ModelFault, match=r"tokenizer_config\.json: there is no chat template"):
        Template.from_folder(folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelFault, match="not valid"):
        Template.from_folder(folder)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFault, match=r"without config\.json"):
        locate(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelFault, match=r"config\.json"):
        FolderCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFault, match=r"neither model\.safetensors nor"):
        FolderCheckpoint(tmp_path)
    assert module.CONFIG == "config.json"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_pipe_is_no_part_of_a_model(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFault, match=f"{name}: not a file"):
        Served.load(choose(str(folder), tmp_path))
