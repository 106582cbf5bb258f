"""A file of `zj sessions export`, read and checked before anything of it is believed.

Reading goes line by line and keeps facts in memory, contents only by their place in the file: they are the bulk, and
are read again, and proved again, when they are written down. Whatever is wrong is an ImportFault that names the line.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, get_args

import msgspec

from zjournal import ask
from zjournal.dialects import choose
from zjournal.dialects.prompt import Span
from zjournal.errors import ImportFault
from zjournal.journal import chain, content, events
from zjournal.link import wire
from zjournal.sessions import sampling, transfer
from zjournal.sessions.transfer import Content, End, Engine, Header, Line

FACTS_MAX = 1 << 18
FACT_BYTES_MAX = 512 << 20  # of all lines of facts together: they are kept in memory
CONTENTS_MAX = 1 << 20
ENGINES_MAX = 1 << 10
LINE_BYTES_MAX = 2 * content.CONTENT_BYTES_MAX
TOKENS_MAX = 1 << 24  # ids there can be
PARTS_MAX, PART_CHARS_MAX = 64, 256  # of a fingerprint
TEXT_CHARS_MAX = 1 << 16  # of a name or a message in a body
NUMBER_MAX = (1 << 63) - 1
PROTOCOLS = ("chat", "responses", "messages")
TOKEN_BYTES = 4
SHA_BYTES = 32

_NAME = re.compile(r"[!-~]{1,128}")
decode_spans = msgspec.msgpack.Decoder(tuple[Span, ...]).decode
decode_items = msgspec.msgpack.Decoder(tuple[ask.Item, ...]).decode
decode_tools = msgspec.msgpack.Decoder(tuple[ask.ToolSpec, ...]).decode
_decode_body = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # of msgspec, for whatever bytes


class TurnLines(msgspec.Struct, frozen=True):
    """One turn that has ended: its own facts in order, from acceptance to end, and what else is told of it."""

    accepted: Line
    own: tuple[Line, ...]
    results: Line | None  # the tool results that it brought
    deleted: Line | None
    calls: tuple[Line, ...] = ()  # the tool calls that its answer made

    @property
    def request(self) -> events.RequestAccepted:
        assert isinstance(self.accepted.body, events.RequestAccepted)
        return self.accepted.body


class Exported:
    """An export whose lines are whole and whose facts make sense. A context manager: it keeps the file open."""

    def __init__(self, path: Path) -> None:
        """Raises ImportFault: not there, not ours, cut off, damaged, over a limit, or of a newer version."""
        self.path = path
        self.engines: dict[str, Engine] = {}
        self.lines: list[Line] = []
        self._places: dict[str, tuple[int, int]] = {}  # SHA-256 -> offset and length of its line
        self._fact_bytes = 0
        self._file = self._open()
        try:
            self.header, self.digest = self._read()
            self.journal_id = self._journal_id()
            self.turns, self.erased = self._turns()
        except BaseException:
            self.close()
            raise

    def _open(self) -> IO[bytes]:
        """Never waits: a server does this, and a pipe that nobody writes to would hold it up for ever."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # of a path with a zero byte
            raise self.fault(f"cannot be read ({getattr(error, 'strerror', error)})") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self.fault("cannot be read (it is not a file: pipes and devices must be saved to one first)")
        return open(descriptor, "rb")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Exported:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fault(self, reason: str) -> ImportFault:
        return ImportFault(f"{self.path}: {reason}")

    def content(self, sha: str) -> bytes:
        """The bytes of this name. Raises ImportFault if the file has changed since it was read."""
        offset, length = self._places[sha]
        try:
            line = transfer.decode_line(os.pread(self._file.fileno(), length, offset))
        except (OSError, *UNREADABLE):
            line = None
        if not isinstance(line, Content) or transfer.sha_of(line.data) != sha:
            raise self.fault("was changed while it was read")
        return line.data

    def _journal_id(self) -> bytes:
        try:
            return bytes.fromhex(self.header.journal)
        except ValueError:
            raise self.fault("does not name the journal that it comes from") from None

    # --- lines ------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Header, bytes]:
        digest = hashlib.sha256()
        header: Header | None = None
        offset = 0
        for number, data in enumerate(_lines(self._file), 1):
            if len(data) > LINE_BYTES_MAX:
                raise self.fault(f"line {number} has more than {LINE_BYTES_MAX} bytes")
            line = self._line(data, number)
            if isinstance(line, End):
                right = (line.lines, line.sha256) == (number - 1, digest.hexdigest())
                if not right or header is None or self._file.read(1):
                    raise self.fault(f"is damaged: its end (line {number}) does not fit what is before it")
                digest.update(data)
                return header, digest.digest()
            if isinstance(line, Header) != (number == 1):
                raise self.fault(f"line {number} is out of place; it is no export of a session")
            if isinstance(line, Header):
                header = line
            else:
                self._take(line, number, offset, len(data))
            digest.update(data)
            offset += len(data)
        raise self.fault("is cut off: it has no last line" if header else "is empty")

    def _line(self, data: bytes, number: int) -> transfer.AnyLine:
        if not data.endswith(b"\n"):
            raise self.fault(f"is cut off in line {number}")
        try:
            line = transfer.decode_line(data)
        except UNREADABLE as error:
            newer = self._newer(data) if number == 1 else ""
            raise self.fault(newer or f"line {number} cannot be read as one of an export ({error})") from None
        if isinstance(line, Header) and line.format != transfer.FORMAT:
            raise self.fault(self._newer(data))
        return line

    def _newer(self, data: bytes) -> str:
        try:
            form = msgspec.json.decode(data, type=_Format).format
        except UNREADABLE:
            return ""
        known = transfer.FORMAT
        return "" if form == known else f"is of format {form}, this zjournal reads {known}; use the one that wrote it"

    def _take(self, line: Content | Engine | Line, number: int, offset: int, length: int) -> None:
        match line:
            case Content():
                if (line.text is None) == (line.base64 is None) or transfer.sha_of(line.data) != line.sha256:
                    raise self.fault(f"line {number}: the content does not match its name")
                if len(line.data) > content.CONTENT_BYTES_MAX or len(self._places) >= CONTENTS_MAX:
                    raise self.fault(f"line {number}: there is more content than a journal takes")
                self._places[line.sha256] = (offset, length)
            case Engine():
                self._know([sha for sha in (line.vocabulary, line.template) if sha], number)
                longest = max((len(text) for part in line.parts for text in part), default=0)
                if len(line.parts) > PARTS_MAX or longest > PART_CHARS_MAX:
                    raise self.fault(f"line {number}: there are more parts of a fingerprint than there can be")
                if line.namespace in self.engines or len(self.engines) >= ENGINES_MAX:
                    raise self.fault(f"line {number}: the namespace {line.namespace!r} has an engine already")
                self.engines[line.namespace] = line
            case Line():
                self._fact_bytes += length
                if len(self.lines) >= FACTS_MAX or self._fact_bytes > FACT_BYTES_MAX:
                    raise self.fault(f"line {number}: the session is too long to be imported in one piece")
                self._know(line.contents.values(), number)
                reason = _wrong(line)
                if reason:
                    raise self.fault(f"line {number}: {reason}")
                self.lines.append(line)

    def _know(self, shas: Iterable[str], number: int) -> None:
        for sha in shas:
            if sha not in self._places:
                raise self.fault(f"line {number}: the content {sha[:64]!r} does not stand before it")

    # --- turns ------------------------------------------------------------------------------------------

    def _turns(self) -> tuple[dict[str, TurnLines], frozenset[str]]:
        """The turns that have their content, and the ids of those that were erased."""
        erased = frozenset(line.body.response for line in self.lines if isinstance(line.body, events.PayloadErased))
        own: dict[str, list[Line]] = {}
        results: dict[str, Line] = {}
        deleted: dict[str, Line] = {}
        calls: dict[str, list[Line]] = {}
        for line in self.lines:
            response = getattr(line.body, "response", "")
            if not response or response in erased:
                continue
            if isinstance(line.body, events.ResponseDeleted):
                deleted.setdefault(response, line)
            elif isinstance(line.body, events.ToolResultSeen):
                results.setdefault(response, line)
            elif isinstance(line.body, events.ToolCalled):
                calls.setdefault(response, []).append(line)
            elif isinstance(line.body, OWN):
                lines = own.setdefault(response, [])
                if not lines or not isinstance(lines[-1].body, ENDS):  # the first end counts
                    lines.append(line)
        turns = {}
        for response, lines in own.items():
            called = tuple(calls.get(response, ()))
            reason = (
                self._wrong_turn(lines)
                or self._wrong_results(lines[0], results.get(response))
                or _wrong_calls(lines, called)
            )
            if reason:
                raise self.fault(f"{response} cannot be: {reason}")
            turns[response] = TurnLines(lines[0], tuple(lines), results.get(response), deleted.get(response), called)
        return turns, erased

    def _wrong_turn(self, lines: list[Line]) -> str | None:
        """Why these facts are not those of one turn that has ended, as half a sentence."""
        bodies = [line.body for line in lines]
        if any(_named(line.body) != line.contents.keys() for line in lines):
            return "a content of it is not in the file"
        match bodies:
            case [events.RequestAccepted() as accepted, events.PromptRendered() as rendered, *rest]:
                return (
                    self._wrong_acceptance(accepted, lines[0])
                    or self._wrong_prompt(rendered, lines[1])
                    or _wrong_course(rest, rendered.count, lines[2:], accepted.logprobs)
                )
        return "it does not begin with its acceptance and its prompt"

    def _wrong_acceptance(self, accepted: events.RequestAccepted, line: Line) -> str | None:
        if accepted.protocol not in PROTOCOLS:
            return f"the protocol {accepted.protocol!r} is unknown"
        if accepted.previous not in ("", accepted.parent):
            return "its previous response is not its parent"
        if (name := sampling.wrong(accepted)) is not None:
            return f"its {name} is out of range"
        if not 0 <= accepted.choice < ask.CHOICES_MAX or bool(accepted.choice) != bool(accepted.first):
            return f"it is choice {accepted.choice} of {accepted.first!r}"
        if len(line.item_secret) != SHA_BYTES:
            return "it has no secret for its item ids"
        if not {"raw", "items", *(["tools"] if accepted.tools else [])} <= line.contents.keys():
            return "its body is not in the file"
        if accepted.dialect not in choose.NAMES:
            return f"the dialect {accepted.dialect!r} is unknown"
        try:
            raw = self.content(line.contents["raw"])
            _decode_body(raw)
            if len(sampling.logit_bias(raw)) != accepted.logit_bias:
                return "its body has another number of biased tokens than it says"
            decode_items(self.content(line.contents["items"]))
            if len(self.tools(line)) != accepted.tools:
                return "its body has another number of tools than it says"
        except UNREADABLE as error:
            return f"its body cannot be read ({error})"
        return None

    def _wrong_results(self, accepted: Line, results: Line | None) -> str | None:
        if results is None:
            return None
        assert isinstance(results.body, events.ToolResultSeen)
        if not 0 < len(results.body.calls) <= len(self.results(accepted)):
            return "it tells of more tool results than it brought"
        return None

    def results(self, accepted: Line) -> list[ask.Result]:
        """The tool results among the items of a turn."""
        items = decode_items(self.content(accepted.contents["items"]))
        return [item for item in items if isinstance(item, ask.Result)]

    def tools(self, accepted: Line) -> tuple[ask.ToolSpec, ...]:
        """The tools whose calls were looked for in the answer of a turn."""
        sha = accepted.contents.get("tools")
        return decode_tools(self.content(sha)) if sha else ()

    def _wrong_prompt(self, rendered: events.PromptRendered, line: Line) -> str | None:
        if not {"tokens", "spans"} <= line.contents.keys():
            return "its prompt is not in the file"
        try:
            spans = decode_spans(self.content(line.contents["spans"]))
        except UNREADABLE as error:
            return f"its spans cannot be read ({error})"
        ends = [0, *(span.end for span in spans)]
        fits = all(span.start == end < span.end for span, end in zip(spans, ends, strict=False))
        if not fits or ends[-1] != rendered.count:
            return "its spans do not cover its prompt"
        tokens = self.content(line.contents["tokens"])
        if len(tokens) != rendered.count * TOKEN_BYTES:
            return "its prompt has another number of tokens than it says"
        if any(tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES]):
            return "its prompt has a token of more than 24 bits"  # no record takes it, and no vocabulary has it
        return None


