"""Import: an export becomes facts of this journal, all of it in one transaction or nothing.

Turns and sessions keep their ids, so that the conversation goes on by `previous_response_id`. A turn that is here
already must be the same one and is left as it is: a file may be imported twice, and a longer export of the same session
adds what is new. What depends on a journal's secrets is made again with those of this one: names of contents and
digests of histories. Item ids stay, by the secret that travels with each turn.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from zjournal import ask
from zjournal.errors import BadRequest, Fault, ImportFault, JournalFault, NotFound
from zjournal.journal import chain, events
from zjournal.journal.log import LOCAL_TENANT, SERVER_TENANT, Journal
from zjournal.journal.projections import BY_RESPONSE
from zjournal.journal.reader import Reader, Tenant
from zjournal.journal.transaction import Transaction
from zjournal.link import wire
from zjournal.sessions import follow, identity, transfer
from zjournal.sessions.chain import stop_strings
from zjournal.sessions.exported import ENDS, OWN, UNREADABLE, Exported, TurnLines, decode_items, decode_spans
from zjournal.sessions.items import call_ids, digests, items_of, units
from zjournal.sessions.reading import Terms, read, recorded_model
from zjournal.sessions.record import pack
from zjournal.sessions.transfer import Engine, Line
from zjournal.sessions.vocabulary import Vocabulary

ERASED = "{} was erased here, and its id cannot be used again"
SESSION_DELETED = "the session {} was deleted here, and nothing can be added to it"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as names of keys are


class ImportFile(msgspec.Struct, frozen=True):
    """Arguments: the file, by a path that the owner of the journal can read, and the name of the tenant to own it."""

    path: str
    tenant: str = LOCAL_TENANT


class Imported(msgspec.Struct, frozen=True):
    """What became of a file. `known`: turns that were here already; `erased`: those that were without content there."""

    session: str
    tenant: str
    turns: int
    known: int
    erased: int


def import_file(journal: Journal, arguments: ImportFile) -> Imported:
    """Brings the turns of an export into the journal. Waits for the commit.

    Raises ImportFault when the file is no whole export, or does not fit: then nothing of it is in the journal.
    """
    name = arguments.tenant
    if name == SERVER_TENANT or not _TENANT_NAME.fullmatch(name):
        raise BadRequest(f"{name!r} is no name of a key that could own a session", param="tenant")
    with Exported(Path(arguments.path)) as file:
        tenant = journal.tenant(name)
        new = _new_turns(journal, tenant, file)
        if new:
            writing = _Writing(journal, tenant, file, new)
            journal.run(writing.write).result()
        return Imported(file.header.session, name, len(new), len(file.turns) - len(new), len(file.erased))


def _new_turns(journal: Journal, tenant: Tenant, file: Exported) -> dict[str, TurnLines]:
    """The turns of a file that are not here yet. Raises ImportFault for one that cannot be brought here."""
    new: dict[str, TurnLines] = {}
    for response, turn in file.turns.items():
        here = journal.turn(response)
        if here is None:
            parent = turn.request.parent
            if parent and parent not in file.erased and parent not in new and journal.turn(parent) is None:
                raise file.fault(f"{response} continues {parent}, which is neither before it in the file nor here")
            new[response] = turn
        elif here.erased:
            raise file.fault(ERASED.format(response))
        elif here.finished_us is None:
            raise file.fault(f"{response} is running here")
        elif here.tenant != tenant.id or _digest(_lines_here(journal, response)) != _digest(turn.own):
            raise file.fault(f"the id {response} is taken here by another turn")
    _refuse_gone(journal, file, new)
    opened = {line.body.session for line in file.lines if isinstance(line.body, events.SessionOpened)}
    for name in {turn.request.session for turn in new.values()}:
        session = journal.session(name)
        if session is None and name not in opened:
            raise file.fault(f"the session {name} is never opened")
        if session is not None and session.tenant != tenant.id:
            raise file.fault(f"the id {name} is taken here by another session")
        if session is not None and session.deleted:
            raise file.fault(SESSION_DELETED.format(name))
    return new


def _refuse_gone(journal: Journal, file: Exported, new: Mapping[str, TurnLines]) -> None:
    """Raises ImportFault for what was deleted and erased here: it has no row any more, and its facts still tell."""
    if not new:
        return
    end = journal.head + 1
    for fact in journal.before(end, events.PayloadErased):
        if isinstance(fact.event, events.PayloadErased) and fact.event.response in new:
            raise file.fault(ERASED.format(fact.event.response))
    sessions = {turn.request.session for turn in new.values()}
    for fact in journal.before(end, events.SessionDeleted):
        if isinstance(fact.event, events.SessionDeleted) and fact.event.session in sessions:
            raise file.fault(SESSION_DELETED.format(fact.event.session))


def _lines_here(journal: Reader, response: str) -> list[Line]:
    facts = [fact for fact in journal.read_response(response) if isinstance(fact.event, OWN)]
    ends = [index for index, fact in enumerate(facts) if isinstance(fact.event, ENDS)]
    try:
        return transfer.recorded_lines(journal, facts[: ends[0] + 1] if ends else facts)
    except NotFound as fault:
        raise ImportFault(fault.message) from None


def _digest(lines: Sequence[Line]) -> bytes:
    """What a turn is, in whatever journal: bodies, payloads and contents without what is one journal's own."""
    digest = hashlib.sha256()
    for line in lines:
        body = line.body
        names: dict[str, object] = {"tenant": ""}
        if isinstance(body, events.RequestAccepted):
            names |= {"history": b"", "item_secret": line.item_secret, "record": b"", "client": b""}
        elif isinstance(body, events.ResponseFinished):
            names |= {"history": b""}
        plain = events.encode_body(msgspec.structs.replace(body, **names))
        # Items and tools follow from the body, and need not be in both.
        shas = [
            f"{name} {sha}".encode() for name, sha in sorted(line.contents.items()) if name not in ("items", "tools")
        ]
        for part in (plain, line.payload or b"", *shas):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


