"""`zj serve` on a Hugging Face folder that comes from the hub: fetched once, then served offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine import families
from tests.hub_stub import COMMIT, Stub
from tests.serving import Server
from tests.unit.checkpoint import toy_tokenizer
from zjournal.errors import ConfigFault, HubUnreachable

TEMPLATE = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"""
VOCAB = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of three layers with a tokenizer and a template of its own."""
    made = families.make("qwen3", vocab_size=VOCAB, eos_token_id=1)
    path = families.write_folder(made, tmp_path_factory.mktemp("hub") / "toy")
    toy_tokenizer.byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def answer(server: Server, text: str = "the cat") -> tuple[str, int]:
    told = server.respond(input=text, temperature=0, max_output_tokens=12)
    return told["output"][0]["content"][0]["text"], told["usage"]["input_tokens"]


def test_a_model_from_the_hub_is_fetched_once_and_served_offline(folder: Path, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    cache = ["--cache-dir", str(tmp_path / "cache")]
    with Stub({"org/toy": files}) as stub:
        stub.cuts = [len(files["model.safetensors"]) // 2]
        with Server(tmp_path / "data", *cache, model="org/toy", env={"HF_ENDPOINT": stub.url}) as server:
            first = answer(server)
            assert server.http.get("/v1/models").json()["data"][0]["id"] == "toy"
            assert server.post("/v1/responses", {"model": "org/toy", "input": "x", "max_output_tokens": 1}).is_success
            assert stub.asked[f"/org/toy/resolve/{COMMIT}/model.safetensors"] == 2  # the first was cut
            server.kill()
    with Server(tmp_path / "data", *cache, model="org/toy", env={"HF_ENDPOINT": "http://127.0.0.1:1"}) as server:
        assert answer(server) == first  # the hub is gone
    with Server(tmp_path / "plain", model=str(folder)) as server:
        assert answer(server) == first


def test_a_hub_that_cannot_be_reached_ends_the_start(tmp_path: Path) -> None:
    flags = ["--cache-dir", str(tmp_path / "cache"), "--model", "org/toy"]
    server = Server(tmp_path / "data", *flags, env={"HF_ENDPOINT": "http://127.0.0.1:1"})
    server.spawn()
    assert server.process is not None
    assert server.process.wait(60) == HubUnreachable.exit_code
    assert "org/toy: the hub cannot be reached" in server.log.read_text()


def test_a_context_beyond_the_models_own_needs_a_rope(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", str(folder), "--context", "2000"]
    server = Server(tmp_path / "short", *flags)
    server.spawn()
    assert server.process is not None
    assert server.process.wait(60) == ConfigFault.exit_code
    assert "more than the 512 tokens that toy was made for; --rope can stretch it" in server.log.read_text()
    with Server(tmp_path / "data", *flags, "--rope", "yarn:4") as server:
        _, tokens = answer(server, "the cat sat on the mat, " * 100)
        assert tokens > families.CONTEXT
