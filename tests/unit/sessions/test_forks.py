"""The cause that a fork is counted under, by the facts of its request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.journal.facts import accepted, finished, matched, open_journal, session
from zjournal.sessions.forks import cause


@pytest.mark.parametrize(
    ("request_", "match", "nearest", "told"),
    [
        ({}, {"reason": "extended"}, "one", None),
        ({}, {"reason": "evicted"}, "one", None),
        ({}, {"reason": "forked", "cached": 2}, "one", "input_changed"),
        ({"rewritten": 2}, {"reason": "forked", "cached": 2}, "one", "thoughts_dropped"),
        ({"rewritten": 2}, {"reason": "extended"}, "one", None),
        ({}, {"reason": "forked", "cached": 4}, "one", "input_changed"),
        ({}, {"reason": "forked", "cached": 5}, "one", "branch"),
        ({"rewritten": 2}, {"reason": "forked", "cached": 5}, "one", "branch"),
        ({"parent": ""}, {"reason": "forked", "cached": 5}, "one", "input_changed"),
        ({}, {"reason": "forked", "cached": 5}, "two", "other_conversation"),
        ({}, {"reason": "forked", "cached": 5}, "", "other_conversation"),
        ({"forks": (("r1", "text"),)}, {"reason": "cold", "cached": 0}, "", "answer_changed"),
        ({"forks": (("r1", "text"),), "rewritten": 1}, {"reason": "forked"}, "one", "answer_changed"),
        ({"forks": (("r1", "text"),), "choice": 1}, {"reason": "whole"}, "one", None),
    ],
)
def test_a_cause_by_the_facts(
    tmp_path: Any, request_: dict[str, Any], match: dict[str, Any], nearest: str, told: str | None
) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), session("s2")]).result()
        for name, at in (("r1", "s1"), ("one", "s1"), ("two", "s2")):
            facts = accepted(journal, name)
            (first, *others) = facts
            moved = msgspec.structs.replace(first, event=msgspec.structs.replace(first.event, session=at))
            journal.append([moved, *others, matched(name), finished(name, output=2)]).result()
        parent = journal.turn("r1")
        assert parent is not None and (parent.prompt, parent.output) == (4, 2)
        request = msgspec.structs.replace(accepted(journal, "r9")[0].event, **{"parent": "r1", **request_})
        met = msgspec.structs.replace(matched("r9").event, **match)
        found = cause(request, met, journal.turn(nearest), journal.turn("r1") if request.parent else None)
    assert found == told