class _Writing:
    """One import, from what was checked to the transaction."""

    def __init__(self, journal: Journal, tenant: Tenant, file: Exported, new: dict[str, TurnLines]) -> None:
        self._journal = journal
        self._tenant = tenant
        self._server = journal.tenant(SERVER_TENANT)
        self._file = file
        self._new = new
        histories = _Histories(journal, file, new)
        self._histories, self._named = histories.made, histories.named
        self._records = _Records(journal, tenant, self._server, file)
        self._names: dict[tuple[str, str], bytes] = {}  # tenant and SHA-256 -> name of a content that is stored by now
        self._engines = [engine for engine in file.engines.values() if self._wanted(engine)]

    def _wanted(self, engine: Engine) -> bool:
        """Whether new turns were made by this engine, and no earlier import has told of it."""
        if not any(turn.request.namespace == engine.namespace for turn in self._new.values()):
            return False
        known = (
            fact.event.namespace
            for fact in self._journal.before(self._journal.head + 1, events.EngineImported)
            if isinstance(fact.event, events.EngineImported)
        )
        return engine.namespace not in known

    def write(self, tx: Transaction) -> None:
        """For Journal.run. Raises ImportFault, which rolls back."""
        self._check_again(tx)
        try:
            for engine in self._engines:
                tx.add([self._engine(engine)], tx.now)
            lines = list(self._carried(tx))
            tx.add([events.Fact(self._imported(lines))], tx.now)
            for line in lines:
                tx.add([self._fact(line)], tx.now, placed=True)
        except sqlite3.IntegrityError:  # ids of responses are told apart by their beginning
            raise self._file.fault("an id in it begins like another one that is here") from None

    def _check_again(self, tx: Transaction) -> None:
        """Others may have written since it was looked at."""
        for response in self._new:
            if tx.db.execute(f"SELECT 1 FROM turn WHERE {BY_RESPONSE}", (response, response)).fetchone():
                raise self._file.fault(f"{response} came into the journal meanwhile; try again")
        for response in {turn.request.parent for turn in self._new.values()} - self._new.keys() - self._file.erased:
            alive = f"SELECT 1 FROM turn WHERE {BY_RESPONSE} AND erased = 0"
            if response and tx.db.execute(alive, (response, response)).fetchone() is None:
                raise self._file.fault(f"the turn {response} that it continues was erased here")
        for name in {turn.request.session for turn in self._new.values()}:
            row = tx.db.execute("SELECT tenant, deleted FROM session WHERE session = ?", (name,)).fetchone()
            if row is not None and row != (self._tenant.id, 0):
                raise self._file.fault(f"the session {name} was changed meanwhile; try again")

    def _carried(self, tx: Transaction) -> Iterator[Line]:
        """The lines that become facts, in their order."""
        sessions = {turn.request.session for turn in self._new.values()}
        known = {
            name
            for name in sessions
            if tx.db.execute("SELECT 1 FROM session WHERE session = ?", (name,)).fetchone() is not None
        }
        turns = self._new.values()
        own = {
            id(line)
            for turn in turns
            for line in (*turn.own, *turn.calls, turn.results, turn.deleted)
            if line is not None
        }
        for line in self._file.lines:
            if isinstance(line.body, events.SessionOpened) and line.body.session in sessions - known:
                known.add(line.body.session)
                yield line
            elif id(line) in own:
                yield line

    def _imported(self, lines: Sequence[Line]) -> events.SessionImported:
        header = self._file.header
        return events.SessionImported(
            tenant=self._tenant.id,
            session=header.session,
            source=self._file.journal_id,
            digest=self._file.digest,
            seqs=_distances(line.seq for line in lines),
            times=_distances(line.time for line in lines),
        )

    def _engine(self, engine: Engine) -> events.Fact:
        shas = {name: sha for name in ("vocabulary", "template") if (sha := getattr(engine, name))}
        names, contents = self._store(self._server, shas)
        told = events.EngineImported(
            tenant=SERVER_TENANT,
            namespace=engine.namespace,
            model=engine.model,
            fingerprint=engine.fingerprint,
            kernels=engine.kernels,
            parts=engine.parts,
            **names,
        )
        return events.Fact(told, contents=contents)

    def _fact(self, line: Line) -> events.Fact:
        body = line.body
        changes: dict[str, object] = {"tenant": self._tenant.id}
        contents: tuple[bytes, ...] = ()
        base = b""
        match body:
            case events.SessionOpened():
                changes["key"] = b""  # made with the other journal's secret
            case events.RequestAccepted():
                names, contents = self._store(self._tenant, {k: v for k, v in line.contents.items() if k == "client"})
                record, base = self._records.made(self._new[body.response])
                contents = (record, *contents)
                # A turn of a replay has none, here as there.
                history = self._histories[body.response][0] if body.history else b""
                changes |= {"history": history, "item_secret": line.item_secret}
                changes |= {"record": self._records.names[body.response], **names}
            case events.ToolResultSeen():
                changes["calls"] = self._calls(body)
            case events.ToolCalled():
                secret, named = self._new[body.response].accepted.item_secret, self._named.get(body.response, ())
                known = body.index < len(named)
                call_id = named[body.index] if known else identity.call_id(secret, body.response, body.index)
                changes["call"] = identity.call_key(self._journal.secret, self._tenant.id, call_id)
            case events.ResponseFinished():
                changes["history"] = self._histories[body.response][1]
        event = msgspec.structs.replace(body, **changes)
        return events.Fact(event, payload=line.payload or b"", contents=contents, base=base)

    def _calls(self, seen: events.ToolResultSeen) -> tuple[bytes, ...]:
        """The keys of the calls whose results a turn brought: what was new stood last among its items."""
        results = self._file.results(self._new[seen.response].accepted)[-len(seen.calls) :]
        return tuple(identity.call_key(self._journal.secret, self._tenant.id, result.call_id) for result in results)

    def _store(self, tenant: Tenant, shas: dict[str, str]) -> tuple[dict[str, bytes], tuple[bytes, ...]]:
        """The names that contents have here, by field, and those contents that this import has not offered yet."""
        offered = []
        for sha in dict.fromkeys(shas.values()):
            if (tenant.id, sha) not in self._names:
                data = self._file.content(sha)
                self._names[tenant.id, sha] = chain.content_digest(tenant.secret, data)
                offered.append(data)
        return {field: self._names[tenant.id, sha] for field, sha in shas.items()}, tuple(offered)


