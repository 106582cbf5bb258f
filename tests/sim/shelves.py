"""What a life leaves of the snapshots: journal, files and the tier of a new engine are held against the model.

Whatever the model names must be there as a whole, unless its file was tampered with; and once the new engine has
compared folder and index, nothing else is there.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.sim.kept import Mismatch
from tests.sim.model import Model
from tests.sim.tier import Ask, Tier
from zjournal.errors import SnapshotFault
from zjournal.journal.log import Journal
from zjournal.link import wire
from zjournal.sessions import snapshots as files
from zjournal.snapshots import chunk as chunkfile
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.index import Index

NO_LIMIT = 1 << 40
SERVED_MAX = 3  # snapshots that are restored for a check
MORE = 5  # a token that goes on behind a state, and that no state has


def damage(folder: Path, space: bytes, hash_: bytes, chance: random.Random) -> bool:
    """Flips a bit of a chunk's file, cuts it to half, or removes it; False if there is none."""
    with Folder(folder) as there:
        path = there.where(space, hash_)
    if not path.exists():
        return False
    match chance.choice(("flip", "cut", "remove")):
        case "flip":
            with path.open("r+b", buffering=0) as file:
                at = chance.randrange(path.stat().st_size)
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "remove":
            path.unlink()
    return True


def check_tier(data_dir: Path, journal: Journal, model: Model, damaged: Collection[bytes], when: str) -> Counter[str]:
    """Raises Mismatch when index, files and tier do not agree; returns what came about. Changes what is there."""
    met: Counter[str] = Counter()
    folder = files.folder_of(data_dir)
    if not folder.is_dir():
        if model.kept.chunks:
            raise Mismatch(f"all acknowledged chunks are gone {when}")
        return met
    doubtful = {hash_ for hash_, chunk in model.kept.chunks.items() if chunk.bad or hash_ in damaged}
    _check_files(folder, model, doubtful, when)
    index, _ = files.load(journal)
    _check_index("the journal's index", index, model, when)
    before = _parts(folder)
    tier = Tier(folder, journal, NO_LIMIT, lambda: None)
    try:
        tier.run()
        _check_index("the tier", tier.snapshots.shelf.index, model, when)
        bad = set(tier.snapshots.shelf.index.bad)
        if not bad <= doubtful:
            raise Mismatch(f"the tier holds good chunks for bad {when}: {[hash_.hex() for hash_ in bad - doubtful]}")
        there = tier.files().keys()
        if not model.kept.chunks.keys() - bad <= there or not there <= model.kept.chunks.keys() or _parts(folder):
            raise Mismatch(f"folder and index do not agree {when}, though they were compared")
        met["orphans"] += sum(one.orphans for one in tier.told(wire.Reconciled))
        met["leftovers"] += before
        met["restored after a start"] += _restore(tier, model, doubtful, when)
    finally:
        tier.close()
    return met


def _check_files(folder: Path, model: Model, doubtful: Collection[bytes], when: str) -> None:
    with Folder(folder) as there:
        for hash_, chunk in model.kept.chunks.items():
            if hash_ in doubtful:
                continue
            try:
                header = chunkfile.verify(there, chunk.space, hash_)
            except SnapshotFault as fault:
                raise Mismatch(f"an acknowledged chunk is lost {when}: {fault.message}") from None
            if (header.chunk.parent, header.chunk.count) != (chunk.parent, chunk.tokens):
                raise Mismatch(f"an acknowledged chunk is another one {when}: {hash_.hex()}")


def _check_index(who: str, index: Index, model: Model, when: str) -> None:
    index.check()
    if index.chunks.keys() != model.kept.chunks.keys():
        raise Mismatch(f"{who} has {len(index.chunks)} chunks {when}, not {len(model.kept.chunks)}")
    told = {name: (one.chunk.hash, one.tokens, one.pinned) for name, one in index.snapshots.items()}
    right = {name: (one.end, one.tokens, one.pinned) for name, one in model.kept.snapshots.items()}
    if told != right:
        raise Mismatch(f"{who} has snapshots {told} {when}, not {right}")


def _restore(tier: Tier, model: Model, doubtful: Collection[bytes], when: str) -> int:
    """Goes on behind some states; each must be met as far as its files are good. The tier compares the bytes."""
    restored = 0
    for number, (name, one) in enumerate(list(model.kept.snapshots.items())[-SERVED_MAX:]):
        good = 0
        for hash_ in model.kept.path(one.end):
            if hash_ in doubtful:
                break
            good += model.kept.chunks[hash_].tokens
        prompt = (*model.states[name][: one.tokens], MORE)
        served = tier.serve_one(Ask(f"again{number}", "", prompt, (10, 11)))
        if served.cached < good:
            raise Mismatch(f"of {name} {good} tokens are on disk {when}, and {served.cached} were met")
        restored += served.restored > 0
    return restored


def _parts(folder: Path) -> int:
    return len(list(folder.glob("*/*/*.part")))
