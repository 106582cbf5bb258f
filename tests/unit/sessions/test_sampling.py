"""Sampling settings and logprobs on their way through the journal: recorded, sealed, exported, and asked again."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sessions.talk import Talk
from tests.unit.sessions.test_transfer import lines_of, refused, sealed, write
from zjournal import ask, loops
from zjournal.journal import compact, events
from zjournal.journal.events import Fact
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.link import wire
from zjournal.sessions import follow, sampling
from zjournal.sessions.importing import ImportFile, import_file

ENTRIES = [
    wire.pack_logprobs(-0.5, [(3, -0.25), (5, -0.5)]),
    wire.pack_logprobs(-1.5, [(1, -1.5)]),
    wire.pack_logprobs(-9.0, []),
]


def request(**changed: Any) -> events.RequestAccepted:
    plain: dict[str, Any] = {
        "response": "r",
        "session": "s",
        "protocol": "chat",
        "model": "m",
        "namespace": "n",
        "stored": True,
        "stream": False,
        "created": 1,
        "record": b"",
        "dialect": "chatml",
        "encoder": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "max_tokens": 5,
    }
    return events.RequestAccepted(**plain | changed)


def unit(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most)


asked = st.builds(
    ask.Sampling,
    temperature=unit(0, 2),
    top_p=unit(0, 1),
    top_k=st.integers(0, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    min_p=unit(0, 1),
    repetition_penalty=unit(0.01, 10),
    presence_penalty=unit(-2, 2),
    frequency_penalty=unit(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 999), unit(-100, 100), max_size=4).map(
        lambda d: tuple(sorted(d.items()))
    ),
    min_tokens=st.integers(0, 99),
    logprobs=st.integers(-1, 20),
)


@given(asked)
def test_what_was_asked_is_what_the_engine_is_sent_from_the_record_alone(one: ask.Sampling) -> None:
    accepted = events.decode_body(events.encode_body(request(**sampling.recorded(one, 99))))
    assert isinstance(accepted, events.RequestAccepted)
    body = msgspec.json.encode({"x": 1, "logit_bias": {str(token): bias for token, bias in one.logit_bias}})
    found = sampling.sent(accepted, sampling.logit_bias(body))
    expected = msgspec.structs.asdict(one) | {"seed": 99 if one.seed is None else one.seed}
    assert msgspec.structs.asdict(found) == expected
    assert sampling.wrong(accepted) is None


def test_defaults_take_no_room_and_change_nothing() -> None:
    plain = request(**sampling.recorded(ask.Sampling(), 7))
    assert b"penalty" not in events.encode_body(plain)
    assert sampling.sent(plain, ()) == wire.Sampling(1.0, 1.0, 0, 7)
    assert sampling.logit_bias(b'{"input": "hi"}') == ()


@pytest.mark.parametrize("name", [*ask.RANGES, "logit_bias"])
@pytest.mark.parametrize("value", [float("nan"), -1e9, 1e12])
def test_a_foreign_record_out_of_range_is_named(name: str, value: float) -> None:
    assert sampling.wrong(request(**{name: value})) == name


@pytest.mark.parametrize("guard", [(1,), (-1, 1, 2, 1, 0, 0, 1), (0, 1, 2, 1, 0, 0, 1, 0), (0, 1, 2, 1, 0, 0, 10**9)])
def test_foreign_limits_of_the_guard_are_looked_at(guard: tuple[int, ...]) -> None:
    assert sampling.wrong(request(guard=guard)) == "guard"


def test_a_turn_is_asked_again_with_the_limits_it_had() -> None:
    limits = loops.limits("run=9")
    assert sampling.wrong(request(guard=limits)) is None
    again = events.decode_body(events.encode_body(request(guard=limits)))
    assert isinstance(again, events.RequestAccepted)
    assert sampling.guarded(again) == wire.Guard(9, *limits[1:])
    assert sampling.guarded(request()) is None


# --- logprobs -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False), st.lists(st.tuples(st.integers(0, 2**32 - 1), st.just(-1.0))))
    )
)
def test_logprobs_survive_packing(entries: list[tuple[float, list[tuple[int, float]]]]) -> None:
    made = [wire.pack_logprobs(own, others) for own, others in entries]
    assert wire.cut_logprobs(b"".join(made), len(made)) == made
    assert [wire.unpack_logprobs(one) for one in made] == entries
    ids = list(range(len(made)))
    assert wire.unpack_sampled(wire.pack_sampled(ids, made), len(ids)) == (ids, made)
    assert wire.unpack_sampled(wire.pack_sampled(ids, []), len(ids)) == (ids, [])


def test_the_bytes_of_sampled_tokens_are_those_of_the_docs() -> None:
    entry = wire.pack_logprobs(-0.5, [(7, -0.5), (258, -1.0)])
    docs = "07000000 000000bf 02000000 07000000 000000bf 02010000 000080bf"
    assert wire.pack_sampled([7], [entry]).hex() == docs.replace(" ", "")


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        wire.pack_ids([1]),
        wire.pack_ids([1, 2]) + b"x",
        wire.pack_ids([1, 2]) + ENTRIES[0],
        wire.pack_ids([1, 2]) + ENTRIES[0] + ENTRIES[1][:-1],
        wire.pack_ids([1, 2]) + ENTRIES[0] + ENTRIES[1] + b"1234",
        wire.pack_ids([1, 2]) + struct.pack("<fI", 0.0, 2**32 - 1) + ENTRIES[1],
    ],
)
def test_what_is_no_run_of_sampled_tokens_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off|follow"):
        wire.unpack_sampled(damaged, 2)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    """One turn whose logprobs were asked for, sealed in a segment, and one without."""
    with Talk(tmp_path / "a") as talk:
        talk.open("s_1")
        first, *rest = talk.facts("resp_1", "one", "no", "", "s_1", True)
        assert isinstance(first, list)
        accepted = first[0].event
        assert isinstance(accepted, events.RequestAccepted)
        changed = msgspec.structs.replace(accepted, logprobs=2, min_p=0.25, frequency_penalty=-0.5)
        facts = [msgspec.structs.replace(first[0], event=changed), *first[1:]]
        entries = iter(ENTRIES)
        for fact in rest:
            assert isinstance(fact, Fact)
            told = isinstance(fact.event, events.TokensSampled)
            facts.append(msgspec.structs.replace(fact, payload=fact.payload + next(entries)) if told else fact)
        talk.journal.append(facts).result()
        talk.turn("resp_2", "two", "dos", previous="resp_1")
        yield talk


def tail_of(journal: Journal, response: str = "resp_1") -> follow.Tail:
    return follow.recorded_tail(journal.read_response(response))


def test_logprobs_are_the_same_in_a_segment(talk: Talk) -> None:
    assert tail_of(talk.journal).logprobs == ENTRIES
    compact.compact(talk.journal)
    assert tail_of(talk.journal).logprobs == ENTRIES
    assert tail_of(talk.journal, "resp_2").logprobs == []


def test_they_are_exported_and_imported(talk: Talk, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "b") as other:
        import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
        assert tail_of(other).logprobs == ENTRIES
        (accepted,) = [
            fact.event for fact in other.read_response("resp_1") if isinstance(fact.event, events.RequestAccepted)
        ]
        assert (accepted.logprobs, accepted.min_p, accepted.frequency_penalty) == (2, 0.25, -0.5)
    assert verify(tmp_path / "b").fault is None


def _of(kind: str, line: dict[str, Any]) -> bool:
    return line.get("body", {}).get("t") == f"{kind}.1" and line["body"]["response"] == "resp_1"


@pytest.mark.parametrize(
    ("said", "kind", "change"),
    [
        ("not one run", "request_accepted", {"logprobs": 1}),  # fewer than there are
        ("not one run", "request_accepted", {"logprobs": -1}),
        ("logprobs is out of range", "request_accepted", {"logprobs": 21}),
        ("min_p is out of range", "request_accepted", {"min_p": 2.0}),
        ("another number of biased tokens", "request_accepted", {"logit_bias": 1}),
        ("it is choice 1 of", "request_accepted", {"choice": 1}),
        ("it is choice 0 of", "request_accepted", {"first": "resp_2"}),
        ("it is choice 16 of", "request_accepted", {"choice": 16, "first": "resp_2"}),
    ],
)
def test_a_file_that_lies_about_them(talk: Talk, tmp_path: Path, said: str, kind: str, change: dict[str, Any]) -> None:
    lines = lines_of(talk.journal)[:-1]
    for line in lines:
        if _of(kind, line):
            line["body"].update(change)
    with Journal.open(tmp_path / "b") as other:
        assert said in refused(other, tmp_path / "f", sealed(lines))


def test_an_alternative_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with Talk(tmp_path / "a") as talk, Journal.open(tmp_path / "b") as other:
        talk.open("s_1")
        first, *rest = talk.facts("resp_1", "one", "a", "", "s_1", True)
        assert isinstance(first, list)
        accepted = msgspec.structs.replace(first[0].event, logprobs=1)
        facts = [msgspec.structs.replace(first[0], event=accepted), *first[1:]]
        for fact in rest:
            assert isinstance(fact, Fact)
            strange = wire.pack_logprobs(-1.0, [(999, -1.0)])
            told = isinstance(fact.event, events.TokensSampled)
            facts.append(msgspec.structs.replace(fact, payload=fact.payload + strange) if told else fact)
        talk.journal.append(facts).result()
        said = refused(other, tmp_path / "f", sealed(lines_of(talk.journal)[:-1]))
    assert "holds token 999" in said


def test_the_seed_of_a_choice_is_what_the_page_says() -> None:
    """docs/api.md gives it away, so it cannot change: whoever kept a seed can ask for that choice alone."""
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        assert sampling.choice_seed(seed, 0) == seed
        drawn = [sampling.choice_seed(seed, choice) for choice in range(1, 16)]
        assert len({seed, *drawn}) == 16
        for choice, found in enumerate(drawn, 1):
            digest = hashlib.sha256(b"choice\0" + str(seed).encode() + b"\0" + str(choice).encode()).digest()
            assert found == int.from_bytes(digest[:8], "big") // 2 < 2**63
    assert sampling.choice_seed(7, 1) == 3_250_794_366_860_797_438