class _Records:
    """Makes the records of turns anew, in the terms of this journal, each in those of its parent's."""

    def __init__(self, journal: Reader, tenant: Tenant, server: Tenant, file: Exported) -> None:
        self._journal = journal
        self._tenant = tenant
        self._server = server
        self._file = file
        self._vocabularies: dict[str, Vocabulary | None] = {}
        self.names: dict[str, bytes] = {}  # response -> name of its record

    def made(self, turn: TurnLines) -> tuple[bytes, bytes]:
        """The record of a turn, and the name of its parent's; b"" if it has none."""
        request = turn.request
        told = turn.own[1].contents
        above = self._above(request.parent)
        ids = wire.unpack_ids(self._file.content(told["tokens"]))
        spans = decode_spans(self._file.content(told["spans"]))
        vocabulary = self._vocabulary(request.namespace)
        text_of = None if vocabulary is None else vocabulary.decode
        body = self._file.content(turn.accepted.contents["raw"])
        try:
            record = pack(
                body, ids, spans, text_of, lambda response: self._output(response) if response in above else ()
            )
        except JournalFault as fault:
            raise self._file.fault(f"{request.response} cannot be: {fault.message}") from None
        self.names[request.response] = chain.content_digest(self._tenant.secret, record)
        return record, self._name(request.parent)

    def _above(self, response: str) -> set[str]:
        """This turn and those that it continues, as far as they have their content."""
        found: set[str] = set()
        while response and response not in found:
            if response in self._file.turns:
                found.add(response)
                response = self._file.turns[response].request.parent
                continue
            turn = self._journal.turn(response)
            if turn is None or turn.erased or turn.tenant != self._tenant.id:
                break
            found.add(response)
            response = turn.parent
        return found

    def _output(self, response: str) -> Sequence[int]:
        turn = self._file.turns.get(response)
        if turn is None:
            return follow.recorded_tail(self._journal.read_response(response)).ids
        return follow.recorded_tail(
            [events.Recorded(line.seq, line.time, line.body, line.payload) for line in turn.own]
        ).ids

    def _name(self, response: str) -> bytes:
        if response in self.names:
            return self.names[response]
        turn = self._journal.turn(response) if response else None
        if turn is None or turn.erased:
            return b""
        (fact,) = self._journal.read(after=turn.accepted_seq - 1, limit=1)
        return fact.event.record if isinstance(fact.event, events.RequestAccepted) else b""

    def _vocabulary(self, namespace: str) -> Vocabulary | None:
        """What the records of this namespace will be read with; None if the file does not have it."""
        if namespace not in self._vocabularies:
            engine = self._file.engines.get(namespace)
            data = self._file.content(engine.vocabulary) if engine is not None and engine.vocabulary else b""
            known = self._known(namespace)
            right = bool(data) and known in (None, chain.content_digest(self._server.secret, data))
            self._vocabularies[namespace] = Vocabulary(data) if right else None
        return self._vocabularies[namespace]

    def _known(self, namespace: str) -> bytes | None:
        """The name of the vocabulary that this journal has for a namespace; None if it does not know it."""
        head = self._journal.head + 1
        engine = self._journal.engine_before(head)
        if engine is not None and identity.namespace(engine.fingerprint, self._tenant.id) == namespace:
            return engine.vocabulary
        for fact in self._journal.before(head, events.EngineImported):
            if isinstance(fact.event, events.EngineImported) and fact.event.namespace == namespace:
                return fact.event.vocabulary
        return None


