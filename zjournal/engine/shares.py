"""Fair shares of one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence


def shares(budget: int, wants: Sequence[int], least: int) -> list[int]:
    """Splits `budget` tokens: nobody gets more than it wants, and who wants more gets no less than others.

    Where equal shares would be smaller than `least`, only the first in order get some.
    """
    assert budget >= 0 and all(want > 0 for want in wants), (budget, wants)
    given = [0] * len(wants)
    admitted = sorted(range(min(len(wants), max(budget // least, 1))), key=lambda at: wants[at])
    for place, at in enumerate(admitted):
        given[at] = min(wants[at], budget // (len(admitted) - place))
        budget -= given[at]
    for at in range(len(admitted), len(wants)):
        given[at] = min(wants[at], budget)
        budget -= given[at]
    return given
