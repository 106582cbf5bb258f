"""System messages behind the beginning: in place where the template has a place for them, else in the user's words."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.dialects.templates import GLM, QWEN
from tests.unit.dialects.test_turns import CHATML, PLAIN, TOKENIZER, output, said, text, thought, user
from zjournal import ask
from zjournal.checkpoint.template import Template
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.dialects.reminders import placed

STRICT = Template(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOISTING = Template(
    "{% for m in messages if m.role == 'system' %}S:{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def system(words: str, role: ask.Role = "system") -> ask.Message:
    return ask.Message(role, (ask.Text(words, "s"),))


def asked(*items: ask.Item, **more) -> ask.Ask:
    return ask.Ask(protocol="messages", model="m", items=items, **more)


def built(template: Template, *items: ask.Item, **more) -> Prompt:
    return assemble(placed(asked(*items, **more), template), template, TOKENIZER, CHATML)


def reminder(words: str) -> str:
    return f"<system-reminder>\n{words}\n</system-reminder>"


@pytest.mark.parametrize(("template", "place"), [(PLAIN, True), (STRICT, False), (HOISTING, False), (GLM, True)])
def test_whether_a_template_has_a_place(template, place):
    assert template.places_system is place


@pytest.mark.parametrize("template", [PLAIN, STRICT, HOISTING, GLM, QWEN])
def test_o03_each_prompt_begins_with_the_one_before(template):
    first = [system("Keep a log."), user("hello"), system("Helpers: cook.")]
    then = [*first, said("Hi."), system("The list is empty."), user("next entry")]
    prompts = [built(template, *items) for items in (first, then)]
    told = text(prompts[1])
    order = [told.find(words) for words in ("Keep a log.", "hello", "Helpers: cook.", "Hi.", "The list", "next entry")]
    assert -1 not in order
    assert order == sorted(order)
    answered = len(text(prompts[0]).removesuffix("<think>\n"))
    assert told[: min(answered, told.find("Hi."))] == text(prompts[0])[: min(answered, told.find("Hi."))]


def test_a_template_with_a_place_gets_the_request_as_it_is():
    request = asked(system("a"), user("b"), system("c"))
    assert placed(request, PLAIN) is request
    assert placed(asked(user("b")), STRICT).items == (user("b"),)


def test_reminders_join_the_words_or_results_before_them():
    call = ask.Call("c", "f", "{}")
    items = (user("hi"), system("a"), system("b", "developer"), call, ask.Result("c", (ask.Text("42"),)), system("d"))
    told = placed(asked(*items), STRICT).items
    assert [type(item) for item in told] == [ask.Message, ask.Call, ask.Result]
    assert told[0].text == f"hi\n\n{reminder('a')}\n\n{reminder('b')}"
    assert told[2].text == f"42\n\n{reminder('d')}"
    assert [part.path for part in told[0].parts] == ["u", "", "", "s", "", "", "", "s", ""]


def test_behind_an_answer_a_reminder_is_the_users():
    told = placed(asked(user("hi"), said("Yes."), system("a")), STRICT).items
    assert (told[2].role, told[2].text) == ("user", reminder("a"))


def test_what_a_conversation_begins_with_is_one_message():
    told = placed(asked(system("b"), system("c", "developer"), user("hi"), instructions=ask.Text("a", "i")), STRICT)
    assert told.instructions is None
    assert (told.items[0].role, told.items[0].text) == ("system", "a\n\nb\n\nc")
    assert [part.path for part in told.items[0].parts if part.path] == ["i", "s", "s"]


def test_a_reminder_behind_a_result_lets_thoughts_stay():
    """It is no turn of the user's, behind which a dialect drops them and the cache would be lost."""
    call = ask.Call("c", "f", "{}")
    answered = msgspec.structs.replace(output(), items=(call,))
    loop = (user("hi"), answered, ask.Result("c", (ask.Text("42"),)))
    assert built(STRICT, *loop, system("a")).rewritten == ()
    assert built(STRICT, *loop, user("a")).rewritten == ("r",)
    assert thought("x").text == "x"
