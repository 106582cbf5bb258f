"""Chunk files: what was written is read, in parts as well, and what is not right is refused with its reason."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.snapshots import chunks
from zjournal.errors import ChunkFault, SnapshotFault
from zjournal.snapshots import chunk, format, reconcile
from zjournal.snapshots.chunk import ChunkFile
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Codec, Reason
from zjournal.snapshots.reconcile import Kind, Totals

ROOT = Path(__file__).resolve().parents[3]
SIZES = [4, 4092, 4096, 8192, 10_000]


@pytest.fixture
def folder(tmp_path):
    with Folder(tmp_path / "snapshots") as opened:
        yield opened


def path_of(folder, made):
    return folder.where(made.namespace, made.hash)


def forget(path):
    """Drops a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def content(folder, made, blocks=None, direct=True):
    into = chunks.room(made, blocks)
    with ChunkFile(folder, made.namespace, made.hash) as file:
        file.read(into, direct)
    return [bytes(one) for one in into]


def refusal(folder, made) -> ChunkFault:
    with pytest.raises(ChunkFault) as refused:
        chunk.verify(folder, made.namespace, made.hash)
    assert str(path_of(folder, made)) in refused.value.message
    return refused.value


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read(folder, codec, size):
    for count in (1, 16, 100, 256):
        made = chunks.make(chunks.tokens(count), block_bytes=size)
        header = chunks.store(folder, made, codec)
        known = [bytes(block) for block in chunks.kv(made)]
        assert path_of(folder, made).stat().st_size == header.file_bytes
        assert chunk.verify(folder, made.namespace, made.hash) == header
        for direct in (True, False):
            assert content(folder, made, direct=direct) == known
            forget(path_of(folder, made))
            assert content(folder, made, direct=direct) == known
            assert content(folder, made, 1, direct) == known[:1]


def test_memory_that_is_not_aligned_is_read_as_well(folder):
    made = chunks.make(chunks.tokens(64))
    chunks.store(folder, made)
    forget(path_of(folder, made))
    memory = chunk.aligned(made.block_bytes * 4 + 64)[64:]
    into = [memory[at : at + made.block_bytes] for at in range(0, len(memory), made.block_bytes)]
    with ChunkFile(folder, made.namespace, made.hash) as file:
        file.read(into)
    assert [bytes(one) for one in into] == [bytes(one) for one in chunks.kv(made)]


def test_a_raw_file_is_header_and_blocks(folder):
    made = chunks.make(chunks.tokens(20), block_bytes=4100)
    header = chunks.store(folder, made)
    data = path_of(folder, made).read_bytes()
    first, second = chunks.kv(made)
    assert data == format.encode(header) + bytes(first).ljust(8192, b"\0") + bytes(second).ljust(8192, b"\0")


def _aligned_kv(made):
    blocks = chunks.room(made)
    for block, values in zip(blocks, chunks.kv(made), strict=True):
        block[:] = values
    return blocks


def test_what_is_written_past_the_page_cache_is_the_same_file(folder):
    made = chunks.make(chunks.tokens(250))
    chunks.store(folder, made)
    usual = path_of(folder, made).read_bytes()
    chunk.write(folder, made, _aligned_kv(made), Packer(Codec.RAW))
    assert path_of(folder, made).read_bytes() == usual


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_file_system_that_will_not_write_past_the_cache_gets_the_rest_as_usual(folder, monkeypatch, whole):
    made = chunks.make(chunks.tokens(250))
    usual, calls = os.pwritev, []

    def refuse(descriptor, parts, at):
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        calls.append(bool(direct))
        if direct and len(calls) > whole:
            raise OSError(errno.EINVAL, "not here")
        return usual(descriptor, parts[:2] if direct else parts, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    chunk.write(folder, made, _aligned_kv(made), Packer(Codec.RAW))
    assert calls[: whole + 1] == [True] * (whole + 1)
    assert calls[whole + 1 :] and not any(calls[whole + 1 :])
    assert content(folder, made) == [bytes(block) for block in chunks.kv(made)]


def test_zstd_stores_less_and_says_its_level(folder):
    made = chunks.make(chunks.tokens(256))
    header = chunks.store(folder, made, Codec.ZSTD)
    assert header.level > 0 and sum(one.stored for one in header.sections) < 0.95 * made.blocks * made.block_bytes


def test_files_are_private(folder):
    made = chunks.make(chunks.tokens(20))
    chunks.store(folder, made)
    path = path_of(folder, made)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(one.stat().st_mode) for one in list(path.parents)[:3]] == [0o700] * 3


