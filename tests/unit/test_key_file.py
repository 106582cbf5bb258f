"""A file of keys that changes: what of it is taken, and when it is looked at again."""

import os
from pathlib import Path

import pytest

from zjournal import keys
from zjournal.errors import ConfigFault
from zjournal.keys import KeyFile, Limits

KEY = "a-key-of-some-length"
OTHER = "another-key-of-some-length"


def put(path: Path, text: str, age_s: float = 60.0) -> None:
    """Writes it as if that had been `age_s` ago."""
    path.touch(0o600)
    path.write_text(text)
    then = path.stat().st_mtime_ns - int(age_s * 1e9)
    os.utime(path, ns=(then, then))


def test_it_is_read_again_where_it_was_written(tmp_path):
    path = tmp_path / "keys"
    put(path, f"one:{KEY}\n")
    file = KeyFile(path)
    assert not file.changed()
    put(path, f"# a remark\none:{KEY}\n")
    assert not file.changed(), "the keys are the same"
    put(path, f"one:{KEY} requests=5\n")
    assert file.changed() and file.keys.limits("one") == Limits(requests=5)
    put(path, f"two:{OTHER}\n", age_s=90)
    assert file.changed() and (file.keys.name_of(KEY), file.keys.name_of(OTHER)) == (None, "two")
    assert not file.changed()


def test_one_that_cannot_be_read_changes_nothing(tmp_path):
    path = tmp_path / "keys"
    put(path, f"one:{KEY}\n")
    file = KeyFile(path)
    put(path, "nonsense\n")
    with pytest.raises(ConfigFault):
        file.changed()
    assert file.keys.name_of(KEY) == "one" and not file.changed(), "it is the same file still"
    path.unlink()
    with pytest.raises(ConfigFault):
        file.changed()
    assert file.keys.name_of(KEY) == "one" and not file.changed()
    put(path, f"one:{OTHER}\n")
    assert file.changed() and file.keys.name_of(OTHER) == "one"


def test_a_second_write_that_leaves_no_trace_is_seen(tmp_path):
    """Two writes within one tick of the file system's clock leave equal times and, here, equal sizes."""
    path = tmp_path / "keys"
    put(path, f"one:{KEY}\n", age_s=0)
    file = KeyFile(path)
    before = path.stat()
    with path.open("r+b") as same:
        same.write(f"two:{KEY}\n".encode())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.changed() and file.keys.name_of(KEY) == "two"


def test_keys_are_equal_by_what_they_allow(tmp_path):
    assert keys.ApiKeys({b"a": "one"}) == keys.ApiKeys({b"a": "one"}, {})
    assert keys.ApiKeys({b"a": "one"}) != keys.ApiKeys({b"a": "one"}, {"one": Limits(streams=1)})
    assert keys.ApiKeys({}) != 3
