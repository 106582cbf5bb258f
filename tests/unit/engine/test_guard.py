"""The guard: what is a loop and what is none, what is done in which order, and that it is a function of the tokens."""

from __future__ import annotations

import base64
import calendar
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import smollm2
from zjournal import loops
from zjournal.engine.decoding.guard import OPENING_TOKENS, Act, Evidence, Guard
from zjournal.link import wire

LIMITS = wire.Guard(*loops.limits("on"))
SMALL = wire.Guard(run=8, period=16, repeats=3, tokens=12, restarts=2, exclusions=2, values=2)
RESTARTS = wire.Guard(run=0, period=1, repeats=3, tokens=12, restarts=2, exclusions=2, values=2)  # and nothing else
CLOSING = 90
LIBRARY = Path(os.__file__).parent

Next = Callable[[list[int]], int]


def driven(
    says: Next, limits: wire.Guard = SMALL, *, closing: int = -1, thinking: bool = False, bound: bool = False
) -> tuple[list[int], list[Act], Evidence | None]:
    """A model that says what it wants but for what it may not: then 99. Its tokens, what was done, and why it ended."""
    guard = Guard(limits, closing)
    said: list[int] = []
    for _ in range(6000):
        forced = guard.forced()
        token = says(said) if forced is None else forced
        token = 99 if token in guard.banned() else token
        said.append(token)
        guard.push(token, thinking and forced is None, bound)
        thinking = thinking and forced is None
        if guard.over is not None:
            break
    return said, guard.take(), guard.over


def cycle(pattern: Sequence[int]) -> Next:
    """Says the pattern again and again, wherever it is thrown out."""
    return lambda said: pattern[len(said) % len(pattern)]


def actions(acts: Sequence[Act]) -> list[str]:
    return [act.action for act in acts]


# --- the order of what is done ---------------------------------------------------------------------------


def test_one_token_in_a_row_is_excluded_first_and_ends_the_answer_last() -> None:
    said, acts, over = driven(cycle([7]))
    assert said[:9] == [7] * 8 + [99]
    assert actions(acts) == ["excluded", "excluded", "ended"]
    assert acts[0] == Act(Evidence("token", 0, 1, 8), "excluded", 8, 7)
    assert over is not None and over == acts[-1].evidence
    assert acts[-1].at == len(said) < 2 * 8, "what follows an exclusion need not loop for as long"


def test_a_pattern_is_found_with_its_period_and_its_beginning() -> None:
    prefix = [40, 41, 42, 43, 44]
    said, acts, _ = driven(lambda said: [*prefix, *[1, 2, 3] * 9][len(said)] if len(said) < 30 else 50 + len(said) % 30)
    assert acts[0] == Act(Evidence("pattern", 5, 3, 4), "excluded", 17, 1)
    assert said[17] == 99


def test_a_model_that_leaves_the_loop_goes_on_and_is_forgiven() -> None:
    def says(said: list[int]) -> int:
        turn, at = divmod(len(said), 60)
        return 7 if turn in (0, 2, 4) and at < 9 else 100 + len(said)  # loops now and then, and says new things between

    said, acts, over = driven(says)
    assert over is None and len(said) == 6000
    assert actions(acts) == ["excluded"] * 3, "SMALL has two, but long ago is forgotten"


def test_in_thoughts_the_closing_tag_is_forced_before_the_answer_ends() -> None:
    said, acts, over = driven(cycle([1, 2, 3]), thinking=True, closing=CLOSING)
    closed = said.index(CLOSING)
    assert actions(acts) == ["excluded", "excluded", "closed", "excluded", "excluded", "ended"]
    assert (acts[2].at, acts[2].token) == (closed, CLOSING)
    assert acts[3].evidence.begin > closed, "the answer starts with a clean sheet"
    assert over is not None


def test_thoughts_without_a_closing_token_end_the_answer() -> None:
    _, acts, over = driven(cycle([1, 2, 3]), thinking=True)
    assert actions(acts) == ["excluded", "excluded", "ended"]
    assert over is not None


def test_no_exclusions_end_at_once() -> None:
    said, acts, _ = driven(cycle([7]), wire.Guard(8, 16, 3, 12, 2, 0, 2))
    assert (said, actions(acts)) == ([7] * 8, ["ended"])


# --- restart of reasoning --------------------------------------------------------------------------------


def restarting(said: list[int]) -> int:
    """The same opening, then thoughts that are never the same."""
    at = len(said) % 100
    return 200 + at if at < OPENING_TOKENS + 4 else 1000 + len(said)


