"""The snapshots' files and index: bandwidth beside the plain disk, and what 100,000 chunks cost.

Chunks of SmolLM2-135M (11.8 MB of made-up fp32 KV each) are written and read by several threads, one chunk each at a
time, as the engine does. The peer reads or writes the same bytes in one plain file, in pieces of a chunk, with as many
threads, and checks nothing. Both take turns; what is told is the median of the rounds, and of their ratios.

With --engine also the whole: what a long session waits for after kill -9, beside a llama-server that restores a slot by
hand, what backing up costs those who decode, and the bytes of ten branches.

    python benchmarks/snapshots.py [--quick] [--engine] [--dir FOLDER]     (FOLDER: on the disk to measure)
"""

from __future__ import annotations

import gc
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from parts.table import Line, head, text

from zjournal.snapshots import chunk, format, plan
from zjournal.snapshots.chunk import ChunkFile
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Chunk, Codec
from zjournal.snapshots.index import Index, Row

BLOCK_BYTES = 30 * 3 * 2 * 64 * 16 * 4
CHUNK_BYTES = BLOCK_BYTES * format.CHUNK_BLOCKS
THREADS = 4
READ_MUST = 0.8
CHUNKS = 100_000
DEPTH = 64  # chunks in a row below which a branch begins
READY_S_MUST = 1.0
LOOKUP_MS_MUST = 1.0
NAMESPACE = format.digest("bench")