def test_a_file_is_synced_and_renamed_before_its_folder_is_synced(folder):
    made = chunks.make(chunks.tokens(20))
    seen = []

    def sync(descriptor):
        state = os.fstat(descriptor)
        seen.append((stat.S_ISDIR(state.st_mode), path_of(folder, made).exists(), state.st_size))
        os.fsync(descriptor)

    header = chunk.write(folder, made, chunks.kv(made), Packer(Codec.RAW), sync)
    assert seen[0] == (False, False, header.file_bytes)
    assert seen[1][:2] == (True, True)
    assert len(seen) == 2


KILLED = """
import sys
from pathlib import Path
from tests.unit.snapshots import chunks
from zjournal.snapshots import chunk
from zjournal.snapshots.codec import Packer
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Codec

def sync(descriptor):
    print("written", flush=True)
    sys.stdin.read()

made = chunks.make(chunks.tokens(64))
chunk.write(Folder(Path(sys.argv[1])), made, chunks.kv(made), Packer(Codec.RAW), sync)
"""


def test_o16_a_kill_while_a_file_is_written_leaves_a_leftover_and_no_chunk(folder):
    """O16: nobody meets the half-written file, and it is found and removed."""
    made = chunks.make(chunks.tokens(64))
    script = [sys.executable, "-c", KILLED, str(folder.path)]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        child.kill()
    assert refusal(folder, made).reason == Reason.MISSING
    later_ns = time.time_ns() + 10**15
    steps = reconcile.walk(folder, lambda *_: None, lambda _: False, later_ns, Totals())
    found = [one for step in steps for one in step]
    assert [one.kind for one in found] == [Kind.LEFTOVER]
    assert reconcile.remove(folder, found[0])
    chunks.store(folder, made)
    assert [path.name for path in path_of(folder, made).parent.iterdir()] == [path_of(folder, made).name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_sync_leaves_nothing(folder, number):
    made = chunks.make(chunks.tokens(20))

    def sync(descriptor):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SnapshotFault) as refused:
        chunk.write(folder, made, chunks.kv(made), Packer(Codec.RAW), sync)
    assert refused.value.errno == number and not isinstance(refused.value, ChunkFault)
    assert list(path_of(folder, made).parent.iterdir()) == []
    chunks.store(folder, made)
    assert chunk.verify(folder, made.namespace, made.hash).chunk == made


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(folder):
    made = chunks.make(chunks.tokens(256))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(SnapshotFault) as refused:
            chunks.store(folder, made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert list(path_of(folder, made).parent.iterdir()) == []


def test_a_file_is_written_over(folder):
    made = chunks.make(chunks.tokens(20))
    chunks.store(folder, made, Codec.RAW, seed=1)
    chunks.store(folder, made, Codec.ZSTD, seed=2)
    assert content(folder, made) == [bytes(one) for one in chunks.kv(made, 2)]


def test_an_open_file_is_read_though_it_is_replaced_or_gone(folder):
    """What was proved is what is read: no second look at the name."""
    made = chunks.make(chunks.tokens(40))
    chunks.store(folder, made, seed=1)
    into = chunks.room(made)
    with ChunkFile(folder, made.namespace, made.hash) as file:
        chunks.store(folder, made, seed=2)
        os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        file.read(into)
    assert [bytes(one) for one in into] == [bytes(one) for one in chunks.kv(made, 1)]
    with ChunkFile(folder, made.namespace, made.hash) as file:
        assert folder.remove(made.namespace, made.hash)
        os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        file.read(into)
    assert [bytes(one) for one in into] == [bytes(one) for one in chunks.kv(made, 2)]


def test_only_the_blocks_that_are_wanted_are_checked(folder):
    made = chunks.make(chunks.tokens(64))
    header = chunks.store(folder, made)
    with path_of(folder, made).open("r+b") as file:
        file.seek(header.sections[2].offset)
        file.write(b"damage")
    assert content(folder, made, 2) == [bytes(one) for one in chunks.kv(made)[:2]]
    refused = refusal(folder, made)
    assert (refused.reason, refused.block) == (Reason.SECTION, 2)


@pytest.mark.parametrize("size", [8192, 8196])
@pytest.mark.parametrize("codec", Codec)
def test_a_chunk_is_read_from_its_middle_on(folder, codec, size):
    made = chunks.make(chunks.tokens(100), block_bytes=size)
    header = chunks.store(folder, made, codec)
    with path_of(folder, made).open("r+b") as file:  # what is before it is not looked at
        file.seek(header.sections[1].offset)
        file.write(b"damage")
    into = chunks.room(made, 4)
    with ChunkFile(folder, made.namespace, made.hash) as file:
        file.read(into, first=2)
        assert [bytes(one) for one in into] == [bytes(one) for one in chunks.kv(made)[2:6]]
        with pytest.raises(ChunkFault) as refused:
            file.read(into, first=1)
    assert (refused.value.reason, refused.value.block) == (Reason.SECTION, 1)


@pytest.mark.parametrize("codec", Codec)
def test_zeros_behind_a_block_are_checked_too(folder, codec):
    made = chunks.make(chunks.tokens(20), block_bytes=4100)
    header = chunks.store(folder, made, codec)
    with path_of(folder, made).open("r+b") as file:
        file.seek(header.sections[1].offset + header.sections[1].stored + 7)
        file.write(b"\1")
    assert refusal(folder, made).reason == Reason.SECTION


@pytest.mark.parametrize(
    ("size", "reason"),
    [(0, Reason.CUT), (100, Reason.CUT), (4096, Reason.CUT), (-1, Reason.CUT), (-8192, Reason.CUT)],
)
def test_a_cut_file_is_refused(folder, size, reason):
    made = chunks.make(chunks.tokens(64))
    whole = chunks.store(folder, made).file_bytes
    os.truncate(path_of(folder, made), size if size >= 0 else whole + size)
    assert refusal(folder, made).reason == reason


def test_bytes_at_the_end_are_refused(folder):
    made = chunks.make(chunks.tokens(64))
    chunks.store(folder, made)
    with path_of(folder, made).open("ab") as file:
        file.write(b"x")
    assert refusal(folder, made).reason == Reason.TRAILING


def test_a_file_cut_while_it_is_read_is_refused(folder):
    made = chunks.make(chunks.tokens(64))
    chunks.store(folder, made)
    with ChunkFile(folder, made.namespace, made.hash) as file:
        os.truncate(path_of(folder, made), 9000)
        for direct in (True, False):
            with pytest.raises(ChunkFault) as refused:
                file.read(chunks.room(made), direct)
            assert refused.value.reason == Reason.CUT


def test_another_chunk_under_this_name_is_refused(folder):
    made, other = chunks.make(chunks.tokens(64)), chunks.make(chunks.tokens(64, 1))
    chunks.store(folder, made)
    chunks.store(folder, other)
    os.replace(path_of(folder, other), path_of(folder, made))
    assert refusal(folder, made).reason == Reason.HASH


def test_the_same_tokens_of_another_namespace_are_refused(folder):
    made = chunks.make(chunks.tokens(64))
    other = replace(made, namespace=format.digest("other weights", "local"))
    chunks.store(folder, other)
    path_of(folder, made).parent.mkdir(parents=True)
    os.replace(path_of(folder, other), path_of(folder, made))
    assert refusal(folder, made).reason == Reason.NAMESPACE


def test_a_hit_is_proved_by_tokens_layout_and_place(folder):
    first, second = chunks.split(chunks.tokens(300))
    chunks.store(folder, second)
    with ChunkFile(folder, second.namespace, second.hash) as file:
        file.prove(second.layout, first.hash, 256, second.tokens)
        file.prove(second.layout, first.hash, 256, second.tokens[:12])
        for reason, *wanted in (
            (Reason.LAYOUT, format.digest("bf16"), first.hash, 256, second.tokens),
            (Reason.PARENT, second.layout, bytes(32), 256, second.tokens),
            (Reason.PARENT, second.layout, first.hash, 512, second.tokens),
            (Reason.TOKENS, second.layout, first.hash, 256, second.tokens + bytes(4)),
            (Reason.TOKENS, second.layout, first.hash, 256, bytes(4)),
            (Reason.TOKENS, second.layout, first.hash, 256, second.tokens, b"i" * 32),
        ):
            with pytest.raises(ChunkFault) as refused:
                file.prove(*wanted)
            assert refused.value.reason == reason
        with pytest.raises(ChunkFault) as refused:
            file.read([chunk.aligned(4096)])
        assert refused.value.reason == Reason.LAYOUT


def test_a_missing_file_is_missing_and_no_damage(folder):
    made = chunks.make(chunks.tokens(64))
    assert refusal(folder, made).reason == Reason.MISSING
    chunks.store(folder, chunks.make(chunks.tokens(64, 1)))
    assert refusal(folder, made).reason == Reason.MISSING


def test_links_and_what_is_no_file_are_refused(folder, tmp_path):
    made = chunks.make(chunks.tokens(64))
    chunks.store(folder, made)
    path = path_of(folder, made)
    aside = tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    assert refusal(folder, made).reason == Reason.SYMLINK
    path.unlink()
    path.mkdir()
    assert refusal(folder, made).reason == Reason.KIND
    path.rmdir()
    os.mkfifo(path)
    assert refusal(folder, made).reason == Reason.KIND
    path.unlink()
    aside.rename(path)
    for place in (path.parent, path.parent.parent):
        place.rename(aside)
        place.symlink_to(aside)
        assert refusal(folder, made).reason == Reason.SYMLINK
        place.unlink()
        aside.rename(place)
    assert chunk.verify(folder, made.namespace, made.hash).chunk == made


def test_nothing_is_written_through_a_link(folder, tmp_path):
    made = chunks.make(chunks.tokens(64))
    target = tmp_path / "elsewhere"
    target.mkdir()
    path_of(folder, made).parent.parent.symlink_to(target)
    with pytest.raises(SnapshotFault):
        chunks.store(folder, made)
    assert list(target.iterdir()) == []


def test_a_system_that_is_short_of_files_blames_none(folder):
    """Whoever puts bad files aside must not do so because a limit of the process was reached."""
    made = chunks.make(chunks.tokens(64))
    chunks.store(folder, made)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.dup(folder.descriptor)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, limits[1]))
    try:
        with pytest.raises(SnapshotFault) as refused:
            chunk.verify(folder, made.namespace, made.hash)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(opened[0])
    assert refused.value.errno == errno.EMFILE and not isinstance(refused.value, ChunkFault)


def test_no_descriptor_is_left_open(folder, tmp_path):
    made = chunks.make(chunks.tokens(64))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        chunks.store(folder, made)
        content(folder, made)
        with path_of(folder, made).open("r+b") as file:
            file.write(b"?")
        refusal(folder, made)
        assert folder.quarantine(made.namespace, made.hash)
        refusal(folder, made)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_threads_write_and_read(folder):
    made = [chunks.make(chunks.tokens(64, seed)) for seed in range(24)]

    def both(number):
        one = made[number % len(made)]
        chunks.store(folder, one, Codec(number % 2), number % len(made))
        return content(folder, one) == [bytes(block) for block in chunks.kv(one, number % len(made))]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(96)))
