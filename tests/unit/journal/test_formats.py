"""docs/journal.md is enough: decoders written from that page alone read what the journal has written."""

from __future__ import annotations

import hashlib
import json
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.dialects.prompt import Span
from zjournal.journal import delta, retention
from zjournal.sessions import record

ID = re.compile(rb"[a-z]+[-_][0-9a-f]{32}")


def _array(frame: bytes, **how: Any) -> list[Any]:
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor(**how).decompress(frame))


def _bodies(columns: list[Any]) -> list[bytes]:
    """The bodies kind by kind, with the ids that were taken out of them."""
    sizes, names, (steps, before, changes), left = columns[4], columns[6], columns[7], columns[8]
    ids = [name[16:] + name[:16].hex().encode() for name in names]
    places = list(zip(accumulate(steps), before, accumulate(changes), strict=True))
    bodies = []
    for number, size in enumerate(sizes):
        body = b""
        for _, literal, name in (place for place in places if place[0] == number):
            body, left = body + left[:literal] + ids[name], left[literal:]
        rest = size - len(body)
        bodies.append(body + left[:rest])
        left = left[rest:]
    assert left == b""
    return bodies


def _payloads(columns: list[Any], bodies: list[bytes]) -> list[tuple[bytes | None, bytes | None]]:
    """Of each fact kind by kind its payload, and its digest where only that is left."""
    sizes, low, high, chained, salts, gone = columns[5], *columns[9:]
    total = sum(size - 16 for size in sizes if size > 0)
    plain = low
    if total % 4 == 0:
        pairs = [high[at : at + 2] if high else b"\0\0" for at in range(0, total // 2, 2)]
        plain = b"".join(low[2 * k : 2 * k + 2] + pair for k, pair in enumerate(pairs))
    last: dict[bytes, bytes] = {}
    found: list[tuple[bytes | None, bytes | None]] = []
    for body, size in zip(bodies, sizes, strict=True):
        if size <= 0:
            sha, gone = (gone[:32], gone[32:]) if size < 0 else (None, gone)
            found.append((None, sha))
            continue
        name = ID.search(body)
        whose = name.group() if name else b""
        follows, chained = chained[0], chained[1:]
        if follows:
            salt = hashlib.sha256(last[whose]).digest()[:16]
        else:
            salt, salts = salts[:16], salts[16:]
        last[whose] = salt
        found.append((salt + plain[: size - 16], None))
        plain = plain[size - 16 :]
    assert plain == salts == chained == gone == b""
    return found


def test_a_segment(tmp_path: Path) -> None:
    names = [f"resp_{random.Random(k).randbytes(16).hex()}" for k in range(3)]
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1"), *whole_turn(journal, names[0]), *whole_turn(journal, names[1])]).result()
        journal.append(whole_turn(journal, names[2], parent=names[1])).result()
        assert retention.delete(journal, "local", names[2]).result()
        with journal.transaction() as db:
            rows = db.execute("SELECT * FROM event ORDER BY seq").fetchall()
        assert journal.seal() == len(rows)
        with journal.transaction() as db:
            ((first, last, link, tags, frame),) = db.execute("SELECT first, last, link, tags, data FROM segment")
        genesis = journal.id, journal.secret
    columns = _array(frame)
    version, kinds, kind, times = columns[:4]
    assert (version, first, last, sorted(tags.split())) == (1, 1, len(rows), sorted({row[2] for row in rows}))
    bodies = _bodies(columns)
    payloads = _payloads(columns, bodies)
    places = sorted(range(len(kind)), key=lambda place: kind[place])
    told = {place: (bodies[at], *payloads[at]) for at, place in enumerate(places)}
    before = hashlib.sha256(b"zjournal journal\0\0\0\1" + genesis[0] + hashlib.sha256(genesis[1]).digest()).digest()
    for place, (row, time) in enumerate(zip(rows, accumulate(times), strict=True)):
        body, payload, gone = told[place]
        tag, _, version = kinds[kind[place]].rpartition(".")
        sha = hashlib.sha256(payload).digest() if payload is not None else gone
        numbers = first + place, len(tag), int(version), time, len(body)
        seq, name, release, at, size = (
            number.to_bytes(n, "big") for number, n in zip(numbers, (8, 4, 4, 8, 4), strict=True)
        )
        chained = before + seq + name + tag.encode() + release + at + size + body + (sha or bytes(32))
        before = hashlib.sha256(chained).digest()
        assert row == (first + place, time, tag, int(version), body, payload, sha, before)
    assert before == link


def _undone(frame: bytes, base: bytes) -> bytes:
    dictionary = zstandard.ZstdCompressionDict(base[-(1 << 20) :], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    numbers, literals = _array(frame, dict_data=dictionary)
    data, at = b"", 0
    for k in range(0, len(numbers), 3):
        literal, skip, copied = numbers[k : k + 3]
        data, literals, at = data + literals[:literal], literals[literal:], at + skip
        data, at = data + base[at : at + copied], at + copied
    return data + literals


def test_a_delta() -> None:
    chance = random.Random(1)
    base = chance.randbytes(3_000)
    for data in (base[:900] + b"new" * 40 + base[1_000:], base[2_000:] + base[:2_000], b"", chance.randbytes(50)):
        assert _undone(delta.encode(data, base), base) == data


def test_a_record() -> None:
    said = "a text that is long enough to be referred to, é\n"
    ids = [*b"<u>", *said.encode(), *b"</u>", 70_000, 1]
    spans = [Span(0, 3, ""), Span(3, 3 + len(said.encode()), "input"), Span(len(ids) - 6, len(ids) - 2, "")]
    spans.append(Span(len(ids) - 2, len(ids), "response:r1"))
    for ascii_only in (False, True):
        body = json.dumps({"model": "m", "input": said, "n": 1}, ensure_ascii=ascii_only).encode()
        packed = record.pack(body, ids, spans, lambda some: bytes(list(some)), lambda name: [70_000, 1, 0])
        version, low, high, lengths, paths, references, skeleton, check = msgspec.msgpack.decode(packed)
        assert (version, paths, check) == (1, [span.path for span in spans], hashlib.sha256(body).digest()[:8])
        tokens = [int.from_bytes(low[k : k + 2], "little") for k in range(0, len(low), 2)]
        tokens = [token + (upper << 16) for token, upper in zip(tokens, high or bytes(len(tokens)), strict=True)]
        texts, whole = [], []
        for length, path in zip(lengths, paths, strict=True):
            if length < 0:  # from what was sampled for the response
                assert path == "response:r1"
                part = [70_000, 1, 0][:-length]
            else:
                part, tokens = tokens[:length], tokens[length:]
            whole += part
            texts.append(bytes(token & 255 for token in part))
        assert (whole, tokens) == (ids, [])
        (literal, span, before, behind) = references
        text = texts[span][before // 2 :][: len(texts[span]) - before // 2 - behind].decode()
        spelled = json.dumps(text, ensure_ascii=bool(before % 2))[1:-1].encode()
        assert skeleton[:literal] + spelled + skeleton[literal:] == body
