"""Chunk files: written so that they are whole or absent, read so that nothing unproved is believed.

A file is written under a name of its own, synced, renamed, and its folder synced; it is known to nobody before the
caller tells of it. A reader keeps one open file from the header to the last block, so that what was proved is
what is read. What lies in the page cache is taken from there; the rest is read past it, if the memory is aligned
for that, because then the disk is as fast as it can be and the cache keeps what others need.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from types import TracebackType

import xxhash

from zjournal.errors import ChunkFault, SnapshotFault
from zjournal.snapshots import folder as folders
from zjournal.snapshots import format
from zjournal.snapshots.codec import Packer, Unpacker
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import HEADER_BYTES, PAGE_BYTES, Chunk, Codec, Header, Malformed, Reason, Section

_ZEROS = bytes(PAGE_BYTES)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # the file system cannot, or asks for more than a page of alignment
_NO_WAIT = (errno.EOPNOTSUPP, errno.EINVAL)


def aligned(size: int) -> memoryview:
    """Writable memory that begins at a page, zeroed; from it and into it files can be read past the page cache."""
    assert size > 0
    return memoryview(mmap.mmap(-1, size))


def write(
    folder: Folder,
    chunk: Chunk,
    blocks: Sequence[memoryview],
    packer: Packer,
    sync: Callable[[int], None] = os.fsync,
) -> Header:
    """Writes a chunk's file, over one of the same name if there is one, and returns its header.

    `blocks` are the bytes of its pages, one each, which must not change meanwhile; a raw one is written from where it
    is. All of the last block is stored: what lies behind the last token is the caller's to clear, and is never used.
    On any fault nothing is left behind. Raises SnapshotFault, whose `errno` tells a full disk.
    """
    assert len(blocks) == chunk.blocks, (len(blocks), chunk.blocks)
    assert all(block.nbytes == chunk.block_bytes for block in blocks)
    hash_ = chunk.hash
    try:
        place = folder.make_place(chunk.namespace, hash_)
        try:
            return _write_in(place, chunk, hash_, blocks, packer, sync)
        finally:
            os.close(place)
    except OSError as error:
        raise folders.fault(folder.where(chunk.namespace, hash_), error) from error


def _write_in(
    place: int, chunk: Chunk, hash_: bytes, blocks: Sequence[memoryview], packer: Packer, sync: Callable[[int], None]
) -> Header:
    """Writes the file into an open folder. Raises OSError; then there is no new file."""
    part = f"{hash_.hex()}.{os.urandom(8).hex()}{format.PART_SUFFIX}"
    descriptor = os.open(part, _NEW, folders.FILE_MODE, dir_fd=place)
    try:
        try:
            header = _write_all(descriptor, chunk, blocks, packer)
            sync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, format.file_name(hash_), src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=place)
        raise
    sync(place)
    return header


def _write_all(descriptor: int, chunk: Chunk, blocks: Sequence[memoryview], packer: Packer) -> Header:
    """Writes all sections, then the header, which tells where they are."""
    if packer.codec is Codec.RAW and all(map(_is_aligned, blocks)):
        return _write_past_cache(descriptor, chunk, blocks, packer)
    sections: list[Section] = []
    at = HEADER_BYTES
    for block in blocks:
        flat = block.cast("B")
        stored = packer.pack(flat)
        size = len(stored.cast("B"))
        parts = [stored.cast("B"), memoryview(_ZEROS)[: format.paged(size) - size]]
        sections.append(Section(at, size, len(flat), _checksum(parts)))
        _put(descriptor, parts, at)
        at = sections[-1].end
    header = Header(chunk, packer.codec, packer.level, tuple(sections))
    _put(descriptor, [memoryview(format.encode(header))], 0)
    return header


def _write_past_cache(descriptor: int, chunk: Chunk, blocks: Sequence[memoryview], packer: Packer) -> Header:
    """Writes a raw file from where its blocks are, if the file system can.

    The kernel's copy costs the processor three times what all the rest does, and the model wants the processor; nor
    is what was written wanted in the page cache, as it is in the engine's memory still.
    """
    flat = [block.cast("B") for block in blocks]
    ends = itertools.accumulate((len(block) for block in flat), initial=HEADER_BYTES)
    sections = tuple(
        Section(at, len(block), len(block), _checksum([block])) for at, block in zip(ends, flat, strict=False)
    )
    header = Header(chunk, packer.codec, packer.level, sections)
    first = aligned(HEADER_BYTES)
    first[:] = format.encode(header)
    parts = [first, *flat]
    done = _put_direct(descriptor, parts)
    _put(descriptor, _rest(parts, done), done)
    return header


def _put_direct(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Writes past the page cache, as far as that goes; the number of bytes. Raises OSError."""
    done = 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while left := _rest(parts, done):
            step = os.pwritev(descriptor, left, done)
            done += step
            if step % PAGE_BYTES:
                break  # the rest is written as usual
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


