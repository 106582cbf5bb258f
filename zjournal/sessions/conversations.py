"""Conversations: lists of items that a client keeps here under a name, beside the chains of responses.

What was put into one are facts; a response that was made in it is named, and its items are those of its turn. So a
conversation is as durable as the journal, and a restart reads it again. Where its facts lie is learnt by one walk over
the journal, at the first use, and remembered. For threads that may wait.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import msgspec

from zjournal import errors
from zjournal.journal.events import ConversationChanged, Fact, PayloadErased
from zjournal.journal.log import Journal
from zjournal.journal.retention import CAUSE_DELETED
from zjournal.journal.transaction import Transaction

ITEMS_MAX = 20  # that can be added at once
PREFIX = "conv_"
CREATED, UPDATED, ADDED, REMOVED, ANSWERED, DELETED = "created", "updated", "added", "removed", "answered", "deleted"


class Entry(msgspec.Struct, frozen=True):
    """Items that were added, or a response: the last `own` items of its request's input, and its output."""

    items: tuple[dict[str, Any], ...] = ()
    response: str = ""
    own: int = 0


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation as it stands. `removed`: ids of items that are not in it any more."""

    id: str
    created: int  # Unix seconds
    metadata: dict[str, str]
    entries: list[Entry]
    removed: set[str]


class Payload(msgspec.Struct, omit_defaults=True):
    """What a client put in, in the payload of a fact."""

    metadata: dict[str, str] | None = None
    items: tuple[dict[str, Any], ...] = ()
    item: str = ""  # the id of a removed one


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Payload).decode


class Conversations:
    """The conversations of one journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seqs: dict[str, list[int]] | None = None  # of each conversation's facts
        self._lock = threading.Lock()

    def read(self, name: str, tenant: str) -> Conversation:
        """A conversation of this tenant. Raises NotFound for any other."""
        missing = errors.NotFound(f"Conversation with id '{name}' not found.", param="conversation_id")
        found: Conversation | None = None
        for seq in self._facts_of(name):
            (fact,) = self._journal.read(after=seq - 1, limit=1)
            event = fact.event
            assert isinstance(event, ConversationChanged), fact
            if event.tenant != tenant or fact.payload is None or event.change == DELETED:
                raise missing
            said = _decode(fact.payload) if fact.payload else Payload()
            if event.change == CREATED:
                found = Conversation(id=name, created=event.at, metadata={}, entries=[], removed=set())
            assert found is not None, fact
            _fold(found, event, said)
        if found is None:
            raise missing
        return found

    def change(
        self, name: str, tenant: str, change: str, at: int, said: Payload, response: str = "", own: int = 0
    ) -> None:
        """Writes a change down; `at` in Unix seconds. Waits for the commit."""
        event = ConversationChanged(tenant=tenant, conversation=name, change=change, at=at, answered=response, own=own)
        payload = b"" if said == Payload() else _encode(said)
        self._append(name, functools.partial(_write, fact=Fact(event, payload)))

    def delete(self, name: str, tenant: str, at: int) -> None:
        """Deletes a conversation and what was put into it; its responses stay. Raises NotFound."""
        self.read(name, tenant)
        seqs = tuple(self._facts_of(name))
        event = ConversationChanged(tenant=tenant, conversation=name, change=DELETED, at=at)
        self._append(name, functools.partial(_erase, fact=Fact(event), seqs=seqs, name=name))

    def _append(self, name: str, work: Any) -> None:
        with self._lock:
            known = self._known()
            seq = self._journal.run(work, scrub=work.func is _erase).result()
            known.setdefault(name, []).append(seq)

    def _facts_of(self, name: str) -> list[int]:
        with self._lock:
            return list(self._known().get(name, ()))

    def _known(self) -> dict[str, list[int]]:
        if self._seqs is None:
            found: dict[str, list[int]] = {}
            for fact in self._journal.before(self._journal.head + 1, ConversationChanged):
                assert isinstance(fact.event, ConversationChanged), fact
                found.setdefault(fact.event.conversation, []).append(fact.seq)
            self._seqs = {name: seqs[::-1] for name, seqs in found.items()}
        return self._seqs


def _fold(found: Conversation, event: ConversationChanged, said: Payload) -> None:
    if said.metadata is not None:
        found.metadata = said.metadata
    if said.items:
        found.entries.append(Entry(items=said.items))
    if event.change == ANSWERED:
        found.entries.append(Entry(response=event.answered, own=event.own))
    if said.item:
        found.removed.add(said.item)


def _write(tx: Transaction, fact: Fact) -> int:
    tx.append([fact])
    return tx.head.seq


def _erase(tx: Transaction, fact: Fact, seqs: tuple[int, ...], name: str) -> int:
    seq = _write(tx, fact)
    tx.append([Fact(PayloadErased(tenant=fact.event.tenant, response=name, cause=CAUSE_DELETED))])
    tx.erase_payloads(number for number in seqs for bare in tx.facts(number - 1, number) if bare.payload is not None)
    return seq
