"""Conversations in the journal: they fold to the same whenever they are read, and leave nothing when deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal
from zjournal import errors
from zjournal.journal.verify import verify
from zjournal.sessions import conversations
from zjournal.sessions.conversations import Conversations, Entry, Payload

ITEM = {"id": "msg_1", "type": "message", "role": "user", "content": "the heron stands still"}


def made(store: Conversations, name: str = "conv_1", tenant: str = "local") -> None:
    store.change(name, tenant, conversations.CREATED, 7, Payload({"a": "b"}, (ITEM,)))


def test_changes_fold_to_a_conversation_also_when_another_reads_them(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        store = Conversations(journal)
        made(store)
        made(store, "conv_2")
        store.change("conv_1", "local", conversations.ANSWERED, 8, Payload(), "resp_1", 2)
        store.change("conv_1", "local", conversations.REMOVED, 9, Payload(item="msg_1"))
        store.change("conv_1", "local", conversations.UPDATED, 9, Payload({}))
        for reader in (store, Conversations(journal)):
            found = reader.read("conv_1", "local")
            assert (found.created, found.metadata, found.removed) == (7, {}, {"msg_1"})
            assert found.entries == [Entry(items=(ITEM,)), Entry(response="resp_1", own=2)]
            assert reader.read("conv_2", "local").metadata == {"a": "b"}


def test_others_and_unknown_ones_are_not_found(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        store = Conversations(journal)
        made(store)
        for name, tenant in (("conv_1", "other"), ("conv_2", "local"), ("", "local")):
            with pytest.raises(errors.NotFound):
                store.read(name, tenant)
            with pytest.raises(errors.NotFound):
                store.delete(name, tenant, 9)
        assert store.read("conv_1", "local").entries


def test_a_deleted_one_leaves_no_text_and_the_journal_verifies(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        store = Conversations(journal)
        made(store)
        store.change("conv_1", "local", conversations.ANSWERED, 8, Payload(), "resp_1", 2)
        store.delete("conv_1", "local", 9)
        for reader in (store, Conversations(journal)):
            with pytest.raises(errors.NotFound):
                reader.read("conv_1", "local")
            with pytest.raises(errors.NotFound):
                reader.delete("conv_1", "local", 9)
    report = verify(tmp_path)
    assert report.fault is None, report.fault
    for file in tmp_path.glob("journal.db*"):
        assert b"heron" not in file.read_bytes()


def test_there_may_be_so_many_of_a_tenant_and_no_more(tmp_path: Path) -> None:
    limits = conversations.Limits(conversations=2)
    with open_journal(tmp_path) as journal:
        store = Conversations(journal, limits)
        made(store, "conv_1")
        made(store, "conv_2")
        made(store, "conv_3", tenant="other")
        for reader in (store, Conversations(journal, limits)):
            with pytest.raises(errors.BadRequest, match="There are 2 conversations"):
                made(reader, "conv_4")
        store.delete("conv_1", "local", 9)
        made(store, "conv_4")
        assert store.read("conv_4", "local").entries


def test_there_may_be_so_many_changes_and_items_of_one(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        store = Conversations(journal, conversations.Limits(items=3, changes=2))
        made(store)
        store.change("conv_1", "local", conversations.UPDATED, 9, Payload({}))
        with pytest.raises(errors.BadRequest, match="was changed 2 times"):
            store.change("conv_1", "local", conversations.UPDATED, 9, Payload({}))
        store.check_items(3, "items")
        with pytest.raises(errors.BadRequest, match="at most 3 items; this one would have 4") as caught:
            store.check_items(4, "items")
        assert caught.value.param == "items"
        store.delete("conv_1", "local", 9)
        with pytest.raises(errors.NotFound):
            store.read("conv_1", "local")


def test_what_was_deleted_meanwhile_is_not_changed(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        store = Conversations(journal)
        made(store)
        store.delete("conv_1", "local", 9)
        with pytest.raises(errors.NotFound):
            store.change("conv_1", "local", conversations.UPDATED, 9, Payload({}))
        for reader in (store, Conversations(journal)):
            with pytest.raises(errors.NotFound):
                reader.read("conv_1", "local")
