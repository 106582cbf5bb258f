"""Whether reading KV back is faster than computing it again, by what both took so far.

Both rates are moving averages, kept within bounds, so that one strange measurement can neither stop restoring for ever
nor force it. What was measured first takes the place of the guess: at the start that is how fast the disk reads a chunk
(probe.py), and how fast this model read prompts in its last life, as the journal has it. While nothing is read, the
disk's rate drifts upwards, no farther than the guess: a disk that was slow once is tried again.
"""

from __future__ import annotations

from zjournal.snapshots.plan import ATTENTION_TOKENS, Rates

READ_BYTES_S_FIRST = 1e9  # a guess, of a common SSD: it stands until a chunk of MEASURED_BYTES_MIN was read
READ_BYTES_S = (1e6, 1e11)  # bounds
PREFILL_TOKENS_S_FIRST = 500.0  # a guess, of a small model on few cores: it stands until 64 tokens were computed
PREFILL_TOKENS_S = (1.0, 1e6)
RESTORE_US = 1_000  # what a restore takes beside its bytes: two steps without work, and opening files
WEIGHT = 0.25  # of the latest measurement: four of them outweigh what was before
DRIFT = 1.1  # of the read rate, for each time that nothing is read: one that is ten times too low is tried after 24
MEASURED_TOKENS_MIN = 64  # a step with fewer prompt tokens says little about the rate of prompts
MEASURED_BYTES_MIN = 1 << 20
SECOND_US = 1_000_000


class Gate:
    """Pure: told of times, asked for estimates. With `learns` off the rates stay as they begin.

    A scripted model computes nothing, so how long its steps take says nothing. With `always` on what is on disk is
    read, however long it takes: both are still estimated, for the event.
    """

    def __init__(self, *, learns: bool = True, always: bool = False) -> None:
        self.learns, self.always = learns, always
        self._read = READ_BYTES_S_FIRST
        self._read_measured = False
        self._prefill = PREFILL_TOKENS_S_FIRST  # at depth 0
        self._prefill_measured = False

    @property
    def rates(self) -> Rates:
        """For plans of what to delete."""
        return Rates(self._prefill)

    def read_us(self, file_bytes: int) -> int:
        """How long reading so many bytes is expected to take."""
        return RESTORE_US + int(file_bytes / self._read * SECOND_US)

    def recompute_us(self, start: int, tokens: int) -> int:
        """How long computing so many tokens behind the first `start` is expected to take."""
        return int(self.rates.recompute_s(start, tokens) * SECOND_US)

    def lets_read(self, read_us: int, recompute_us: int) -> bool:
        """Whether to read what is expected to take so long, instead of computing it."""
        return self.always or read_us <= recompute_us

    def restored(self, file_bytes: int, took_us: int) -> None:
        """So many bytes were read in so many microseconds."""
        if not self.learns or file_bytes < MEASURED_BYTES_MIN:
            return
        measured = file_bytes / max(took_us, 1) * SECOND_US
        if not self._read_measured:  # the first guess knows nothing of the machine
            self._read, self._read_measured = measured, True
        self._read = _mixed(self._read, measured, READ_BYTES_S)

    def remember(self, prefill_tokens_s: float) -> None:
        """What this model did in an earlier life, at depth 0: better than a guess, until it is measured again."""
        if self.learns and not self._prefill_measured:
            low, high = PREFILL_TOKENS_S
            self._prefill = min(max(prefill_tokens_s, low), high)

    def refused(self) -> None:
        """Something was computed because reading was expected to take longer."""
        if self.learns:
            self._read = max(self._read, min(self._read * DRIFT, READ_BYTES_S_FIRST))

    def computed(self, start: int, tokens: int, took_us: int) -> None:
        """A step computed so many tokens of prompts, which stood behind `start` others on average."""
        if not self.learns or tokens < MEASURED_TOKENS_MIN:
            return
        weight = 1 + (start + tokens / 2) / ATTENTION_TOKENS
        measured = tokens * weight / max(took_us, 1) * SECOND_US
        if not self._prefill_measured:
            self._prefill, self._prefill_measured = measured, True
        self._prefill = _mixed(self._prefill, measured, PREFILL_TOKENS_S)


def _mixed(before: float, measured: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return min(max(before + WEIGHT * (measured - before), low), high)
