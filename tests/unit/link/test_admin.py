"""admin.sock: faults keep their class, lengths have a limit, and a deep data directory still has a socket."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import msgspec
import pytest

from zjournal import errors
from zjournal.link import admin


@pytest.mark.parametrize("kind", [errors.NotFound, errors.DataDirLocked, errors.JournalUnavailable, errors.Fault])
def test_a_fault_arrives_as_it_left(kind: type[errors.Fault]) -> None:
    sent = admin.Outcome(admin.VERSION, failure=admin.failure_of(kind("It is so.", param="a.b")))
    got = admin.decode_outcome(admin.frame(sent)[admin.LENGTH_BYTES :])
    assert got.failure is not None
    fault = admin.fault_of(got.failure)
    assert (type(fault), fault.message, fault.param) == (kind, "It is so.", "a.b")


@pytest.mark.parametrize("name", ["Unheard", "annotations", "SystemExit"])
def test_a_class_that_is_no_fault_of_ours_is_not_raised(name: str) -> None:
    assert type(admin.fault_of(admin.Failure(name, "no"))) is errors.Fault


def test_frames_have_a_limit_both_ways() -> None:
    with pytest.raises(errors.BadRequest):
        admin.length_of(struct.pack("<I", admin.FRAME_BYTES_MAX + 1))
    assert admin.length_of(struct.pack("<I", admin.FRAME_BYTES_MAX)) == admin.FRAME_BYTES_MAX
    with pytest.raises(errors.BadRequest):
        admin.frame(admin.Call(1, "x", msgspec.Raw(bytes(admin.FRAME_BYTES_MAX))))


@pytest.mark.parametrize("depth", [1, 200])
def test_a_socket_can_be_bound_and_found_however_deep(tmp_path: Path, depth: int) -> None:
    folder = tmp_path / ("d" * depth)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with admin.address(folder) as address:
            server.bind(address)
        server.listen()
        assert (folder / admin.SOCKET_FILE).is_socket()
        with admin.address(folder) as address:
            client.connect(address)
    with pytest.raises(OSError), admin.address(tmp_path / ("e" * 200)):
        raise AssertionError("there is no such folder")
