"""The self-test of a dialect: it passes for each of ours, and finds what is broken."""

from __future__ import annotations

import pytest

from tests import smollm2
from tests.unit.dialects.templates import GLM, MOVING, QWEN, spoken
from zjournal import ask
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.base import Piece
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.check import check
from zjournal.dialects.choose import NAMES, choose, named, settled
from zjournal.errors import ModelFault

TOKENIZER = spoken("<tool_call>", "</tool_call>", *glm.TAGS[2:], dsml.MARKER, llama3.TAG)


@pytest.mark.parametrize("name", NAMES)
def test_every_dialect_passes(name: str) -> None:
    report = check(QWEN, TOKENIZER, named(name, TOKENIZER))
    assert [(one.name, one.fault) for one in report.failed] == []
    assert report.dialect == name.removesuffix("+think")
    assert len(report.inverse) >= 7 and len(report.prefix) >= 6 and len(report.fence) == 8
    assert {one.text for one in report.literals} and report.triggers
    assert all(one.ids for one in (*report.literals, *report.triggers))
    assert all(one.expected for one in report.prefix if one.fault)


def test_what_a_dialect_leaves_out_is_an_exception_and_no_failure() -> None:
    report = check(GLM, TOKENIZER, choose(GLM, TOKENIZER))
    assert [one.name for one in report.prefix if one.fault] == ["thoughts", "thoughts behind a tool loop"]
    assert report.kept == "after_user" and not report.failed


def test_a_template_that_moves_the_tools_fails() -> None:
    report = check(MOVING, TOKENIZER, choose(MOVING, TOKENIZER))
    assert {"calls", "parallel"} <= {one.name for one in report.failed}


class Unsound(ChatML):
    """Writes what it does not read: the arguments twice escaped, and a tag that is another."""

    def calls(self, content: list[Piece], calls: list[ask.Call]) -> list[Piece]:
        pieces = super().calls(content, calls)
        return [Piece(piece.text.replace("write_file", "write file"), piece.path, piece.trusted) for piece in pieces]


def test_what_is_not_read_as_it_was_written_fails() -> None:
    report = check(smollm2.template(), smollm2.tokenizer(), Unsound(smollm2.tokenizer()))
    failed = {one.name: one.fault for one in report.failed}
    assert "were read as ['write file']" in failed["a call"]
    assert "is refused" in failed["accepts a call"]
    assert "text" not in failed and "a call without arguments" not in failed


def test_a_setting_names_the_dialect_and_the_model_says_whether_it_thinks() -> None:
    assert settled("auto", GLM, TOKENIZER).name == "glm-4.5"
    assert settled("glm-4.7", QWEN, TOKENIZER).name == "glm-4.7"
    assert settled("chatml", GLM, TOKENIZER).reasoning is not None
    assert settled("chatml", smollm2.template(), smollm2.tokenizer()).reasoning is None
    with pytest.raises(ModelFault, match="dsml-v4 needs"):
        settled("dsml-v4", smollm2.template(), smollm2.tokenizer())
