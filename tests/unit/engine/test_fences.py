"""The state of one fence, without a model: what is legal where, for every way that tokens cut tags."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import toy
from tests.engine.fencing import (
    CALL,
    CALLED,
    CLOSE,
    CONTROL,
    END,
    ENDS,
    ID,
    MARK,
    STOP,
    THINK,
    TOKENS,
    USER,
    letters,
    say,
    text,
    vocabulary,
)
from zjournal.engine.decoding.fence import Compiled, State
from zjournal.engine.decoding.vocabulary import has
from zjournal.errors import FenceFailed
from zjournal.link import wire

WORDS = vocabulary()
TOKEN_CALL = f'start: (<[{CALL}]> "{{" /[a-c]{{1,6}}/ "}}" <[{CALLED}]>)+\n'
TEXT_CALL = 'start: "<call>"i /[a-c]{1,6}/ "</call>"\n'
FUNCTION = 'start: "<function="i ("get" | "set") ">" /[a-z]*/ "</function>"\n'
MARKED = f'start: "<" <[{MARK}]> "go>" /[a-c]{{1,6}}/ "</" <[{MARK}]> ">"\n'
TAGS = (wire.Tag(b"<think>", THINK), wire.Tag(b"</think>", CLOSE))
SPELLED = (wire.Tag(b"<think>"), wire.Tag(b"</think>"))
BY_TOKEN = (wire.Tag(b"<tool_call>", CALL),)
BY_TEXT = (wire.Tag(b"<call>"),)
BY_MARK = (wire.Tag(b"<" + TOKENS[MARK]),)
CALL_TEXT = r"<tool_call>\{[abc]{1,6}\}</tool_call>"

FENCES = {
    "whole": wire.Fence(grammar=TOKEN_CALL, whole=True),
    "whole, may think": wire.Fence(grammar=TOKEN_CALL, whole=True, triggers=BY_TOKEN, thoughts=TAGS, banned=(USER,)),
    "whole, thinks": wire.Fence(
        grammar=TOKEN_CALL, whole=True, triggers=BY_TOKEN, thoughts=TAGS, begun=True, banned=(USER,)
    ),
    "whole, may think, spelled": wire.Fence(grammar=TEXT_CALL, whole=True, thoughts=SPELLED),
    "whole, thinks, spelled": wire.Fence(grammar=TEXT_CALL, whole=True, thoughts=SPELLED, begun=True),
    "token": wire.Fence(grammar=TOKEN_CALL, triggers=BY_TOKEN, thoughts=TAGS, banned=(USER, CALLED)),
    "token, thinks": wire.Fence(grammar=TOKEN_CALL, triggers=BY_TOKEN, thoughts=TAGS, begun=True, banned=(USER,)),
    "text": wire.Fence(grammar=TEXT_CALL, triggers=BY_TEXT, thoughts=SPELLED),
    "text, thinks": wire.Fence(grammar=TEXT_CALL, triggers=BY_TEXT, thoughts=SPELLED, begun=True),
    "mark": wire.Fence(grammar=MARKED, triggers=BY_MARK, thoughts=TAGS, banned=(MARK, USER)),
    "only banned": wire.Fence(banned=(USER, CALL)),
}
COMPILED = {name: Compiled(WORDS, fence) for name, fence in FENCES.items()}


def state(fence: wire.Fence | str, *said: int) -> State:
    compiled = COMPILED[fence] if isinstance(fence, str) else Compiled(WORDS, fence)
    one = State(compiled, ENDS)
    for token in said:
        one.feed(token)
    return one


def legal(one: State) -> set[int]:
    found = one.legal()
    return {token for token in range(toy.VOCAB) if found.allows(token)}


# --- any walk -------------------------------------------------------------------------------------------


def walk(name: str, data: st.DataObject, most: int = 40) -> tuple[State, list[int]]:
    """Says legal tokens, those that matter more often than others."""
    one, said = State(COMPILED[name], ENDS), list[int]()
    special = [*range(len(TOKENS) - len(CONTROL) - 11, len(TOKENS)), *letters("<>/fcalthink=a")]
    for _ in range(data.draw(st.integers(0, most))):
        may = legal(one)
        liked = [token for token in special if token in may]
        token = data.draw(st.sampled_from(liked if liked and data.draw(st.booleans()) else sorted(may)))
        said.append(token)
        one.feed(token)
        if one.ended:
            break
    return one, said


@pytest.mark.parametrize("name", FENCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_state_that_is_rebuilt_from_its_tokens_is_the_live_one(name: str, data: st.DataObject) -> None:
    live, said = walk(name, data)
    rebuilt = state(name, *said)
    assert (rebuilt.ended, rebuilt.where) == (live.ended, live.where)
    if live.ended:
        return
    may = legal(live)
    assert may, "a row has at least one bit"
    assert legal(rebuilt) == may
    other = live.copy()
    other.feed(data.draw(st.sampled_from(sorted(may))))
    assert legal(live) == may, "a guess on a copy changes nothing"
    assert max(may) < len(TOKENS), "padding is never legal"


@pytest.mark.parametrize("name", FENCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_may_end_only_where_it_is_finished(name: str, data: st.DataObject) -> None:
    one, said = walk(name, data)
    if one.ended:
        said.pop()
    answer = text(said)
    may_end = one.ended or bool(legal(one) & set(ENDS))
    if not one.ended:
        assert legal(one) & set(ENDS) in (set(), set(ENDS)), "all of the request's, or none"
    call = re.escape("<call>") + "[abc]{1,6}</call>"
    finished = {
        "whole": f"(?:{CALL_TEXT})+",
        "whole, may think": f"(?:<think>(?s:.*)</think>)?(?:{CALL_TEXT})+",
        "whole, thinks": f"(?s:.*)</think>(?:{CALL_TEXT})+",
        "whole, may think, spelled": f"(?i:(?:<think>(?s:.*)</think>)?{call})",
        "whole, thinks, spelled": f"(?i:(?s:.*)</think>{call})",
    }
    if name in finished:
        assert not may_end or re.fullmatch(finished[name], answer), answer
        assert may_end or not re.fullmatch(finished[name], answer), answer
    elif one.where == "call" and not one.ended:
        ends = {"token": "</tool_call>", "token, thinks": "</tool_call>", "mark": "</" + TOKENS[MARK].decode() + ">"}
        assert may_end == answer.lower().endswith(ends.get(name, "</call>")), answer
    elif not one.ended:
        assert may_end, "free text and thoughts may end anywhere"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_end_of_a_call_is_never_said_outside_of_one(data: st.DataObject) -> None:
    _, said = walk("token", data)
    assert CALLED not in said or CALL in said[: said.index(CALLED)]
    assert USER not in said


# --- triggers ------------------------------------------------------------------------------------------------


def test_a_trigger_inside_a_token_names_no_unknown_tool() -> None:
    """Bug 23: the token `=list` completes `<function=`, and goes on with a name that is none."""
    fence = wire.Fence(grammar=FUNCTION, triggers=(wire.Tag(b"<function="),))
    one = state(fence, *letters("So <function"))
    assert ID[b"=list"] not in legal(one)
    assert ID[b"="] in legal(one)
    one.feed(ID[b"="])
    assert one.where == "call"
    assert legal(one) == set(letters("gs"))
    assert ID[b"=list"] in legal(state(fence, *letters("So function"))), "elsewhere it is a token like any other"


def test_a_token_with_a_whole_trigger_is_right_to_its_end_or_not_legal() -> None:
    """Bug 23 again: `a<call>` begins a call in its middle; `<CALL>x` goes on with what no call has."""
    one = state("text", *letters("see"))
    assert ID[b"<CALL>x"] not in legal(one)
    one.feed(ID[b"a<call>"])
    assert one.where == "call"
    assert legal(one) == set(letters("abc"))


def test_a_trigger_that_begins_inside_a_token_is_fed_from_there() -> None:
    one = state("text", *letters("so"), ID[b".<"], *letters("call>"))
    assert one.where == "call"
    assert legal(one) == set(letters("abc"))
    marked = state("mark", ID[b".<"])
    assert MARK in legal(marked)
    marked.feed(MARK)
    assert marked.where == "call"
    assert legal(marked) == {ID[b"g"]}


def test_a_marker_is_legal_only_where_it_continues_a_trigger() -> None:
    assert MARK not in legal(state("mark"))
    assert MARK not in legal(state("mark", *letters("< ")))
    assert MARK not in legal(state("mark", THINK, *letters("<"))), "thoughts call nobody"


def test_a_trigger_inside_a_word_is_text() -> None:
    """Bug 24: "functional" is a word, though it begins as the trigger does."""
    fence = wire.Fence(grammar=FUNCTION, triggers=(wire.Tag(b"<function="),))
    one = state(fence, *letters("a <functional <func"))
    assert one.where == "text"
    assert set(ENDS) <= legal(one)
    one.feed(ID[b"t"])
    assert one.where == "text"


def test_what_only_looks_like_a_call_goes_on_as_text() -> None:
    """A marker that is spelled by letters is text for the grammar, so it begins nothing."""
    fence = wire.Fence(grammar=f"start: <[{CALL}]> /[a-c]+/\n", triggers=(wire.Tag(b"<call>"),))
    one = state(fence, *letters("<call"))
    assert ID[b">"] not in legal(one), "it would look like a call to whoever reads it"
    one = state(fence, *letters("<call>"))
    assert one.where == "text"
    assert set(ENDS) <= legal(one)


@pytest.mark.parametrize("said", ["<CALL>", "<Call>", "<call>"])
def test_letters_of_a_trigger_match_in_either_case(said: str) -> None:
    assert state("text", *letters("x" + said)).where == "call"


def test_a_trigger_in_the_prompt_is_nothing_to_the_answer() -> None:
    """Bug 25: a state sees output tokens alone."""
    assert state("token").where == "text"
    assert legal(state("token")) > set(ENDS)


def test_a_second_beginning_inside_the_first_is_found() -> None:
    assert state("text", *letters("<ca<call>")).where == "call"
    assert state("text", *letters("<<<call>")).where == "call"


# --- thoughts ----------------------------------------------------------------------------------------------------


def test_thoughts_may_come_before_a_call_that_must() -> None:
    """Bugs 37 and 38: `required` neither refuses the first token of thoughts nor is forgotten behind them."""
    one = state("whole, may think")
    assert legal(one) == {THINK, CALL}
    one.feed(THINK)
    assert one.where == "thoughts"
    assert not legal(one) & {*ENDS, CALL, USER}
    for token in say("I think", CLOSE):
        one.feed(token)
    assert legal(one) == {CALL}


def test_thoughts_that_are_spelled_may_come_before_a_call_that_must() -> None:
    one = state("whole, may think, spelled")
    assert {ID[b"<"]} <= legal(one) and ID[b"t"] not in legal(one)
    one.feed(ID[b"<"])
    assert {ID[b"t"], ID[b"c"], ID[b"think>"]} <= legal(one)
    one.feed(ID[b"think>"])
    assert one.where == "thoughts"
    for token in letters("hm</THINK"):
        one.feed(token)
    assert not legal(one) & set(ENDS)
    one.feed(ID[b">"])
    assert legal(one) == {ID[b"<"]}


def test_a_token_that_ends_thoughts_and_says_more_is_legal_only_where_more_is_right() -> None:
    more = ID[b"</think>\n"]
    assert more not in legal(state("whole, thinks, spelled"))
    fence = wire.Fence(grammar='start: "\\n"? "<call>" /[a-c]+/\n', whole=True, thoughts=SPELLED, begun=True)
    one = state(fence)
    assert more in legal(one)
    one.feed(more)
    assert legal(one) == {ID[b"<"]}
    assert more in legal(state("text, thinks"))


def test_no_call_begins_in_thoughts() -> None:
    """Bug 39: a call inside thoughts that are not closed is read by nobody, and the agent stands still."""
    for name in ("token, thinks", "whole, thinks"):
        assert CALL not in legal(state(name, *letters("I call")))
    one = state("token", THINK, *letters("I call"))
    assert CALL not in legal(one)
    one.feed(CLOSE)
    assert CALL in legal(one)


def test_a_spelled_tag_opens_thoughts_at_the_beginning_alone() -> None:
    assert state("text", *letters(" \n<think>")).where == "thoughts"
    assert state("text", *letters("The tag <think>")).where == "text"
    assert state("text", *letters("<think>a</think><think>")).where == "text"
    assert state("token", *letters("The"), THINK).where == "thoughts", "as the parser reads it"


# --- ends ----------------------------------------------------------------------------------------------------------


def test_no_end_inside_a_call() -> None:
    """Bug 53."""
    one = state("token", *letters("I call "), CALL, *letters("{ab"))
    assert not legal(one) & set(ENDS)


def test_behind_the_grammar_nothing_but_the_ends_of_the_request_is_legal() -> None:
    """Bugs 29 and 36: no newlines without end, and an end is counted by no one but us."""
    one = state("whole, may think, spelled", *letters("<call>ab</call>"))
    found = one.legal()
    assert legal(one) == set(ENDS)
    assert found.complete
    for end in ENDS:
        other = one.copy()
        other.feed(end)
        assert other.ended and not one.ended
    assert legal(state("whole", CALL, *letters("{a}"), CALLED)) == {*ENDS, CALL}, "another call may follow here"


def test_free_text_runs_no_grammar() -> None:
    """Bug 59: a few ids are banned and no mask is made."""
    for name, said in (("token", "text"), ("only banned", "text"), ("token, thinks", "hm")):
        found = state(name, *letters(said)).legal()
        assert found.allowed is None
        assert not set(found.banned) & set(ENDS)
    assert {USER, CALL} <= set(state("only banned").legal().banned)


def test_end_tokens_are_legal_though_they_are_banned_as_text() -> None:
    fence = wire.Fence(grammar=TOKEN_CALL, triggers=BY_TOKEN, banned=(USER, END, STOP))
    assert set(ENDS) <= legal(state(fence))


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_padding_and_the_end_of_the_grammar_are_no_tokens() -> None:
    """Bug 50: the logits are wider than the tokenizer."""
    row = COMPILED["whole"].vocabulary.mask(COMPILED["whole"].start())
    assert not any(has(row, token) for token in range(len(TOKENS), toy.VOCAB))
    anything = state(wire.Fence(grammar="start: /(?s:.*)/\n", whole=True))
    assert legal(anything) == {*range(len(TOKENS) - len(CONTROL)), *ENDS}, "and text is no control token"
    assert set(range(len(TOKENS), toy.VOCAB)) <= set(state("token").legal().banned)


@pytest.mark.parametrize(
    "fence",
    [
        wire.Fence(grammar="start: nothing\n", whole=True),
        wire.Fence(grammar="", whole=True),
        wire.Fence(grammar=TEXT_CALL, begun=True),
        wire.Fence(grammar=TEXT_CALL, triggers=(wire.Tag(b"x", toy.VOCAB),)),
        wire.Fence(grammar=TEXT_CALL, triggers=(wire.Tag(b""),)),
        wire.Fence(banned=(len(TOKENS),)),
        wire.Fence(grammar='start: o\no: %json {"$ref": "#"}\n', whole=True),
    ],
)
def test_a_fence_that_cannot_be_is_a_fault_with_a_code(fence: wire.Fence) -> None:
    with pytest.raises(FenceFailed) as caught:
        Compiled(WORDS, fence)
    assert caught.value.code == "fence_error"


def test_a_matcher_that_broke_is_a_fault_and_no_empty_answer() -> None:
    """Bug 57: the library says so in a state that nobody has to look at."""
    one = state("whole")
    with pytest.raises(FenceFailed):
        one.feed(ID[b"x"])
    assert legal(one) == {CALL}, "what was refused was not taken"
    assert one._matcher is not None
    one._matcher.consume_token(ID[b"x"])
    with pytest.raises(FenceFailed, match="broke off"):
        one.legal()


def test_the_grammar_is_quoted_in_no_fault() -> None:
    with pytest.raises(FenceFailed) as caught:
        Compiled(WORDS, wire.Fence(grammar='start: secret\n%llguidance {"x": 1}', whole=True))
    assert "secret" not in caught.value.message


def test_masks_are_the_librarys_bit_for_bit() -> None:
    one, matcher = state("whole"), COMPILED["whole"].start()
    for token in (CALL, *letters("{ab}"), CALLED):
        row = one.legal().allowed
        assert row is not None
        theirs = np.frombuffer(matcher.compute_bitmask()[: row.nbytes], dtype=np.uint32)
        bits = [np.unpackbits(part.view(np.uint8), bitorder="little")[: len(TOKENS)] for part in (row, theirs)]
        bits[0][list(ENDS)] = 0
        assert (bits[0] == bits[1]).all()
        one.feed(token)
        assert matcher.consume_token(token)
