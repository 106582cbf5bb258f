"""Runs and records that begin like earlier ones become what they become alone, wherever the two part."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import smollm2
from zjournal import ask
from zjournal.dialects.encoding import Prompt, Run, Span, encode, encodings
from zjournal.errors import ContextTooLong
from zjournal.growing import Own
from zjournal.link.wire import pack_ids
from zjournal.sessions.record import Record, pack, packings

ABSENT = "\x04"  # without a token in this vocabulary
CONTROL = "<|im_end|>"
TEMPLATE = st.sampled_from(["\n", CONTROL, f"{CONTROL}\n", f"{CONTROL}\n<|im_start|>user\n", "a b", f"x{CONTROL}y"])
CLIENT = st.sampled_from(["", " ", "a", "b c", f"d{ABSENT}e", CONTROL, "word " * 9])
OUTPUT = st.sampled_from([(), (5,), (5, 6, 7)]).map(lambda ids: ask.Output("r", (), pack_ids(ids)))
RUN = (
    st.builds(Run, st.just("template"), TEMPLATE)
    | st.builds(Run, st.just("client"), CLIENT, st.sampled_from(["p", "q"]))
    | OUTPUT.map(lambda output: Run("output", path="response:r", output=output))
)


@st.composite
def growing(draw: st.DrawFn) -> list[list[Run]]:
    """Sequences of runs, each with a beginning of an earlier one."""
    made: list[list[Run]] = [[]]
    for _ in range(draw(st.integers(2, 5))):
        before = draw(st.sampled_from(made))
        kept = draw(st.integers(0, len(before)) | st.just(len(before)))
        made.append(before[:kept] + draw(st.lists(RUN, max_size=6)))
    return made


def told(runs: list[Run], limit: int | None, known: Own | None = None) -> Prompt | tuple[str, int]:
    try:
        return encode(runs, smollm2.tokenizer(), limit, (), known)
    except ContextTooLong as fault:
        return fault.message, fault.least


@settings(deadline=None)
@given(growing(), st.integers(0, 40) | st.none())
def test_runs_are_encoded_as_without_a_memory(made: list[list[Run]], limit: int | None) -> None:
    known = encodings()
    for runs in made:
        for most in (limit, None):
            assert told(runs, most, known.of("x")) == told(runs, most)
            assert told(runs, most, known.of("y" * len(runs))) == told(runs, most), "nobody's"


@pytest.mark.parametrize("last", [Run("client", "more", "p"), Run("output", path="response:r"), Run("template", "z")])
def test_each_part_of_what_is_gone_on_with_is_as_it_was_at_that_place(last: Run) -> None:
    """Spans that went on, bytes without a token, the rest of a run that is another one now."""
    output = ask.Output("r", (), pack_ids((5, 6)))
    shared = [Run("client", f"d{ABSENT}e", "p"), Run("template", CONTROL), Run("output", path="p", output=output)]
    rest = [Run("template", f"{CONTROL}{CONTROL}a"), Run("client", f"f{ABSENT}{ABSENT}", "p")]
    if last.kind == "output":
        last = Run("output", path="p", output=output)
    for first in ([*shared, *rest], [*shared, Run("output", path="p", output=output)], shared):
        for other in (f"{CONTROL}b", f"{CONTROL}{CONTROL}b", "b"):
            known = encodings()
            told(first, None, known.of("x"))
            runs = [*shared, Run("template", other), last]
            assert told(runs, None, known.of("x")) == told(runs, None)
            assert told([*shared, last], None, known.of("x")) == told([*shared, last], None)


# --- records ------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["", "a short one", *(f"text {n} that is long enough to be kept as a reference" for n in range(4))]
)
PATHS = st.sampled_from([f"messages[{n}].content" for n in range(6)] + ["tools[0]", "response:r"])


def spelled(ids: Sequence[int]) -> bytes:
    """Each id is a byte."""
    return bytes(list(ids))


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Messages of bodies, and texts of prompts with their paths; each with beginnings of earlier ones."""
    made: list[tuple[list[str], list[tuple[str, str]]]] = [([], [])]
    for _ in range(draw(st.integers(2, 5))):
        said, prompt = draw(st.sampled_from(made))
        said = said[: draw(st.integers(0, len(said)) | st.just(len(said)))] + draw(st.lists(TEXTS, max_size=4))
        prompt = prompt[: draw(st.integers(0, len(prompt)) | st.just(len(prompt)))]
        added = [(f"messages[{k}].content", said[k]) for k in range(len(prompt), len(said))]
        prompt = prompt + draw(st.just(added) | st.lists(st.tuples(PATHS, TEXTS), max_size=4))
        if said and draw(st.booleans()):  # only what the client wrote is another text, or only what is told of it
            said = _edited(said, draw(st.integers(0, len(said) - 1)), draw(TEXTS))
        elif prompt and draw(st.booleans()):
            at = draw(st.integers(0, len(prompt) - 1))
            prompt = _edited(prompt, at, (prompt[at][0], draw(TEXTS)))
        made.append((said, prompt))
    return made


def _edited(values: list[Any], at: int, value: Any) -> list[Any]:
    return [*values[:at], value, *values[at + 1 :]]


@settings(deadline=None)
@given(turns(), st.booleans())
def test_a_record_gives_back_what_was_packed_whatever_it_begins_with(
    made: list[tuple[list[str], list[tuple[str, str]]]], tools_first: bool
) -> None:
    known = packings()
    for said, prompt in made:
        value = {"messages": [{"role": "user", "content": text} for text in said], "tools": ["t" * 30]}
        body = json.dumps(dict(sorted(value.items(), reverse=tools_first))).encode()
        ids, spans = array("I"), []
        for path, text in prompt:
            if text:
                spans.append(Span(len(ids), len(ids) + len(text), path))
                ids.extend(text.encode())
        data = pack(body, ids, tuple(spans), spelled, lambda response: (), known.of("x"))
        record = Record(data, lambda response: ())
        assert (record.body(spelled), record.ids(), record.spans) == (body, ids, tuple(spans))
        alone = pack(body, ids, tuple(spans), spelled, lambda response: ())
        assert len(data) <= len(alone) + sum(map(len, said)), "nothing is kept twice"


def _packed(said: list[str], prompt: list[str]) -> tuple[bytes, array[int], tuple[Span, ...]]:
    ids, spans = array("I"), []
    for index, text in enumerate(prompt):
        spans.append(Span(len(ids), len(ids) + len(text), f"messages[{index}].content"))
        ids.extend(text.encode())
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in said]}).encode()
    return body, ids, tuple(spans)


@pytest.mark.parametrize("at", range(4))
def test_no_reference_is_kept_whose_string_or_text_is_another_one(at: int) -> None:
    """Of the same length at the same path, so that all but the bytes is equal."""
    texts = [f"text {number} that is long enough to be kept as a reference" for number in range(4)]
    other = _edited(texts, at, texts[at].replace("text", "TEXT"))
    for said, prompt in ((texts, other), (other, texts), (other, other), (texts, texts[:at]), (texts[:at], texts)):
        known = packings().of("x")
        first, second = _packed(texts, texts), _packed(said, prompt)
        pack(*first, spelled, lambda response: (), known)
        record = Record(pack(*second, spelled, lambda response: (), known), lambda response: ())
        assert (record.body(spelled), record.ids(), record.spans) == second