class ChunkFile:
    """A chunk's file, open, with a header that was proved. Not for two threads at once."""

    def __init__(self, folder: Folder, namespace: bytes, hash_: bytes) -> None:
        """Opens the file and checks header, name, namespace and size. Raises ChunkFault or SnapshotFault."""
        self._folder, self._namespace, self._hash = folder, namespace, hash_
        self.path = str(folder.where(namespace, hash_))
        self._descriptor = folder.open_file(namespace, hash_)
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def prove(self, layout: bytes, parent: bytes, start: int, tokens: bytes, extra: bytes = format.PLAIN) -> None:
        """Checks that the chunk continues `parent` at token `start`, and begins with the packed `tokens`.

        Raises ChunkFault. With this, a hit is proved by tokens and not by a hash.
        """
        chunk = self.header.chunk
        if chunk.layout != layout:
            raise self._refused(Reason.LAYOUT, "has KV of another dtype or layout")
        if chunk.parent != parent or chunk.start != start:
            raise self._refused(Reason.PARENT, "continues another chunk")
        if chunk.extra != extra or not chunk.tokens.startswith(tokens):
            raise self._refused(Reason.TOKENS, "has other tokens")

    def read(self, into: Sequence[memoryview], direct: bool = True, first: int = 0) -> None:
        """Reads the blocks of the chunk from block `first` on, each into its memory, and checks them.

        `direct`: what is not in the page cache is read past it, where memory and file system allow that. On a fault
        the memory may hold anything. Raises ChunkFault or SnapshotFault.
        """
        sections = self.header.sections[first : first + len(into)]
        assert 0 < len(into) == len(sections) and first >= 0, (first, len(into), len(self.header.sections))
        flat = [one.cast("B") for one in into]
        if any(len(one) != section.raw for one, section in zip(flat, sections, strict=True)):
            raise self._refused(Reason.LAYOUT, f"has blocks of {sections[0].raw} bytes")
        try:
            if self.header.codec is Codec.RAW:
                self._read_raw(flat, sections, direct, first)
            else:
                self._read_packed(flat, sections, direct, first)
        except OSError as error:
            raise folders.read_fault(self.path, error) from error

    def _read_header(self) -> Header:
        try:
            size = os.fstat(self._descriptor).st_size
            data = os.pread(self._descriptor, HEADER_BYTES, 0)
        except OSError as error:
            raise folders.read_fault(self.path, error) from error
        try:
            header = format.decode(data)
        except Malformed as wrong:
            raise self._refused(wrong.reason, str(wrong)) from None
        if header.chunk.namespace != self._namespace:
            raise self._refused(Reason.NAMESPACE, "is KV of other weights, tokenizer or dtype, or another owner's")
        if header.chunk.hash != self._hash:
            raise self._refused(Reason.HASH, "is another chunk than its name says")
        if size < header.file_bytes:
            raise self._refused(Reason.CUT, f"has {size} bytes of {header.file_bytes}")
        if size > header.file_bytes:
            raise self._refused(Reason.TRAILING, f"has {size - header.file_bytes} bytes more than it tells of")
        return header

    def _read_raw(self, into: Sequence[memoryview], sections: Sequence[Section], direct: bool, first: int) -> None:
        """Reads into the caller's memory; the zeros behind a block, if there are any, go into a scratch."""
        gaps = [memoryview(bytearray(section.end - section.offset - section.stored)) for section in sections]
        parts = [part for pair in zip(into, gaps, strict=True) for part in pair if len(part)]
        self._fill(parts, sections[0].offset, direct)
        for index, (block, gap, section) in enumerate(zip(into, gaps, sections, strict=True), first):
            self._check(index, section, [block, gap])

    def _read_packed(self, into: Sequence[memoryview], sections: Sequence[Section], direct: bool, first: int) -> None:
        """Reads the stored bytes, of which there are hardly more than the caller's memory takes, then unpacks them."""
        begin = sections[0].offset
        stored = aligned(sections[-1].end - begin)
        self._fill([stored], begin, direct)
        unpacker = Unpacker()
        for index, (block, section) in enumerate(zip(into, sections, strict=True), first):
            at = section.offset - begin
            self._check(index, section, [stored[at : section.end - begin]])
            try:
                unpacker.unpack(stored[at : at + section.stored], block)
            except Malformed as wrong:
                raise self._refused(wrong.reason, f"block {index} {wrong}", index) from None

    def _check(self, index: int, section: Section, parts: Sequence[memoryview]) -> None:
        if _checksum(parts) != section.checksum:
            raise self._refused(Reason.SECTION, f"block {index} does not match its checksum", index)

    def _fill(self, parts: Sequence[memoryview], at: int, direct: bool) -> None:
        """Reads the file from byte `at` on until all parts are full. Raises OSError, and ChunkFault at its end."""
        left = _rest(parts, self._cached(parts, at)) if direct else parts
        at += sum(map(len, parts)) - sum(map(len, left))
        if left and direct and at % PAGE_BYTES == 0 and all(_is_aligned(part) for part in left):
            done = self._read_direct(left, at)
            left, at = _rest(left, done), at + done
        if left:
            os.posix_fadvise(self._descriptor, at, sum(map(len, left)), os.POSIX_FADV_WILLNEED)
        while left:
            done = os.preadv(self._descriptor, left, at)
            if done == 0:
                raise self._refused(Reason.CUT, f"ends at byte {at}")
            left, at = _rest(left, done), at + done

    def _cached(self, parts: Sequence[memoryview], at: int) -> int:
        """Reads what the page cache has from byte `at` on without a gap; the number of bytes."""
        try:
            return os.preadv(self._descriptor, parts, at, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _NO_WAIT:
                raise
            return 0

    def _read_direct(self, parts: Sequence[memoryview], at: int) -> int:
        """Reads past the page cache, as far as that goes; the number of bytes."""
        try:
            descriptor = self._folder.open_file(self._namespace, self._hash, os.O_DIRECT)
        except ChunkFault:
            return 0  # renamed meanwhile; the file that is open is the one that was proved
        except SnapshotFault as refused:
            if refused.errno not in _NO_DIRECT:
                raise
            return 0
        try:
            if not os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor)):
                return 0
            total, left = 0, parts
            while left:
                done = os.preadv(descriptor, left, at + total)
                if done % PAGE_BYTES or not done:
                    break  # the rest is read as usual
                total += done
                left = _rest(left, done)
            return total
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return 0
        finally:
            os.close(descriptor)

    def _refused(self, reason: Reason, detail: str, block: int | None = None) -> ChunkFault:
        return ChunkFault(self.path, reason, detail, block=block)