def test_thoughts_that_begin_again_are_led_elsewhere_then_closed() -> None:
    said, acts, over = driven(restarting, thinking=True, closing=CLOSING)
    begin = 2 * 100 + OPENING_TOKENS
    assert acts[0] == Act(Evidence("restart", 0, 100, 3), "excluded", begin, 200 + OPENING_TOKENS)
    assert said[begin] == 99
    assert acts[1] == Act(Evidence("restart", 0, 100, 4), "closed", begin + 100, CLOSING)
    assert over is None and len(acts) == 2, "behind the thoughts these words are text"


def test_text_and_calls_may_begin_again() -> None:
    assert driven(restarting)[1:] == ([], None)
    assert driven(restarting, bound=True)[1:] == ([], None)


def test_a_row_of_dashes_is_no_opening() -> None:
    assert driven(cycle([5, 5, 5, 6]), RESTARTS, thinking=True)[1:] == ([], None)
    assert driven(cycle(OPENING), RESTARTS, thinking=True)[1][0].evidence.times == 3


OPENING = [*range(14), *range(7), 0, 1, 2]  # it holds its own beginning twice
PIECES = st.sampled_from([OPENING, OPENING[:-1], OPENING[:17], OPENING[14:], [0], [50, 51], OPENING + OPENING[:9]])


@given(st.lists(PIECES, max_size=12))
@settings(deadline=None)
def test_openings_are_found_where_they_stand_whatever_stands_before(pieces: list[list[int]]) -> None:
    ids = [*OPENING, 77, *(token for piece in pieces for token in piece)]
    ends: list[int] = []  # by the definition; what was found is not used twice
    for at in range(2 * OPENING_TOKENS, len(ids) + 1):
        if ids[at - OPENING_TOKENS : at] == OPENING and at - OPENING_TOKENS >= (ends or [OPENING_TOKENS])[-1]:
            ends.append(at)
    guard = Guard(RESTARTS)
    for count, token in enumerate(ids, 1):
        guard.push(token, thinking=True)
        if len(ends) >= 2 and count == ends[1]:
            assert guard.banned() == (77,)
            return
        assert guard.banned() == ()
    assert len(ends) < 2


# --- inside calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [[7], [1, 2, 3]])
def test_inside_calls_and_formats_the_limits_are_higher(pattern: list[int]) -> None:
    free, bound = driven(cycle(pattern))[1], driven(cycle(pattern), bound=True)[1]
    assert bound[0].at >= SMALL.values * free[0].at - len(pattern)


def test_a_fence_that_wants_the_excluded_token_has_it_up_to_twice_the_limit() -> None:
    guard = Guard(SMALL)
    count = 0
    while guard.over is None:
        guard.push(7)
        count += 1
    assert count == 2 * SMALL.run - 1
    assert actions(guard.take()) == ["ended"]


def test_a_fence_that_refuses_the_closing_tag_is_obeyed() -> None:
    guard = Guard(wire.Guard(8, 16, 3, 12, 2, 0, 2), CLOSING)
    for _ in range(8):
        guard.push(7, thinking=True)
    assert (guard.banned(), guard.forced()) == ((), CLOSING)
    guard.push(8, thinking=True)
    assert (guard.banned(), guard.forced(), guard.take()) == ((), None, [])


# --- a function of the tokens ----------------------------------------------------------------------------

TOKENS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=120)


def state(guard: Guard) -> tuple:
    return guard.banned(), guard.forced(), guard.over


@given(TOKENS)
@settings(deadline=None)
def test_fed_again_it_is_as_it_was(tokens: list[tuple[int, bool, bool]]) -> None:
    """Preemption, restart and replay feed what was chosen; guesses are tried on a copy."""
    live = Guard(SMALL, closing=1)
    for at, one in enumerate(tokens):
        tried = live.copy()
        for guess in tokens[at : at + 5]:
            if tried.over is None:
                tried.push(*guess)
        tried.take()
        live.push(*one)
        again = Guard(SMALL, closing=1)
        if at % 7 == 0:
            for before in tokens[: at + 1]:
                again.push(*before)
            assert state(again) == state(live)
        if live.over is not None:
            return


def longest(ids: list[int], limits: wire.Guard) -> int | None:
    """By the definition: the shortest period with which the end of `ids` is a loop."""
    for period in range(1, limits.period + 1):
        need = limits.run if period == 1 else max(limits.tokens, limits.repeats * period)
        run = 0
        while run + period < len(ids) and ids[-1 - run] == ids[-1 - run - period]:
            run += 1
        if run and run + period >= need:
            return period
    return None


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=200)
def test_loops_are_found_where_the_definition_has_them(patterns: list[list[int]], data: st.DataObject) -> None:
    ids = [token for pattern in patterns for token in pattern * data.draw(st.integers(1, 6))]
    guard = Guard(SMALL)
    for at, token in enumerate(ids, 1):
        guard.push(token)
        period = longest(ids[:at], SMALL)
        if period is None:
            assert guard.banned() == ()
            continue
        assert guard.banned() == (ids[at - period],)
        return  # what follows depends on what is chosen


