"""The frozen preimage of the chain, and what cannot follow what."""

from __future__ import annotations

import hashlib

import pytest

from zjournal.journal import chain
from zjournal.journal.chain import Head

BODY = b"\x81\xa1t\xaetokens_sampled"


def test_preimage_is_frozen() -> None:
    preimage = (
        b"\x11" * 32  # previous link
        + (258).to_bytes(8, "big")  # seq
        + (14).to_bytes(4, "big")
        + b"tokens_sampled"
        + (1).to_bytes(4, "big")  # version
        + (1_700_000_000_000_000).to_bytes(8, "big")  # time
        + len(BODY).to_bytes(4, "big")
        + BODY
        + b"\x22" * 32  # payload digest
    )
    link = chain.link(b"\x11" * 32, 258, "tokens_sampled", 1, 1_700_000_000_000_000, BODY, b"\x22" * 32)
    assert link == hashlib.sha256(preimage).digest()
    # The bytes themselves, so that a change of both sides shows.
    assert link.hex() == "3c0d6a3741a30f14f1a74219cb8c3399dac5554a4b0eb7ba14563bb1f637de0f"


def test_no_payload_is_32_zero_bytes() -> None:
    one = chain.link(bytes(32), 1, "t", 1, 5, b"b", None)
    assert one == chain.link(bytes(32), 1, "t", 1, 5, b"b", bytes(32))


def test_genesis_binds_id_and_secret() -> None:
    head = chain.genesis(b"i" * 16, b"s" * 32)
    expected = b"zjournal journal" + (1).to_bytes(4, "big") + b"i" * 16 + hashlib.sha256(b"s" * 32).digest()
    assert head == Head(0, hashlib.sha256(expected).digest(), 0)


def _row(seq: int = 4, time: int = 50, payload: bytes | None = b"s" * 16 + b"x", **changes: object) -> chain.Row:
    sha = None if payload is None else hashlib.sha256(payload).digest()
    link = chain.link(b"\x33" * 32, seq, "t", 1, time, b"b", sha)
    row: dict[str, object] = {"seq": seq, "time": time, "tag": "t", "version": 1, "body": b"b"}
    row |= {"payload": payload, "payload_sha": sha, "link": link}
    return tuple((row | changes).values())  # type: ignore[return-value]


BEFORE = Head(3, b"\x33" * 32, 40)


def test_right_rows_follow() -> None:
    assert chain.fault_of(_row(), BEFORE) is None
    assert chain.fault_of(_row(payload=None), BEFORE) is None
    assert chain.fault_of(_row(time=40), BEFORE) is None
    erased = list(_row())
    erased[5] = None
    assert chain.fault_of(tuple(erased), BEFORE) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_row(seq=6), "facts 4 to 5 are missing"),
        (_row(seq=3), "the numbers go back"),
        (_row(time=39), "its time lies before"),
        (_row(tag="u"), "its link does not follow"),
        (_row(version=2), "its link does not follow"),
        (_row(version=-1), "out of range"),
        (_row(body=b"c"), "its link does not follow"),
        (_row(body="b"), "column body holds a str"),
        (_row(version=1.0), "column version holds a float"),
        (_row(link=b""), "its link does not follow"),
        (_row(payload=b"s" * 16), "shorter than its salt"),
        (_row(payload_sha=None), "no digest of one"),
        (_row(payload_sha=b"short"), "has 5 bytes"),
        (tuple({**dict(enumerate(_row())), 5: b"s" * 16 + b"y"}.values()), "does not match its digest"),
    ],
)
def test_wrong_rows_are_named(row: chain.Row, reason: str) -> None:
    assert reason in str(chain.fault_of(row, BEFORE))
