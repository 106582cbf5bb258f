"""The demo model under a fence at temperature 1.5, in every dialect: a small part of what `make fences` tries."""

from __future__ import annotations

import pytest

from tests.fenced import SPOKEN, Runner, Voice
from tests.generations import tried

COUNT, REPEATED = 3, 1
# One form of each dialect is tried at once; the others, which differ in their literals alone, by `make soak`.
AT_ONCE = {("chatml", True), ("glm-4.7", True), ("dsml-v4", True), ("qwen-xml", True), ("llama3", True)}
assert set(SPOKEN) >= AT_ONCE


@pytest.mark.parametrize(
    ("name", "tags"), [pytest.param(*one, marks=() if one in AT_ONCE else pytest.mark.soak) for one in SPOKEN]
)
def test_what_a_fence_lets_through_parses_and_validates(loaded: Runner, name: str, tags: bool) -> None:
    row = tried(loaded, Voice(name, tags), COUNT, 0, REPEATED, seed=60)
    assert row.wrong == []
    assert row.whole + row.cut == COUNT
    assert row.repeated == 2 * REPEATED
