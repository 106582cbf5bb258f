"""For any conversation: the prompt is what the template says, grows by appending, and every token is accounted for."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import smollm2
from zjournal import ask
from zjournal.checkpoint.tokenizer import Encoded, Tokenizer
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.errors import ContextTooLong
from zjournal.link.wire import pack_ids, unpack_ids

ABSENT = "\x04\x06\x13\x14\x16\x1d"  # without a token in this vocabulary
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters=ABSENT, max_codepoint=0x3FFFF)
SPECIAL = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "\n", " ", "", "\ue000", "\ue000<0\ue000", "é"]
)
TEXTS = st.lists(st.text(CHARACTERS, max_size=8) | SPECIAL, max_size=4).map("".join)
TEXT = st.builds(ask.Text, TEXTS, st.sampled_from(["a", "b", "messages[0].content", ""]))
ROLES = st.sampled_from(["system", "developer", "user", "assistant"])
MESSAGES = st.builds(ask.Message, ROLES, st.lists(TEXT, max_size=3).map(tuple))
OUTPUTS = st.builds(
    ask.Output,
    st.sampled_from(["r1", "r2"]),
    st.just(()),
    st.lists(st.integers(0, 49151), max_size=5).map(pack_ids),
)
ITEMS = st.lists(MESSAGES | OUTPUTS, max_size=5).map(tuple)
TOOL = ask.ToolSpec("f", "<|im_end|>", b'{"type": "object"}', "tools[0]")
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def request(items: tuple[ask.Item, ...]) -> ask.Ask:
    return ask.Ask(protocol="chat", model="m", items=items)


def build(asked: ask.Ask) -> Prompt:
    return assemble(asked, smollm2.template(), smollm2.tokenizer(), ChatML())


def spelled(items: tuple[ask.Item, ...]) -> bytes:
    """What the template says, written down once more by hand."""
    tokenizer = smollm2.tokenizer()
    turns = []
    for item in items:
        if isinstance(item, ask.Output):
            turns.append(("assistant", b"".join(map(tokenizer.token_bytes, unpack_ids(item.tokens)))))
        else:
            turns.append(("system" if item.role == "developer" else item.role, item.text.encode()))
    if turns and turns[0][0] != "system":
        turns.insert(0, ("system", DEFAULT.encode()))
    parts = [b"<|im_start|>%s\n%s<|im_end|>\n" % (role.encode(), content) for role, content in turns]
    return b"".join(parts) + b"<|im_start|>assistant\n"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """What takes long is done before any example is timed."""
    build(request(()))


@given(ITEMS)
def test_the_prompt_is_what_the_template_says(items):
    prompt = build(request(items))
    assert b"".join(map(smollm2.tokenizer().token_bytes, prompt.ids)) == spelled(items)


@given(ITEMS)
def test_only_the_template_makes_control_tokens(items):
    prompt = build(request(items))
    control = set(smollm2.tokenizer().control.values())
    for span in prompt.spans:
        if not span.path.startswith("response:") and span.path:
            assert not control & set(prompt.ids[span.start : span.end])
    turns = len(items) + (bool(items) and (isinstance(items[0], ask.Output) or items[0].role in ("user", "assistant")))
    sampled = [i for item in items if isinstance(item, ask.Output) for i in unpack_ids(item.tokens)]
    assert prompt.ids.count(1) == turns + 1 + sampled.count(1)
    assert prompt.ids.count(2) == turns + sampled.count(2)


@given(ITEMS, st.booleans())
def test_spans_partition_the_ids(items, tools):
    prompt = build(msgspec.structs.replace(request(items), tools=(TOOL,) if tools else ()))
    end = 0
    for span in prompt.spans:
        assert span.start == end < span.end
        end = span.end
    assert end == len(prompt.ids)
    paths = [span.path for span in prompt.spans]
    assert all(left != right for left, right in pairwise(paths))


@given(ITEMS, OUTPUTS, MESSAGES, st.booleans())
def test_growth_is_append_only(items, output, message, tools):
    first = msgspec.structs.replace(request((ask.Message("user", ()), *items)), tools=(TOOL,) if tools else ())
    before = build(first)
    longer = build(msgspec.structs.replace(first, items=(*first.items, output, message)))
    grown = before.ids + list(unpack_ids(output.tokens))
    assert longer.ids[: len(grown)] == grown
    assert longer.ids[len(grown)] == 2


@given(TEXTS, st.lists(st.integers(0, 30), max_size=4), st.sampled_from(["user", "assistant", "system"]))
def test_how_a_text_is_cut_into_parts_does_not_matter(text, cuts, role):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = tuple(ask.Text(text[a:b], f"p{a}") for a, b in pairwise(edges))
    whole = ask.Message(role, (ask.Text(text, "p"),))
    assert build(request((ask.Message(role, parts),))).ids == build(request((whole,))).ids


@given(TEXTS)
def test_a_text_is_found_at_its_path(text):
    prompt = build(request((ask.Message("user", (ask.Text(text, "here"),)),)))
    tokens = [i for span in prompt.spans if span.path == "here" for i in prompt.ids[span.start : span.end]]
    assert text.encode() in b"".join(map(smollm2.tokenizer().token_bytes, tokens))


@given(ITEMS, st.integers(0, 200))
def test_a_limit_refuses_only_what_is_longer(items: tuple[ask.Item, ...], limit: int) -> None:
    whole = build(request(items))
    try:
        bounded = assemble(request(items), smollm2.template(), smollm2.tokenizer(), ChatML(), limit)
    except ContextTooLong as fault:
        assert len(whole.ids) >= fault.least > limit == fault.limit
        assert f"at least {fault.least} tokens" in fault.message
    else:
        assert bounded == whole


def test_a_prompt_far_over_the_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode_with_offsets

    def short(self: Tokenizer, text: str) -> Encoded:
        assert len(text) < 1_000, "it must not come to that"
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", short)
    items = (ask.Message("user", (ask.Text("word " * 1_000_000, "input"),)),)
    with pytest.raises(ContextTooLong, match="more than the 8192 tokens") as raised:
        assemble(request(items), smollm2.template(), smollm2.tokenizer(), ChatML(), 8192)
    assert raised.value.least > 5_000_000 // smollm2.tokenizer().longest


def test_all_that_is_not_encoded_counts() -> None:
    """Also what stands behind the text that was one too many, and before it, and the tokens of earlier outputs."""
    text = "word " * 20_000
    answer = ask.Output("resp_1", (), pack_ids(range(100, 5_100)), "")
    message = ask.Message("user", (ask.Text(text, "input"),))
    with pytest.raises(ContextTooLong) as once:
        assemble(request((message,)), smollm2.template(), smollm2.tokenizer(), ChatML(), 300)
    with pytest.raises(ContextTooLong) as thrice:
        assemble(request((message, answer, message, message)), smollm2.template(), smollm2.tokenizer(), ChatML(), 300)
    assert thrice.value.least > 3 * smollm2.tokenizer().at_least(text) + 5_000
    assert thrice.value.least > once.value.least + 5_000


@settings(deadline=None)  # each example forgets what makes the next one quick
@given(ITEMS)
def test_what_is_remembered_of_earlier_prompts_changes_nothing(items):
    """A conversation that grows turn by turn, and the same one rendered by somebody who has never seen any of it."""
    grown = [build(request(items[:count])) for count in range(len(items) + 1)]
    for count, prompt in enumerate(grown):
        smollm2.tokenizer().forget()
        assert build(request(items[:count])) == prompt
