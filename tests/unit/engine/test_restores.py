"""Restoring: what comes back after a restart, to the token; what happens when files are bad, slow, or half there."""

import os
from array import array

import pytest

from tests.unit.engine.tiers import BLOCK_BYTES, FILE_BYTES, MANY, Tiered, tokens
from zjournal.engine.cache import sweep
from zjournal.errors import SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import chunk as chunkfile
from zjournal.snapshots import format
from zjournal.snapshots.codec import Packer

SAYS = (10, 11, 12, 13)


@pytest.fixture
def engine(tmp_path):
    return Tiered(tmp_path / "snapshots")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def paths(engine, request):
    """The files of a request's snapshot, the first one first."""
    files = engine.files()
    return [files[hash_] for hash_ in reversed(list(engine.journal.path(request)))]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 700])
def test_a_turn_goes_on_after_a_kill(tmp_path, count, codec):
    engine = Tiered(tmp_path / "s", codec=codec)
    prompt = tokens(count, count)
    engine.serve("a", prompt)
    again = engine.restart()
    matched = again.serve("b", [*prompt, *SAYS, 7, 8, 9])
    kept = count + len(SAYS) - 1  # the last token was never computed
    assert (matched.cached, matched.restored, matched.tier) == (kept, kept, "ssd")
    assert (matched.reason, matched.nearest) == ("extended", "a")
    (restored,) = again.told(wire.Restored)
    assert (restored.tokens, restored.tier) == (kept, "ssd")
    assert restored.file_bytes > 0 and restored.read_us > 0 and restored.recompute_us > 0
    assert again.computed["b"] == count + len(SAYS) + 3 - kept + len(SAYS) - 1
    kinds = [type(one) for one in again.events]
    assert kinds.index(wire.Restored) < kinds.index(wire.Matched)


@pytest.mark.parametrize("at", [1, 16, 31, 256, 300, 511, 599])
def test_a_prompt_that_departs_in_the_middle_of_a_chunk_is_met_to_the_token(engine, at):
    prompt = tokens(600, 1)
    engine.serve("a", prompt)
    again = engine.restart()
    matched = again.serve("b", [*prompt[:at], 5000, *tokens(50, 2)])
    assert (matched.cached, matched.restored) == (at, at)
    assert (matched.reason, matched.nearest) == ("forked", "a")


def test_the_last_token_of_a_prompt_is_computed(engine):
    prompt = tokens(512, 1)
    engine.serve("a", prompt)
    matched = engine.restart().serve("b", prompt)
    assert (matched.cached, matched.reason) == (511, "whole")


