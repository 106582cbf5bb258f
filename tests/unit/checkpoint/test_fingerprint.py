"""The fingerprint follows content, and is remembered only while the file is surely unchanged."""

from __future__ import annotations

import hashlib
import os

import pytest

from zjournal.checkpoint import fingerprint as module
from zjournal.checkpoint.fingerprint import DIGESTS_FILE, fingerprint
from zjournal.errors import ModelFault


@pytest.fixture
def reads(monkeypatch):
    """Counts the files that are read."""
    count = []
    sha256 = hashlib.sha256

    def counted():
        count.append(1)
        return sha256()

    monkeypatch.setattr(module.hashlib, "sha256", counted)
    return count


def test_second_time_is_not_read(tmp_path, reads):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    first = fingerprint(path, tmp_path / "cache")
    assert first == fingerprint(path, tmp_path / "cache")
    assert len(reads) == 1
    assert first == hashlib.new("sha256", b"weights").hexdigest()


def test_touched_mtime_keeps_the_identity(tmp_path, reads):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    first = fingerprint(path, tmp_path)
    os.utime(path, ns=(1, 1))
    assert fingerprint(path, tmp_path) == first
    assert len(reads) == 2


def test_other_weights_under_the_same_name_and_mtime_change_it(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    before = os.stat(path)
    first = fingerprint(path, tmp_path)
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_ino == before.st_ino
    assert fingerprint(path, tmp_path) != first


@pytest.mark.parametrize("damage", [b"", b"{", b'{"x": 3}', b"\xff\xfe", b"[]"])
def test_damaged_memory_is_ignored(damage, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    first = fingerprint(path, tmp_path)
    (tmp_path / DIGESTS_FILE).write_bytes(damage)
    assert fingerprint(path, tmp_path) == first


def test_cache_that_cannot_be_written_costs_only_time(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    (tmp_path / "file").write_bytes(b"")
    assert len(fingerprint(path, tmp_path / "file" / "cache")) == 64


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFault, match=r"none\.gguf"):
        fingerprint(tmp_path / "none.gguf", tmp_path)
