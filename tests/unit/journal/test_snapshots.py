"""What is on disk of the KV, as the journal has it: what is written down, refused, given up, and erased with a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, open_journal, session, whole_turn
from tests.unit.journal.stored import FILE_BYTES, back_up, backed_up, ends, hashes, known, purge
from tests.unit.snapshots.chunks import NAMESPACE, tokens
from zjournal.errors import NotFound
from zjournal.journal import removal, retention, snapshots
from zjournal.journal.events import (
    CacheBackedUp,
    CacheMatched,
    CachePurged,
    CacheQuarantined,
    CacheReconciled,
    CacheRestored,
    Fact,
    SnapshotPinned,
)
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify

BASE = tokens(512, 1)
ONE = BASE + tokens(100, 2)  # two full chunks and a tail
TWO = BASE + tokens(300, 3)  # the same two, another one, and a tail


@pytest.fixture
def journal(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Two turns of s1, the second on the first, and one of s2."""
    with open_journal(tmp_path) as opened:
        opened.append([session("s1"), *whole_turn(opened, "r1"), *whole_turn(opened, "r2", parent="r1")]).result()
        opened.append([session("s2"), *whole_turn(opened, "r3", session="s2")]).result()
        yield opened
    assert verify(tmp_path).fault is None


def purged(journal: Journal) -> list[tuple[str, tuple[bytes, ...]]]:
    return [(fact.event.cause, fact.event.hashes) for fact in journal.read() if isinstance(fact.event, CachePurged)]


def test_only_new_chunks_are_told_and_the_rows_follow(journal: Journal) -> None:
    assert back_up(journal, "r1", ONE) and back_up(journal, "r3", TWO)
    told = [fact.event for fact in journal.read() if isinstance(fact.event, CacheBackedUp)]
    assert [len(event.chunks) for event in told] == [3, 2]
    assert told[0].tenant == "local"
    assert ends(journal) == {"r1": (hashes(ONE)[-1], 612), "r3": (hashes(TWO)[-1], 812)}
    assert snapshots.totals(journal) == snapshots.Totals(2, 5, 0, 5 * FILE_BYTES)
    assert [row.hash for row in snapshots.path(journal, hashes(TWO)[-1])] == hashes(TWO)
    rows = {row.hash: row for page in snapshots.chunks(journal) for row in page}
    assert [len(rows[hash_].marks) for hash_ in hashes(ONE)] == [64, 64, 24]


def test_a_state_is_refused_whose_turn_is_gone_or_whose_chunks_are(journal: Journal) -> None:
    assert back_up(journal, "r3", BASE)
    onward, marks = backed_up("r1", ONE, hashes(BASE))
    assert purge(journal, hashes(BASE)[::-1]).hashes == tuple(hashes(BASE)[::-1])
    assert not journal.run(lambda tx: snapshots.back_up(tx, onward, marks)).result(), "what it stands on is gone"
    assert not back_up(journal, "nobody", ONE)
    retention.delete(journal, "local", "r3").result()
    assert not back_up(journal, "r3", ONE)
    assert ends(journal) == {} and known(journal) == {}


def test_a_longer_state_of_a_response_takes_the_place_of_the_shorter_and_its_tail_goes(journal: Journal) -> None:
    assert back_up(journal, "r1", ONE)
    assert back_up(journal, "r1", ONE + tokens(50, 4))
    assert purged(journal) == [("replaced", (hashes(ONE)[-1],))]
    assert len(known(journal)) == 3


def test_chunks_go_from_the_end_and_snapshots_get_shorter(journal: Journal) -> None:
    back_up(journal, "r1", ONE)
    back_up(journal, "r3", TWO)
    assert purge(journal, [hashes(BASE)[0]], whole=True) == snapshots.Purged((), (hashes(BASE)[0],), 0)
    assert purge(journal, hashes(TWO)[:1:-1]).file_bytes == 2 * FILE_BYTES
    assert ends(journal)["r1"] == (hashes(ONE)[-1], 612)
    assert "r3" not in ends(journal), "r1 needs what is left of it as well: it would say nothing new"
    assert purge(journal, hashes(ONE)[-1:]).hashes
    assert ends(journal) == {"r1": (hashes(BASE)[-1], 512)}
    assert purge(journal, [b"x" * 32]) == snapshots.Purged((), (), 0)


def test_what_is_pinned_stays_and_what_it_needs(journal: Journal) -> None:
    back_up(journal, "r1", ONE)
    snapshots.pin(journal, "r1", True)
    snapshots.pin(journal, "r1", True)  # changes nothing
    assert sum(isinstance(fact.event, SnapshotPinned) for fact in journal.read()) == 1
    everything = hashes(ONE)[::-1]
    assert purge(journal, everything) == snapshots.Purged((), tuple(everything), 0)
    snapshots.pin(journal, "r1", False)
    removal.pin(journal, "s1", True)
    assert purge(journal, everything).left == tuple(everything), "its session is pinned"
    removal.pin(journal, "s1", False)
    assert purge(journal, everything).hashes == tuple(everything)
    with pytest.raises(NotFound):
        snapshots.pin(journal, "r1", True)