def read_header(folder: Folder, namespace: bytes, hash_: bytes) -> Header:
    """The header of a chunk's file. Raises as ChunkFile does."""
    with ChunkFile(folder, namespace, hash_) as file:
        return file.header


def verify(folder: Folder, namespace: bytes, hash_: bytes) -> Header:
    """Reads and checks the whole file, in memory of one chunk. Raises ChunkFault or SnapshotFault."""
    with ChunkFile(folder, namespace, hash_) as file:
        size = file.header.chunk.block_bytes
        memory = aligned(size * len(file.header.sections))
        file.read([memory[at : at + size] for at in range(0, len(memory), size)])
        return file.header


def _checksum(parts: Sequence[memoryview]) -> bytes:
    if len(parts) == 1 or not len(parts[1]):
        return xxhash.xxh3_128_digest(parts[0])
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()


def _put(descriptor: int, parts: Sequence[memoryview], at: int) -> None:
    """Writes all parts from byte `at` on. Raises OSError."""
    left = [part for part in parts if len(part)]
    while left:
        done = os.pwritev(descriptor, left, at)
        left, at = _rest(left, done), at + done


def _rest(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts behind their first `done` bytes."""
    left = []
    for part in parts:
        if done >= len(part):
            done -= len(part)
            continue
        left.append(part[done:])
        done = 0
    return left


def _is_aligned(part: memoryview) -> bool:
    import numpy as np  # as in codec.py

    address = int(np.frombuffer(part, np.uint8).__array_interface__["data"][0])
    return address % PAGE_BYTES == 0 and len(part) % PAGE_BYTES == 0
