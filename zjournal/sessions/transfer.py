"""Sessions as files: the lossless JSON Lines that `zj sessions export` writes and `import` reads. docs/transfer.md.

A line is one object with a `kind`. Contents stand once, under their SHA-256, before the first fact that refers to them;
the bodies of facts stand as they are in the journal. The last line counts and hashes what is before it, so a file that
was cut off or changed is known. The same session in the same journal gives the same bytes.

Nothing here writes to a journal: that is sessions.importing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from zjournal.config import version
from zjournal.errors import JournalFault, NotFound
from zjournal.journal import content
from zjournal.journal.events import AnyEvent, PromptRendered, Recorded, RequestAccepted, SessionImported
from zjournal.journal.projections import Session, Turn
from zjournal.journal.reader import PAGE_FACTS, Reader
from zjournal.link import wire
from zjournal.sessions import identity
from zjournal.sessions.makers import Makers
from zjournal.sessions.reading import Decoders
from zjournal.sessions.records import Records

FORMAT = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="session", tag_field="kind"):
    """The first line."""

    format: int
    version: str  # of the zjournal that wrote the file
    journal: str  # its id in hex
    session: str
    tenant: str  # the name of its owner
    turns: int  # in the file, those that the asked ones build on included
    running: int = 0  # turns left out because they had not ended


class Engine(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """What made turns of this namespace. `vocabulary` and `template` name contents; "" where none was recorded."""

    namespace: str
    model: str
    fingerprint: str
    kernels: str
    vocabulary: str = ""
    template: str = ""
    parts: tuple[tuple[str, str], ...] = ()  # of the fingerprint


class Content(msgspec.Struct, frozen=True, kw_only=True, tag="content", tag_field="kind", omit_defaults=True):
    """Bytes under their SHA-256 in hex: as text where they are UTF-8, else in base64."""

    sha256: str
    text: str | None = None
    base64: bytes | None = None

    @property
    def data(self) -> bytes:
        return self.text.encode() if self.text is not None else self.base64 or b""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag="fact", tag_field="kind", omit_defaults=True):
    """One fact. `seq` is its place in the journal that wrote the file, `time` when it happened (microseconds, Unix)."""

    seq: int
    time: int
    body: AnyEvent
    payload: bytes | None = b""  # absent: there never was one; null: erased
    contents: dict[str, str] = {}  # name of a content of the fact -> its SHA-256; none of a turn that was erased
    item_secret: bytes = b""  # of an acceptance: see identity.item_secret


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """The last line: how many lines there are before it, and their SHA-256 in hex."""

    lines: int
    sha256: str


AnyLine = Header | Engine | Content | Line | End
decode_line = msgspec.json.Decoder(AnyLine).decode
_encode = msgspec.json.Encoder().encode
encode_spans = encode_items = encode_tools = msgspec.msgpack.Encoder().encode


class Selection(msgspec.Struct, frozen=True):
    """What of a session goes into a file: ended turns, oldest first, and those of any session that they build on."""

    session: Session
    turns: tuple[Turn, ...]
    running: int

    @classmethod
    def of(cls, reader: Reader, session: Session, turns: Iterable[Turn]) -> Selection:
        """`turns` are some or all of the session's."""
        chosen: dict[str, Turn] = {}
        wanted = list(turns)
        running = sum(turn.finished_us is None for turn in wanted)
        wanted = [turn for turn in wanted if turn.finished_us is not None]
        while wanted:
            turn = wanted.pop()
            if turn.response in chosen:
                continue
            chosen[turn.response] = turn
            # An erased turn has nothing left that could be built on anything.
            parent = reader.turn(turn.parent) if turn.parent and not turn.erased else None
            if parent is not None:
                wanted.append(parent)
        return cls(session, tuple(sorted(chosen.values(), key=lambda turn: turn.accepted_seq)), running)


def export(reader: Reader, selection: Selection, decoders: Decoders) -> Iterator[bytes]:
    """The lines of the file, each with its newline. Raises NotFound if a turn is erased meanwhile; JournalFault."""
    digest = hashlib.sha256()
    count = 0
    for line in _lines(reader, selection, decoders):
        data = _encode(line) + b"\n"
        digest.update(data)
        count += 1
        yield data
    yield _encode(End(lines=count, sha256=digest.hexdigest())) + b"\n"


def _lines(reader: Reader, selection: Selection, decoders: Decoders) -> Iterator[AnyLine]:
    session = selection.session
    yield Header(
        format=FORMAT,
        version=version(),
        journal=reader.id.hex(),
        session=session.session,
        tenant=reader.tenant_name(session.tenant),
        turns=len(selection.turns),
        running=selection.running,
    )
    told: set[str] = set()
    makers = Makers(reader)
    for namespace, turn in {makers.namespace(turn): turn for turn in selection.turns}.items():
        maker = makers.of(turn)
        if maker is not None:
            named = {name: reader.content(maker.tenant, digest) for name, digest in digests_of(maker).items()}
            yield from _contents(named.values(), told)
            shas = {name: sha_of(data) for name, data in named.items()}
            yield Engine(
                namespace=namespace,
                model=maker.model,
                fingerprint=maker.fingerprint,
                kernels=maker.kernels,
                vocabulary=shas.get("vocabulary", ""),
                template=shas.get("template", ""),
                parts=maker.parts,
            )
    told_by = Contents(reader, makers, decoders)
    for fact in _facts(reader, selection):
        named = told_by.of(fact)
        yield from _contents(named.values(), told)
        yield line_of(reader, fact, {name: sha_of(data) for name, data in named.items()})


