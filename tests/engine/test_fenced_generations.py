"""The demo model under a fence at temperature 1.5, in every dialect: a small part of what `make fences` tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import native
from tests.fenced import SPOKEN, Runner, Voice, runner
from tests.generations import tried
from zjournal.kernels import cpu

COUNT, REPEATED = 3, 1


@pytest.fixture(scope="module")
def loaded() -> Iterator[Runner]:
    found = native.library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "open_library", lambda: (found, ""))
        one = runner()
    yield one
    one.close()


@pytest.mark.parametrize(("name", "tags"), SPOKEN)
def test_what_a_fence_lets_through_parses_and_validates(loaded: Runner, name: str, tags: bool) -> None:
    row = tried(loaded, Voice(name, tags), COUNT, 0, REPEATED, seed=60)
    assert row.wrong == []
    assert row.whole + row.cut == COUNT
    assert row.repeated == 2 * REPEATED
