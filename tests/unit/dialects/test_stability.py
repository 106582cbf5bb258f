"""Each prompt begins with the one before it and its answer: proved per template, and what is no beginning is found."""

from __future__ import annotations

import pytest

from tests import smollm2
from tests.unit.dialects.templates import GLM, MOVING, QWEN, R1, spoken
from zjournal.checkpoint.template import Template
from zjournal.dialects import glm
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.choose import choose
from zjournal.dialects.stability import exceptions, prove

LEFT_OUT = ("thoughts", "thoughts behind a tool loop")  # where the dialect keeps them no longer


def unstable(template: Template, *control: str) -> dict[str, str]:
    tokenizer = spoken("<tool_call>", "</tool_call>", *control)
    findings = prove(template, tokenizer, choose(template, tokenizer))
    assert not any(finding.refused for finding in findings)
    return {finding.name: finding.parts for finding in findings if finding.parts}


def test_the_demo_model_is_stable_in_all() -> None:
    findings = prove(smollm2.template(), smollm2.tokenizer(), ChatML(smollm2.tokenizer()))
    assert [finding.told for finding in findings] == [
        *("text: ok", "system: ok", "calls: ok", "parallel: ok", "resent text: ok", "resent calls: ok")
    ]
    assert exceptions(findings) == ()


@pytest.mark.parametrize(("template", "control"), [(QWEN, ()), (GLM, glm.TAGS[2:])], ids=["qwen", "glm"])
def test_thoughts_that_are_left_out_are_the_only_exception(template: Template, control: tuple[str, ...]) -> None:
    """Empty pairs of tags that a template writes into old answers, or into the newest, are none."""
    found = unstable(template, *control)
    assert tuple(found) == LEFT_OUT
    assert "'<think>" in found["thoughts"] and "Hi" in found["thoughts"]


def test_a_template_that_opens_thoughts_in_the_prompt() -> None:
    """What it sampled behind the tag is replayed behind it; answers that only a client has are not."""
    assert tuple(unstable(R1)) == (*LEFT_OUT, "resent text", "resent calls")


def test_a_template_that_moves_the_tools_is_found_out() -> None:
    found = unstable(MOVING)
    assert {"calls", "parallel", "resent calls"} < found.keys()
    assert found["calls"].startswith("token 0 of ")
    assert "text" not in found


def test_a_template_that_refuses_is_told_with_its_own_words() -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    refusing = Template(source + "{{ m.content }}{% endfor %}{{ tools and '' }}")
    tokenizer = spoken()
    findings = prove(refusing, tokenizer, ChatML(tokenizer))
    assert [line for line in exceptions(findings) if "no tools here" in line]
    assert {finding.name for finding in findings if finding.refused} == {"calls", "parallel", "resent calls"}