def _contents(contents: Iterable[bytes], told: set[str]) -> Iterator[Content]:
    """The contents that were not told yet."""
    for data in contents:
        sha = sha_of(data)
        if sha not in told:
            told.add(sha)
            try:
                yield Content(sha256=sha, text=data.decode())
            except UnicodeDecodeError:
                yield Content(sha256=sha, base64=data)


def _facts(reader: Reader, selection: Selection) -> Iterator[Recorded]:
    """The facts of the selection in journal order, with the times at which they happened."""
    responses = {turn.response for turn in selection.turns}
    sessions = {turn.session for turn in selection.turns} | {selection.session.session}
    opened = [found.opened_seq for name in sessions if (found := reader.session(name)) is not None]
    after = min(opened + [turn.accepted_seq for turn in selection.turns]) - 1
    head = reader.head
    times = _Times(next((fact for fact in reader.before(after + 1, SessionImported)), None))
    while page := reader.read(after, PAGE_FACTS, head):
        for fact in page:
            times.see(fact)
            event = fact.event
            response = getattr(event, "response", None)
            if response in responses if response else getattr(event, "session", None) in sessions:
                yield msgspec.structs.replace(fact, time=times.of(fact))
        after = page[-1].seq


class _Times:
    """When facts happened: those that were imported carry the time of their import, and their import the true one."""

    def __init__(self, before: Recorded | None) -> None:
        self._first = 0
        self._times: list[int] = []
        if before is not None:
            self.see(before)

    def see(self, fact: Recorded) -> None:
        if isinstance(fact.event, SessionImported):
            self._first = fact.seq + 1
            self._times = list(accumulate(fact.event.times))

    def of(self, fact: Recorded) -> int:
        at = fact.seq - self._first
        return self._times[at] if 0 <= at < len(self._times) else fact.time


def line_of(reader: Reader, fact: Recorded, shas: Mapping[str, str]) -> Line:
    """A fact as a line; `shas` names its contents by field."""
    event, secret = fact.event, b""
    if isinstance(event, RequestAccepted):
        secret = event.item_secret or identity.item_secret(reader.secret, event.response)
    return Line(seq=fact.seq, time=fact.time, body=event, payload=fact.payload, contents=dict(shas), item_secret=secret)


def recorded_lines(reader: Reader, facts: Sequence[Recorded]) -> list[Line]:
    """Facts that are in a journal as the lines that they would be, without items. Raises NotFound, JournalFault."""
    told_by = Contents(reader, Makers(reader), {})
    return [line_of(reader, fact, {name: sha_of(data) for name, data in told_by.of(fact).items()}) for fact in facts]


class Contents:
    """What stands in a file as the contents of a fact: those that it names, and a record in its parts.

    A record means something only in its journal, so a file has the body (`raw`), the items and tools in it (as far as
    `decoders` know its protocol), the prompt's `tokens` (little-endian uint32) and its `spans`.
    """

    def __init__(self, reader: Reader, makers: Makers, decoders: Decoders) -> None:
        self._reader = reader
        self._records = Records(reader, makers)
        self._decoders = decoders

    def of(self, fact: Recorded) -> dict[str, bytes]:
        """The contents of a fact by name; none for a turn that was erased. Raises NotFound, JournalFault."""
        event = fact.event
        turn = self._reader.turn(getattr(event, "response", ""))
        if turn is not None and turn.erased:
            return {}
        try:
            if turn is not None and isinstance(event, RequestAccepted):
                return self._accepted(turn, event)
            if turn is not None and isinstance(event, PromptRendered):
                ids, spans = self._records.prompt(turn)
                return {"tokens": wire.pack_ids(ids), "spans": encode_spans(spans)}
            return {name: self._reader.content(event.tenant, digest) for name, digest in digests_of(event).items()}
        except JournalFault:
            turn = self._reader.turn(getattr(event, "response", ""))
            if turn is not None and turn.erased:
                raise NotFound(f"{turn.response} was erased while it was read; try again") from None
            raise

    def _accepted(self, turn: Turn, event: RequestAccepted) -> dict[str, bytes]:
        found = {"raw": self._records.body(turn)}
        decode = self._decoders.get(turn.protocol)
        if decode is not None:
            request = decode(found["raw"])
            found["items"] = encode_items(request.items)
            if event.tools:
                found["tools"] = encode_tools(request.tools)
        if event.client:
            found["client"] = self._reader.content(event.tenant, event.client)
        return found


def digests_of(event: AnyEvent) -> dict[str, bytes]:
    """The contents that an event names, by field."""
    names = content.references(event)
    return {field: value for field in event.__struct_fields__ if (value := getattr(event, field)) and value in names}


def sha_of(data: bytes) -> str:
    """The name of a content in a file: SHA-256 in hex. Names in the journal depend on its secrets."""
    return hashlib.sha256(data).hexdigest()
