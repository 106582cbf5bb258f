"""Restore or recompute, raw or packed: what is chosen, also for the first request after a start."""

import pytest

from tests.unit.engine.tiers import Tiered, tokens
from zjournal.engine.cache import gate as gates
from zjournal.engine.cache import probe
from zjournal.engine.cache.codecs import Choice
from zjournal.engine.cache.gate import Gate
from zjournal.link import wire
from zjournal.snapshots.format import Codec

MB = 1_000_000
CHUNK_TOKENS, CHUNK_BYTES = 256, 12 * MB  # of a model of 135 M parameters


def restores(gate, tokens=16 * CHUNK_TOKENS):
    file_bytes = tokens // CHUNK_TOKENS * CHUNK_BYTES
    return gate.read_us(file_bytes) <= gate.recompute_us(0, tokens)


def learnt(disk_mb_s, prefill_tokens_s):
    gate = Gate()
    gate.restored(8 * MB, 8 * MB // disk_mb_s)
    gate.remember(prefill_tokens_s)
    return gate


@pytest.mark.parametrize(
    ("disk_mb_s", "prefill_tokens_s", "restoring"),
    [
        (50, 20_000, False),
        (50, 200, True),
        (1500, 20_000, True),
        (1500, 200, True),
        (5, 200, True),
        (5, 2000, False),
    ],
)
def test_one_measurement_of_each_decides(disk_mb_s, prefill_tokens_s, restoring):
    assert restores(learnt(disk_mb_s, prefill_tokens_s)) == restoring


def test_what_was_measured_first_takes_the_place_of_the_guess():
    gate = Gate()
    gate.restored(8 * MB, 160_000)
    assert gate.read_us(50 * MB) == gates.RESTORE_US + 1_000_000
    gate.remember(1000.0)
    assert gate.rates.prefill_tokens_s == 1000.0
    gate.computed(0, 512, 512_000)
    here = gate.rates.prefill_tokens_s
    assert here == pytest.approx(1000 * (1 + 256 / 2048))
    gate.remember(5.0)
    assert gate.rates.prefill_tokens_s == here, "an earlier life does not count any more"


def test_a_strange_number_from_the_journal_is_kept_within_bounds():
    gate = Gate()
    gate.remember(1e-9)
    assert gate.rates.prefill_tokens_s == gates.PREFILL_TOKENS_S[0]
    gate.remember(1e12)
    assert gate.rates.prefill_tokens_s == gates.PREFILL_TOKENS_S[1]


def test_a_slow_disk_is_tried_again_after_a_while():
    gate = learnt(50, 5000)
    refusals = 0
    while not restores(gate):
        gate.refused()
        refusals += 1
    assert 3 < refusals < 40


class Timed(Tiered):
    """Each look at the clock while the disk reads finds it a while later."""

    learns = True
    step_us = 0

    def clock(self):
        self.now += self.step_us
        return self.now


@pytest.fixture
def small(monkeypatch):
    """Chunks of a few KiB say something as well."""
    for module in (gates, probe):
        monkeypatch.setattr(module, "MEASURED_BYTES_MIN", 1024)


def started_again(engine, step_us, speed, fingerprint="weights"):
    """A new life that is told the speed of the last one, before its disk has done anything."""
    engine.serve("a", tokens(700, 1))
    pages = engine.journal.known()
    engine.journal.known = lambda: [
        *pages[:-1],
        wire.Known(space=bytes(32), last=True, speeds=(wire.Speed(fingerprint, speed),)),
    ]
    again = engine.restart()
    again.step_us = step_us
    return again


@pytest.mark.parametrize(("speed", "cached"), [(100.0, 700), (1_000_000.0, 0)])
def test_the_first_request_after_a_start_is_decided_by_what_was_measured(tmp_path, small, speed, cached):
    """A chunk of 69,632 bytes takes a tenth of a second: 0.7 MB/s."""
    again = started_again(Timed(tmp_path / "s"), 100_000, speed)
    again.submit("b", [*tokens(700, 1), 7])
    again.disk.held = {"read"}
    for _ in range(5):
        again.step()
    assert not again.of(wire.Matched, "b"), "it waits for the measurement"
    again.disk.held.clear()
    again.run()
    matched = again.matched("b")
    assert matched.cached == cached
    assert cached or (matched.reason, matched.nearest) == ("recompute", "a")


def test_the_speed_of_other_weights_is_not_taken(tmp_path, small):
    again = started_again(Timed(tmp_path / "s"), 0, 123.0, fingerprint="others")
    assert again.snapshots.gate.rates.prefill_tokens_s == gates.PREFILL_TOKENS_S_FIRST


def test_a_bad_file_is_found_by_the_measurement_and_nobody_waits_for_ever(tmp_path, small):
    engine = Timed(tmp_path / "s")
    engine.serve("a", tokens(700, 1))
    last = next(iter(engine.journal.path("a")))
    path = engine.files()[last]
    path.write_bytes(path.read_bytes()[:5000])
    again = engine.restart()
    again.step_us = 10
    matched = again.serve("b", [*tokens(700, 1), 7])
    assert matched.cached == 512
    assert [one.hash for one in again.told(wire.Quarantined)] == [last]
    assert not again.snapshots.shelf.probing and not again.snapshots.shelf.reading


# --- codecs -----------------------------------------------------------------------------------------------


def wrote(choice, codec, mb_s, times=1):
    for _ in range(times):
        choice.wrote(codec, 12 * MB, 12 * MB // mb_s)


def test_the_codec_that_is_faster_is_taken_once_both_are_known():
    choice = Choice()
    assert choice.codec is Codec.RAW
    wrote(choice, Codec.RAW, 500)
    assert choice.codec is Codec.RAW
    wrote(choice, Codec.RAW, 20, times=20)
    assert choice.codec is Codec.ZSTD, "never tried, and the disk is slow"
    wrote(choice, Codec.ZSTD, 23)
    assert choice.codec is Codec.ZSTD
    wrote(choice, Codec.ZSTD, 10, times=20)
    assert choice.codec is Codec.RAW, "it does not pay here"


def test_a_disk_that_was_slow_once_is_tried_raw_again():
    choice = Choice()
    wrote(choice, Codec.RAW, 20)
    packed = 0
    while choice.codec is Codec.ZSTD:
        wrote(choice, Codec.ZSTD, 23)
        packed += 1
    assert 5 < packed < 50
    wrote(choice, Codec.RAW, 500)
    assert choice.codec is Codec.RAW
