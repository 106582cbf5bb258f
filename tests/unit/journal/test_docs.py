"""docs/journal.md names every fact, every field, every table and every column, and its example is right."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from zjournal.journal import chain, content
from zjournal.journal.events import AnyEvent
from zjournal.journal.log import QUEUE_FACTS_MAX
from zjournal.journal.projections import _STATUS_OF_REASON

PAGE = (Path(__file__).parents[3] / "docs" / "journal.md").read_text()
ROWS = {row.split("`")[1]: row for row in PAGE.splitlines() if re.match(r"\| `[a-z_]+\.\d+` \|", row)}
EVENTS = typing.get_args(AnyEvent)


@pytest.mark.parametrize("event", EVENTS)
def test_every_fact_and_field_is_described(event: type[msgspec.Struct]) -> None:
    row = ROWS[str(event.__struct_config__.tag)]
    _, _, _, body, payload, _ = row.split("|")
    named = re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)", "", body))
    assert sorted(named) == sorted(field for field in event.__struct_fields__ if field != "tenant")
    assert bool(payload.strip()) == ("payload is" in (event.__doc__ or ""))


def test_no_fact_is_described_that_does_not_exist() -> None:
    assert set(ROWS) == {event.__struct_config__.tag for event in EVENTS}


def test_every_column_and_status_is_described() -> None:
    for name in (*chain.COLUMNS.split(", "), "digest", "tenant", "size", "refs", "data", "seal"):
        assert f"`{name}`" in PAGE
    for reason, status in _STATUS_OF_REASON.items():
        assert f"`{reason}`" in PAGE
        assert f"`{status}`" in PAGE


def test_limits_are_those_of_the_code() -> None:
    assert f"At most {QUEUE_FACTS_MAX:,} facts wait" in PAGE
    assert f"at most {content.CONTENT_BYTES_MAX >> 20} MiB" in PAGE


def test_the_example_is_right() -> None:
    body = bytes.fromhex("81a174ae746f6b656e735f73616d706c6564")
    link = chain.link(b"\x11" * 32, 258, "tokens_sampled", 1, 1_700_000_000_000_000, body, b"\x22" * 32)
    assert f"`{body.hex()}`" in PAGE
    assert link.hex() in PAGE