def test_a_limit_of_zero_looks_for_nothing() -> None:
    assert driven(cycle([7]), wire.Guard(0, 1, 3, 12, 0, 2, 2))[1:] == ([], None)
    assert driven(restarting, wire.Guard(0, 1, 3, 12, 0, 2, 2), thinking=True)[1:] == ([], None)


# --- real text that says the same again -------------------------------------------------------------------


def zeros(side: int) -> str:
    return "\n".join(" ".join("0" for _ in range(side)) for _ in range(side))


def mandelbrot(width: int, height: int) -> str:
    """ASCII art with long rows of blanks and of one letter."""
    lines = []
    for y in range(height):
        line = ""
        for x in range(width):
            c, z, n = complex(-2.2 + 3.2 * x / width, -1.2 + 2.4 * y / height), 0j, 0
            while abs(z) < 2 and n < 40:
                z, n = z * z + c, n + 1
            line += " .:-=+*#%@"[min(n // 4, 9)]
        lines.append(line)
    return "\n".join(lines)


def table(rows: int) -> str:
    head = "| id | name | on | off |\n|----|------|----|-----|\n"
    return head + "".join(f"| {row} | n/a | 0 | 0 |\n" for row in range(rows))


def rows_of_rst(rows: int) -> str:
    rule = "+" + "+".join("-" * 20 for _ in range(6)) + "+\n"
    return rule + "".join("|" + "|".join(f" {row * 6 + n:<19}" for n in range(6)) + "|\n" + rule for row in range(rows))


TEXTS = {
    "a table of zeros": zeros(28),
    "zeros as JSON": str([[0] * 24 for _ in range(24)]),
    "one hot": "\n".join(" ".join("1" if x == y else "0" for x in range(64)) for y in range(64)),
    "a rule": "=" * 4000,
    "base64 of zeros": base64.b64encode(bytes(2000)).decode(),
    "base64 of bytes": base64.b64encode(random.Random(1).randbytes(6000)).decode(),
    "hex of zeros": "\n".join(f"{at:08x}  " + "00 " * 16 for at in range(0, 2048, 16)),
    "ASCII art": mandelbrot(110, 50),
    "a markdown table": table(200),
    "a table with rules": rows_of_rst(60),
    "a calendar": calendar.TextCalendar().formatyear(2026),
    "a song": "\n\n".join(
        f"{n} bottles on the wall, {n} bottles.\nTake one down, pass it on." for n in range(99, 0, -1)
    ),
    "a test with fixtures": "    assert f(0, 0, 0) == 0\n" * 120,
}
CODE = (
    *("encodings/cp437.py", "encodings/cp1252.py", "html/entities.py", "re/_parser.py", "json/__init__.py"),
    *("ntpath.py", "locale.py", "token.py", "keyword.py", "this.py", "turtle.py", "opcode.py", "stat.py"),
)
FILES = {  # inside a call: what a tool writes to a file
    "a table of zeros": zeros(80),
    "a blank image": str([[0] * 64 for _ in range(64)]),
    "base64 of zeros": base64.b64encode(bytes(12_000)).decode(),
    "a rule": "-" * 16_000,
    "the same line": "pass\n" * 2000,
}


def met(text: str, **where: bool) -> list[Act]:
    guard = Guard(LIMITS)
    for token in smollm2.tokenizer().encode(text):
        assert not guard.banned(), (guard._found, text[:60])
        guard.push(token, **where)
    return guard.take()


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_legally_repeats_is_no_loop(name: str) -> None:
    assert met(TEXTS[name]) == []
    assert met(TEXTS[name], thinking=True) == []


@pytest.mark.parametrize("name", CODE)
def test_code_is_no_loop(name: str) -> None:
    assert met((LIBRARY / name).read_text()) == []


@pytest.mark.parametrize("name", FILES)
def test_files_in_calls_are_no_loop(name: str) -> None:
    assert met(FILES[name], bound=True) == []


@pytest.mark.parametrize("line", ["I am sorry, I cannot do that.\n", "Wait, let me check that again. ", "\n", " the"])
def test_what_models_fall_into_is_one(line: str) -> None:
    """Bugs 27 and 28: no penalty of the sampler ends these."""
    guard = Guard(LIMITS)
    ids = smollm2.tokenizer().encode(line * 4000)
    count = 0
    while not guard.banned() and count < len(ids):
        guard.push(ids[count])
        count += 1
    assert guard.banned() and count <= LIMITS.tokens + 1
