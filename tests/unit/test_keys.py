"""The file of keys: digests, limits, and keys that are added."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.parametrize("before", ["", "\n \n", "# who may use the server", "\ufeff# saved by an editor\n\n"])
def test_the_first_key_of_a_file_that_has_none_yet(tmp_path: Path, before: str) -> None:
    path = file(tmp_path, before)
    with pytest.raises(ConfigFault, match="zj keys add NAME makes one"):
        keys.read(path)
    key = keys.add(path, "laptop", Limits())
    assert keys.read(path).name_of(key) == "laptop"
    assert path.read_text().startswith(before)


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


# --- removing -----------------------------------------------------------------------------------------


def test_a_removed_name_has_no_keys_and_all_else_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = b"\xef\xbb\xbf# a remark of \xff bytes that are no text\n\n  a : a-key-of-some-length  \r\n"
    after = b"b:b-key-of-some-length streams=2\n# a is written here: a:not-a-line\n"
    path.touch(0o600)
    path.write_bytes(before + b"a:another-key-of-some-length requests=5\n" + after)
    inode = path.stat().st_ino
    assert keys.remove(path, "a") == 2
    assert path.read_bytes() == before[: before.index(b"  a :")] + after
    assert path.stat().st_ino != inode, "it was written beside and put in its place"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = keys.read(path)
    assert known.names == ("b",) and known.limits("b") == Limits(streams=2)
    assert [one.name for one in tmp_path.iterdir()] == ["keys"], "nothing is left beside it"


def test_at_the_end_of_a_rotation_the_last_key_stays_with_the_limits_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old = keys.add(path, "a", Limits(requests=7, streams=2))
    with pytest.raises(ConfigFault, match="one key"):
        keys.remove(path, "a", keep_last=True)
    older, new = keys.add(path, "a", Limits()), keys.add(path, "a", Limits())
    assert keys.remove(path, "a", keep_last=True) == 2
    known = keys.read(path)
    assert [known.name_of(key) for key in (old, older, new)] == [None, None, "a"]
    assert known.limits("a") == Limits(requests=7, streams=2)


def test_what_cannot_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigFault, match="No such file"):
        keys.remove(path, "a")
    assert not path.exists()
    key = keys.add(path, "a", Limits())
    text = path.read_bytes()
    with pytest.raises(ConfigFault, match="no key"):
        keys.remove(path, "b")
    with pytest.raises(ConfigFault, match="the only ones"):
        keys.remove(path, "a")
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(ConfigFault, match=":2: not of the form"):
        keys.remove(path, "a")
    assert path.read_bytes() == text + b"nonsense\n"
    assert keys.digest(key).hex() in path.read_text()


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    for name in "ab":
        keys.add(path, name, Limits())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigFault, match="No space left"):
        keys.remove(path, "a")
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["keys"]


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path, real = tmp_path / "keys", tmp_path / "real" / "keys"
    for name in "ab":
        keys.add(real, name, Limits())
    path.symlink_to(real)
    assert keys.remove(path, "a") == 1
    assert path.is_symlink() and keys.read(real).names == keys.read(path).names == ("b",)


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    """Names that come and go while another command adds keys: every addition is there at the end."""
    path = tmp_path / "keys"
    keys.add(path, "stays", Limits())
    rounds = 40

    def come_and_go() -> None:
        for _ in range(rounds):
            keys.add(path, "brief", Limits())
            assert keys.remove(path, "brief") == 1

    with ThreadPoolExecutor(2) as pool:
        going = pool.submit(come_and_go)
        added = [keys.add(path, f"n{index}", Limits()) for index in range(rounds)]
        going.result()
    known = keys.read(path)
    assert [known.name_of(key) for key in added] == [f"n{index}" for index in range(rounds)]
    assert "brief" not in known.names and "stays" in known.names
