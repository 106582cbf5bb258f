"""What can be asked again, how it is written down, and where two answers part; all from the journal alone."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sessions.talk import END, FINGERPRINT, VOCABULARY, Talk, ids
from zjournal.api.recorded import DECODERS
from zjournal.errors import BadRequest, NotFound
from zjournal.journal import events, removal, retention
from zjournal.journal.log import SERVER_TENANT
from zjournal.link import wire
from zjournal.sessions import fences, replay, vocabulary
from zjournal.sessions.prompts import Prompts
from zjournal.sessions.record import Record
from zjournal.sessions.replay import Asked, Part, Place

WORDS = vocabulary.Vocabulary(VOCABULARY)
LETTERS = st.lists(st.integers(1, 26), max_size=12)


@pytest.fixture
def talk(tmp_path: Path):
    with Talk(tmp_path / "data") as talk:
        talk.open("s_1")
        talk.turn("resp_a", "hi", "yes")
        talk.turn("resp_b", "more", "no", previous="resp_a")
        talk.turn("resp_c", "other", "well", previous="resp_a")
        yield talk


def recordings(talk: Talk, words: bytes = VOCABULARY) -> replay.Recordings:
    digest = talk.journal.digest(SERVER_TENANT, words)
    return replay.Recordings(talk.journal, digest, vocabulary.Vocabulary(words), DECODERS)


def asked_of(talk: Talk, response: str, words: bytes = VOCABULARY) -> Asked:
    turn = talk.journal.turn(response)
    assert turn is not None
    return recordings(talk, words).asked(turn)


def place(**changed: object) -> Place:
    values = {
        "response": "resp_new",
        "session": "s_new",
        "namespace": "n",
        "salt": "salty",
        "created": 7,
        "opening": True,
    }
    return Place(**{**values, **changed})  # type: ignore[arg-type]


def write(talk: Talk, asked: Asked, where: Place) -> events.RequestAccepted:
    tenant = asked.turn.tenant
    record = talk.journal.digest(tenant, asked.record) if asked.record else asked.accepted.record
    accepted = replay.accepted_again(asked, where, record, b"")
    work = functools.partial(replay.write, asked=asked, place=where, accepted=accepted)
    talk.journal.run(work).result()
    return accepted


def test_the_whole_tree_is_asked_oldest_first(talk: Talk) -> None:
    found = replay.chosen(talk.journal, "s_1")
    assert [(turn.response, reason) for turn, reason in found] == [("resp_a", ""), ("resp_b", ""), ("resp_c", "")]
    ((turn, reason),) = replay.chosen(talk.journal, "s_1", "resp_b")
    assert (turn.response, reason) == ("resp_b", "")


def test_turns_without_an_answer_are_passed_over_and_named(talk: Talk) -> None:
    talk.turn("resp_f", "x", None, previous="resp_a")
    talk.turn("resp_r", "y", "abc", previous="resp_a", ended=False)
    reasons = {turn.response: reason for turn, reason in replay.chosen(talk.journal, "s_1")}
    assert reasons == {
        "resp_a": "",
        "resp_b": "",
        "resp_c": "",
        "resp_f": "nothing was sampled for it",
        "resp_r": "it is still running",
    }
    with pytest.raises(BadRequest, match="nothing can be asked again in resp_f"):
        replay.chosen(talk.journal, "s_1", "resp_f")


def test_what_is_gone_is_said_to_be_gone(talk: Talk) -> None:
    talk.turn("resp_u", "u", "un", stored=False)
    assert retention.erase(talk.journal, "resp_u", retention.CAUSE_UNSTORED).result() == ("resp_u",)
    with pytest.raises(NotFound, match=r"the content of resp_u was erased.*--turn"):
        replay.chosen(talk.journal, "s_1")
    assert replay.chosen(talk.journal, "s_1", "resp_a")[0], "the others can be asked one by one"
    removal.remove_turn(talk.journal, "resp_a")  # hidden, and kept for the turns that continue it
    with pytest.raises(NotFound, match="the content of resp_a was deleted"):
        replay.chosen(talk.journal, "s_1", "resp_a")
    with pytest.raises(NotFound, match="there is no session s_none"):
        replay.chosen(talk.journal, "s_none")
    with pytest.raises(NotFound, match="there is no response resp_x in session s_1"):
        replay.chosen(talk.journal, "s_1", "resp_x")


def test_a_turn_is_asked_with_what_is_recorded_of_it(talk: Talk) -> None:
    asked = asked_of(talk, "resp_b")
    assert list(asked.ids) == ids("more")
    assert list(asked.output) == ids("no")
    assert asked.record == b"", "the recorded one serves"
    accepted = replay.accepted_again(asked, place(), asked.accepted.record, b"digest")
    was = asked.accepted
    assert (accepted.temperature, accepted.seed, accepted.parent) == (was.temperature, was.seed, was.parent)
    assert (accepted.max_tokens, accepted.salt, accepted.fence) == (len(ids("no")), "salty", b"digest")
    assert was.history and not accepted.history


def test_a_replay_is_linked_and_leaves_the_recorded_session_alone(talk: Talk) -> None:
    before = [fact for name in ("resp_a", "resp_b") for fact in talk.journal.read_response(name)]
    session = talk.journal.session("s_1")
    write(talk, asked_of(talk, "resp_b"), place(only="resp_b"))
    assert [fact for name in ("resp_a", "resp_b") for fact in talk.journal.read_response(name)] == before
    assert talk.journal.session("s_1") == session
    (link,) = [fact.event for fact in talk.journal.read() if isinstance(fact.event, events.SessionReplayed)]
    assert (link.session, link.source, link.only) == ("s_new", "s_1", "resp_b")
    turn = talk.journal.turn("resp_new")
    assert turn is not None and (turn.session, turn.parent) == ("s_new", "resp_a")
    mine, recorded = (Prompts(talk.journal).of(talk.journal.turn(name)) for name in ("resp_new", "resp_b"))
    assert mine.ids == recorded.ids


def test_no_conversation_is_taken_for_a_continuation_of_a_replay(talk: Talk) -> None:
    was = asked_of(talk, "resp_b").accepted
    write(talk, asked_of(talk, "resp_b"), place())
    found = talk.journal.find_by_request(talk.tenant, [was.history])
    assert found is not None and found.response == "resp_b"


def test_what_was_deleted_meanwhile_is_not_written_again(talk: Talk) -> None:
    asked = asked_of(talk, "resp_b")
    removal.remove_session(talk.journal, "s_1", removal.ASKED)
    head = talk.journal.head
    with pytest.raises(NotFound, match="resp_b was deleted while it was replayed"):
        write(talk, asked, place())
    assert talk.journal.head == head
    assert talk.journal.session("s_new") is None


def test_what_a_replay_is_built_on_stays_with_it(talk: Talk) -> None:
    """A prompt may refer to answers of turns before it; these must outlive the session that they stand in."""
    write(talk, asked_of(talk, "resp_b"), place())
    end = events.ResponseFinished(
        tenant=talk.tenant, response="resp_new", reason="length", output=0, queue_us=0, prefill_us=0, decode_us=0
    )
    talk.journal.append([events.Fact(end)]).result()
    removal.remove_session(talk.journal, "s_1", removal.ASKED)
    turn = talk.journal.turn("resp_new")
    assert turn is not None
    assert Prompts(talk.journal).of(turn).count == len(ids("more"))
    parent = talk.journal.turn("resp_a")
    assert parent is not None and not parent.erased


def test_another_vocabulary_gets_a_record_of_its_own(talk: Talk) -> None:
    words = vocabulary.pack([b"<|end|>", *(bytes([letter]) for letter in range(65, 91)), b"!"])
    asked = asked_of(talk, "resp_b", words)
    assert asked.record
    read = Record(asked.record, lambda response: ())
    assert list(read.ids()) == list(asked.ids)
    assert msgspec.json.decode(read.body(vocabulary.Vocabulary(words).decode))["input"] == "more"


def test_a_smaller_vocabulary_cannot_be_asked(talk: Talk) -> None:
    words = vocabulary.pack([b"<|end|>", b"a", b"b"])
    with pytest.raises(BadRequest, match="token 18, and the model that is served has 3 tokens"):
        asked_of(talk, "resp_b", words)


# --- where two answers part ---------------------------------------------------------------------------


@given(LETTERS, LETTERS, LETTERS)
def test_the_first_difference_is_the_end_of_the_common_prefix(
    common: list[int], one: list[int], other: list[int]
) -> None:
    left, right = common + one, common + other
    found = replay.difference(left, right, WORDS, WORDS)
    if left == right:
        assert found is None
        return
    assert found is not None
    at = found.position
    assert left[:at] == right[:at]
    assert left[at : at + 1] != right[at : at + 1]
    assert found.recorded.token == (left[at] if at < len(left) else None)
    assert found.replayed.token == (right[at] if at < len(right) else None)
    assert found.before == WORDS.decode(left[max(at - replay.CONTEXT_TOKENS, 0) : at])


def test_an_answer_that_goes_on_differs_at_its_end() -> None:
    found = replay.difference(ids("abc", ended=False), ids("ab", ended=False), WORDS, WORDS)
    assert found is not None
    assert (found.position, found.recorded.text, found.replayed.token) == (2, b"c", None)
    assert replay.measured(found, {3: -1.0}).distance is None, "the end has no logit"


def test_the_distance_is_recorded_minus_replayed() -> None:
    found = replay.difference(ids("abc"), ids("abd"), WORDS, WORDS)
    assert found is not None
    told = replay.measured(found, {3: -2.5, 4: -0.5})
    assert (told.recorded.logprob, told.replayed.logprob, told.distance) == (-2.5, -0.5, -2.0)
    assert replay.measured(found, {4: -0.5}).distance is None


def test_a_token_that_no_vocabulary_spells_has_no_text() -> None:
    found = replay.difference([1, 99], [1, END], None, WORDS)
    assert found is not None
    assert (found.before, found.recorded.text, found.replayed.text) == (None, None, b"<|end|>")


# --- which part differs -------------------------------------------------------------------------------

NOW = wire.Ready(
    fingerprint=FINGERPRINT, kernels="k", context=1, kv_tokens=1, parts={"weights": "w", "rope": "r", "kernels": "c"}
)


def maker(**changed: object) -> events.EngineStarted:
    values = {"pid": 1, "model": "m", "fingerprint": FINGERPRINT, "kernels": "k", "context": 1, "kv_tokens": 1}
    values |= {"vocabulary": b"v" * 32, "template": b"t" * 32, "parts": tuple(sorted(NOW.parts.items()))}
    return events.EngineStarted(**{**values, **changed})  # type: ignore[arg-type]


def parts(one: events.EngineStarted | None, template: bytes = b"t" * 32) -> tuple[Part, ...]:
    return replay.parts_that_differ(one, replay.parts_now(NOW, b"v" * 32, template), NOW.fingerprint)


def test_the_part_that_differs_is_named() -> None:
    assert parts(maker()) == ()
    other = maker(fingerprint="g", parts=(("kernels", "c"), ("rope", "r"), ("weights", "x")))
    assert parts(other) == (Part("weights", "x", "w"),)
    assert parts(maker(fingerprint="g"), b"u" * 32) == (Part("template", "74" * 8, "75" * 8),)
    assert parts(maker(template=b"s" * 32)) == (Part("template", "73" * 8, "74" * 8),)


def test_a_fingerprint_that_differs_in_no_part_is_named_itself() -> None:
    assert parts(maker(fingerprint="g")) == (Part("fingerprint", "g", FINGERPRINT),)
    assert parts(None) == (Part("fingerprint", replay.UNKNOWN, FINGERPRINT),)


def test_parts_that_were_not_recorded_are_unknown_unless_the_fingerprint_is_the_same() -> None:
    assert parts(maker(parts=())) == ()
    found = parts(maker(fingerprint="g", parts=()))
    assert {(part.name, part.recorded) for part in found} == {(name, replay.UNKNOWN) for name in NOW.parts}


def test_a_fence_that_is_derived_otherwise_is_a_part_that_differs() -> None:
    secret = b"s" * 32
    one, other = wire.Fence(grammar='start: "a"\n', whole=True), wire.Fence(grammar='start: "b"\n', whole=True)
    recorded = fences.digest(one, secret)
    assert len(recorded) == fences.DIGEST_BYTES and recorded != fences.digest(one, b"t" * 32)
    assert fences.digest(None, secret) == b""
    assert replay.fence_part(recorded, fences.digest(one, secret)) == ()
    (part,) = replay.fence_part(recorded, fences.digest(other, secret))
    assert (part.name, part.recorded) == ("fence", recorded.hex()[: replay.PART_HEX])
    (gone,) = replay.fence_part(recorded, b"")
    assert gone.now == replay.UNKNOWN
