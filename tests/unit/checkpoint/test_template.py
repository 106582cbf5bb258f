"""Chat templates: the sandbox, its limits, and whose fault a failure is."""

from __future__ import annotations

import pytest

from tests import smollm2
from zjournal.checkpoint import template as module
from zjournal.checkpoint.template import Template
from zjournal.errors import BadRequest, ModelFault

USER = {"role": "user", "content": "hi"}


def test_the_default_models_own_template():
    template = smollm2.template()
    assert not template.uses_tools
    assert template.default_system == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert template.render([{"role": "system", "content": "S"}, USER]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_json_keeps_key_order_and_characters():
    template = Template("{{ messages[0] | tojson }}{{ messages[0] | tojson(indent=1) }}")
    assert template.render([{"z": "ü<", "a": 1}]) == '{"z": "ü<", "a": 1}{\n "z": "ü<",\n "a": 1\n}'


def test_no_default_system_where_the_template_has_none():
    assert Template("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}").default_system == ""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
    assert Template(refusing).default_system == ""


def test_specials_blocks_and_loop_controls():
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}{% break %}\n  {% endfor %}\n"
    assert Template(source, {"bos": "<s>"}).render([USER]) == "<s>\nhi"


def test_refusal_is_the_clients_fault():
    template = Template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ().__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ 2 ** 10000 }}",
        "{{ strftime_now('%Y') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_the_sandbox_stops(source):
    with pytest.raises(BadRequest):
        Template(source).render([USER])


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "OUTPUT_CHARACTERS_MAX", 1000)
    template = Template("{% for i in range(2000) %}{{ i }}{% endfor %}")
    with pytest.raises(BadRequest, match="1000"):
        template.render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ x | no_such_filter }}"])
def test_bad_syntax_is_the_models_fault(source):
    with pytest.raises(ModelFault, match="not valid"):
        Template(source)
