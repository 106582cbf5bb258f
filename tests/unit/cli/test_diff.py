"""`zj sessions diff`: what it prints, its stable keys, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Zj
from tests.unit.journal.facts import open_journal, session
from tests.unit.sessions.test_prompts import start, turn
from zjournal.cli.diff import visible
from zjournal.errors import ConfigFault
from zjournal.journal import retention
from zjournal.journal.events import CacheNearlyMet, Fact
from zjournal.journal.log import Journal
from zjournal.keys import read
from zjournal.sessions import vocabulary

PAGE = (Path(__file__).parents[3] / "docs" / "diff.md").read_text()
RULES = "\nAnswer in one short line."


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """One session: a turn, one that continues it, and one whose `instructions` differ."""
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        start(journal)
        first = ("instructions", "it is 10:41" + RULES), ("", "<u>"), ("input", "one")
        turn(journal, "resp_a1", {"input": "one", "instructions": "it is 10:41" + RULES}, *first)
        more = ("response:resp_a1", "yes"), ("", "<u>"), ("input", "two")
        turn(
            journal,
            "resp_a2",
            {"input": "two", "instructions": "it is 10:41" + RULES},
            *first,
            *more,
            previous="resp_a1",
        )
        other = ("instructions", "it is 10:5\u00a0" + RULES), ("", "<u>"), ("input", "one")
        turn(journal, "resp_b1", {"input": "one", "instructions": "it is 10:5\u00a0" + RULES}, *other)
        yield journal


@pytest.fixture
def diff(zj: Zj, journal: Journal, tmp_path: Path) -> Zj:
    """Runs `zj sessions diff` beside the open journal."""
    return lambda *arguments: zj("sessions", "diff", *arguments, "--data-dir", str(tmp_path / "data"))


def test_a_fork_for_people(diff: Zj) -> None:
    done = diff("resp_a1", "resp_b1", "--context", "5")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        "verdict   client-changed: the client's texts differ",
        "a         resp_a1  43 tokens",
        "b         resp_b1  44 tokens",
        "first     token 9 of 43   byte 9   shared 20.9 %   lost 34 tokens",
        "where     instructions (system)",
        '  a: "s 10:"|"41\\nAn"',
        '  b: "s 10:"|"5\\u00a0\\nA"',
        "resync    yes, after a replacement of 2 tokens by 3; then 32 tokens match",
    ]


def test_an_earlier_request_of_a_chain_is_named(diff: Zj) -> None:
    done = diff("resp_a2", "resp_b1")
    assert "where     instructions (system)" in done.out.splitlines()


def test_the_keys_are_those_of_the_page(diff: Zj) -> None:
    told = diff("resp_a1", "resp_b1", "--json").json
    assert isinstance(told, dict)
    keys = [*told, *told["first"], *told["a"], *told["resync"], "from", "to", "digest"]
    assert not [key for key in keys if f"`{key}`" not in PAGE]
    assert told["a"] == {
        "response": "resp_a1",
        "session": "s1",
        "tokens": 43,
        "path": "instructions",
        "turn": "resp_a1",
        "role": "system",
        "token_id": ord("4"),
        "before": "it is 10:",
        "after": "41\\nAnswer in",
    }
    for pair in (("resp_a1", "resp_a1"), ("resp_a1", "resp_a2")):
        other = diff(*pair, "--json").json
        assert isinstance(other, dict)
        assert list(other) == list(told)
        assert list(other["a"]) == list(told["a"])
    assert all(f"`{verdict}`" in PAGE for verdict in ("identical", "append-only", "client-changed", "render-changed"))


def test_what_goes_on_ends_with_0(diff: Zj) -> None:
    done = diff("resp_a1", "resp_a2")
    assert (done.code, done.out.splitlines()[-1]) == (0, "shared    43 tokens, all of A")
    assert done.out.startswith("verdict   append-only: B goes on for 9 tokens\n")
    assert diff("resp_a2").out == done.out  # against its parent
    same = diff("resp_a1", "resp_a1")
    assert (same.code, same.out.splitlines()[0]) == (0, "verdict   identical: all tokens are the same")


def test_sessions_turns_and_beginnings(diff: Zj) -> None:
    def pair(*arguments: str) -> tuple[str, str]:
        told = diff(*arguments, "--json").json
        assert isinstance(told, dict)
        return told["a"]["response"], told["b"]["response"]

    assert pair("s1") == ("resp_a2", "resp_b1")  # without a parent: the turn before it
    assert pair("resp_a1", "s1") == ("resp_a1", "resp_b1")
    assert pair("resp_b", "s") == ("resp_b1", "resp_b1")
    assert pair("s1", "--turn", "1:3") == ("resp_a1", "resp_b1")
    assert pair("s1", "resp_a1", "--turn", "2") == ("resp_a2", "resp_a2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("resp_x", "resp_a1"), "no session or response"),
        (("resp_a", "resp_b1"), "'resp_a' is the beginning of several ids: resp_a1, resp_a2"),
        (("resp_a1",), "first turn of its session"),
        (("s1", "--turn", "1:4"), "no turn '4'"),
        (("s1", "--turn", "x"), "no turn 'x'"),
        (("s1", "--turn", "0:1"), "no turn '0'"),
        (("s1", "--context", "-1"), "--context"),
    ],
)
def test_an_error_ends_with_2(diff: Zj, arguments: tuple[str, ...], said: str) -> None:
    done = diff(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_without_a_journal_or_a_content_it_ends_with_2(zj: Zj, diff: Zj, journal: Journal, tmp_path: Path) -> None:
    done = zj("sessions", "diff", "a", "b", "--data-dir", str(tmp_path / "absent"))
    assert (done.code, "no journal here" in done.err) == (2, True)
    assert retention.erase(journal, "resp_b1", retention.CAUSE_UNSTORED).result()
    done = diff("resp_a1", "resp_b1")
    assert (done.code, done.err) == (2, "zj: the content of resp_b1 was erased\n")
    assert diff("resp_a1", "s1").code == 0  # the newest turn that is still there


def test_another_model_cannot_be_compared(diff: Zj, journal: Journal) -> None:
    start(journal, "g", words=vocabulary.pack([b"x"] * 128))
    turn(journal, "resp_c1", {"input": "one"}, ("input", "one"), fingerprint="g")
    done = diff("resp_a1", "resp_c1")
    assert done.code == 1
    assert done.out.startswith("verdict   unknown: the two prompts were made with different vocabularies")
    told = diff("resp_a1", "resp_c1", "--json").json
    assert isinstance(told, dict)
    assert (told["first"], told["shared_tokens"], told["lost_tokens"]) == (None, None, None)


def test_without_a_vocabulary_tokens_are_told(diff: Zj, journal: Journal) -> None:
    for name, text in (("resp_d1", "low"), ("resp_d2", "lie")):
        turn(journal, name, {"input": text}, ("input", text), fingerprint="unknown")
    lines = diff("resp_d1", "resp_d2").out.splitlines()
    assert lines[3].startswith("first     token 1 of 3   byte unknown")
    assert lines[5] == f"  a: token {ord('o')} (the journal has no vocabulary for it)"


def test_redacted_equal_texts_have_equal_digests(diff: Zj) -> None:
    told = diff("resp_a1", "resp_b1", "--json", "--redact").json
    assert isinstance(told, dict)
    assert told["redacted"] is True
    assert told["a"]["before"] == told["b"]["before"] != told["a"]["after"] != told["b"]["after"]
    assert told["a"]["after"].startswith("hmac:")
    assert told["a"]["token_id"] is None
    done = diff("resp_a1", "resp_b1", "--redact")
    assert "10:" not in done.out and "Answer" not in done.out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tide\n\t\r", "tide\\n\\t\\r"),
        ("a\u00a0b\u200b\u202e", "a\\u00a0b\\u200b\\u202e"),
        ("\x1b[31m\x00", "\\u001b[31m\\u0000"),
        ("C:\\n", "C:\\\\n"),
        ("Ä \U0001f41f \U000e0001", "Ä \U0001f41f \\U000e0001"),
        (b"caf\xc3", "caf\\xc3"),
    ],
)
def test_nothing_hides_in_a_text(text: str | bytes, shown: str) -> None:
    assert visible(text if isinstance(text, bytes) else text.encode()) == shown


@pytest.mark.parametrize("name", ["local", "server"])
def test_a_key_cannot_own_what_is_the_servers(tmp_path: Path, name: str) -> None:
    """Vocabularies belong to the tenant `server`; a key of that name would share it."""
    keys = tmp_path / "keys"
    keys.write_text(f"{name}:a-long-enough-key-0123456789\n")
    keys.chmod(0o600)
    with pytest.raises(ConfigFault, match=f"the name {name} is taken by the server"):
        read(keys)


# --- near misses ------------------------------------------------------------------------------------------


LONG = "all of this was computed once. " * 50  # a token is a byte here


@pytest.fixture
def nearly(tmp_path: Path) -> Iterator[Any]:
    """Makes two turns whose prompts begin with the same text; the second one nearly met a snapshot."""
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        start(journal)

        def make(position: int, nearest: str, second: str) -> None:
            turn(journal, "resp_a1", {"input": LONG + "one"}, ("input", LONG + "one"))
            body = {"input": LONG + second}
            told = CacheNearlyMet(
                tenant="local", response="resp_a2", nearest=nearest, position=position, tokens=len(LONG) + 20
            )
            turn(journal, "resp_a2", body, ("input", LONG + second), early=(Fact(told),))

        yield make


@pytest.mark.parametrize(
    ("nearest", "second", "position", "why"),
    [
        ("resp_a1", "two", len(LONG), "where the prompts part"),
        ("resp_a1", "two", len(LONG) - 9, "before the prompts part: the rest of a block was not looked for"),
        ("resp_a1", "one, and more", len(LONG) + 5, "in A's answer, which B does not have as it was sampled"),
        ("resp_zz", "two", len(LONG), "`zj sessions diff resp_zz resp_a2` tells why"),
    ],
)
def test_a_near_miss_says_where_the_snapshot_was_left_and_why(
    nearly: Any, zj: Zj, tmp_path: Path, nearest: str, second: str, position: int, why: str
) -> None:
    nearly(position, nearest, second)
    where = ("--data-dir", str(tmp_path / "data"))
    whose = "A" if nearest == "resp_a1" else nearest
    size = len(LONG) + 20
    line = f"snapshot  B left the snapshot of {whose} at token {position:,} of {size:,}: {why}"
    assert zj("sessions", "diff", "resp_a1", "resp_a2", *where).out.splitlines()[-1] == line
    told = zj("sessions", "diff", "resp_a1", "resp_a2", "--json", *where).json
    assert told["near_miss"] == {"response": nearest, "at_token": position, "tokens": size, "reason": why}
    assert not [key for key in told["near_miss"] if f"`{key}`" not in PAGE]
    assert zj("sessions", "diff", "resp_a2", "resp_a1", "--json", *where).json["near_miss"] is None

    shown = zj("sessions", "show", "s1", "--json", *where).json["turns"]
    assert [one["near_miss"] for one in shown] == [
        None,
        {"response": nearest, "at_token": position, "tokens": size},
    ]
    assert f"at token {position} of" in " ".join(zj("sessions", "show", "s1", *where).out.split())
