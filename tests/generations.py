"""Many generations under a fence: each must parse and validate, alone and with guesses as in a batch. `make fences`.

    python -m tests.generations [COUNT] [UNFENCED] [REPEATED]

Each dialect gets its share of COUNT requests at temperature 1.5, eight at a time. UNFENCED are asked for again without
a fence, to show what it does; REPEATED alone, and with guesses, which must give the same tokens. An answer that
reaches the limit of tokens is cut: it cannot validate, but what stands before the cut must, and the parser must tell
the cut. Exit code 1: something was wrong, and it is printed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from tests.fenced import SPOKEN, Answer, Case, Engine, Runner, Voice, runner

COUNT, UNFENCED, REPEATED = 1000, 200, 50
GUESSES = 5
UNFENCED_TOKENS = 400  # what has not called by then is counted as cut
SHOWN = 3  # of each dialect's wrong answers
SEED = 6


class Row(msgspec.Struct):
    """What came of one dialect."""

    name: str
    whole: int = 0  # parsed and valid, of those that ended by themselves
    cut: int = 0  # by the limit of tokens
    ended: int = 0  # by fence or guard
    tokens: int = 0
    unfenced: int = 0
    unfenced_valid: int = 0
    unfenced_cut: int = 0
    repeated: int = 0
    differ: int = 0
    wrong: list[str] = []

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.differ)


def tried(loaded: Runner, voice: Voice, count: int, unfenced: int, repeated: int, seed: int = SEED) -> Row:
    """One dialect's share."""
    row = Row(voice.name, wrong=[])
    cases = list(voice.cases(seed, count))
    engine = Engine(loaded, voice.tags)
    answers = engine.run(voice.asked(case) for case in cases)
    for case in cases:
        _judge(row, voice, case, answers[case.name])
    plain = [voice.asked(case, fenced=False, max_tokens=UNFENCED_TOKENS) for case in cases[:unfenced]]
    for case, answer in zip(cases, engine.run(plain).values(), strict=False):
        row.unfenced += 1
        row.unfenced_cut += answer.reason == "length"
        row.unfenced_valid += answer.reason == "stop" and not voice.wrong(case, answer.tokens)
    engine.close()
    for settings in ({"batch": 1}, {"drafts_max": GUESSES}):
        engine = Engine(loaded, voice.tags, **settings)
        again = engine.run(voice.asked(case) for case in cases[:repeated])
        engine.close()
        for name, answer in again.items():
            row.repeated += 1
            if answer != answers[name]:
                row.differ += 1
                row.wrong.append(f"{name}, {settings}: other tokens, or another end")
    return row


def _judge(row: Row, voice: Voice, case: Case, answer: Answer) -> None:
    row.tokens += len(answer.tokens)
    row.cut += answer.reason == "length"
    row.ended += answer.reason in ("loop", "fence")
    if answer.reason not in ("stop", "length", "loop"):
        row.wrong.append(f"{case.name}: ended with {answer.reason}")
    elif wrong := voice.wrong(case, answer.tokens, cut=answer.reason != "stop"):
        row.wrong.append(f"{case.name}: {wrong}")
    elif answer.reason == "stop":
        row.whole += 1


def share(whole: int, at: int) -> int:
    """The part of `whole` that the dialect number `at` gets."""
    return whole * (at + 1) // len(SPOKEN) - whole * at // len(SPOKEN)


def main(arguments: Sequence[str]) -> int:
    """The table; 1 if anything was wrong."""
    count, unfenced, repeated = (*map(int, arguments), *(COUNT, UNFENCED, REPEATED)[len(arguments) :])
    loaded = runner()
    print(f"{'dialect':26}{'valid':>7}{'wrong':>7}{'cut':>5}{'ended':>7}{'tok/s':>8}{'  without: valid':>18}", end="")
    print(f"{'cut':>6}{'repeated':>10}{'differ':>8}")
    rows, sums = [], Counter[str]()
    for at, (name, tags) in enumerate(SPOKEN):
        begun = time.perf_counter()
        row = tried(loaded, Voice(name, tags), share(count, at), share(unfenced, at), share(repeated, at))
        rows.append(row)
        _print(row, row.tokens / (time.perf_counter() - begun))
        for field in row.__struct_fields__[1:-1]:
            sums[field] += getattr(row, field)
    total = Row("all", **sums, wrong=[wrong for row in rows for wrong in row.wrong])
    _print(total, 0)
    loaded.close()
    return int(total.bad)


def _print(row: Row, rate: float) -> None:
    print(f"{row.name:26}{row.whole:>7}{len(row.wrong):>7}{row.cut:>5}{row.ended:>7}{rate:>8.0f}", end="")
    print(f"{row.unfenced_valid:>12} of {row.unfenced:<3}{row.unfenced_cut:>5}{row.repeated:>10}{row.differ:>8}")
    for wrong in row.wrong[:SHOWN] if row.name != "all" else ():
        print("   ", wrong)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
