"""The guard in the engine: the demo model falls into loops, is led out of them, and ends with a reason."""

from __future__ import annotations

from tests import smollm2
from tests.fenced import Answer, Engine, Runner
from zjournal.link import wire

PROMPT = "na na na na na na na na na na na na na na na na na na na na na na na na"
SMALL = wire.Guard(run=12, period=64, repeats=3, tokens=24, restarts=2, exclusions=2, values=2)
TOKENS = 200


def asked(name: str, guard: wire.Guard | None, text: str = PROMPT, **more: object) -> wire.Generate:
    return wire.Generate(
        request=name,
        tokens=wire.pack_ids(smollm2.tokenizer().encode(text)),
        namespace="n",
        sampling=wire.Sampling(0.0, 1.0, 0, 1),
        max_tokens=TOKENS,
        guard=guard,
        **more,  # type: ignore[arg-type]
    )


def answers(loaded: Runner, *asks: wire.Generate, **settings: int) -> tuple[dict[str, Answer], list[wire.Looped]]:
    engine = Engine(loaded, False, **settings)
    try:
        return engine.run(asks), engine.loops
    finally:
        engine.close()


def test_a_loop_is_left_or_ends_with_its_evidence(loaded: Runner) -> None:
    found, loops = answers(loaded, asked("free", None), asked("guarded", SMALL))
    free, guarded = found["free"], found["guarded"]
    assert (free.reason, len(free.tokens)) == ("length", TOKENS), "without a guard it says so to the end"
    assert {loop.request for loop in loops} == {"guarded"}
    first = loops[0]
    looped = free.tokens[first.begin : first.at]
    assert first.action == "excluded" and first.times == len(looped) // first.period
    assert looped[first.period :] == looped[: -first.period]
    assert guarded.tokens[: first.at] == free.tokens[: first.at]
    assert guarded.tokens[first.at] != free.tokens[first.at] == free.tokens[first.at - first.period]
    assert guarded.reason == ("loop" if loops[-1].action == "ended" else "length")
    assert guarded.reason == "length" or loops[-1].at == len(guarded.tokens)


def test_guesses_change_nothing_of_it(loaded: Runner) -> None:
    """A loop is what prompt look-up guesses best: most of these tokens are guessed."""
    alone = answers(loaded, asked("a", SMALL))
    assert answers(loaded, asked("a", SMALL), drafts_max=5) == alone
    company = [asked(f"other {n}", None, "I say " * (n + 2)) for n in range(3)]
    batched, loops = answers(loaded, asked("a", SMALL), *company)
    assert (batched["a"], [loop for loop in loops if loop.request == "a"]) == (alone[0]["a"], alone[1])


def test_no_exclusions_end_at_the_first_loop(loaded: Runner) -> None:
    found, loops = answers(loaded, asked("a", wire.Guard(12, 64, 3, 24, 2, 0, 2)))
    assert [loop.action for loop in loops] == ["ended"]
    assert (found["a"].reason, len(found["a"].tokens)) == ("loop", loops[0].at)


def test_where_a_fence_leaves_one_token_it_comes_up_to_twice_the_limit(loaded: Runner) -> None:
    """Bugs 26 and 30: whatever a grammar wants for ever, there is an end with a reason."""
    fence = wire.Fence(grammar='start: "a"{500}', whole=True)
    ends = smollm2.tokenizer().eos_ids
    found, loops = answers(loaded, asked("a", SMALL, fence=fence, end_tokens=ends))
    assert found["a"].reason == "loop"
    assert set(smollm2.tokenizer().decode(found["a"].tokens)) == {"a"}
    assert loops[-1].action == "ended"


def test_thoughts_are_closed_before_the_answer_ends(loaded: Runner) -> None:
    """The closing tag is a token here: one that the demo model never says."""
    closing = smollm2.tokenizer().control["<empty_output>"]
    opening = smollm2.tokenizer().control["<jupyter_start>"]
    thoughts = (wire.Tag(b"<jupyter_start>", opening), wire.Tag(b"<empty_output>", closing))
    fence = wire.Fence(thoughts=thoughts, begun=True)
    found, loops = answers(loaded, asked("a", wire.Guard(12, 64, 3, 24, 2, 1, 2), fence=fence))
    assert [loop.action for loop in loops][:2] == ["excluded", "closed"]
    assert found["a"].tokens[loops[1].at] == closing
    assert found["a"].tokens.count(closing) == 1
