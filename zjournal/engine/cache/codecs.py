"""Which codec `auto` takes, by what writing took with each: the one that gets more KV to the disk in a second.

Raw comes first. Packing with zstd pays where the disk is slower than packing saves bytes: for a part p of a second for
each packed byte, and r of the bytes left, below (1 - r) / p. Measured on one core with fp32 KV (docs/log.md): 0.54 GB/s
and 1 / 1.168 of the bytes, so below 78 MB/s. From then on both are known, and the faster one is taken.
"""

from __future__ import annotations

from zjournal.snapshots.format import Codec

ZSTD_BELOW_BYTES_S = 78e6
WEIGHT = 0.25  # of the latest measurement
DRIFT = 1.01  # of raw's rate, for each chunk that is packed: a disk that was slow once is tried raw again


class Choice:
    """Pure: told of times, asked for a codec. Rates are bytes of KV per second, as they lie in memory."""

    def __init__(self) -> None:
        self._rates: dict[Codec, float] = {}

    @property
    def codec(self) -> Codec:
        raw, zstd = self._rates.get(Codec.RAW), self._rates.get(Codec.ZSTD)
        if raw is None or raw >= ZSTD_BELOW_BYTES_S:
            return Codec.RAW
        return Codec.ZSTD if zstd is None or zstd > raw else Codec.RAW

    def wrote(self, codec: Codec, kv_bytes: int, took_us: int) -> None:
        """So many bytes of KV were packed, written and synced."""
        rate = kv_bytes / max(took_us, 1) * 1e6
        before = self._rates.get(codec)
        self._rates[codec] = rate if before is None else before + WEIGHT * (rate - before)
        if codec is Codec.ZSTD and Codec.RAW in self._rates:
            self._rates[Codec.RAW] *= DRIFT
