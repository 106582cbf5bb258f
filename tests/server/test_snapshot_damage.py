"""Snapshots on real processes, hurt on purpose: what is deleted stays deleted, and nobody waits for a dead disk."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.server.test_snapshots import LONG, clean, names, whole
from tests.serving import STOP_S_MAX, Server, happened, scripted, until
from zjournal.journal import snapshots
from zjournal.journal.events import CacheQuarantined
from zjournal.journal.reader import Reader
from zjournal.sessions import snapshots as files

END_S_MAX = 8.0  # less than what is left for writing states down


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Yes."}))


def first_chunk(data_dir: Path) -> Path:
    """The file of the chunk that all others of the only session continue."""
    with Reader.open(data_dir) as reader:
        row = next(snapshots.chunks(reader))[0]
    return next(files.folder_of(data_dir).glob(f"*/*/{row.hash.hex()}.zjc"))


def test_what_was_put_aside_goes_with_its_turn_though_the_engine_was_killed(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        server.kill()
        path = first_chunk(server.data_dir)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        server.start()
        second = server.respond(input="go on", previous_response_id=first["id"])
        until(lambda: whole(server.data_dir, second["id"]))
        assert happened(server.data_dir, CacheQuarantined)
        aside = files.folder_of(server.data_dir) / "quarantine" / path.name
        until(aside.exists)
        server.restart()
        assert aside.exists(), "it is kept as long as its chunk is"
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        for answer in (second, first):
            assert server.http.delete(f"/v1/responses/{answer['id']}").status_code == 200
        until(lambda: server.children() not in ([], [engine]))
        server.wait_ready()
        until(lambda: not aside.exists())
        assert not names(server.data_dir)
    assert clean(server.data_dir)


def test_the_end_does_not_wait_for_a_disk_that_refuses(server: Server) -> None:
    with server:
        server.respond(input="one")
        shutil.rmtree(files.folder_of(server.data_dir))
        assert server.respond(input=LONG)["status"] == "completed"
        until(lambda: "zj_snapshot_backups_off 1.0" in server.http.get("/metrics").text)
        begun = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun < END_S_MAX < STOP_S_MAX


def test_two_servers_that_are_led_to_one_folder_leave_each_other_s_files(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    model = scripted(tmp_path, {"text": "Yes."})
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
        files.folder_of(tmp_path / name).symlink_to(shared)
    with Server(tmp_path / "one", model=model) as one, Server(tmp_path / "two", model=model) as two:
        assert two.respond(input=LONG)["status"] == "completed"
        assert "another server uses this folder" in two.log.read_text()
        first = one.respond(input=LONG)
        until(lambda: whole(one.data_dir, first["id"]))
        assert two.respond(input=LONG)["status"] == "completed"
        one.restart()
        second = one.respond(input="go on", previous_response_id=first["id"])
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 512


def test_off_removes_at_its_start_what_a_kill_has_left(server: Server) -> None:
    """Turned off, and killed between the commit of a deletion and the unlink: it would have stayed for ever."""
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        server.kill()
        path = first_chunk(server.data_dir)
        left = path.with_name(path.name[:2] + "0" * 62 + ".zjc")
        left.write_bytes(path.read_bytes())
        aside = files.folder_of(server.data_dir) / "quarantine" / left.name
        aside.parent.mkdir()
        aside.write_bytes(path.read_bytes())
        server.flags += ["--snapshots", "off"]
        server.start()
        until(lambda: not left.exists() and not aside.exists())
        assert path.exists()
        assert server.terminate() == 0
    assert clean(server.data_dir)
