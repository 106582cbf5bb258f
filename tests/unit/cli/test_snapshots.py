"""`zj snapshots` without a server: what is listed, what gc would do and does, what verify finds, and pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Zj
from tests.unit.journal.stored import backed_up, ends, hashes, known
from tests.unit.snapshots import chunks
from tests.unit.snapshots.chunks import NAMESPACE, tokens
from zjournal.journal import datadir, snapshots
from zjournal.journal.events import CacheBackedUp, CacheReconciled, Chunk
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.verify import verify
from zjournal.sessions import identity
from zjournal.sessions import snapshots as files
from zjournal.snapshots import format
from zjournal.snapshots.folder import Folder

BASE = tokens(512, 1)
STATES = {"resp_a2": BASE + tokens(100, 2), "resp_c1": BASE + tokens(300, 3)}


def size(one: Any) -> int:
    return chunks.row(one).file_bytes


TOTAL = sum({one.hash: size(one) for data in STATES.values() for one in chunks.split(data)}.values())


@pytest.fixture
def where(data_dir: Path) -> tuple[str, str]:
    """The data directory with two snapshots in it, which share two chunks, and their files."""
    with datadir.lock(data_dir), Journal.open(data_dir) as journal, Folder(files.folder_of(data_dir)) as folder:
        for response, data in STATES.items():
            for one in chunks.split(data):
                chunks.store(folder, one)
            event, marks = backed_up(
                response, data, known(journal), namespace=identity.namespace("f", "local"), size=size
            )
            done = journal.run(lambda tx, event=event, marks=marks: snapshots.back_up(tx, event, marks))  # type: ignore[misc]
            assert done.result()
    return ("--data-dir", str(data_dir))


def names(data_dir: Path) -> set[str]:
    return {path.stem for path in files.folder_of(data_dir).rglob("*.zjc")}


def told(zj: Zj, *arguments: str) -> Any:
    return zj("snapshots", *arguments, "--json").json


def test_list_and_show(zj: Zj, where: tuple[str, str]) -> None:
    found = told(zj, "list", *where)
    assert (found["bytes"], found["chunks"]) == (TOTAL, 5)
    assert [one["response"] for one in found["snapshots"]] == ["resp_c1", "resp_a2"]
    assert [one["own_bytes"] for one in found["snapshots"]] == [
        sum(size(one) for one in chunks.split(data)[2:]) for data in reversed(STATES.values())
    ]
    assert not any(one["foreign"] or one["bad"] or one["pinned"] for one in found["snapshots"])
    shown = told(zj, "show", "resp_a", *where)
    assert [(one["start"], one["tokens"]) for one in shown["chunks"]] == [(0, 256), (256, 256), (512, 100)]
    assert zj("snapshots", "list", *where).out.count("resp_") == 2
    assert "612 tokens" in zj("snapshots", "show", "resp_a2", *where).out
    assert "several ids: resp_a2, resp_c1" in zj("snapshots", "show", "resp_", *where).err
    assert zj("snapshots", "show", "resp_b", *where).code == 1, "a response without a snapshot"


def test_gc_is_a_plan_with_reasons_and_costs_until_yes(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    assert told(zj, "gc", *where)["deletions"] == [], "there is room, and all of it is worth something"
    plan = told(zj, "gc", "--limit", str(TOTAL - 1), *where)
    assert plan["fits"] and plan["collected"] is None
    assert all(one["recompute_s"] > 0 and one["reason"] in ("least", "live") for one in plan["deletions"])
    done = zj("snapshots", "gc", "--limit", str(TOTAL - 1), *where)
    assert "s to compute again" in done.out and "nothing was deleted; add --yes" in done.out
    assert len(names(data_dir)) == 5

    done = zj("snapshots", "gc", "--limit", str(TOTAL - 1), "--yes", "--json", *where)
    assert done.json["collected"] == {  # type: ignore[index]
        "chunks": len(plan["deletions"]),
        "left": 0,
        "bytes": plan["bytes"],
    }
    with Reader.open(data_dir) as reader:
        assert names(data_dir) == {hash_.hex() for hash_ in known(reader)}
    assert TOTAL - plan["bytes"] == told(zj, "list", *where)["bytes"]
    assert zj("journal", "verify", "--deep", *where).code == 0


def test_gc_without_a_server_removes_what_nothing_names_and_tells_what_is_missing(
    zj: Zj, data_dir: Path, where: tuple[str, str]
) -> None:
    orphan = chunks.make(tokens(40, 9))
    with Folder(files.folder_of(data_dir)) as folder:
        chunks.store(folder, orphan)
        folder.remove(NAMESPACE, hashes(STATES["resp_a2"])[2])
    assert zj("snapshots", "gc", "--yes", *where).code == 0
    assert orphan.hash.hex() not in names(data_dir)
    with Reader.open(data_dir) as reader:
        (event,) = [fact.event for fact in reader.read() if isinstance(fact.event, CacheReconciled)]
    assert (event.orphans, event.missing) == (1, (hashes(STATES["resp_a2"])[2],))
    plan = told(zj, "gc", "--yes", *where)
    assert [(one["reason"], one["snapshots"]) for one in plan["deletions"]] == [("bad", ["resp_a2"])]
    assert zj("snapshots", "verify", "--deep", *where).code == 0


def test_a_pinned_snapshot_stays(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    assert told(zj, "pin", "resp_a", *where) == {"response": "resp_a2", "pinned": True}
    plan = told(zj, "gc", "--limit", "0", *where)
    assert not plan["fits"] and all(one["snapshots"] == ["resp_c1"] for one in plan["deletions"])
    assert "pinned and stays" in zj("snapshots", "gc", "--limit", "0", "--yes", *where).out
    with Reader.open(data_dir) as reader:
        assert ends(reader).keys() == {"resp_a2"}
    assert zj("snapshots", "unpin", "resp_a2", *where).out == "the snapshot of resp_a2 is not pinned\n"
    assert told(zj, "gc", "--limit", "0", "--yes", *where)["fits"]
    assert names(data_dir) == set()


@pytest.mark.parametrize("deep", [False, True])
def test_verify_names_the_first_file_that_is_wrong(zj: Zj, data_dir: Path, where: tuple[str, str], deep: bool) -> None:
    clean = told(zj, "verify", *where)
    assert clean["clean"] and clean["chunks"] == 5 and clean["file_bytes"] == TOTAL
    with Folder(files.folder_of(data_dir)) as folder:
        path = folder.where(NAMESPACE, hashes(STATES["resp_c1"])[-1])
    data = bytearray(path.read_bytes())
    data[5000 if deep else 300] ^= 1
    path.write_bytes(data)
    if deep:
        assert zj("snapshots", "verify", *where).code == 0, "headers and sizes are right"
        assert zj("journal", "verify", *where).code == 0
    flags = ["--deep"] * deep
    done = zj("snapshots", "verify", *flags, *where)
    assert (done.code, str(path) in done.out) == (1, True)
    whole = zj("journal", "verify", "--json", *flags, *where)
    assert (whole.code, whole.json["clean"], whole.json["fault"]) == (1, False, None)  # type: ignore[index]
    assert whole.json["files"]["fault"]["file"] == str(path)  # type: ignore[index]
    path.unlink()
    assert "is missing" in zj("snapshots", "verify", *where).out


def test_a_copy_of_the_journal_alone_verifies(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    files.folder_of(data_dir).rename(data_dir / "elsewhere")
    assert zj("journal", "verify", *where).code == 0
    assert zj("snapshots", "verify", *where).code == 1


def test_deleting_a_session_takes_its_files(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    bad = hashes(STATES["resp_c1"])[-1]
    with Folder(files.folder_of(data_dir)) as folder:
        assert folder.quarantine(NAMESPACE, bad)
    assert zj("sessions", "delete", "ses_two", "--yes", *where).code == 0
    assert names(data_dir) == {hash_.hex() for hash_ in hashes(STATES["resp_a2"])}, "what they share stays"
    assert verify(data_dir).fault is None
    assert zj("sessions", "delete", "ses_one", "--yes", *where).code == 0
    assert names(data_dir) == set()


@pytest.mark.parametrize("command", [("sessions", "delete", "ses_two"), ("snapshots", "gc", "--limit", "0")])
def test_a_command_that_dies_between_commit_and_unlink_leaves_files_that_nothing_names(
    zj: Zj, data_dir: Path, where: tuple[str, str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def die(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files, "unlink", die)
        assert zj(*command, "--yes", *where).code == 130
    with Reader.open(data_dir) as reader:
        left = {hash_.hex() for hash_ in known(reader)}
    assert left < names(data_dir)
    assert zj("journal", "verify", *where).code == 0, "an orphan is nothing wrong"
    assert zj("snapshots", "gc", "--yes", *where).code == 0
    assert names(data_dir) == left


def test_stats_tells_what_is_on_disk(zj: Zj, where: tuple[str, str]) -> None:
    assert zj("journal", "stats", "--json", *where).json["snapshot_bytes"] == TOTAL  # type: ignore[index]
    assert f"{TOTAL:,} bytes of KV" in zj("journal", "stats", *where).out


def test_r21_two_images_behind_the_same_tokens_are_two_snapshots(zj: Zj, data_dir: Path) -> None:
    """Field report R21: listed, counted, given up and verified apart, though their tokens are the same."""
    where = ("--data-dir", str(data_dir))
    images = {"resp_a2": b"c" * 32, "resp_c1": b"d" * 32}
    paths = []
    with datadir.lock(data_dir), Journal.open(data_dir) as journal, Folder(files.folder_of(data_dir)) as folder:
        for response, image in images.items():
            first = chunks.make(BASE[:1024], extra=image)
            tail = chunks.make(BASE[1024:1424], first.hash, 256)
            for one in (first, tail):
                chunks.store(folder, one)
            event = CacheBackedUp(
                response=response,
                namespace=identity.namespace("f", "local"),
                space=NAMESPACE,
                tokens=356,
                end=tail.hash,
                chunks=(
                    Chunk(first.hash, format.ROOT, 256, size(first), plain=False),
                    Chunk(tail.hash, b"", 100, size(tail)),
                ),
                write_us=1,
            )
            marks = format.marks(first.tokens) + format.marks(tail.tokens)
            assert journal.run(lambda tx, event=event, marks=marks: snapshots.back_up(tx, event, marks)).result()  # type: ignore[misc]
            paths.append(folder.where(NAMESPACE, first.hash))
    found = told(zj, "list", *where)
    assert found["chunks"] == 4 and [one["own_bytes"] for one in found["snapshots"]] == [found["bytes"] // 2] * 2
    assert zj("snapshots", "verify", "--deep", *where).code == 0
    cat, dog = (path.read_bytes() for path in paths)
    paths[0].write_bytes(dog)
    done = zj("snapshots", "verify", *where)
    assert done.code == 1 and "is another chunk than its name says" in done.out, "the other image's KV"
    paths[0].write_bytes(cat)
    assert told(zj, "gc", *where)["deletions"] == [], "neither repeats the other"
    assert told(zj, "gc", "--limit", str(found["bytes"] // 2), "--yes", *where)["fits"]
    assert len({one["response"] for one in told(zj, "list", *where)["snapshots"]}) == 1
    assert zj("snapshots", "verify", "--deep", *where).code == 0


# --- sessions ---------------------------------------------------------------------------------------------


def test_an_id_may_be_that_of_a_session(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    with Reader.open(data_dir) as reader:
        of = {row.response: row.session for page in snapshots.snapshots(reader) for row, _ in page}
    session = of["resp_a2"]
    mine = sorted(response for response, its in of.items() if its == session)
    shown = told(zj, "show", session, *where)
    assert (shown["session"], sorted(one["response"] for one in shown["snapshots"])) == (session, mine)
    assert all(one["chunks"][0]["start"] == 0 and one["recompute_s"] > 0 for one in shown["snapshots"])
    assert zj("snapshots", "show", session, *where).out.count(" of session ") == len(mine)

    done = told(zj, "pin", session, *where)
    assert (done["session"], sorted(done["responses"]), done["pinned"]) == (session, mine, True)
    listed = {one["response"]: one["pinned"] for one in told(zj, "list", *where)["snapshots"]}
    assert listed == {response: its == session for response, its in of.items()}
    assert f"session {session}: not pinned" in zj("snapshots", "unpin", session, *where).out
    assert not any(one["pinned"] for one in told(zj, "list", *where)["snapshots"])

    assert zj("sessions", "pin", session, *where).code == 0
    assert f"zj sessions unpin {session}" in zj("snapshots", "unpin", session, *where).out
    (row,) = [one for one in zj("sessions", "list", *where).out.splitlines() if session in one]
    *_, state, words = row.split()
    assert (state, words) == ("pinned", "-")


def test_gc_of_an_id_takes_what_it_alone_needs(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    assert zj("snapshots", "gc", "resp_a2", "--limit", "1", *where).code == 2
    plan = told(zj, "gc", "resp_a2", *where)
    assert [(one["start"], one["reason"], one["snapshots"]) for one in plan["deletions"]] == [
        (512, "asked", ["resp_a2"])
    ]
    assert plan["fits"] and plan["recompute_s"] > 0 and plan["collected"] is None
    assert told(zj, "gc", "resp_a2", "--yes", *where)["collected"]["chunks"] == 1
    assert [one["response"] for one in told(zj, "list", *where)["snapshots"]] == ["resp_c1"]
    assert names(data_dir) == {hash_.hex() for hash_ in hashes(STATES["resp_c1"])}
    told(zj, "pin", "resp_c1", *where)
    assert told(zj, "gc", "resp_c1", *where)["deletions"] == []
    assert "pinned and stays" in zj("snapshots", "gc", "resp_c1", "--yes", *where).out
    told(zj, "unpin", "resp_c1", *where)
    assert told(zj, "gc", "resp_c1", "--yes", *where)["collected"]["chunks"] == 4
    assert names(data_dir) == set()
    assert zj("journal", "verify", "--deep", *where).code == 0


def test_what_lies_in_quarantine_counts_into_the_limit_of_gc(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    aside = files.folder_of(data_dir) / "quarantine"
    aside.mkdir(mode=0o700)
    assert told(zj, "gc", "--limit", str(TOTAL), *where)["deletions"] == []
    (aside / f"{'ab' * 32}.zjc").write_bytes(bytes(1000))
    plan = told(zj, "gc", "--limit", str(TOTAL), *where)
    assert (plan["quarantine"], plan["fits"]) == (1000, True)
    assert plan["bytes"] >= 1000 and plan["stays"] + plan["quarantine"] <= TOTAL
    assert "0.98 KiB are in quarantine" in zj("snapshots", "gc", *where).out
    told(zj, "pin", "resp_a2", *where)
    told(zj, "pin", "resp_c1", *where)
    assert "pinned and stays" in zj("snapshots", "gc", "--limit", str(TOTAL), *where).out


def test_the_list_is_for_people(zj: Zj, where: tuple[str, str]) -> None:
    found = told(zj, "list", *where)["snapshots"]
    assert [one["used"] for one in found] == sorted((one["used"] for one in found), reverse=True)
    assert all(one["recompute_s"] > 0 and one["restores"] == 0 for one in found)
    out = zj("snapshots", "list", *where).out
    assert "KiB" in out and " ago" in out