# What a turn is made of. What a device held, and what became of the turn later, is told by other kinds.
OWN = (
    events.RequestAccepted,
    events.PromptRendered,
    events.CacheMatched,
    events.TokensSampled,
    events.ResponseWaited,
    events.ResponseFinished,
    events.ResponseFailed,
)


ENDS = (events.ResponseFinished, events.ResponseFailed)


class _Format(msgspec.Struct):
    """Of a header of any version."""

    format: int


def _lines(file: IO[bytes]) -> Iterable[bytes]:
    while line := file.readline(LINE_BYTES_MAX + 1):
        yield line


def _named(body: events.AnyEvent) -> set[str]:
    """The names of the contents that stand beside a fact of a turn that has its content."""
    match body:
        case events.RequestAccepted():
            return {"raw", "items", *(["client"] if body.client else []), *(["tools"] if body.tools else [])}
        case events.PromptRendered():
            return {"tokens", "spans"}
    return set(transfer.digests_of(body))


def _wrong(line: Line) -> str | None:
    """Why no journal could hold this fact, as half a sentence. Any fact; what a turn needs is looked at later."""
    body = line.body
    if not (0 < line.seq <= NUMBER_MAX and 0 <= line.time <= NUMBER_MAX):
        return "its number or time is out of range"
    for field in body.__struct_fields__:
        value = getattr(body, field)
        if isinstance(value, bool | float):
            continue
        if isinstance(value, int) and not -NUMBER_MAX <= value <= NUMBER_MAX:
            return f"{field} is out of range"
        if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
            return f"{field} is too long"
        if field in ("response", "session", "parent", "previous") and value and not _NAME.fullmatch(value):
            return f"{field} is no id"
    if not getattr(body, "response", "x") or not getattr(body, "session", "x"):
        return "it names no response or session"
    if len(line.payload or b"") > chain.PAYLOAD_BYTES_MAX - chain.SALT_BYTES:
        return "its payload is too long"
    if not line.contents.keys() <= _named(body):
        return "it has a content that its body does not name"
    if len(events.encode_body(body)) > chain.BODY_BYTES_MAX >> 1:
        return "its body is too long"
    return None


