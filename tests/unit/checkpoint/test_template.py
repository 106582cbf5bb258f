"""Chat templates: the sandbox, its limits, and whose fault a failure is."""

from __future__ import annotations

import contextlib

import pytest

from tests import smollm2
from zjournal.checkpoint import sandbox
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
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x ** 60 %}{% endfor %}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%.*f' % (10 ** 10, 1.0) }}",
        "{{ '{:>9999999999}'.format('a') }}",
        "{{ '{:>{}}'.format('a', 10 ** 10) }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a' | indent(width=10 ** 10, first=true) }}",
        "{{ [1] | tojson(indent=10 ** 10) }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        "{{ 1.5 | round(10 ** 10) }}",
        "{{ lipsum() }}",
    ],
)
def test_what_the_sandbox_stops(source, monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS_MAX", 100_000)
    with pytest.raises(BadRequest):
        Template(source).render([USER])


def test_what_the_sandbox_lets_through():
    source = (
        "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s + m.role ~ loop.index ~ loop.length %}"
        "{% endfor %}{{ n.s }}{{ '%05.1f' % 2 }}{{ '{:>4}{}'.format('a', 10 ** 9) }}{{ 'ab' | center(6) }}"
        "{{ 2 ** 10 * 3 }}"
        "{% for m in messages if m.role == 'user' %}{{ loop.last }}{% else %}none{% endfor %}{{ nothing ~ 1 }}"
    )
    assert Template(source).render([USER]) == "user11002.0   a1000000000  ab  3072True1"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ 'a' + messages[0].role + 'b' + 'c' }}", "auserbc"),
        ("{{ 'a' + (messages[0].role + 'b') + 'c' }}", "auserbc"),
        ("{{ 1 + 2 + 3 }} {{ 1 + (2 + 0.5) }}", "6 3.5"),
        ("{{ [1] + [2] + messages[:0] }}", "[1, 2]"),
        ("{{ 'a' + ('b' + 'c' if messages else 'd') + 'e' * (1 + 1 + 1) }}", "abceee"),
        ("{{ ('a' | safe) + '<' + '>' }}", "a&lt;&gt;"),
    ],
)
def test_a_sum_of_several_values_is_added_from_the_left(source, told):
    assert Template(source).render([USER]) == told


@pytest.mark.parametrize("sum_", ["'a' + 'b' + 1", "1 + 2 + 'a'", "'a' + nothing.x + 'b'", "'a' + 'b' + none"])
def test_a_sum_that_cannot_be_is_refused(sum_):
    with pytest.raises(BadRequest):
        Template("{{ " + sum_ + " }}").render([USER])


@pytest.mark.parametrize("kind", ["'%s'", "[%s]"])
def test_a_sum_of_several_values_is_bounded_as_any_other(kind, monkeypatch):
    one = kind % ("1" if kind.startswith("[") else "a")
    source = (
        "{% set n = namespace(x=" + one + ") %}{% for i in range(2) %}{% set n.x = n.x + n.x + n.x %}{% endfor %}ok"
    )
    monkeypatch.setattr(sandbox, "LENGTH_MAX", 9)
    assert Template(source).render([USER]) == "ok"
    monkeypatch.setattr(sandbox, "LENGTH_MAX", 8)
    with pytest.raises(BadRequest):
        Template(source).render([USER])


@pytest.mark.parametrize("name", ["__class__", "_iterator", "__init__.__globals__", "_undefined"])
def test_what_a_loop_hides_stays_hidden(name):
    source = "{% for m in messages %}[{{ loop." + name + " }}]{% endfor %}"
    with contextlib.suppress(BadRequest):  # an attribute of what is hidden
        assert Template(source).render([USER]) == "[]"


def test_what_a_loop_tells_of_itself():
    told = "{{ loop.first }}{{ loop.index0 }}{{ loop.nothing }}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}"
    assert Template("{% for m in messages %}" + told + "{% endfor %}").render([USER, USER]) == "True0FalseaFalse1Trueb"


def test_what_is_marked_as_generated_is_rendered_as_it_is():
    source = (
        "{% for m in messages %}{% generation %}{% if m.role == 'user' %}{{ m.content }}{% endif %}!\n"
        "{% endgeneration %}{%- endfor %}"
    )
    assert Template(source).render([USER, USER]) == "hi!\nhi!\n"
    with pytest.raises(ModelFault, match="endgeneration"):
        Template("{% generation %}x")


def test_r01_a_template_that_asks_for_the_time_gets_none():
    """Field report R01: a date that the template puts in makes every day another prompt."""
    dated = Template(
        "{{ strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' }}|{{ messages[0].content }}"
    )
    assert dated.render([USER]) == dated.render([USER]) == "26 Jul 2024|hi"
    for clock in ("strftime_now('%Y')", "now()", "datetime.now()", "time.time()"):
        with pytest.raises(BadRequest):
            Template("{{ " + clock + " }}").render([USER])


def test_what_stands_before_an_answer():
    chatml = Template(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert chatml.answers == module.Answers("<assistant>", ("<assistant><think></think>", "<assistant>"))
    settle = chatml.answers.settle
    assert settle("<user>x<assistant><think></think>") == settle("<user>x<assistant>") == "<user>x<assistant>"
    assert settle("<user>x") == "<user>x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",  # it asks for no answer
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_not_ask_for_answers_in_order_is_left_alone(source):
    assert Template(source).answers.settle("x") == "x"


def test_each_rendering_has_all_its_steps(monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS_MAX", 100)
    template = Template("{% for i in range(60) %}{{ i % 2 }}{% endfor %}")
    assert template.render([USER]) == template.render([USER]) == "01" * 30


def test_a_template_has_no_dice():
    with pytest.raises(ModelFault, match="random"):
        Template("{{ [1, 2] | random }}")


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "OUTPUT_CHARACTERS_MAX", 1000)
    template = Template("{% for i in range(2000) %}{{ i }}{% endfor %}")
    with pytest.raises(BadRequest, match="1000"):
        template.render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ x | no_such_filter }}"])
def test_bad_syntax_is_the_models_fault(source):
    with pytest.raises(ModelFault, match="not valid"):
        Template(source)
