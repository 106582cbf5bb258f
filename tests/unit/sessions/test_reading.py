"""How answers are read again: with the recorded vocabulary, in the recorded dialect, on the request's own terms."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests import smollm2
from tests.unit.dialects.outputs import DIALECTS, tokenizer
from tests.unit.sessions.talk import Talk
from zjournal import ask
from zjournal.api.recorded import DECODERS
from zjournal.dialects import choose, llama3
from zjournal.dialects.chatml import ChatML
from zjournal.errors import JournalFault
from zjournal.journal import events
from zjournal.sessions import vocabulary
from zjournal.sessions.follow import Tail, deltas_of
from zjournal.sessions.makers import Makers
from zjournal.sessions.reading import Answers, Model, Models, Terms, begun, read, recorded_model
from zjournal.sessions.records import Records

LS = (ask.ToolSpec("ls", parameters=b'{"type": "object", "properties": {"path": {"type": "string"}}}'),)
SPOKEN = {
    "chatml": 'Look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "1"}}\n</tool_call>',
    "chatml+think": '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {"path": "1"}}\n</tool_call>',
    "qwen-xml+think": (
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=ls>\n<parameter=path>\n1\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
}


def tail(ids: list[int]) -> Tail:
    found = Tail()
    found.ids, found.durable, found.calls = list(ids), len(ids), 9
    found.end = ask.Ended("stop", ask.Usage(1, 0, len(ids)))
    return found


@pytest.mark.parametrize("name", SPOKEN)
def test_the_recorded_vocabulary_reads_what_the_tokenizer_reads(name: str) -> None:
    words = smollm2.tokenizer()
    today = Model.today(words, choose.named(name, words), frozenset(words.eos_ids))
    texts = (words.token_bytes(token) for token in range(words.vocab_size))
    later = recorded_model(vocabulary.Vocabulary(vocabulary.pack(texts, today.control)), name)
    ids = [*words.encode_trusted(SPOKEN[name]), words.eos_ids[0]]
    told = read(today, Terms(LS), tail(ids))
    assert read(later, Terms(LS), tail(ids)) == told
    assert ask.CallStarted(0, "ls") in told and ask.CallEnded(0) in told
    arguments = "".join(delta.text for delta in told if isinstance(delta, ask.CallArguments))
    assert arguments == '{"path": "1"}'


@pytest.mark.parametrize("name", choose.NAMES)
def test_each_dialect_is_made_again_by_its_recorded_name(name: str) -> None:
    tags = {tag for make in DIALECTS.values() for tag in make().literals}
    made = choose.named(name, tokenizer(*tags))
    assert choose.told(made) == name
    assert (made.reasoning is not None) == (name not in ("chatml", "qwen-xml", "llama3"))


def test_a_dialect_of_a_newer_version_is_named() -> None:
    with pytest.raises(JournalFault, match="chatml-2"):
        choose.named("chatml-2", tokenizer())


THINKS = ChatML(tokenizer(), thinks=True)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<|Assistant|></think>", "<think></think>"),
        ("He writes <think> often.<|im_end|>\n<|im_start|>assistant\n", ""),
        ("He writes </think> often.<|im_end|>\n<|im_start|>assistant\n", ""),
    ],
)
def test_only_tags_at_the_very_end_say_something_of_the_answer(prompt: str, said: str) -> None:
    assert begun(THINKS, prompt) == said
    assert begun(ChatML(), prompt) == ""


def test_terms_look_for_no_call_where_none_may_be_made() -> None:
    request = ask.Ask(protocol="chat", model="m", items=(), tools=LS, stop=("x",))
    assert Terms.of(request, "<think>") == Terms(LS, ("x",), "<think>")
    none = ask.Ask(protocol="chat", model="m", items=(), tools=LS, choice=ask.ToolChoice("none"))
    assert Terms.of(none, "") == Terms()


def test_the_body_is_read_only_where_it_matters(tmp_path: Path) -> None:
    def body() -> bytes:
        raise AssertionError("read for nothing")

    with Talk(tmp_path / "a") as talk:
        talk.open("s_1")
        talk.turn("resp_1")
        turn = talk.journal.turn("resp_1")
        assert turn is not None
        makers = Makers(talk.journal)
        records = Records(talk.journal, makers)
        accepted = records.accepted(turn)
        assert Terms.recorded(accepted, body, DECODERS) == Terms()
        answer = Answers(talk.journal, records, Models(makers), DECODERS).of(turn)
        assert answer is not None and answer.foreign
        assert answer.deltas == tuple(deltas_of(answer.tail, recorded_reader(talk)))


def recorded_reader(talk: Talk):  # type: ignore[no-untyped-def]
    started = next(fact.event for fact in talk.journal.read() if isinstance(fact.event, events.EngineStarted))
    words = vocabulary.Vocabulary(talk.journal.content(started.tenant, started.vocabulary))
    return recorded_model(words, "chatml").reader(Terms())


def test_todays_model_reads_an_answer_in_the_dialect_of_its_time(tmp_path: Path) -> None:
    """The setting `dialect` may change between two starts; what was told is told again."""
    words = smollm2.tokenizer()
    today = Model.today(words, choose.named("qwen-xml", words), frozenset(words.eos_ids))
    with Talk(tmp_path / "a") as talk:
        talk.open("s_1")
        talk.turn("resp_1")
        turn = talk.journal.turn("resp_1")
        assert turn is not None
        makers = Makers(talk.journal)
        maker = makers.of(turn)
        assert maker is not None
        accepted = Records(talk.journal, makers).accepted(turn)
        assert accepted.dialect == "chatml"
        models = Models(makers, today, maker.vocabulary)
        found = models.of(turn, accepted)
        assert found is not None and found.dialect.name == "chatml" and not found.foreign
        assert models.of(turn, accepted) is found
        others = Models(makers, today, b"another vocabulary").of(turn, accepted)
        assert others is not None and others.foreign


def test_with_a_format_a_call_needs_its_tags():
    """Else JSON that was asked for could be read as a call whose arguments nobody has checked."""
    form = ask.Format("json_object")
    request = ask.Ask(protocol="chat", model="m", items=(), tools=LS, format=form)
    assert Terms.of(request, "") == Terms(LS, tagged=True)
    required = msgspec.structs.replace(request, choice=ask.ToolChoice("required"))
    assert Terms.of(required, "") == Terms(LS), "the answer is a call, and no JSON of the format"
    words = tokenizer(llama3.TAG)
    answer = '{"name": "ls", "parameters": {"x": 1}}'
    for terms, kind in ((Terms(LS), ask.CallStarted), (Terms(LS, tagged=True), ask.TextDelta)):
        parser = llama3.Llama3(words).parser(terms.tools, in_tags=terms.tagged)
        deltas = [*parser.feed(answer.encode()), *parser.end()]
        assert isinstance(deltas[0], kind)
        assert kind is ask.CallStarted or "".join(delta.text for delta in deltas) == answer
    parser = llama3.Llama3(words).parser(LS, in_tags=True)
    deltas = [*parser.feed(llama3.TAG.encode(), True), *parser.feed(answer.encode()), *parser.end()]
    assert isinstance(deltas[0], ask.CallStarted)