class Disk:
    """Chunks in a folder, and a plain file of as many bytes; memory for each thread."""

    def __init__(self, where: Path, count: int) -> None:
        self.folder = Folder(where / "snapshots")
        self.plain = where / "plain"
        self.count = count
        dice = random.Random(0)
        self.chunks: list[Chunk] = []
        for _ in range(count):
            tokens = np.array(dice.choices(range(49_152), k=format.CHUNK_TOKENS), dtype="<u4").tobytes()
            one = Chunk(NAMESPACE, format.digest("fp32"), format.ROOT, format.PLAIN, 0, tokens, BLOCK_BYTES)
            self.chunks.append(one)
        self.memory = [chunk.aligned(CHUNK_BYTES) for _ in range(THREADS)]
        for memory in self.memory:
            memory[:] = memoryview(np.random.default_rng(0).normal(size=CHUNK_BYTES // 4).astype(np.float32)).cast("B")
        self.pool = ThreadPoolExecutor(THREADS)

    def blocks(self, thread: int) -> list[memoryview]:
        return [self.memory[thread][at : at + BLOCK_BYTES] for at in range(0, CHUNK_BYTES, BLOCK_BYTES)]

    def spread(self, work: Callable[[int, int], None]) -> float:
        """Does `work(thread, number)` for all numbers, each thread the next one; bytes per second."""
        numbers = iter(range(self.count))  # next() of it is one step of the interpreter, so threads may share it

        def run(thread: int) -> None:
            for number in numbers:
                work(thread, number)

        started = time.perf_counter()
        for done in [self.pool.submit(run, thread) for thread in range(THREADS)]:
            done.result()
        return self.count * CHUNK_BYTES / (time.perf_counter() - started)

    def forget(self) -> None:
        """Drops all files from the page cache."""
        paths = [self.folder.where(one.namespace, one.hash) for one in self.chunks]
        for path in [*paths, self.plain]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def write(self, codec: Codec) -> float:
        packers = [Packer(codec) for _ in range(THREADS)]

        def work(thread: int, number: int) -> None:
            chunk.write(self.folder, self.chunks[number], self.blocks(thread), packers[thread])

        return self.spread(work)

    def read(self, cold: bool) -> float:
        if cold:
            self.forget()

        def work(thread: int, number: int) -> None:
            one = self.chunks[number]
            with ChunkFile(self.folder, one.namespace, one.hash) as file:
                file.prove(one.layout, one.parent, one.start, one.tokens)
                file.read(self.blocks(thread))

        return self.spread(work)

    def write_plain(self) -> float:
        descriptor = os.open(self.plain, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def work(thread: int, number: int) -> None:
            os.pwrite(descriptor, self.memory[thread], number * CHUNK_BYTES)
            os.fsync(descriptor)

        try:
            return self.spread(work)
        finally:
            os.close(descriptor)

    def read_plain(self, cold: bool) -> float:
        if cold:
            self.forget()
        descriptor = os.open(self.plain, os.O_RDONLY | (os.O_DIRECT if cold else 0))

        def work(thread: int, number: int) -> None:
            done = os.preadv(descriptor, [self.memory[thread]], number * CHUNK_BYTES)
            assert done == CHUNK_BYTES, done

        try:
            return self.spread(work)
        finally:
            os.close(descriptor)


def beside(rounds: int, ours: Callable[[], float], peer: Callable[[], float]) -> tuple[float, float, float]:
    """Median of ours, of the peer, and of their ratios; they take turns."""
    pairs = [(ours(), peer()) if at % 2 else (peer(), ours())[::-1] for at in range(rounds)]
    return (
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(one / other for one, other in pairs),
    )


def rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def files(disk: Disk, rounds: int) -> list[Line]:
    ours, peer, ratio = beside(rounds, lambda: disk.write(Codec.RAW), disk.write_plain)
    lines = [Line("raw, written and synced", rate(ours), f"plain file {rate(peer)}", ratio)]
    ours, peer, ratio = beside(rounds, lambda: disk.read(True), lambda: disk.read_plain(True))
    reached = ratio >= READ_MUST
    lines.append(Line("raw, read cold", rate(ours), f"O_DIRECT {rate(peer)}", ratio, f"{READ_MUST:g}", reached))
    disk.read(False)
    disk.read_plain(False)
    ours, peer, ratio = beside(rounds, lambda: disk.read(False), lambda: disk.read_plain(False))
    lines.append(Line("raw, read from the page cache", rate(ours), f"page cache {rate(peer)}", ratio))
    ours, peer, ratio = beside(rounds, lambda: disk.write(Codec.ZSTD), disk.write_plain)
    lines.append(Line("zstd, written and synced", rate(ours), f"plain file {rate(peer)}", ratio))
    ours, peer, ratio = beside(rounds, lambda: disk.read(True), lambda: disk.read_plain(True))
    lines.append(Line("zstd, read cold", rate(ours), f"O_DIRECT {rate(peer)}", ratio))
    one = disk.chunks[0]
    size = disk.folder.size(one.namespace, one.hash) or 0
    lines.append(
        Line("zstd, size of noise as KV", f"{size / 1e6:.1f} MB", f"raw {CHUNK_BYTES / 1e6:.1f} MB", CHUNK_BYTES / size)
    )
    return lines


def branches(count: int) -> tuple[list[tuple[str, list[Row]]], list[bytes], dict[bytes, bytes]]:
    """Rows of `count` chunks in branches of `DEPTH`, which part from each other halfway; some prompts; the tokens."""
    dice = random.Random(1)
    made: list[tuple[str, list[Row]]] = []
    prompts: list[bytes] = []
    tokens: dict[bytes, bytes] = {}
    stem: list[tuple[bytes, bytes]] = []  # hash and tokens of the branch before
    total = 0
    while total < count:
        path = stem[: DEPTH // 2] if stem and dice.random() < 0.75 else []
        rows = []
        for _ in range(min(DEPTH - len(path), count - total)):
            parent = path[-1][0] if path else format.ROOT
            data = np.frombuffer(dice.randbytes(format.CHUNK_TOKENS_BYTES), "<u4") % 49_152
            packed = data.astype("<u4").tobytes()
            hash_ = format.chain(parent, NAMESPACE, format.PLAIN, packed)
            rows.append(Row(hash_, parent, format.CHUNK_TOKENS, CHUNK_BYTES, format.marks(packed)))
            path = [*path, (hash_, packed)]
            tokens[hash_] = packed
        total += len(rows)
        stem = path
        made.append((f"snapshot {len(made)}", rows))
        prompts.append(b"".join(packed for _, packed in path)[: -100 * format.TOKEN_BYTES] + bytes(400))
    return made, prompts, tokens


def index(count: int) -> list[Line]:
    made, prompts, tokens = branches(count)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    built = Index()
    for at, (name, rows) in enumerate(made):
        built.add(name, name, NAMESPACE, rows[-1].hash, rows, at)
    ready_s = time.perf_counter() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    built.check()
    spent = []
    for prompt in prompts[:2000]:
        started = time.perf_counter()
        found = built.find(NAMESPACE, prompt, lambda one: tokens[one.hash])
        spent.append((time.perf_counter() - started) * 1000)
        assert found.tokens >= len(prompt) // format.TOKEN_BYTES - 100, found.tokens
    stakes = plan.Stakes(len(made), plan.Rates(1000))
    started = time.perf_counter()
    room = plan.make_room(built, CHUNK_BYTES, built.file_bytes, stakes)
    room_ms = (time.perf_counter() - started) * 1000
    assert room.fits
    lookup_ms = statistics.median(spent)
    long_ms = max(spent)
    ready = (f"{READY_S_MUST:g} s", ready_s <= READY_S_MUST)
    lookup = (f"{LOOKUP_MS_MUST:g} ms", lookup_ms < LOOKUP_MS_MUST)
    return [
        Line(f"index of {count:,} chunks ready", f"{ready_s:.2f} s", "", None, *ready),
        Line(
            f"lookup of a prompt of {DEPTH * 256:,} tokens",
            f"{lookup_ms:.3f} ms",
            f"longest {long_ms:.3f} ms",
            None,
            *lookup,
        ),
        Line("plan that makes room for one chunk", f"{room_ms:.1f} ms"),
        Line("memory of the index", f"{grown / count:.0f} B/chunk"),
    ]


def main() -> None:
    quick = "--quick" in sys.argv
    where = sys.argv[sys.argv.index("--dir") + 1] if "--dir" in sys.argv else None
    print(head())
    for line in index(CHUNKS // 10 if quick else CHUNKS):
        print(text(line))
    with tempfile.TemporaryDirectory(dir=where) as made:
        disk = Disk(Path(made), 8 if quick else 24)
        for line in files(disk, 3 if quick else 5):
            print(text(line))
    if "--engine" in sys.argv:
        from parts import backups, restores  # torch, and a server: not for who measures files alone

        for lines in (backups.branches, backups.decoding, restores.lines):
            with tempfile.TemporaryDirectory(dir=where) as made:
                for line in lines(Path(made), quick):
                    print(text(line), flush=True)


if __name__ == "__main__":
    main()
