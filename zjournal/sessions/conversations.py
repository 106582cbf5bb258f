"""Conversations: lists of items that a client keeps here under a name, beside the chains of responses.

What was put into one are facts; a response that was made in it is named, and its items are those of its turn. So a
conversation is as durable as the journal, and a restart reads it again. Where its facts lie is learnt by one walk over
the journal, at the first use, and remembered. For threads that may wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from zjournal import errors
from zjournal.journal.events import ConversationChanged, Fact, PayloadErased
from zjournal.journal.log import Journal
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.journal.retention import CAUSE_DELETED
from zjournal.journal.transaction import Transaction

ITEMS_MAX = 20  # that can be added at once
TENANT_CONVERSATIONS_MAX = 10_000  # that are there at the same time
CONVERSATION_ITEMS_MAX = 5_000  # that are in one, before its last answer
CONVERSATION_CHANGES_MAX = 20_000  # facts of one; each is read whenever it is
PREFIX = "conv_"
CREATED, UPDATED, ADDED, REMOVED, ANSWERED, DELETED = "created", "updated", "added", "removed", "answered", "deleted"


_Work = Callable[[Transaction], int]  # in one transaction; gives the fact's number


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
# Fractions stay as they were sent: a float may have no room for them.
_decode = msgspec.json.Decoder(Payload, float_hook=lambda digits: msgspec.Raw(digits.encode())).decode


class _Facts(msgspec.Struct):
    """Where the facts of a conversation lie, and whose it is."""

    tenant: str
    seqs: list[int]


class Limits(msgspec.Struct, frozen=True):
    """How much there may be."""

    conversations: int = TENANT_CONVERSATIONS_MAX
    items: int = CONVERSATION_ITEMS_MAX
    changes: int = CONVERSATION_CHANGES_MAX


class Conversations:
    """The conversations of one journal."""

    def __init__(self, journal: Journal, limits: Limits | None = None) -> None:
        self._journal = journal
        self._limits = limits or Limits()
        self._seqs: dict[str, _Facts] | None = None  # of those that are not deleted
        self._lock = threading.Lock()

    def check_items(self, items: int, param: str) -> None:
        """Raises BadRequest, for the field `param`, where a conversation would have more items than it may."""
        if items > self._limits.items:
            message = f"A conversation has at most {self._limits.items} items; this one would have {items}."
            raise errors.BadRequest(message, param=param)

    def read(self, name: str, tenant: str) -> Conversation:
        """A conversation of this tenant. Raises NotFound for any other."""
        found: Conversation | None = None
        for seq in self._facts_of(name):
            (fact,) = self._journal.read(after=seq - 1, limit=1)
            event = fact.event
            assert isinstance(event, ConversationChanged), fact
            if event.tenant != tenant or fact.payload is None or event.change == DELETED:
                raise _missing(name)
            said = _decode(fact.payload) if fact.payload else Payload()
            if event.change == CREATED:
                found = Conversation(id=name, created=event.at, metadata={}, entries=[], removed=set())
            assert found is not None, fact
            _fold(found, event, said)
        if found is None:
            raise _missing(name)
        return found

    def change(
        self, name: str, tenant: str, change: str, at: int, said: Payload, response: str = "", own: int = 0
    ) -> None:
        """Writes a change down; `at` in Unix seconds. Waits for the commit.

        Raises BadRequest where there are too many conversations of this tenant, or changes of this one.
        """
        event = ConversationChanged(tenant=tenant, conversation=name, change=change, at=at, answered=response, own=own)
        payload = b"" if said == Payload() else _encode(said)
        self._append(name, event, lambda seqs: functools.partial(_write, fact=Fact(event, payload)))

    def delete(self, name: str, tenant: str, at: int) -> None:
        """Deletes a conversation and what was put into it; its responses stay. Raises NotFound."""
        self.read(name, tenant)
        event = ConversationChanged(tenant=tenant, conversation=name, change=DELETED, at=at)
        self._append(name, event, lambda seqs: functools.partial(_erase, fact=Fact(event), seqs=seqs, name=name))

    def _append(self, name: str, event: ConversationChanged, made: Callable[[tuple[int, ...]], _Work]) -> None:
        """Does the work that is `made` of where the conversation's facts lie; nobody else changes it meanwhile."""
        with self._lock:
            known = self._known()
            if name not in known and event.change != CREATED:  # it was deleted since it was read
                raise _missing(name)
            if event.change != DELETED:
                self._check_room(known, name, event)
            seqs = tuple(known[name].seqs) if name in known else ()
            seq = self._journal.run(made(seqs), scrub=event.change == DELETED).result()
            if event.change == DELETED:
                known.pop(name, None)
            else:
                known.setdefault(name, _Facts(event.tenant, [])).seqs.append(seq)

    def _check_room(self, known: dict[str, _Facts], name: str, event: ConversationChanged) -> None:
        """Raises BadRequest where the change would be one too many."""
        most = self._limits
        if event.change == CREATED and sum(one.tenant == event.tenant for one in known.values()) >= most.conversations:
            raise errors.BadRequest(f"There are {most.conversations} conversations; delete some to create others.")
        if name in known and len(known[name].seqs) >= most.changes:
            message = f"Conversation '{name}' was changed {most.changes} times; go on in another one."
            raise errors.BadRequest(message, param="conversation")

    def _facts_of(self, name: str) -> list[int]:
        with self._lock:
            found = self._known().get(name)
            return list(found.seqs) if found is not None else []

    def _known(self) -> dict[str, _Facts]:
        if self._seqs is None:
            found: dict[str, _Facts] = {}
            deleted: set[str] = set()
            for fact in self._journal.before(self._journal.head + 1, ConversationChanged):
                event = fact.event
                assert isinstance(event, ConversationChanged), fact
                if event.change == DELETED:
                    deleted.add(event.conversation)
                    found.pop(event.conversation, None)
                elif event.conversation not in deleted:
                    found.setdefault(event.conversation, _Facts(event.tenant, [])).seqs.append(fact.seq)
            for one in found.values():
                one.seqs.reverse()
            self._seqs = found
        return self._seqs


def holding(reader: Reader, turns: Collection[Turn]) -> int:
    """How many conversations that are not deleted hold a response of these turns."""
    responses = {turn.response for turn in turns}
    after = min((turn.accepted_seq for turn in turns), default=reader.head)
    deleted: set[str] = set()
    found: set[str] = set()
    for fact in reader.before(reader.head + 1, ConversationChanged, after):
        event = fact.event
        assert isinstance(event, ConversationChanged), fact
        if event.change == DELETED:
            deleted.add(event.conversation)
        elif event.answered in responses and event.conversation not in deleted:
            found.add(event.conversation)
    return len(found)


def _missing(name: str) -> errors.NotFound:
    return errors.NotFound(f"Conversation with id '{name}' not found.", param="conversation_id")


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