class _Histories:
    """The digests by which a resent history finds a turn, with this journal's secret: (before, after) the answer."""

    def __init__(self, journal: Reader, file: Exported, new: dict[str, TurnLines]) -> None:
        self._journal = journal
        self._file = file
        self._start = identity.history_start(journal.secret)
        self._vocabularies: dict[str, Vocabulary | None] = {}
        self.made: dict[str, tuple[bytes, bytes]] = {}
        self.named: dict[str, tuple[str, ...]] = {}  # of turns whose calls have no ids: what stands for these
        for response, turn in new.items():
            self.made[response] = self._of(turn)

    def _of(self, turn: TurnLines) -> tuple[bytes, bytes]:
        request = turn.request
        before = self._after(request.previous) if request.previous else self._start
        if before:
            before = digests(units(decode_items(self._file.content(turn.accepted.contents["items"]))), before)[-1]
        end = turn.own[-1].body
        if not before or not isinstance(end, events.ResponseFinished) or not end.history:
            return before, b""
        answer = self._answer(turn)
        return before, b"" if answer is None else identity.history(before, answer)

    def _after(self, response: str) -> bytes:
        """The digest after an earlier turn's answer; b"" if it is unknown, and so is whatever comes after it."""
        if response in self.made:
            return self.made[response][1]
        turn = self._journal.turn(response)
        return turn.history if turn is not None else b""

    def _answer(self, turn: TurnLines) -> tuple[ask.Item, ...] | None:
        """What the client saw of an answer; None if the file does not say what its tokens stand for."""
        request = turn.request
        vocabulary = self._vocabulary(request.namespace)
        if vocabulary is None:
            return None
        lines = sorted((*turn.own, *turn.calls), key=lambda line: line.seq)
        tail = follow.recorded_tail([events.Recorded(line.seq, line.time, line.body, line.payload) for line in lines])
        try:
            stop = stop_strings(self._file.content(turn.accepted.contents["raw"])) if request.stop else ()
            terms = Terms(self._file.tools(turn.accepted), stop, request.begun, request.tagged)
            deltas = read(recorded_model(vocabulary, request.dialect), terms, tail)
        except (Fault, *UNREADABLE) as error:
            raise self._file.fault(f"the answer {request.response} cannot be read ({error})") from None
        secret = turn.accepted.item_secret
        ids = call_ids(secret, request.response, deltas, request.nameless)
        if request.nameless:
            self.named[request.response] = tuple(ids(one.index) for one in deltas if isinstance(one, ask.CallStarted))
        return items_of(deltas, ids)

    def _vocabulary(self, namespace: str) -> Vocabulary | None:
        if namespace not in self._vocabularies:
            engine = self._file.engines.get(namespace)
            found = None
            if engine is not None and engine.vocabulary:
                try:
                    found = Vocabulary(self._file.content(engine.vocabulary))
                except JournalFault as fault:
                    raise self._file.fault(fault.message) from None
            self._vocabularies[namespace] = found
        return self._vocabularies[namespace]


def _distances(numbers: Iterable[int]) -> tuple[int, ...]:
    """The first number, then the distance of each from the one before."""
    listed = list(numbers)
    return (*listed[:1], *(after - before for before, after in pairwise(listed)))
