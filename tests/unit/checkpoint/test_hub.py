"""The hub against a stub of it on loopback: what is fetched, checked, continued, refused, and used offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hub_stub
from tests.hub_stub import COMMIT, OLDER
from zjournal.checkpoint import hub
from zjournal.checkpoint.locate import locate
from zjournal.errors import HubDenied, HubDiskFull, HubNotFound, HubUnreachable, ModelFault

ROOT = Path(__file__).parents[3]
WEIGHTS = bytes(range(256)) * 20_000
FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"never wanted",
    "onnx/model.onnx": b"nor this",
}
GGUFS = {"a-q4.gguf": b"GGUF" + WEIGHTS, "b-q8.gguf": b"GGUF" + WEIGHTS[::-1], "README.md": b"#"}
REPOS = {"org/folder": FOLDER, "org/ggufs": GGUFS, "org/one": {"only.gguf": b"GGUF" + WEIGHTS}, "org/none": {"x": b"y"}}


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # before it tries again
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    with hub_stub.Stub(REPOS) as server:
        yield server


def pull(stub, text, tmp_path, told=None):
    note = (lambda done, total: None) if told is None else (lambda done, total: told.append((done, total)))
    return hub.pull(hub.parse(text), tmp_path, note, stub.url)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", hub.HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct", hub.HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/name@v1.0", hub.HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3:x.gguf", hub.HubName("org/name", "refs/pr/3", "x.gguf")),
        ("org/name:sub/x-00.gguf", hub.HubName("org/name", "main", "sub/x-00.gguf")),
        ("smollm2", None),
        ("models/x.gguf", None),
        ("/org/name", None),
        ("./name", None),
        ("org/../name", None),
        ("org/name:../x.gguf", None),
        ("org/name:x.bin", None),
        ("a/b/c", None),
        ("", None),
    ],
)
def test_names(text, expected):
    assert hub.parse(text) == expected
    assert expected is None or str(expected) == text


def test_a_folder_brings_what_runs_and_no_more(stub, tmp_path):
    told: list = []
    path = pull(stub, "org/folder", tmp_path, told)
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {file.name for file in path.iterdir()} == wanted | {"complete.json"}
    assert all((path / name).read_bytes() == FOLDER[name] for name in wanted)
    total = sum(len(FOLDER[name]) for name in wanted)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 5


def test_what_is_there_is_used_without_the_network(stub, tmp_path):
    path = pull(stub, "org/folder", tmp_path)
    asked = sum(stub.asked.values())
    found = locate("org/folder", tmp_path, lambda name: pytest.fail("it is there"))
    assert found.path == path
    assert found.accepts("org/folder") and found.accepts("folder")
    assert sum(stub.asked.values()) == asked
    (path / "model.safetensors").write_bytes(b"cut")
    assert hub.find(hub.parse("org/folder"), tmp_path) is None


def test_a_revision_is_pinned(stub, tmp_path):
    main, older = pull(stub, "org/one", tmp_path), pull(stub, "org/one@v1", tmp_path)
    assert (main.parent.name, older.parent.name) == (COMMIT, OLDER)
    assert hub.find(hub.parse("org/one@v1"), tmp_path) == older
    with pytest.raises(HubNotFound, match="no revision v2"):
        pull(stub, "org/one@v2", tmp_path)


def test_one_file_of_several(stub, tmp_path):
    path = pull(stub, "org/ggufs:b-q8.gguf", tmp_path)
    assert path.read_bytes() == GGUFS["b-q8.gguf"]
    assert hub.find(hub.parse("org/ggufs"), tmp_path) is None
    with pytest.raises(ModelFault, match=r"org/ggufs:FILE, of a-q4\.gguf, b-q8\.gguf"):
        pull(stub, "org/ggufs", tmp_path)
    with pytest.raises(HubNotFound, match=r"no such file; it has a-q4\.gguf"):
        pull(stub, "org/ggufs:c.gguf", tmp_path)
    with pytest.raises(ModelFault, match="holds neither"):
        pull(stub, "org/none", tmp_path)


def test_cut_connections_are_continued(stub, tmp_path):
    stub.cuts = [1_000_000, 700_000, 1]
    path = pull(stub, "org/one", tmp_path)
    assert path.read_bytes() == b"GGUF" + WEIGHTS
    assert len(stub.ranges) == 3
    assert stub.ranges[-1] != "bytes=0-"


def test_a_later_run_goes_on_where_an_interrupted_one_stopped(stub, tmp_path):
    class Interrupted(Exception):
        pass

    def stop(done, total):
        if done > 2_000_000:
            raise Interrupted

    with pytest.raises(Interrupted):
        hub.pull(hub.parse("org/one"), tmp_path, stop, stub.url)
    (part,) = (tmp_path / "hub").rglob("*.part")
    kept = part.stat().st_size
    assert kept > 2_000_000
    assert hub.find(hub.parse("org/one"), tmp_path) is None
    told: list = []
    path = pull(stub, "org/one", tmp_path, told)
    assert path.read_bytes() == b"GGUF" + WEIGHTS
    assert stub.ranges == [f"bytes={kept}-"]
    assert told[0][0] == kept
    assert not list((tmp_path / "hub").rglob("*.part"))


def test_a_damaged_file_is_never_a_model(stub, tmp_path):
    stub.damaged = True
    with pytest.raises(ModelFault, match="arrived damaged"):
        pull(stub, "org/one", tmp_path)
    assert not [*(tmp_path / "hub").rglob("*.gguf"), *(tmp_path / "hub").rglob("*.part")]
    stub.damaged = False
    assert pull(stub, "org/one", tmp_path).read_bytes() == b"GGUF" + WEIGHTS


def test_a_hub_that_never_ends_does_not_fill_the_disk(stub, tmp_path):
    stub.endless = True
    with pytest.raises(ModelFault, match=r"org/one: only.gguf is longer than the 5120004 bytes of its listing"):
        pull(stub, "org/one", tmp_path)
    assert not [*(tmp_path / "hub").rglob("*.gguf"), *(tmp_path / "hub").rglob("*.part")]


RESOLVE = f"/org/one/resolve/{COMMIT}/only.gguf"
LISTING = "/api/models/org/one/revision/main"


@pytest.mark.parametrize(
    ("path", "answer", "fault", "reason"),
    [
        (RESOLVE, (403, "GatedRepo"), HubDenied, "gated"),
        (LISTING, (401, "GatedRepo"), HubDenied, "gated"),
        (LISTING, (401, "RepoNotFound"), HubNotFound, "private"),
        (LISTING, (403, ""), HubDenied, "403"),
        (RESOLVE, (404, "EntryNotFound"), HubNotFound, "not there"),
        (RESOLVE, (500, ""), HubUnreachable, "500"),
    ],
)
def test_refusals_have_kinds_of_their_own(stub, tmp_path, path, answer, fault, reason):
    stub.status[path] = answer
    with pytest.raises(ModelFault) as caught:
        pull(stub, "org/one", tmp_path)
    assert type(caught.value) is fault
    assert reason in caught.value.message
    assert caught.value.message.startswith("org/one: ")
    assert "\n" not in caught.value.message


def test_no_such_model_and_no_network(stub, tmp_path):
    with pytest.raises(HubNotFound, match="org/absent: there is no such model"):
        pull(stub, "org/absent", tmp_path)
    with pytest.raises(HubUnreachable, match="org/one: the hub cannot be reached") as caught:
        hub.pull(hub.parse("org/one"), tmp_path, lambda *_: None, "http://127.0.0.1:1")
    assert "\n" not in caught.value.message
    with pytest.raises(ModelFault, match="zj models pull org/one"):
        locate("org/one", tmp_path)


def test_the_disk_is_looked_at_first(stub, tmp_path, monkeypatch):
    class Usage:
        free = 70_000_000

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(HubDiskFull, match="5120004 bytes are to be fetched"):
        pull(stub, "org/one", tmp_path)
    assert not stub.asked[RESOLVE]


def test_a_full_disk_keeps_what_has_come(stub, tmp_path, monkeypatch):
    class Full(hub._Counted):
        def write(self, data: bytes) -> int:
            if self.tell() > 1_000_000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    with monkeypatch.context() as patched:
        patched.setattr(hub, "_Counted", Full)
        with pytest.raises(HubDiskFull, match="the disk is full"):
            pull(stub, "org/one", tmp_path)
    assert pull(stub, "org/one", tmp_path).read_bytes() == b"GGUF" + WEIGHTS
    assert len(stub.ranges) == 1


def test_the_command(stub, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": stub.url, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "zjournal", "models", "pull", "org/one", "--cache-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"] == "org/one"
    assert Path(told["path"]).read_bytes() == b"GGUF" + WEIGHTS
    command[5] = "org/absent"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (HubNotFound.exit_code, "")
    assert "no such model" in done.stderr
