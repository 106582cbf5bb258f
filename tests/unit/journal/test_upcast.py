"""Older and newer facts: an old body is carried to today's shape on each read, a newer one is refused by name."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import chain, events, retention, transaction
from zjournal.journal.events import AnyEvent, CacheMatched, NewerEvent, ServerStopped, decode_body, encode_body
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.verify import verify

OLDER = "cache_matched.0"


def _older(body: dict[str, Any]) -> dict[str, Any]:
    """As a release before the first might have written it: without a tier, and with another name for `cached`."""
    kept = {name: value for name, value in body.items() if name not in ("tier", "cached", "reason", "nearest")}
    return {**kept, "t": OLDER, "reused": body["cached"]}


def _upcast(body: dict[str, Any]) -> dict[str, Any]:
    reused = body.pop("reused")
    return {**body, "t": "cache_matched.1", "tier": "device", "cached": reused}


def _encode(event: AnyEvent) -> bytes:
    body = encode_body(event)
    if isinstance(event, CacheMatched):
        return msgspec.msgpack.encode(_older(msgspec.msgpack.decode(body)))
    return body


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal whose `cache_matched` were written by an older version."""
    with monkeypatch.context() as older:
        older.setattr(transaction, "encode_body", _encode)
        older.setattr(transaction, "TAGS", {**chain.TAGS, CacheMatched: ("cache_matched", 0)})
        with open_journal(tmp_path) as journal:
            journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2")]).result()
    return tmp_path


@pytest.fixture
def upcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "UPCASTS", MappingProxyType({OLDER: _upcast}))


def _columns(data_dir: Path) -> list[tuple]:
    db = sqlite3.connect(data_dir / "journal.db")
    rows = db.execute("SELECT tag, version FROM event WHERE tag = 'cache_matched'").fetchall()
    db.close()
    return rows


@pytest.mark.usefixtures("upcasts")
def test_an_older_fact_is_read_as_one_of_today_and_stays_as_it_is(data_dir: Path) -> None:
    assert _columns(data_dir) == [("cache_matched", 0)] * 2
    assert verify(data_dir).fault is None
    with Journal.open(data_dir) as journal:
        read = [fact.event for fact in journal.read() if isinstance(fact.event, CacheMatched)]
        assert read == [
            CacheMatched(tenant="local", response=r, tier="device", cached=3, prompt=4) for r in ("r1", "r2")
        ]
        before = journal.turns("s1")
        journal.rebuild()
        assert journal.turns("s1") == before
        assert [turn.cached for turn in before] == [3, 3]
        assert retention.delete(journal, "local", "r2").result()
        journal.append(whole_turn(journal, "r3")).result()
    assert verify(data_dir).fault is None
    assert _columns(data_dir) == [("cache_matched", 0)] * 2 + [("cache_matched", 1)]


def test_an_older_fact_that_nobody_can_read_is_a_fault(data_dir: Path) -> None:
    with Reader.open(data_dir) as reader, pytest.raises(JournalFault, match="fact 4 cannot be read"):
        reader.read()
    fault = verify(data_dir).fault
    assert fault is not None and fault.seq == 4


@pytest.mark.usefixtures("upcasts")
def test_a_body_of_another_version_than_its_columns_is_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(transaction, "encode_body", _encode)  # and the columns say 1
        with open_journal(tmp_path) as journal:
            journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
    fault = verify(tmp_path).fault
    assert fault is not None and "another kind than cache_matched.1" in fault.reason


@pytest.mark.parametrize("tag", ["cache_matched.2", "cache_melted.1"])
def test_a_newer_fact_asks_for_a_newer_zjournal(tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, version = tag.rpartition(".")
    with monkeypatch.context() as newer:
        newer.setattr(
            transaction,
            "encode_body",
            lambda event: msgspec.msgpack.encode({**msgspec.msgpack.decode(encode_body(event)), "t": tag}),
        )
        newer.setattr(transaction, "TAGS", {**chain.TAGS, ServerStopped: (name, int(version))})
        with open_journal(tmp_path) as journal:
            journal.append([events.Fact(ServerStopped())]).result()
    with Reader.open(tmp_path) as reader, pytest.raises(JournalFault, match=rf"fact 1: .*{tag}.*use a newer zjournal"):
        reader.read()
    fault = verify(tmp_path).fault
    assert fault is not None
    assert fault.seq == 1
    assert "use a newer zjournal" in fault.reason


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"t": 7}),
        msgspec.msgpack.encode({"t": "cache_matched"}),
        msgspec.msgpack.encode({"t": "cache_matched.one"}),
        msgspec.msgpack.encode({"t": "cache_matched.-1"}),
        msgspec.msgpack.encode({"t": "cache_matched." + "9" * 5000}),
        msgspec.msgpack.encode({"t": "cache_matched.1"}),
        msgspec.msgpack.encode({"t": "cache_matched.1", "response": 7}),
    ],
)
def test_what_is_no_body_is_not_taken_for_a_newer_one(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError) as refused:
        decode_body(body)
    assert not isinstance(refused.value, NewerEvent)


def test_each_upcast_leads_to_a_version_of_today() -> None:
    """What holds for those that are released: the tag is one no event has, and its successor is known."""
    current = {f"{name}.{version}" for name, version in chain.TAGS.values()}
    for tag in events.UPCASTS:
        name, _, version = tag.rpartition(".")
        assert tag not in current
        successor = f"{name}.{int(version) + 1}"
        assert successor in current or successor in events.UPCASTS
