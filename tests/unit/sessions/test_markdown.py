"""A session as a page for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sessions.talk import Talk
from zjournal import ask
from zjournal.api.recorded import DECODERS
from zjournal.journal import retention
from zjournal.sessions import markdown as module
from zjournal.sessions.markdown import markdown
from zjournal.sessions.transfer import Selection


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    with Talk(tmp_path / "a") as talk:
        talk.open("s_1")
        yield talk


def page(talk: Talk) -> str:
    session = talk.journal.session("s_1")
    assert session is not None
    return "".join(markdown(talk.journal, Selection(session, tuple(talk.journal.turns("s_1")), 0), DECODERS))


def test_who_said_what(talk: Talk) -> None:
    talk.turn("resp_1", "one", "uno")
    talk.turn("resp_2", "two", None, previous="resp_1")
    text = page(talk)
    assert text.startswith("# Session s_1\n\n## 1. resp_1\n\nbegins · m · prompt 4, cached 1, output 4 · stop\n")
    assert "### user\n\none\n\n### assistant\n\nuno\n" in text
    assert "## 2. resp_2\n\ncontinues resp_1 · m · " in text
    assert "failed: It died." in text


def test_an_erased_turn_says_so(talk: Talk) -> None:
    talk.turn("resp_1", "secret", "uno")
    assert retention.erase(talk.journal, "resp_1", retention.CAUSE_UNSTORED).result()
    assert "*The content of this turn was erased.*" in page(talk)
    assert "secret" not in page(talk)


def test_a_resent_history_is_not_repeated(talk: Talk) -> None:
    talk.turn("resp_1", "one", "uno")
    said = (("user", "one"), ("assistant", "uno"), ("user", "two"))
    resent = [{"role": role, "content": text} for role, text in said]
    facts = talk.facts("resp_2", "two", "dos", "", "s_1", True, resent, "resp_1")
    talk.journal.append([*facts[0], *facts[1:]]).result()  # type: ignore[list-item, misc]
    _, second = page(talk).split("## 2.")
    assert "### user\n\ntwo\n\n### assistant\n\ndos\n" in second
    assert "one" not in second and "uno" not in second


def test_texts_cannot_steer_a_terminal_or_leave_their_fence() -> None:
    assert module._shown("a\x1b[31m\tb\n\x9b\r") == "a\\x1b[31m\tb\n\\x9b\\r"
    call = module._item(ask.Call("c1", "run", '{"a": "```\\n"}'))
    assert call == '\n### tool call c1: run\n\n````\n{"a": "```\\n"}\n````\n'
    result = module._item(ask.Result("c1", (ask.Text("out"),)))
    assert result == "\n### tool result c1\n\n```\nout\n```\n"
