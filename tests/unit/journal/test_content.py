"""Contents: stored once per tenant, counted, checked on every read."""

from __future__ import annotations

import hmac
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from tests.unit.journal.facts import accepted, open_journal, session
from zjournal.errors import JournalFault
from zjournal.journal import content
from zjournal.journal.events import Fact
from zjournal.journal.log import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        opened.append([session("s1"), session("s2")]).result()
        yield opened


def _refs(journal: Journal) -> dict[bytes, int]:
    with journal.transaction() as db:
        return dict(db.execute("SELECT digest, refs FROM content"))


def test_stored_once_and_counted(journal: Journal) -> None:
    prompt = b"a record that two turns share " * 20
    for name in ("r1", "r2"):
        journal.append(accepted(journal, name, record=prompt)).result()
    digest = journal.digest("local", prompt)
    assert digest == hmac.digest(journal.tenant("local").secret, prompt, "sha256")
    assert journal.content("local", digest) == prompt
    refs = _refs(journal)
    assert refs == {digest: 2}


def test_empty_content(journal: Journal) -> None:
    journal.append(accepted(journal, "r1", record=b"")).result()
    assert journal.content("local", journal.digest("local", b"")) == b""


def test_not_shared_between_tenants(journal: Journal) -> None:
    other = journal.tenant("alice").id
    journal.append(accepted(journal, "r1")).result()
    journal.append([session("s3", tenant=other), *accepted(journal, "r2", tenant=other)]).result()
    prompt = b"the record of r2"
    journal.append(accepted(journal, "r3", record=prompt)).result()
    mine, theirs = journal.digest("local", prompt), journal.digest(other, prompt)
    assert _refs(journal)[mine] == _refs(journal)[theirs] == 1
    assert journal.content(other, theirs) == prompt
    with pytest.raises(JournalFault, match="is not in the journal"):
        journal.content(other, mine)


def test_a_content_must_be_offered_or_there(journal: Journal) -> None:
    request, rendered = accepted(journal, "r1")
    with pytest.raises(AssertionError, match="neither stored nor offered"):
        journal.append([Fact(request.event), rendered]).result()
    with pytest.raises(AssertionError, match="does not name"):
        journal.append([Fact(request.event, contents=(*request.contents, b"more")), rendered]).result()
    assert _refs(journal) == {}
    journal.append([request, rendered]).result()
    again, _ = accepted(journal, "r2", record=b"the record of r1")
    journal.append([Fact(again.event)]).result()


def test_damage_is_found_on_read(journal: Journal) -> None:
    journal.append(accepted(journal, "r1")).result()
    digest = journal.digest("local", b"the record of r1")
    outside = sqlite3.connect(journal.path, isolation_level=None)
    other = zstandard.ZstdCompressor().compress(b"another, as long as it"[:16])
    outside.execute("UPDATE content SET data = ? WHERE digest = ?", (other, digest))
    with pytest.raises(JournalFault, match="do not match its digest"):
        journal.content("local", digest)
    outside.execute("UPDATE content SET data = x'00' WHERE digest = ?", (digest,))
    with pytest.raises(JournalFault, match="cannot be read"):
        journal.content("local", digest)
    outside.close()


@pytest.mark.parametrize(
    ("data", "size", "reason"),
    [
        (b"", 0, "cannot be read"),
        (zstandard.ZstdCompressor().compress(b"abc"), 4, "holds 3 bytes, not 4"),
        (zstandard.ZstdCompressor().compress(b"abc"), -1, "its size is -1"),
        (zstandard.ZstdCompressor().compress(b"abc"), content.CONTENT_BYTES_MAX + 1, "its size is"),
        (zstandard.ZstdCompressor().compress(b"abc") + b"x", 3, "cannot be read"),
        (zstandard.ZstdCompressor().compress(b"abc" * 999)[:-3], 2997, "cannot be read|it has"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"), 3, "holds"),
    ],
)
def test_a_bad_frame_is_refused_before_memory_is_taken(data: bytes, size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        content.unpack(data, size)
