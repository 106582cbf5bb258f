"""The file of keys: digests, limits, and keys that are added."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from zjournal import keys
from zjournal.errors import ConfigFault
from zjournal.keys import Limits

KEY = "correct-horse-battery"


def file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_digest_stands_for_its_key(tmp_path: Path) -> None:
    hexed = keys.digest(KEY).hex()
    known = keys.read(file(tmp_path, f"a:sha256:{hexed}\nb:sha256:{keys.digest('other').hex().upper()}  streams=2\n"))
    assert (known.name_of(KEY), known.name_of("other")) == ("a", "b")
    assert known.name_of(hexed) is None and known.name_of(f"sha256:{hexed}") is None
    assert (known.limits("a"), known.limits("b")) == (Limits(), Limits(streams=2))


def test_limits_belong_to_the_name(tmp_path: Path) -> None:
    text = f"a:{KEY} requests=60  tokens=9000\na:{KEY}-2\na:{KEY}-3 tokens=9000 requests=60\nb:{KEY}-4\n"
    known = keys.read(file(tmp_path, text))
    assert known.limits("a") == Limits(requests=60, tokens=9000)
    assert known.limits("b") == Limits()
    assert (known.count("a"), known.count("b")) == (3, 1)


def test_a_key_that_is_added_is_kept_as_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = keys.add(path, "laptop", Limits())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n") + "\n# a comment without an end")
    second = keys.add(path, "ci", Limits(requests=5, streams=1))
    text = path.read_text()
    assert first not in text and second not in text and first != second
    known = keys.read(path)
    assert (known.name_of(first), known.name_of(second)) == ("laptop", "ci")
    assert known.limits("ci") == Limits(requests=5, streams=1)
    third = keys.add(path, "ci", Limits())
    assert keys.read(path).name_of(third) == "ci"
    assert keys.read(path).limits("ci") == Limits(requests=5, streams=1)


def test_what_cannot_be_added(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for name in ("local", "server", "a b", "", "x" * 65):
        with pytest.raises(ConfigFault):
            keys.add(path, name, Limits())
    assert not path.exists()
    keys.add(path, "a", Limits(streams=1))
    with pytest.raises(ConfigFault, match="other limits"):
        keys.add(path, "a", Limits(streams=2))
    path.chmod(0o644)
    with pytest.raises(ConfigFault, match="chmod 600"):
        keys.add(path, "a", Limits())
    with pytest.raises(ConfigFault, match="No such file"):
        keys.add(tmp_path / "no" / "keys", "a", Limits())