def test_memory_goes_first_and_disk_behind_it(engine):
    prompt = tokens(900, 1)
    engine.serve("a", prompt)
    again = engine.restart()
    assert again.serve("b", [*prompt[:300], 5000]).restored == 300
    matched = again.serve("c", [*prompt, 5001])
    assert (matched.cached, matched.restored) == (900, 900 - 300 // 16 * 16)
    assert again.serve("d", [*prompt, 5002]).restored == 0, "all of it is in memory by now"


def test_two_branches_from_one_snapshot_and_a_batch_of_four(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = engine.restart(blocks=400)
    for number in range(4):
        again.submit(str(number), [*prompt[: 600 + number], 2000 + number, *tokens(20, number)])
    again.run()
    assert [again.matched(str(number)).cached for number in range(4)] == [600, 600, 602, 603] or all(
        again.matched(str(number)).cached >= 600 for number in range(4)
    )
    reads = sum(one.tokens for one in again.told(wire.Restored))
    assert reads < 2 * 700, "those who want the same chunks share them"


def test_namespaces_do_not_meet(engine):
    prompt = tokens(600, 1)
    engine.serve("a", prompt, namespace="n")
    again = engine.restart()
    matched = again.serve("b", prompt, namespace="other")
    assert (matched.cached, matched.restored, matched.reason) == (0, 0, "cold")


@pytest.mark.parametrize("shared", [400, 200])
def test_o15_a_match_that_is_missed_for_another_model_says_what_changed(engine, shared):
    """Field report O15: reuse 0, and the reason is the fingerprint with its parts; of a whole chunk and more."""
    prompt = tokens(600, 1)
    engine.serve("a", prompt, namespace="n")
    again = engine.restart()
    space = again.snapshots.shelf.space("n")
    again.snapshots.take(wire.Foreign((space,), (wire.Stale(space, "now", "weights, rope"),)))
    asked = [*prompt[:shared], 5000, 5001]
    matched = again.serve("b", asked, namespace="now")
    told = "fingerprint: weights, rope" if shared >= 256 else "cold"
    assert (matched.cached, matched.restored, matched.reason, matched.nearest) == (0, 0, told, "")
    matched = again.serve("c", asked, namespace="now")
    assert (matched.cached, matched.reason) == (shared + 1, "whole"), "it is there by now"
    assert again.serve("d", asked, namespace="of another tenant").reason == "cold"


@pytest.mark.parametrize("lies", [False, True])
def test_r21_kv_behind_an_image_is_not_met_by_its_placeholders(engine, lies):
    """Field report R21: two images, the same placeholder tokens. Their hashes differ, and the files say so as well.

    `lies`: the journal's rows tell of nothing but tokens; then what the file has is what counts.
    """
    prompt = tokens(300, 1)
    packed = array("I", prompt).tobytes()
    shelf = engine.snapshots.shelf
    space, layout = shelf.space("n"), format.digest("layout", engine.layout, str(BLOCK_BYTES))
    for name, image in (("cat", b"c" * 32), ("dog", b"d" * 32)):
        first = format.Chunk(space, layout, format.ROOT, image, 0, packed[:1024], BLOCK_BYTES)
        tail = format.Chunk(space, layout, first.hash, format.PLAIN, 256, packed[1024:], BLOCK_BYTES)
        for one in (first, tail):
            blocks = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(one.blocks)]
            size = chunkfile.write(shelf.folder, one, blocks, Packer(format.Codec.RAW)).file_bytes
            plain = lies or one.extra == format.PLAIN
            told = wire.Chunk(one.hash, one.parent, one.count, size, format.marks(one.tokens), plain)
            engine.journal.chunks[one.hash] = (space, told)
        engine.journal.ends[name] = (space, tail.hash)
    assert len(engine.files()) == 4
    again = engine.restart()
    matched = again.serve("b", [*prompt, 7])
    assert (matched.cached, matched.restored) == (0, 0)
    assert {one.reason for one in again.told(wire.Quarantined)} == ({"tokens"} if lies else set())
    assert again.serve("c", [*prompt, 8]).cached == 300, "what was computed from tokens alone is met by tokens"


def test_a_near_miss_is_told_with_its_place(engine):
    prompt = tokens(1200, 1)
    engine.serve("a", prompt)
    again = engine.restart()
    again.serve("b", [*prompt[:1150], 5000, *prompt[1151:]])
    (near,) = again.told(wire.NearMiss)
    assert (near.request, near.nearest, near.position) == ("b", "a", 1150)
    assert near.tokens == 1203


# --- bad files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 8, 300, 1300, 4085, 4096, 4200, 40_000])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_o16_a_flipped_bit_costs_what_is_behind_it_and_is_met_once(engine, at, number):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    bad = paths(engine, "a")[number]
    flip(bad, at)
    again = engine.restart()
    matched = again.serve("b", [*prompt, 7])
    assert matched.cached == 256 * number
    assert (matched.reason, matched.tier) == ("unreadable", "ssd" if number else "device")
    (told,) = again.told(wire.Quarantined)
    assert (told.file, told.hash.hex()) == (bad.name, bad.stem)
    assert (engine.folder / "quarantine" / bad.name).exists()
    third = again.restart()
    assert third.serve("c", [*prompt, 8]).cached >= 700, "it was written again"
    assert not third.told(wire.Quarantined)


@pytest.mark.parametrize("kind", ["cut", "longer", "missing", "symlink", "folder", "swapped"])
def test_o16_r20_other_things_in_a_file_s_place(engine, kind, tmp_path):
    """Field reports O16 and R20: cut, swapped, linked elsewhere; the answer comes by computing."""
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    first, second, _ = paths(engine, "a")
    if kind == "cut":
        os.truncate(second, second.stat().st_size // 2)
    elif kind == "longer":
        second.write_bytes(second.read_bytes() + b"x")
    elif kind == "swapped":
        second.write_bytes(first.read_bytes())
    else:
        second.unlink()
        if kind == "symlink":
            second.symlink_to(first)
        elif kind == "folder":
            second.mkdir()
    again = engine.restart()
    again.disk.held.add("write")  # the comparison of folder and index must not be what finds it
    again.submit("b", [*prompt, 7])
    again.disk.held.clear()
    again.run()
    assert again.matched("b").cached == 256
    assert len(again.told(wire.Finished)) == 1


def test_a_missing_file_is_found_by_the_comparison_as_well(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    paths(engine, "a")[1].unlink()
    again = engine.restart()
    again.run()
    (told,) = again.told(wire.Reconciled)
    assert len(told.missing) == 1
    assert again.serve("b", [*prompt, 7]).restored == 256


def test_orphans_and_leftovers_go_and_what_is_named_stays(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    first = paths(engine, "a")[0]
    orphan = first.with_name("ab" * 32 + ".zjc")
    orphan = first.parent.parent / "ab" / orphan.name
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(first.read_bytes())
    part = first.with_name(first.stem + "." + "0" * 16 + ".part")
    part.write_bytes(b"half")
    stranger = first.parent / "notes.txt"
    stranger.write_text("mine")
    for path in (orphan, part):
        os.utime(path, (1, 1))
    again = Tiered(engine.folder, journal=engine.journal)
    again.now = 10**15  # the files are older than the walk
    sweep.begin(again.snapshots.shelf)
    again.run()
    told = again.told(wire.Reconciled)[-1]
    assert (told.orphans, told.leftovers, told.strange) == (1, 1, 1)
    assert not orphan.exists() and not part.exists() and stranger.exists()
    assert again.serve("b", [*prompt, 7]).cached == 700


def test_a_disk_that_refuses_puts_no_file_aside(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = engine.restart()

    def refuse(kind):
        if kind == "read":
            raise SnapshotFault("no more descriptors", errno=24)

    again.run()
    again.disk.fault = refuse
    assert again.serve("b", [*prompt, 7]).cached == 0
    assert not again.told(wire.Quarantined)
    again.disk.fault = None
    assert again.restart().serve("c", [*prompt, 8]).cached >= 700


# --- in between ----------------------------------------------------------------------------------------------


def held(engine, prompt, **options):
    """An engine in which a restore of this prompt has begun and does not end."""
    again = engine.restart(**options)
    again.run()
    again.disk.held.add("read")
    again.submit("b", [*prompt, 7])
    again.step()
    (header,) = again.disk.queue
    again.disk.one(0)
    again.step()
    assert len(again.disk.queue) == 3 and header not in again.disk.queue
    return again


def test_cancel_while_it_is_read_gives_everything_back(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = held(engine, prompt)
    assert not again.of(wire.Matched, "b")
    again.cancel("b")
    assert again.scheduler.idle
    assert again.scheduler._residency.lent > 0, "the reads go on into blocks that nobody else gets"
    again.disk.held.clear()
    again.run()
    assert again.scheduler._residency.lent == 0
    assert again.scheduler._residency.free + again.scheduler._residency.kept == again.options["blocks"]
    assert again.serve("c", [*prompt, 8]).cached == 700


def test_others_decode_while_one_is_restored(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = held(engine, prompt)
    again.submit("other", tokens(20, 3), says=range(100, 150), namespace="other")
    for _ in range(60):
        again.step()
    assert [one.request for one in again.told(wire.Finished)] == ["other"]
    again.disk.held.clear()
    again.run()
    assert again.matched("b").cached == 700


def test_r16_a_restoring_request_is_preempted_like_any_other(engine):
    """Field report R16: it needs more memory than is free."""
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = held(engine, prompt, blocks=60)
    again.submit("first", tokens(20, 3), says=range(100, 500))
    again.disk.held.clear()
    again.run()
    assert sorted(one.request for one in again.told(wire.Finished)) == ["b", "first"]
    assert len(again.of(wire.Matched, "b")) == 1


def test_r15_what_is_being_read_is_not_given_up_for_something_new(tmp_path):
    """Field report R15: the room for a new state is not made by what another request is just about to load."""
    engine = Tiered(tmp_path / "s", limit=4 * FILE_BYTES, blocks=200)
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = held(engine, prompt, blocks=200)
    again.submit("new", tokens(700, 2), namespace="other")
    for _ in range(30):
        again.step()
    assert again.of(wire.Finished, "new")
    assert set(again.journal.path("a")) <= again.files().keys()
    again.disk.held.clear()
    again.run()
    assert again.matched("b").cached == 700


def test_two_that_want_the_same_read_it_once(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = engine.restart(blocks=400)
    again.submit("b", [*prompt, 7])
    again.submit("c", [*prompt, 8])
    again.run()
    assert sum(one.tokens for one in again.told(wire.Restored)) == 700 + 12, "but for a part of a block"
    assert again.matched("c").cached == 700


def test_always_reads_whatever_it_takes(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = engine.restart()
    again.snapshots.gate._read = 1e3  # a very slow disk
    again.snapshots.gate.always = True
    assert again.serve("b", [*prompt, 7]).cached == 700
    (told,) = again.told(wire.Restored)
    assert told.estimate_us > told.recompute_us > 0, "both estimates are told"


def test_computing_is_chosen_where_reading_takes_longer(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    again = engine.restart()
    again.snapshots.gate._read = 1e3  # a very slow disk
    matched = again.serve("b", [*prompt, 7])
    assert (matched.cached, matched.reason, matched.nearest) == (0, "recompute", "a")
    assert matched.estimate_us > matched.recompute_us > 0, "both estimates are told"
    warm = engine.restart().serve("c", [*prompt, 8])
    assert (warm.estimate_us, warm.recompute_us) == (0, 0), "of what was read, cache_restored tells them"


def test_host_memory_in_front(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=60, host=MANY)
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    engine.serve("fills", tokens(900, 2))
    matched = engine.serve("b", [*prompt, 7])
    assert (matched.cached, matched.tier) == (700, "host")
    assert matched.restored_host == matched.restored > 0
    assert {one.tier for one in engine.told(wire.Restored)} == {"host"}
    assert engine.scheduler.gauges().host_bytes > 0


def test_host_memory_is_bounded_and_checked(tmp_path):
    engine = Tiered(tmp_path / "s", blocks=60, host=3 * 1024)
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    assert 0 < engine.scheduler.gauges().host_bytes <= 3 * 1024
    engine.serve("fills", tokens(900, 2))
    held = list(engine.snapshots.shelf.host._held.values())
    held[0].memory[0, 0] ^= 1
    engine.serve("b", [*prompt, 7])
    engine.serve("c", [*tokens(900, 2), 7])
    assert not engine.told(wire.Quarantined), "memory is not the file's fault"


def test_the_marks_of_an_erased_turn_are_not_needed(engine):
    prompt = tokens(700, 1)
    engine.serve("a", prompt)
    for hash_, (space, chunk) in engine.journal.chunks.items():
        named = (chunk.hash, chunk.parent, chunk.tokens, chunk.file_bytes)
        engine.journal.chunks[hash_] = (space, wire.Chunk(*named, b""))
    assert engine.restart().serve("b", [*prompt, 7]).cached == 700


def test_a_chunk_is_named_by_all_before_it_and_by_the_key(engine):
    engine.serve("a", tokens(300, 1))
    space = engine.snapshots.shelf.space("n")
    assert space == format.digest("kv", "n", bytes(range(32)).hex())
    for hash_, path in engine.files().items():
        assert path.parent.parent.name == space.hex()[:16] and path.parent.name == hash_.hex()[:2]
