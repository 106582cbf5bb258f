"""Makes the golden journal of today's schema: `python -m tests.golden.make`.

`journals/N.db.zst` is a whole journal of schema N with facts of every kind, `journals/N.json` what its projections
must fold to. Once schema N is in a release (RELEASED), its two files are never made again: whatever changes later has
to open them. Clock and entropy are counters, so equal code makes equal facts.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import sys
import tempfile
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from tests.unit.journal.facts import accepted, failed, finished, matched, sampled, session, whole_turn
from tests.unit.journal.stored import back_up, hashes, purge
from tests.unit.snapshots.chunks import tokens
from zjournal.journal import retention, snapshots
from zjournal.journal.chain import TAGS
from zjournal.journal.database import SCHEMA_VERSION
from zjournal.journal.datadir import JOURNAL_FILE
from zjournal.journal.events import AnyEvent, Fact
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.verify import verify

RELEASED = 0  # the last schema that is in a release
JOURNALS = Path(__file__).resolve().parent / "journals"
START_US = 1_700_000_000_000_000
ZSTD_LEVEL = 19


def build(data_dir: Path) -> None:
    """A closed journal in `data_dir`: turns of every status, two tenants, an erasure, and each kind of fact."""
    times = itertools.count(START_US, 1_000)
    with Journal.open(data_dir, clock=lambda: next(times), entropy=_entropy()) as journal:
        for tenant in ("local", "a key's name", "server"):
            journal.tenant(tenant)
        other = journal.tenant("a key's name").id
        journal.append([Fact(sample(kind)) for kind in typing.get_args(AnyEvent) if not _of_a_turn(kind)]).result()
        journal.append([session("s1"), *whole_turn(journal, "r1"), session("s2", key=b"k")]).result()
        journal.append(whole_turn(journal, "r2", parent="r1")).result()
        journal.append([*accepted(journal, "r3", session="s2", parent="r1"), matched("r3"), failed("r3")]).result()
        journal.append([*accepted(journal, "r4", stored=False), sampled("r4", 0), finished("r4", "length", 1)]).result()
        journal.append([*accepted(journal, "r5"), finished("r5", "cancelled", 0)]).result()
        journal.append([session("s3", tenant=other), *whole_turn(journal, "r6", session="s3", tenant=other)]).result()
        record = b"a record that the next one repeats, and to which it is therefore stored as a delta; " * 9
        more = {"record": record + b"and more", "base": journal.digest("local", record), "parent": "r8"}
        journal.append(whole_turn(journal, "r8", record=record)).result()
        journal.append(whole_turn(journal, "r9", **more)).result()  # type: ignore[arg-type]
        assert journal.seal()
        assert retention.delete(journal, "local", "r2").result()
        assert retention.delete(journal, "local", "r8").result()  # hidden: the next one is built on it
        data = tokens(700)
        assert back_up(journal, "r4", data[: 600 * 4]) and back_up(journal, "r9", data)
        snapshots.pin(journal, "r9", True)
        snapshots.pin(journal, "r9", False)
        assert purge(journal, hashes(data)[2:]).hashes
        assert retention.erase(journal, "r4", retention.CAUSE_UNSTORED).result()
        journal.append([*accepted(journal, "r7", session="s2"), sampled("r7", 0), sampled("r7", 1)]).result()


def fold(data_dir: Path) -> dict[str, Any]:
    """What a journal folds to: its head, its rows by column, and its facts without their bodies."""
    report = verify(data_dir)
    assert report.fault is None, report.fault
    with Reader.open(data_dir) as reader:
        facts = [fact for page in _pages(reader) for fact in page]
        with reader.transaction() as db:
            tables = {name: _rows(db, name) for name in ("session", "turn", "chunk", "snapshot")}
    told = [(fact.seq, fact.time, TAGS[type(fact.event)][0], fact.payload) for fact in facts]
    numbers = {"head": report.head, "link": report.link, "contents": report.contents, "erased": report.erased}
    return msgspec.to_builtins({**numbers, "facts": told, **tables})


def sample(kind: type[msgspec.Struct]) -> AnyEvent:
    """An event of this kind with made-up values; its names of contents stay empty."""
    made = {field.name: _value(field.type, field.name) for field in msgspec.structs.fields(kind)}
    return kind(**{**made, "tenant": ""})  # type: ignore[return-value]


def pack(data_dir: Path) -> bytes:
    """The journal's file, whole, without a log beside it."""
    db = sqlite3.connect(data_dir / JOURNAL_FILE)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress((data_dir / JOURNAL_FILE).read_bytes())


def unpack(golden: Path, data_dir: Path) -> None:
    """Lays a golden journal into an empty data directory."""
    data_dir.mkdir(mode=0o700)
    file = data_dir / JOURNAL_FILE
    file.write_bytes(zstandard.ZstdDecompressor().decompress(golden.read_bytes()))
    file.chmod(0o600)


def main() -> int:
    """Writes both files. Returns 1 for a schema that is released."""
    if SCHEMA_VERSION <= RELEASED:
        print(f"schema {SCHEMA_VERSION} is released; its golden journal does not change any more", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        build(data_dir)
        rows = fold(data_dir)
        packed = pack(data_dir)
    JOURNALS.mkdir(exist_ok=True)
    (JOURNALS / f"{SCHEMA_VERSION}.db.zst").write_bytes(packed)
    (JOURNALS / f"{SCHEMA_VERSION}.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    print(f"schema {SCHEMA_VERSION}: {len(rows['facts'])} facts, {len(packed)} bytes")
    return 0


def _of_a_turn(kind: type[msgspec.Struct]) -> bool:
    """Whether facts of this kind stand in a turn's life, and so have to fit together; those are made one by one."""
    return "response" in kind.__struct_fields__ and not kind.__name__.startswith(
        ("Cache", "Tool", "Loop", "Reader", "Replay", "ResponseWaited", "Snapshot")
    )


def _value(kind: Any, name: str) -> Any:
    kind = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
    if typing.get_origin(kind) is tuple:
        return ()
    return {str: f"a {name}", int: 7, bytes: b"", bool: True, float: 0.5}[kind]


def _entropy() -> Callable[[int], bytes]:
    numbers = itertools.count()
    return lambda size: hashlib.shake_128(next(numbers).to_bytes(8)).digest(size)


def _pages(reader: Reader) -> Any:
    after = 0
    while page := reader.read(after):
        yield page
        after = page[-1].seq


def _rows(db: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    found = db.execute(f"SELECT * FROM {table} ORDER BY 1")
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


if __name__ == "__main__":
    sys.exit(main())
