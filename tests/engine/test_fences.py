"""Fences in a real engine: batches, guesses, preemption and restarts change no token, and none is ever illegal."""

from __future__ import annotations

import json
import random
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import smollm2
from tests.engine import fencing, toy
from tests.engine.fencing import (
    CALL,
    CALLED,
    CLOSE,
    END,
    ENDS,
    ID,
    MARK,
    THINK,
    TOKENS,
    USER,
    Engine,
    ask,
    letters,
    say,
    text,
)
from zjournal.engine.decoding import steering
from zjournal.engine.decoding.fence import Compiled, State
from zjournal.engine.decoding.vocabulary import Vocabulary
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Slice
from zjournal.errors import FenceFailed
from zjournal.link import wire

TAGS = (wire.Tag(b"<think>", THINK), wire.Tag(b"</think>", CLOSE))
CALLS = f'start: (<[{CALL}]> "{{" /[a-c]{{1,6}}/ "}}" <[{CALLED}]>)+\n'
DIGITS = "start: /[0-9]+/\n"
TRIGGERS = (wire.Tag(b"<tool_call>", CALL),)
CALL_TEXT = r"(?:<tool_call>\{[abc]{1,6}\}</tool_call>)+"

REQUIRED = wire.Fence(grammar=CALLS, whole=True, triggers=TRIGGERS)
THOUGHTFUL = wire.Fence(grammar=CALLS, whole=True, triggers=TRIGGERS, thoughts=TAGS, begun=True, banned=(USER,))
AUTO = wire.Fence(grammar=CALLS, triggers=TRIGGERS, thoughts=TAGS, banned=(USER, CALLED))
SPELLED = wire.Fence(
    grammar='start: "<call>"i /[a-c]{1,6}/ "</call>"\n', triggers=(wire.Tag(b"<call>"),), banned=(USER,)
)
MARKED = wire.Fence(
    grammar=f'start: "<" <[{MARK}]> "go>" /[a-c]{{1,6}}/ "</" <[{MARK}]> ">"\n',
    triggers=(wire.Tag(b"<" + TOKENS[MARK]),),
    banned=(MARK, USER),
)
FENCES = (REQUIRED, THOUGHTFUL, AUTO, SPELLED, MARKED, None)
LIKED = tuple((token, 6.0) for token in (CALL, CLOSE, MARK, ID[b"<"], ID[b"a<call>"], *letters("cal>{}/go")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    made = Engine(path)
    yield made
    made.close()


def alone(path: Path, request: wire.Generate, **options: int) -> tuple[list[int], str]:
    one = Engine(path, **options)
    one.submit(request)
    one.run()
    one.close()
    return one.tokens[request.request], one.ends[request.request]


def right(fence: wire.Fence | None, ids: list[int], end: str) -> bool:
    """Whether an answer is one that its fence has, as far as it got."""
    if fence is None:
        return True
    if any(token >= len(TOKENS) or token == USER for token in ids):
        return False
    said = text(token for token in ids if token not in ENDS)
    if end != "stop":
        return end == "length"
    match fence:
        case wire.Fence(whole=True):
            start = "(?s:.*?)</think>" if fence.begun else ""
            return re.fullmatch(start + CALL_TEXT, said) is not None
        case _ if fence is AUTO:
            answer = re.sub("<think>(?s:.*?)(</think>|$)", "", said)
            return re.fullmatch(f"(?s:(?!.*<tool_call>).*)|(?s:.*?){CALL_TEXT}", answer) is not None
        case _ if fence is SPELLED:
            return (
                re.fullmatch("(?i)(?s:(?!.*<call>).*)|(?s:(?!.*<call>.*<call>).*)<call>[abc]{1,6}</call>", said)
                is not None
            )
    mark = TOKENS[MARK].decode()
    return re.fullmatch(f"[^◆]*(<{mark}go>[abc]{{1,6}}</{mark}>)?", said) is not None


def mixed(dice: random.Random, count: int) -> list[wire.Generate]:
    """Requests of every kind of fence; some of them repeat themselves, so that guesses can be right."""
    made = []
    for number in range(count):
        repeats = say("aaabaaab", CALL, "{abc}", CALLED, "<call>abc</call>") * dice.randint(1, 4)
        made.append(
            ask(
                f"r{number}",
                FENCES[number % len(FENCES)],
                prompt=[*(dice.randrange(toy.VOCAB) for _ in range(dice.choice([1, 15, 16, 40]))), *repeats],
                seed=number,
                temperature=dice.choice([0.0, 4.0, 8.0]),
                max_tokens=dice.choice([20, 150]),
                repetition_penalty=dice.choice([1.0, 1.2]),
                logit_bias=LIKED,
                logprobs=dice.choice([-1, 2]),
            )
        )
    return made


@pytest.mark.parametrize("seed", range(3))
def test_batches_guesses_and_preemptions_change_no_token(path: Path, seed: int) -> None:
    """Bugs 31 to 35: rows of others, too few guesses, rows behind a wrong one, a tag in the middle of guesses."""
    dice = random.Random(seed)
    requests = mixed(dice, 24)
    busy = Engine(path, blocks=24, max_running=6, step_tokens=40, drafts_max=6)
    waiting = list(requests)
    while waiting or not busy.scheduler.idle:
        if waiting and dice.random() < 0.4:
            busy.submit(waiting.pop(0))
            busy.compiled()
        if not busy.scheduler.idle:
            busy.step()
    gauges = busy.scheduler.gauges()
    busy.close()
    assert gauges.preemptions > 0 and gauges.accepted > 0
    stopped = 0
    for request in requests:
        tokens, end = busy.tokens[request.request], busy.ends[request.request]
        assert (tokens, end) == alone(path, request), request.request
        assert right(request.fence, tokens, end), (request.request, text(t for t in tokens if t < len(TOKENS)))
        stopped += end == "stop" and request.fence is not None
    assert stopped > 2


def test_without_a_fence_the_same_model_says_anything(path: Path) -> None:
    """What the checks above find where there is nothing to find: they do."""
    wrong = 0
    for request in mixed(random.Random(1), 12):
        if request.fence in (REQUIRED, THOUGHTFUL):
            free = ask("free", None, seed=request.sampling.seed, logit_bias=LIKED)
            wrong += not right(request.fence, alone(path, free)[0], "stop")
    assert wrong > 2


def test_an_unfenced_request_is_what_it_was_and_has_no_state(engine: Engine) -> None:
    """Bugs 31 and 59."""
    plain = [ask(f"p{number}", None, seed=number, max_tokens=12) for number in range(3)]
    assert engine.fences.open(plain[0]) is None
    for number, request in enumerate(plain):
        engine.submit(request)
        engine.submit(ask(f"f{number}", REQUIRED, seed=number))
    engine.run()
    mine = {request.request: engine.tokens[request.request] for request in plain}
    for request in plain:
        engine.submit(request)
        engine.run()
        assert engine.tokens[request.request] == mine[request.request]
    assert engine.fences.counts.requests == 3


def test_an_end_is_illegal_while_the_call_is_unfinished(engine: Engine) -> None:
    """Bug 53, and against every setting: a bias for the end, and a min_tokens that has passed."""
    wanted = tuple((end, 100.0) for end in ENDS)
    for number in range(6):
        engine.submit(ask(f"{number}", REQUIRED, seed=number, logit_bias=wanted, min_tokens=2))
    engine.run()
    for number in range(6):
        assert engine.ends[f"{number}"] == "stop"
        assert right(REQUIRED, engine.tokens[f"{number}"], "stop")


def test_an_answer_that_is_complete_ends_before_min_tokens(engine: Engine) -> None:
    fence = wire.Fence(grammar='start: "ab"\n', whole=True)
    engine.submit(ask("r", fence, min_tokens=50))
    engine.run()
    assert engine.ends["r"] == "stop"
    assert text(engine.tokens["r"][:-1]) == "ab"


def test_where_no_token_is_left_the_request_ends_with_a_reason(engine: Engine) -> None:
    """A grammar that is over, and a request that has no end tokens."""
    fence = wire.Fence(grammar='start: "ab"\n', whole=True)
    endless = ask("r", fence)
    engine.submit(
        wire.Generate(**{name: getattr(endless, name) for name in endless.__struct_fields__} | {"end_tokens": ()})
    )
    engine.run()
    assert engine.ends["r"] == "fence"
    assert text(engine.tokens["r"]) == "ab"
    engine.submit(ask("next", fence))
    engine.run()
    assert engine.ends["next"] == "stop"


def test_a_stop_string_ends_a_fenced_answer_as_any(engine: Engine) -> None:
    engine.submit(ask("r", wire.Fence(grammar="start: /(ab){9}/\n", whole=True), stop=(b"abab",)))
    engine.run()
    assert (text(engine.tokens["r"]), engine.ends["r"]) == ("abab", "stop_string")


def test_logprobs_stay_the_models_own(engine: Engine) -> None:
    """A mask decides what is chosen, not how likely the model found it."""
    ids = [3, 1, 4, 1, 5]
    compiled = engine.fences.open(ask("r", REQUIRED))
    assert compiled is not None
    engine.compiled()
    told = []
    for steer in (None, compiled):
        part = Slice(
            "r", ids, 0, range(2), wire.Sampling(0.0, 1.0, 0, 0, logprobs=20), 0, ids=ids, prompt=len(ids), steer=steer
        )
        (sampled,) = engine.runner.step([part])
        told.append(wire.unpack_logprobs(sampled.logprobs))
        token = sampled.tokens[0]
    assert token == CALL
    assert told[0][1] == told[1][1], "the alternatives are those of the model"
    assert told[1][0] < told[0][0]


# --- guesses --------------------------------------------------------------------------------------------------


def steer(engine: Engine, fence: wire.Fence, *said: int, **options: object) -> steering.Steer:
    made = engine.fences.open(ask("r", fence, **options))  # type: ignore[arg-type]
    assert made is not None
    engine.compiled()
    made.advance(said)
    return made


def test_each_guess_has_its_row_and_none_behind_a_wrong_one(engine: Engine) -> None:
    """Bugs 32 and 33."""
    one = steer(engine, REQUIRED, *say(CALL, "{"))
    drafts = say("ab}", CALLED)
    rows = one.choices(drafts)
    assert isinstance(rows, list)
    assert len(rows) == len(drafts) + 1
    for at, row in enumerate(rows):
        sequential = steer(engine, REQUIRED, *say(CALL, "{"), *drafts[:at]).choices([])
        assert isinstance(sequential, list)
        assert (row.allowed == sequential[0].allowed).all()
    wrong = one.choices(say("ab}x", CALLED))
    assert isinstance(wrong, list) and len(wrong) == 4, (
        "the guess that is not legal has a row before it, none behind it"
    )
    again = one.choices(drafts)
    assert isinstance(again, list) and (again[0].allowed == rows[0].allowed).all(), "guesses leave nothing behind"


def test_a_tag_in_the_middle_of_guesses_changes_the_rows_behind_it(engine: Engine) -> None:
    """Bug 35: the thoughts end inside the window."""
    one = steer(engine, THOUGHTFUL, *say("hm"))
    rows = one.choices(say("so", CLOSE, CALL, "{a"))
    assert isinstance(rows, list)
    assert [row.allowed is None for row in rows] == [True, True, True, False, False, False, False]
    assert not rows[0].allows(CALL) and rows[3].allows(CALL) and not rows[3].allows(ID[b"x"])


def test_an_end_among_the_guesses_is_the_last_row(engine: Engine) -> None:
    """Bug 36."""
    one = steer(engine, REQUIRED, *say(CALL, "{ab}", CALLED))
    rows = one.choices([END, END, 7])
    assert isinstance(rows, list) and len(rows) == 1 and rows[0].allows(END)
    one.advance([CALL])
    assert one.choices([])


def test_a_right_guess_of_the_end_is_told_once(path: Path) -> None:
    class Sure:
        def propose(self, request: str, ids: object, prompt: int, most: int) -> list[int]:
            said = say("ab", END, END, END)
            at = len(ids) - prompt  # type: ignore[arg-type]
            return said[at : at + most]

        def verified(self, request: str, drafted: int, accepted: int) -> None: ...

        def end(self, request: str) -> None: ...

    one = Engine(path, drafts_max=6)
    one.scheduler._drafter = Sure()
    one.submit(ask("r", wire.Fence(grammar='start: "ab"\n', whole=True), logit_bias=((END, 100.0),)))
    one.run()
    one.close()
    assert one.tokens["r"] == say("ab", END)
    assert one.scheduler.gauges().accepted > 0


# --- compiling --------------------------------------------------------------------------------------------------


def test_others_go_on_while_a_fence_is_compiled(path: Path) -> None:
    hold = threading.Event()
    engine = Engine(path, hold=hold)
    engine.submit(ask("slow", REQUIRED))
    engine.submit(ask("plain", None, max_tokens=5))
    while "plain" not in engine.ends:
        engine.step()
    assert engine.tokens["slow"] == []
    assert not engine.scheduler.plan(0).slices, "and then nothing is to be done"
    assert not engine.fences.settle()
    hold.set()
    engine.compiled()
    assert select.select([engine.fences.fileno()], [], [], 60)[0], "the poll of the worker returns"
    assert engine.fences.settle() and not engine.fences.settle()
    engine.run()
    assert engine.ends["slow"] == "stop"
    engine.close()


def test_a_request_can_be_cancelled_while_its_fence_is_compiled(path: Path) -> None:
    hold = threading.Event()
    engine = Engine(path, hold=hold)
    engine.submit(ask("r", REQUIRED))
    engine.scheduler.check()
    engine.cancel("r")
    engine.scheduler.check()
    assert engine.ends["r"] == "cancelled"
    assert engine.scheduler.idle
    hold.set()
    engine.submit(ask("s", REQUIRED))
    engine.run()
    assert engine.ends["s"] == "stop"
    engine.close()


def test_what_compiles_counts_as_waiting(path: Path) -> None:
    hold = threading.Event()
    engine = Engine(path, hold=hold)
    for number in range(101):
        engine.submit(ask(f"{number}", REQUIRED))
    assert engine.ends == {"100": "rate_limit_exceeded"}
    assert engine.scheduler.gauges().waiting == 100
    for number in range(100):
        engine.cancel(f"{number}")
    hold.set()
    engine.close()


def test_one_digest_is_compiled_once(engine: Engine) -> None:
    for number in range(4):
        engine.submit(ask(f"{number}", wire.Fence(grammar=CALLS, whole=True, triggers=TRIGGERS), seed=number))
    engine.submit(ask("other", SPELLED))
    engine.run()
    engine.submit(ask("later", REQUIRED))
    engine.run()
    gauges = engine.fences.gauges()
    assert (gauges["fenced"], gauges["fences_compiled"]) == (6, 2)
    assert gauges["fence_masks"] >= sum(map(len, engine.tokens.values()))


def test_fences_that_nobody_uses_go_first(engine: Engine) -> None:
    for number in range(steering.COMPILED_MAX + 8):
        engine.submit(ask(f"{number}", wire.Fence(grammar=f'start: "{number}"\n', whole=True)))
        engine.submit(ask(f"again{number}", REQUIRED, seed=number))
        engine.run()
    assert len(engine.fences._compiled) == steering.COMPILED_MAX
    assert engine.fences.counts.compiled == steering.COMPILED_MAX + 9
    assert set(engine.ends.values()) == {"stop"}


def test_a_fence_that_cannot_be_compiled_fails_its_request_alone(engine: Engine) -> None:
    engine.submit(ask("bad", wire.Fence(grammar="start: nothing\n", whole=True)))
    engine.submit(ask("good", REQUIRED))
    engine.run()
    assert engine.ends == {"bad": "fence_error", "good": "stop"}
    engine.submit(ask("bad again", wire.Fence(grammar="start: nothing\n", whole=True)))
    engine.run()
    assert engine.ends["bad again"] == "fence_error"


def test_a_matcher_that_breaks_fails_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 57: the error of the library is asked for at each mask."""
    engine.submit(ask("bad", wire.Fence(grammar='start: "ab" /[0-9]+/ "c"\n', whole=True)))
    engine.submit(ask("good", REQUIRED))
    engine.compiled()
    while len(engine.tokens["bad"]) < 3:
        engine.step()
    state = engine.scheduler._running["bad"].steer._state  # type: ignore[union-attr]
    assert isinstance(state, State) and state._matcher is not None
    state._matcher.consume_token(ID[b"x"])  # as an internal error leaves it
    engine.run()
    assert engine.ends == {"bad": "fence_error", "good": "stop"}


def test_a_fence_that_cannot_go_on_says_which_limit_it_met() -> None:
    """It once said that a token had come that the grammar does not have. No word of the grammar stands in a fact."""
    state = State(Compiled(fencing.vocabulary(), wire.Fence(grammar='start: "secret"{100000}\n', whole=True)), (END,))
    with pytest.raises(FenceFailed, match="broke off: parser error: Too many items") as caught:
        for byte in b"secret" * 3:
            state.legal()
            state.feed(ID[bytes([byte])])
    assert "secret" not in caught.value.message
    rule = "start: /(?s:.*)a.{40}b/\n"
    state = State(Compiled(fencing.vocabulary(), wire.Fence(grammar=rule, whole=True)), (END,))
    chance = random.Random(3)
    with pytest.raises(FenceFailed, match="broke off: lexer error: too many states"):
        for _ in range(100_000):
            state.legal()
            state.feed(ID[chance.choice([b"a", b"x"])])


def test_after_a_restart_the_same_tokens_come(path: Path) -> None:
    for fence in (REQUIRED, THOUGHTFUL, AUTO):
        request = ask("r", fence, seed=4, logit_bias=LIKED)
        assert alone(path, request) == alone(path, request, step_tokens=24)


# --- loops ------------------------------------------------------------------------------------------------------------


GUARD = wire.Guard(run=8, period=8, repeats=4, tokens=16, restarts=2, exclusions=2, values=1)
ONLY_SEVEN = ((ID[b"7"], 100.0),)


def test_the_guard_ends_what_no_penalty_stops(engine: Engine) -> None:
    """Bugs 27 and 28: with a grammar and without."""
    for name, fence in (("free", None), ("fenced", wire.Fence(grammar=DIGITS, whole=True))):
        engine.submit(ask(name, fence, logit_bias=ONLY_SEVEN, max_tokens=200, min_tokens=190, guard=GUARD))
    engine.run()
    for name in ("free", "fenced"):
        assert engine.ends[name] == "loop"
        acts = [looped.action for looped in engine.looped if looped.request == name]
        assert acts[0] == "excluded" and acts[-1] == "ended"
        assert acts.count("ended") == 1
    assert re.fullmatch("7+[0-689]7+[0-689]7+", text(engine.tokens["fenced"])), "the exclusions are within the fence"


def test_a_fence_goes_before_the_guard_where_it_leaves_one_token(engine: Engine) -> None:
    """The guard excludes the only digit that the grammar has: it comes all the same, until nothing else helps."""
    engine.submit(ask("r", wire.Fence(grammar='start: /7{40}/ "x"\n', whole=True), max_tokens=200, guard=GUARD))
    engine.run()
    assert engine.ends["r"] == "loop"
    assert set(text(engine.tokens["r"])) == {"7"}
    assert [looped.action for looped in engine.looped] == ["ended"]
    engine.submit(ask("short", wire.Fence(grammar='start: /7{12}/ "x"\n', whole=True), guard=GUARD))
    engine.run()
    assert (engine.ends["short"], text(engine.tokens["short"][:-1])) == ("stop", "7" * 12 + "x")


def test_the_guard_closes_thoughts_that_loop(engine: Engine) -> None:
    guard = wire.Guard(run=8, period=8, repeats=4, tokens=16, restarts=2, exclusions=0, values=4)
    engine.submit(ask("r", THOUGHTFUL, logit_bias=ONLY_SEVEN, max_tokens=100, guard=guard))
    engine.run()
    assert engine.ends["r"] == "stop"
    assert re.fullmatch("7{8}</think>" + CALL_TEXT, text(engine.tokens["r"][:-1]))


@pytest.mark.parametrize("seed", range(2))
def test_the_guard_says_the_same_with_guesses_and_without(path: Path, seed: int) -> None:
    bias = tuple((ID[letter.encode()], 20.0) for letter in "ab")
    request = ask("r", None, seed=seed, temperature=3.0, logit_bias=bias, max_tokens=200, guard=GUARD)
    assert alone(path, request) == alone(path, request, drafts_max=8)


# --- a real model -----------------------------------------------------------------------------------------


def test_smollm2_at_a_high_temperature_says_nothing_but_what_parses() -> None:
    tokenizer = smollm2.tokenizer()
    schema = {
        "x-guidance": {"whitespace_pattern": "[ ]{0,1}"},
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    fence = wire.Fence(grammar=f"start: o\no: %json {json.dumps(schema)}\n", whole=True)
    runner = Runner.load(wire.Start(model=str(smollm2.path()), threads=2, kv_bytes=1 << 26), lambda _: None)
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    fences = steering.Fences(
        lambda: Vocabulary(tokens, tokenizer.control.values(), runner.vocab_size, tokenizer.encode_unkept)
    )
    prompt = wire.pack_ids(tokenizer.encode("The weather in Rome as JSON:\n"))
    engine = Engine.__new__(Engine)
    engine.runner, engine.fences, engine.tokens, engine.ends, engine.looped = runner, fences, {}, {}, []
    engine.scheduler = fencing.Scheduler(fencing.Limits(512, 8, 64, 100), runner.block_count, tokenizer.token_bytes)
    for seed in range(8):
        sampling = wire.Sampling(1.5, 1.0, 0, seed)
        engine.submit(
            wire.Generate(
                request=f"{seed}",
                tokens=prompt,
                namespace="n",
                sampling=sampling,
                max_tokens=100,
                end_tokens=tokenizer.eos_ids,
                fence=fence,
            )
        )
    engine.run()
    engine.close()
    assert set(engine.ends.values()) == {"stop"}
    told = [json.loads(tokenizer.decode(engine.tokens[f"{seed}"][:-1])) for seed in range(8)]
    assert all({"city", "unit"} <= found.keys() <= {"city", "days", "unit"} for found in told)
    assert all(found["unit"] in "CF" and found.get("days", 0) in range(100) for found in told)
    assert len({found["city"] for found in told}) > 4


def test_a_cut_of_the_state_is_what_the_live_one_is(engine: Engine) -> None:
    """A preempted request is not even told: what it said so far is all that there is."""
    tokens, _ = engine_run(engine, ask("r", THOUGHTFUL, seed=2, logit_bias=LIKED))
    compiled = engine.fences._compiled.popitem()[1].result()
    live = State(compiled, ENDS)
    for at, token in enumerate(tokens):
        rebuilt = State(compiled, ENDS)
        for before in tokens[:at]:
            rebuilt.feed(before)
        mine, other = live.legal(), rebuilt.legal()
        assert mine.banned == other.banned and np.array_equal(mine.allowed, other.allowed)  # type: ignore[arg-type]
        assert mine.allows(token)
        live.feed(token)


def engine_run(engine: Engine, request: wire.Generate) -> tuple[list[int], str]:
    engine.submit(request)
    engine.run()
    return engine.tokens[request.request], engine.ends[request.request]


def test_a_broken_fence_is_a_fault_of_its_own_kind() -> None:
    assert (FenceFailed.status, FenceFailed.code) == (500, "fence_error")
    assert BLOCK_TOKENS == 16
