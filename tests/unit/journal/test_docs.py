"""docs/journal.md names every fact, every field, every table and every column, and its example is right."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path

import msgspec
import pytest

from zjournal.journal import chain, content
from zjournal.journal.events import (
    AnyEvent,
    CacheBackedUp,
    ConversationChanged,
    RequestAccepted,
    ResponseFinished,
    TokensSampled,
    ToolCalled,
)
from zjournal.journal.log import QUEUE_FACTS_MAX
from zjournal.journal.projections import _STATUS_OF_REASON

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "zjournal"
PAGE = (ROOT / "docs" / "journal.md").read_text()
ROWS = {row.split("`")[1]: row for row in PAGE.splitlines() if re.match(r"\| `[a-z_]+\.\d+` \|", row)}
EVENTS = typing.get_args(AnyEvent)
WITH_PAYLOAD = (RequestAccepted, CacheBackedUp, TokensSampled, ToolCalled, ResponseFinished, ConversationChanged)


@pytest.mark.parametrize("event", EVENTS)
def test_every_fact_and_field_is_described(event: type[msgspec.Struct]) -> None:
    row = ROWS[str(event.__struct_config__.tag)]
    _, _, what, by, when, promise, body, payload, _ = row.split("|")
    named = re.findall(r"(?:^|, )`([a-z_]+)`", re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", body.strip()))
    assert sorted(named) == sorted(field for field in event.__struct_fields__ if field != "tenant")
    assert all(cell.strip() for cell in (what, by, when, promise))
    assert bool(payload.strip()) == (event in WITH_PAYLOAD)


def test_no_fact_is_described_that_does_not_exist() -> None:
    assert set(ROWS) == {event.__struct_config__.tag for event in EVENTS}


@pytest.mark.parametrize("event", EVENTS)
def test_fields_that_hold_a_content_are_those_that_are_counted(event: type[msgspec.Struct]) -> None:
    """A field is described as the name of a content exactly where it keeps one from being dropped."""
    body = ROWS[str(event.__struct_config__.tag)].split("|")[-3]
    described = set(re.findall(r"`([a-z_]+)` \(content[:,] ", body))
    named = {field.name: field.name.encode() for field in msgspec.structs.fields(event) if field.type is bytes}
    # Only `references` looks at these; the other fields may stay unset.
    filled = {field.name: named.get(field.name, "") for field in msgspec.structs.fields(event)}
    assert {name.decode() for name in content.references(event(**filled))} == described  # type: ignore[arg-type]


def _made() -> set[str]:
    """What the program calls, or chooses to call: a fact that is only matched or tested for is not among it."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            made: list[ast.expr] = []
            if isinstance(node, ast.Call):
                made = [node.func]
            elif isinstance(node, ast.IfExp):
                made = [node.body, node.orelse]
            elif isinstance(node, ast.Dict):
                made = node.values
            names.update(one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in made)
    return names


def test_every_fact_has_a_writer_or_is_described_as_not_written_yet() -> None:
    later = {event.__name__ for event in EVENTS if "Not written yet" in ROWS[str(event.__struct_config__.tag)]}
    assert {event.__name__ for event in EVENTS} - _made() == later


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
