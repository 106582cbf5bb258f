"""Folder against index: what is told, what is left alone, and that nothing is done but when asked."""

from __future__ import annotations

import os
import time

import pytest

from tests.unit.snapshots import chunks
from zjournal.snapshots import format, reconcile
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.reconcile import Kind, Totals

LATER = time.time_ns() + 10**15
PLACE = chunks.NAMESPACE.hex()[:16]


@pytest.fixture
def folder(tmp_path):
    with Folder(tmp_path / "snapshots") as opened:
        yield opened


def walked(folder, named, before_ns=LATER, totals=None, known=lambda hash_: True):
    steps = list(reconcile.walk(folder, named, known, before_ns, totals or Totals()))
    return [finding for step in steps for finding in step]


def stored(folder, count, **other):
    made = [chunks.make(chunks.tokens(16, seed), block_bytes=4, **other) for seed in range(count)]
    for one in made:
        chunks.store(folder, one)
    return made


def test_an_empty_folder_has_nothing_to_tell(folder):
    totals = Totals()
    assert walked(folder, lambda place, hash_: None, totals=totals) == []
    assert totals == Totals()


def test_what_no_snapshot_names_is_told_and_what_one_names_is_not(folder):
    made = stored(folder, 12)
    known = {one.hash: 8192 for one in made[:9]}
    totals = Totals()
    found = walked(folder, lambda place, hash_: known.get(hash_) if place == PLACE else None, totals=totals)
    assert {one.hash for one in found} == {one.hash for one in made[9:]}
    assert {(one.kind, one.file_bytes) for one in found} == {(Kind.ORPHAN, 8192)}
    assert totals.files == 12 and totals.disk_bytes == 12 * 8192
    assert all(reconcile.remove(folder, one) for one in found)
    assert not reconcile.remove(folder, found[0])
    assert walked(folder, lambda place, hash_: known.get(hash_)) == []
    assert all(folder.size(one.namespace, one.hash) for one in made[:9])


def test_the_index_is_asked_after_the_file_was_seen(folder):
    """A chunk that is committed while the walk goes on is never an orphan."""
    made = stored(folder, 5)
    known: dict[bytes, int] = {}

    def named(place, hash_):
        known.update((one.hash, 8192) for one in made)
        return known.get(hash_)

    assert walked(folder, named) == []


def test_what_is_young_is_left_alone(folder):
    made = stored(folder, 2)
    part = folder.where(made[0].namespace, made[0].hash).with_name(f"{made[0].hash.hex()}.{'0' * 16}.part")
    part.write_bytes(b"half")
    assert walked(folder, lambda place, hash_: None, before_ns=0) == []
    kinds = sorted(one.kind for one in walked(folder, lambda place, hash_: None))
    assert kinds == [Kind.LEFTOVER, Kind.ORPHAN, Kind.ORPHAN]


def test_a_file_in_the_wrong_place_or_of_another_kind_is_nobodys_business(folder, tmp_path):
    (made,) = stored(folder, 1)
    path = folder.where(made.namespace, made.hash)
    name = path.name
    for wrong in ("notes.txt", f"{PLACE}/{name}", f"{PLACE}/{path.parent.name}/notes"):
        (folder.path / wrong).write_text("mine")
    other = "00" if path.parent.name != "00" else "01"
    (folder.path / PLACE / other).mkdir()
    (folder.path / PLACE / other / name).write_text("moved")
    (path.parent / f"{'f' * 64}.zjc").symlink_to(tmp_path)
    (folder.path / "0123456789abcdef").symlink_to(tmp_path)
    (folder.path / "strange folder").mkdir()
    found = walked(folder, lambda place, hash_: 8192 if hash_ == made.hash and place == PLACE else None)
    assert {one.kind for one in found} == {Kind.STRANGE}
    assert len(found) == 7
    for one in found:
        with pytest.raises(AssertionError):
            reconcile.remove(folder, one)
    assert tmp_path.exists() and path.exists()


def test_what_was_put_aside_is_counted_and_not_told(folder):
    (made,) = stored(folder, 1)
    folder.quarantine(made.namespace, made.hash)
    totals = Totals()
    assert walked(folder, lambda place, hash_: None, totals=totals) == []
    assert (totals.files, totals.aside, totals.disk_bytes) == (1, 1, 8192)


def test_what_was_put_aside_of_a_chunk_that_has_gone_goes_too(folder):
    """Its turn was deleted, and whoever was to unlink it was killed: it must not outlive that."""
    made = stored(folder, 2)
    for one in made:
        folder.quarantine(one.namespace, one.hash)
    (folder.path / "quarantine" / "notes").write_text("mine")
    (found,) = walked(folder, lambda place, hash_: None, known=lambda hash_: hash_ == made[0].hash)
    assert (found.kind, found.aside, found.hash, found.file_bytes) == (Kind.ORPHAN, True, made[1].hash, 8192)
    assert reconcile.remove(folder, found)
    assert {path.name for path in (folder.path / "quarantine").iterdir()} == {f"{made[0].hash.hex()}.zjc", "notes"}


def test_what_is_named_and_not_there_is_told(folder):
    made = stored(folder, 6)
    folder.remove(made[1].namespace, made[1].hash)
    os.truncate(folder.where(made[2].namespace, made[2].hash), 100)
    known = {one.hash: 8192 for one in made[:5]}
    rows = [(one.namespace, one.hash, 8192) for one in made[:5]]
    found = [one for step in reconcile.absent(folder, rows, lambda place, hash_: known.get(hash_)) for one in step]
    assert [(one.kind, one.hash, one.file_bytes) for one in found] == [
        (Kind.MISSING, made[1].hash, 0),
        (Kind.RESIZED, made[2].hash, 100),
    ]
    assert not [one for step in reconcile.absent(folder, rows, lambda place, hash_: None) for one in step]


def test_steps_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(reconcile, "STEP_ENTRIES", 4)
    made = stored(folder, 11)
    steps = list(reconcile.walk(folder, lambda place, hash_: None, lambda _: False, LATER, Totals()))
    assert [len(step) for step in steps] == [4, 4, 3]
    rows = [(one.namespace, format.ROOT, 1) for one in made]
    assert [len(step) for step in reconcile.absent(folder, rows, lambda place, hash_: 1)] == [4, 4, 3]
