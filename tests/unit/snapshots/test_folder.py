"""The folder: removal, quarantine with its limit, and a root that cannot be had."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from tests.unit.snapshots import chunks
from zjournal.errors import SnapshotFault
from zjournal.snapshots.folder import QUARANTINE, QUARANTINE_FILES_MAX, Folder


@pytest.fixture
def folder(tmp_path):
    with Folder(tmp_path / "snapshots") as opened:
        yield opened


def test_a_chunk_is_removed_once(folder):
    made = chunks.make(chunks.tokens(20))
    header = chunks.store(folder, made)
    assert folder.size(made.namespace, made.hash) == header.file_bytes
    assert folder.remove(made.namespace, made.hash)
    assert not folder.remove(made.namespace, made.hash)
    assert folder.size(made.namespace, made.hash) is None


def test_what_is_put_aside_is_gone_from_its_place(folder):
    made = chunks.make(chunks.tokens(20))
    assert not folder.quarantine(made.namespace, made.hash)
    chunks.store(folder, made)
    assert folder.quarantine(made.namespace, made.hash)
    assert not folder.where(made.namespace, made.hash).exists()
    assert [path.name for path in (folder.path / QUARANTINE).iterdir()] == [f"{made.hash.hex()}.zjc"]
    chunks.store(folder, made)
    assert folder.quarantine(made.namespace, made.hash)
    assert len(list((folder.path / QUARANTINE).iterdir())) == 1


def test_links_and_folders_are_put_aside_themselves(folder, tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    link, place = (chunks.make(chunks.tokens(20, seed)) for seed in (1, 2))
    for made in (link, place):
        folder.where(made.namespace, made.hash).parent.mkdir(parents=True, exist_ok=True)
    folder.where(link.namespace, link.hash).symlink_to(target)
    (folder.where(place.namespace, place.hash) / "below").mkdir(parents=True)
    assert folder.quarantine(link.namespace, link.hash) and folder.quarantine(place.namespace, place.hash)
    assert target.read_text() == "keep"
    assert (folder.path / QUARANTINE / f"{link.hash.hex()}.zjc").is_symlink()


def test_the_quarantine_is_bounded_and_the_oldest_goes(folder):
    names = []
    for seed in range(QUARANTINE_FILES_MAX + 3):
        made = chunks.make(chunks.tokens(16, seed), block_bytes=4)
        chunks.store(folder, made)
        path = folder.where(made.namespace, made.hash)
        assert folder.quarantine(made.namespace, made.hash)
        names.append(path.name)
    left = {path.name for path in (folder.path / QUARANTINE).iterdir()}
    assert len(left) == QUARANTINE_FILES_MAX and names[-1] in left


def test_folders_are_synced_once_though_they_were_there(tmp_path, monkeypatch):
    """A process may have been killed between making a folder and syncing the one that it is in."""
    made = chunks.make(chunks.tokens(20))
    with Folder(tmp_path / "snapshots") as folder:
        chunks.store(folder, made)
    place = folder.where(made.namespace, made.hash).parent
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with Folder(tmp_path / "snapshots") as folder:
        for _ in range(3):
            os.close(folder.make_place(made.namespace, made.hash))
    assert synced == [path.stat().st_ino for path in (tmp_path, folder.path, place.parent)]


def test_a_root_that_is_a_link_is_the_owners_choice(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "snapshots").symlink_to(tmp_path / "disk")
    made = chunks.make(chunks.tokens(20))
    with Folder(tmp_path / "snapshots") as folder:
        chunks.store(folder, made)
        assert folder.size(made.namespace, made.hash)


def test_a_root_that_cannot_be_had_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotFault) as refused:
        Folder(tmp_path / "file")
    assert str(tmp_path / "file") in refused.value.message and refused.value.errno


def test_folders_below_are_opened_without_links(folder, tmp_path):
    os.symlink(tmp_path, folder.path / "link")
    for name in ("link", "nothing"):
        with pytest.raises(OSError):
            folder.open_folder(name)


def test_a_folder_is_taken_by_one_at_a_time(tmp_path):
    with Folder(tmp_path / "s") as other:
        with Folder(tmp_path / "s") as one:
            one.lock(0)
            with pytest.raises(SnapshotFault, match="another server") as refused:
                other.lock(0)
            assert refused.value.errno == errno.EBUSY
            assert other.size(bytes(32), bytes(32)) is None, "who does not remove anything needs no lock"
            waiting = threading.Thread(target=other.lock)
            waiting.start()
        waiting.join()
        with Folder(tmp_path / "s") as third, pytest.raises(SnapshotFault):
            third.lock(0)