def _holds(payload: bytes | None, count: int, logprobs: int) -> bool:
    """Whether a payload holds `count` tokens, each with at most so many alternatives; with -1 without logprobs."""
    try:
        _, entries = wire.unpack_sampled(payload or b"", count)
    except ValueError:
        return False
    for own, others in map(wire.unpack_logprobs, entries):
        sound = math.isfinite(own) and all(math.isfinite(value) and token < TOKENS_MAX for token, value in others)
        if not sound or len(others) > logprobs:
            return False
    return len(entries) == (count if logprobs >= 0 else 0)


def _wrong_calls(own: list[Line], calls: tuple[Line, ...]) -> str | None:
    """Why an answer cannot have made these calls."""
    if not calls:
        return None
    indexes = [line.body.index for line in calls if isinstance(line.body, events.ToolCalled)]
    if indexes != list(range(len(calls))) or calls[-1].seq > own[-1].seq:
        return "its tool calls are not one run"
    accepted = own[0].body
    return None if isinstance(accepted, events.RequestAccepted) and accepted.tools else "it called a tool without any"


def _wrong_course(rest: list[events.AnyEvent], prompt: int, lines: list[Line], logprobs: int) -> str | None:
    """Why these cannot follow acceptance and prompt. `logprobs` as asked for."""
    position = 0
    if not rest or not isinstance(rest[-1], ENDS):
        return "it has not ended"
    for event, line in zip(rest, lines, strict=True):
        negative = any(
            getattr(event, name, 0) < 0
            for name in ("position", "count", "output", "queue_us", "prefill_us", "decode_us")
        )
        if negative:
            return "a number in it is negative"
        match event:
            case events.CacheMatched(cached=cached, prompt=told, restored=restored, restored_host=host) if not (
                0 <= host <= restored <= cached <= told == prompt
            ):
                return "its match with the cache does not fit its prompt"
            case events.TokensSampled(position=at, count=count):
                if at != position or not count or not _holds(line.payload, count, logprobs):
                    return "its tokens are not one run"
                position += count
            case events.ResponseWaited(done=done) if not 0 <= done <= prompt:
                return "it waited for more than its prompt"
            case events.ResponseFinished(reason=reason, output=output):
                if reason not in get_args(ask.EndReason) or output != position:
                    return "its end does not fit its tokens"
            case events.RequestAccepted() | events.PromptRendered():
                return "it was accepted twice"
    return None