def test_a_turn_takes_the_chunks_with_it_that_nobody_else_needs(journal: Journal, tmp_path: Path) -> None:
    back_up(journal, "r1", ONE)
    back_up(journal, "r3", TWO)
    removal.remove_session(journal, "s2", removal.ASKED)
    assert purged(journal) == [("deleted", tuple(hashes(TWO)[:1:-1]))]
    assert ends(journal) == {"r1": (hashes(ONE)[-1], 612)}
    # r1 is needed by r2, and so its KV stays until both go.
    retention.delete(journal, "local", "r1").result()
    assert known(journal).keys() == set(hashes(ONE))
    retention.delete(journal, "local", "r2").result()
    assert known(journal) == {} and snapshots.totals(journal).snapshots == 0


def test_the_marks_go_with_the_turn_that_told_them_even_if_the_chunk_stays(journal: Journal) -> None:
    back_up(journal, "r3", TWO)
    back_up(journal, "r1", ONE)
    retention.delete(journal, "local", "r3").result()
    rows = [row for page in snapshots.chunks(journal) for row in page]
    assert {row.hash: bool(row.marks) for row in rows} == {
        hashes(ONE)[0]: False,
        hashes(ONE)[1]: False,
        hashes(ONE)[2]: True,
    }
    told = [fact for fact in journal.read() if isinstance(fact.event, CacheBackedUp)]
    assert [fact.payload is None for fact in told] == [True, False]
    before = rows
    journal.rebuild()
    assert [row for page in snapshots.chunks(journal) for row in page] == before


def test_an_unstored_turn_loses_its_snapshot_with_its_retention(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r4", session="s2", stored=False)).result()
    back_up(journal, "r4", ONE)
    assert retention.sweep(journal, 1 << 60, 0) == 1
    assert known(journal) == {}


def test_use_damage_and_what_the_next_turn_kept(journal: Journal) -> None:
    back_up(journal, "r1", ONE)
    end = hashes(ONE)[-1]
    more = {"space": NAMESPACE, "read_us": 1, "estimate_us": 1, "recompute_us": 9}
    restored = CacheRestored(
        tenant="local",
        response="r2",
        tier="ssd",
        tokens=612,
        file_bytes=9,
        end=end,
        **more,  # type: ignore[arg-type]
    )
    matched = CacheMatched(
        tenant="local", response="r2", tier="ssd", cached=600, prompt=700, reason="forked", nearest="r1", restored=600
    )
    of_another = CacheMatched(
        tenant="local", response="r3", tier="ssd", cached=610, prompt=700, reason="forked", nearest="r1", restored=600
    )
    journal.append([Fact(restored), Fact(matched), Fact(of_another)]).result()
    row = snapshots.has(journal, end)
    assert row is not None and (row.uses, row.bad) == (1, False)
    found = snapshots.snapshot(journal, "r1")
    assert found is not None and found.kept == 600
    turn = journal.turn("r2")
    assert turn is not None and (turn.cached, turn.restored, turn.restored_host) == (600, 600, 0)

    quarantined = CacheQuarantined(file="x.zjc", hash=end, space=NAMESPACE, reason="cut")
    lost = CacheReconciled(files=1, orphans=0, leftovers=0, strange=0, file_bytes=0, missing=(hashes(ONE)[0],))
    journal.append([Fact(quarantined), Fact(lost)]).result()
    assert snapshots.totals(journal) == snapshots.Totals(1, 3, 2, FILE_BYTES)
    event, marks = backed_up("r1", ONE, hashes(ONE)[1:2])
    assert journal.run(lambda tx: snapshots.back_up(tx, event, marks)).result()
    assert snapshots.totals(journal).bad == 0, "they were written again"


def test_a_backup_before_the_end_of_a_long_turn(journal: Journal) -> None:
    journal.append(accepted(journal, "r5")).result()
    assert back_up(journal, "r5", BASE) and back_up(journal, "r5", TWO)
    assert ends(journal)["r5"][1] == 812


def test_verify_names_a_row_that_does_not_follow(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        back_up(journal, "r1", ONE)
        journal.run(lambda tx: tx.db.execute("UPDATE chunk SET file_bytes = 1 WHERE tokens = 100")).result()
    fault = verify(tmp_path).fault
    assert fault is not None and (fault.where, "file_bytes" in fault.reason) == ("chunk", True)
