"""The scripted model: its file, its choice of turns, its faults, and that a wrong block table is noticed."""

import json

import pytest

from zjournal.checkpoint.script import read_script
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine.models.scripted import ScriptedRunner
from zjournal.engine.sequence import Sampled, Slice
from zjournal.errors import EngineFailed, ModelFault
from zjournal.link import wire

LETTERS = [chr(byte) for byte in range(0x21, 0x7F)]
END = len(LETTERS)


@pytest.fixture(scope="module")
def tokenizer():
    tokens = [*LETTERS, "<|end|>", "<|other|>", "Ġ"]
    kinds = [1] * len(LETTERS) + [3, 3, 1]
    return Tokenizer.byte_level(tokens, kinds, [], "gpt-2", ends=[END], specials={"eos": END})


@pytest.fixture
def runner_of(tokenizer, tmp_path):
    def build(turns, *, start=None, **rest):
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"turns": turns, **rest}))
        return ScriptedRunner(read_script(path), tokenizer, start or wire.Start(model=str(path)), "d")

    return build


GREEDY = wire.Sampling(0.0, 1.0, 0, 0)


def play(runner, request, text, count=20, block=0):
    """Runs a request by itself in blocks from `block` on; returns what it was given."""
    ids = runner.tokenizer.encode(text)
    runner.begin(request, ids)
    table = list(range(block, block + 8))
    given, new, start = [], ids, 0
    for index in range(count):
        (result,) = runner.step([Slice(request, new, start, table, GREEDY, index)])
        if not isinstance(result, Sampled):
            given.append(result)
            break
        (result,) = result.tokens
        given.append(result)
        if result == END:
            break
        start, new = start + len(new), [result]
    runner.end(request)
    return given


def said(runner, request, text):
    return runner.tokenizer.decode(play(runner, request, text)[:-1])


def test_turns_are_taken_by_when_then_in_order_and_the_last_repeats(runner_of):
    runner = runner_of([{"text": "one"}, {"when": "sky", "text": "blue"}, {"text": "two"}])
    assert said(runner, "a", "sky?") == "blue"
    assert said(runner, "b", "sky?") == "one"
    assert said(runner, "c", "x") == "two"
    assert said(runner, "d", "x") == "two"


def test_when_looks_at_the_last_4000_characters(runner_of):
    runner = runner_of([{"when": "sky", "text": "blue"}, {"text": "far"}])
    runner.begin("far", runner.tokenizer.encode("sky" + "x" * 3998))
    runner.begin("near", runner.tokenizer.encode("sky" + "x" * 3997))
    assert runner._playing["far"].turn.text == "far"
    assert runner._playing["near"].turn.text == "blue"


def test_text_may_hold_control_literals_and_tokens_are_taken_as_they_are(runner_of):
    runner = runner_of([{"text": "a<|other|>b"}, {"tokens": [1, 2, END + 1]}])
    assert play(runner, "a", "x") == [*runner.tokenizer.encode("a"), END + 1, *runner.tokenizer.encode("b"), END]
    assert play(runner, "b", "x") == [1, 2, END + 1, END]


def test_fail_after_gives_a_fault_in_place_of_the_next_token(runner_of):
    runner = runner_of([{"text": "abcdef", "fail_after": 2}])
    *given, fault = play(runner, "a", "x")
    assert runner.tokenizer.decode(given) == "ab"
    assert isinstance(fault, EngineFailed)


def test_a_table_that_spells_other_tokens_is_noticed(runner_of):
    runner = runner_of([{"text": "abc"}])
    play(runner, "a", "hello", block=0)
    ids = runner.tokenizer.encode("help!")
    runner.begin("b", ids)
    with pytest.raises(AssertionError, match="spell"):
        runner.step([Slice("b", ids[4:], 4, [0], GREEDY, 0)])


def test_a_copied_block_spells_what_was_copied_and_no_more(runner_of):
    runner = runner_of([{"text": "abc"}])
    play(runner, "a", "hello", block=0)
    runner.copy_block(0, 5, 3)
    ids = runner.tokenizer.encode("help")
    runner.begin("b", ids)
    assert runner.step([Slice("b", ids[3:], 3, [5], GREEDY, 0)]) == [Sampled(tuple(runner.tokenizer.encode("a")))]
    with pytest.raises(AssertionError, match="never computed"):
        runner.copy_block(5, 6, 5)


def test_context_and_memory_come_from_script_and_start(runner_of):
    start = wire.Start(model="m", context=50, kv_bytes=3 * 16 * 1024)
    runner = runner_of([{"text": "a"}], start=start, context=100)
    assert (runner.context, runner.block_count) == (50, 3)
    assert runner_of([{"text": "a"}], context=100).context == 100


@pytest.mark.parametrize(
    ("script", "where"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        ("{}", "turns"),
        ('{"turns": []}', "$.turns"),
        ('{"turns": [{"text": "a", "colour": 1}]}', "colour"),
        ('{"turns": [{"text": 5}]}', "$.turns[0].text"),
        ('{"turns": [{"text": "a", "tokens": [1]}]}', "$.turns[0]"),
        ('{"turns": [{"delay_ms": 1}]}', "$.turns[0]"),
        ('{"turns": [{"text": "a", "delay_ms": -1}]}', "$.turns[0].delay_ms"),
        ('{"turns": [{"text": "a"}], "context": 0}', "$.context"),
        ('{"turns": [{"tokens": [1, 99999]}]}', "$.turns[0].tokens[1]"),
    ],
)
def test_a_wrong_script_is_refused_with_file_and_path(tokenizer, tmp_path, script, where):
    path = tmp_path / "script.json"
    path.write_text(script)
    with pytest.raises(ModelFault) as caught:
        ScriptedRunner(read_script(path), tokenizer, wire.Start(model=str(path)), "d")
    assert where in caught.value.message
    assert "script.json" in caught.value.message


def test_a_missing_script_is_refused(tmp_path):
    with pytest.raises(ModelFault, match=r"none\.json: No such file"):
        read_script(tmp_path / "none.json")
