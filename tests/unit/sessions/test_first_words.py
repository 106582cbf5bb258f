"""What a session is told by in a list: which text of which turn, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import smollm2
from tests.unit.sessions.loop import Loop
from tests.unit.sessions.talk import Talk
from zjournal.checkpoint.template import Template
from zjournal.journal import retention
from zjournal.journal.reader import Reader
from zjournal.sessions.first_words import CHARS_MAX, FirstWords, _user_texts, shown

LONG = "thewordsofthefirstmessageofasession"
TRIMS = Template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}")


def of(data_dir: Path, session: str = "s_1") -> str | None:
    with Reader.open(data_dir) as reader:
        words = FirstWords(reader)
        told = words.of(session)
        assert words.damaged == 0
        return told


def test_it_is_the_first_turn_that_is_still_there(tmp_path: Path) -> None:
    with Talk(tmp_path) as talk:
        talk.open("s_1")
        talk.turn("resp_1", LONG)
        talk.turn("resp_2", "thesecond", previous="resp_1")
        assert of(tmp_path) == LONG
        assert of(tmp_path, "s_none") is None
        assert retention.delete(talk.journal, talk.tenant, "resp_1").result()
        assert of(tmp_path) == "thesecond", "nothing of a deleted turn, though its content is needed still"
        assert retention.delete(talk.journal, talk.tenant, "resp_2").result()
        assert of(tmp_path) is None


def test_what_is_damaged_is_counted(tmp_path: Path) -> None:
    with Talk(tmp_path) as talk:
        talk.open("s_1")
        talk.turn("resp_1", LONG)
        talk.journal.run(lambda tx: tx.db.execute("UPDATE content SET data = x'00' WHERE length(data) < 1000")).result()
    with Reader.open(tmp_path) as reader:
        words = FirstWords(reader)
        assert words.of("s_1") is None and words.damaged == 1


@pytest.mark.parametrize("around", ["{}", "{} and more\n", "so {}\n", "{}5 apples\n", "so {}{} 5\n"])
def test_a_text_that_holds_what_the_prompt_says_elsewhere(
    around: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template trims the first message, so that the text of the second one is met within it."""
    monkeypatch.setattr(smollm2, "template", lambda: TRIMS)
    first = around.format(LONG, LONG)
    with Loop(tmp_path) as loop:
        asked = loop.ask([{"role": "user", "content": text} for text in (first, LONG, LONG)])
        turn = loop.journal.turn(asked.response)
        assert turn is not None
        assert FirstWords(loop.journal).of(turn.session) == first.strip()


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"input": "a"}, ["a"]),
        ({"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": "a"}]}, ["a"]),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, ["a"]),
        ({"input": [{"type": "function_call", "role": 5}, None, "x"]}, []),
        ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}], "input": "y"}, ["a"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}, {"text": "a"}, {"text": 5}, {"text": "b"}]}]},
            ["a", "b"],
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, []),
        ({"messages": "x", "input": {"role": "user"}}, []),
        ([], []),
        (None, []),
    ],
)
def test_what_users_say_is_found_in_each_protocol(body: Any, texts: list[str]) -> None:
    assert list(_user_texts(body)) == texts


@given(st.text())
def test_it_is_one_printable_line(text: str) -> None:
    told = shown(text)
    assert told.isprintable() and len(told) <= CHARS_MAX
    assert (shown(f" \n{text}\t") == told) or len(text) > CHARS_MAX


def test_what_is_cut_says_so_and_what_steers_a_terminal_is_escaped() -> None:
    assert shown("a\n\n b\x1b[2J\u202ec") == "a b\\x1b[2J\\u202ec"
    assert shown("x" * CHARS_MAX) == "x" * CHARS_MAX
    assert shown("x" * (CHARS_MAX + 1)) == "x" * (CHARS_MAX - 1) + "…"
    assert shown("x" + " " * 1000 + "y").endswith("…")
