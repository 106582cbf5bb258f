"""Which dialect a model speaks, and tokenizers that cannot write it."""

from __future__ import annotations

import pytest

from tests import smollm2
from tests.unit.dialects.outputs import THOUGHTS, tokenizer
from zjournal.checkpoint.template import Template
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.choose import choose, guessed
from zjournal.dialects.literals import Literals
from zjournal.errors import ModelFault

_ALL = (*glm.TAGS, *THOUGHTS, dsml.MARKER, llama3.TAG)
_LOOP = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"
_GLM = (
    "<tool_call>{{ c.function.name }}NEW{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
)


def template(body: str) -> Template:
    return Template(_LOOP.replace("BODY", body))


@pytest.mark.parametrize(
    ("source", "control", "name"),
    [
        (_GLM.replace("NEW", "\n"), _ALL, "glm-4.5"),
        (_GLM.replace("NEW", ""), _ALL, "glm-4.7"),
        ("<｜DSML｜function_calls>", _ALL, "dsml-v3.2"),
        ("<｜DSML｜tool_calls>", _ALL, "dsml-v4"),
        ("<｜DSML｜ calls>", _ALL, "dsml-v4.1"),
        ("", (*THOUGHTS, dsml.MARKER), "dsml-v4"),  # DeepSeek's own models have no template that says it
        ("<tool_call>\n<function={{ c.function.name }}>\n<parameter=x>", (*THOUGHTS,), "qwen-xml"),
        ('<tool_call>\n{"name": {{ c.function.name }}', (*THOUGHTS, "<tool_call>"), "chatml"),
        ('<tool_call>\n{"name": {{ c.function.name }}', (llama3.TAG,), "chatml"),  # Hermes on Llama
        ('{"name": {{ c.function.name }}, "parameters"', (llama3.TAG,), "llama3"),
        ("<function={{ c.function.name }}>{{ c.function.arguments }}", (llama3.TAG,), "chatml"),  # Functionary
        ("<seed:tool_call><function=x><parameter=y>", (), "chatml"),
        ("", (), "chatml"),
    ],
)
def test_template_and_tokens_tell_the_dialect(source, control, name):
    assert choose(template(source), tokenizer(*control)).name == name


def test_a_template_that_cannot_render_the_probe_is_read_instead():
    broken = template("{{ raise_exception('no') }}<｜DSML｜function_calls>")
    assert choose(broken, tokenizer(*_ALL)).name == "dsml-v3.2"


def test_tags_that_a_template_puts_together_are_seen_in_what_it_writes():
    assembled = template("{% set m = '｜DSML｜' %}{{ '<' + m + 'function_calls>' }}")
    assert choose(assembled, tokenizer(*_ALL)).name == "dsml-v3.2"


def test_the_demo_model_speaks_chatml_without_thoughts():
    chosen = choose(smollm2.template(), smollm2.tokenizer())
    assert chosen.name == "chatml"
    assert chosen.reasoning is None
    for tag, ids in chosen.literals.items():
        assert len(ids) > 1
        assert smollm2.tokenizer().decode(ids) == tag


def test_a_dialect_is_guessed_where_neither_template_nor_tokens_speak_for_it():
    assert guessed(smollm2.template(), smollm2.tokenizer())
    for source, control in (
        ("<tool_call>", ()),
        ("<arg_key>", _ALL),
        ("<｜DSML｜tool_calls>", _ALL),
        ("", ("<tool_call>",)),
        ("", (dsml.MARKER,)),
        ("", (llama3.TAG,)),
    ):
        assert not guessed(template(source), tokenizer(*control))
    assert guessed(template("<function={{ c.function.name }}>"), tokenizer(llama3.TAG))  # Functionary


def test_thoughts_are_read_where_template_or_tokens_have_them():
    assert choose(template("<think>"), tokenizer()).reasoning is not None
    assert choose(template(""), tokenizer("<think>", "</think>")).reasoning is not None


def test_a_tag_with_a_token_is_that_token():
    chosen = ChatML(tokenizer("<tool_call>", "</tool_call>"))
    assert chosen.literals == {"<tool_call>": (256,), "</tool_call>": (257,)}


@pytest.mark.parametrize(
    ("build", "literal"),
    [
        (lambda: glm.Glm(tokenizer("<tool_call>", "</tool_call>")), "<arg_key>"),
        (lambda: dsml.Dsml(tokenizer(*THOUGHTS)), dsml.MARKER),
        (lambda: dsml.Dsml(tokenizer(dsml.MARKER, "<think>")), "</think>"),
        (lambda: llama3.Llama3(tokenizer()), llama3.TAG),
    ],
)
def test_a_tokenizer_without_a_needed_token_fails_with_the_literal_named(build, literal):
    with pytest.raises(ModelFault, match=r"the dialect .* needs ") as caught:
        build()
    assert repr(literal) in caught.value.message


def test_a_tokenizer_that_has_no_text_for_a_tag_fails_with_the_literal_named():
    class Lacking:
        def __init__(self) -> None:
            self.control: dict[str, int] = {}

        def encode(self, text: str) -> list[int]:
            return [ord(character) for character in text if character != "_"]

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    with pytest.raises(ModelFault, match="'<tool_call>'"):
        ChatML(Lacking())
    assert Literals("x", Lacking(), ("<toolcall>",)).ids == {"<toolcall>": tuple(map(ord, "<toolcall>"))}
