"""The limits of the guard against loops: their names, their ranges, and how the setting `guard` spells them.

What a loop is and what is done about it: engine/decoding/guard.py and docs/guard.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Each limit with its default, its least and its most. The order is that of wire.Guard and of RequestAccepted.guard.
LIMITS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "run": (512, 0, 1 << 20),  # equal tokens in a row; 0: they are not looked for
        "period": (1024, 1, 1 << 14),  # tokens of the longest pattern; 1: none is looked for
        "repeats": (4, 2, 1 << 20),  # times that a pattern comes in a row, and
        "tokens": (2048, 1, 1 << 24),  # tokens that it covers in all
        "restarts": (4, 0, 1 << 10),  # times that thoughts begin again with their first words; 0: not looked for
        "exclusions": (3, 0, 1 << 10),  # times that the next token of a loop is excluded before more is done
        "values": (8, 1, 1 << 10),  # inside calls and formats the limits are so many times higher
    }
)


def parse(text: str) -> str:
    """`on`, `off`, or limits such as `run=256,tokens=1024`, as short as it can be said.

    Raises ValueError, as the second half of a sentence.
    """
    if text.strip() in ("on", "off"):
        return text.strip()
    given: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (bit.strip() for bit in part.partition("="))
        if name not in LIMITS or name in given or not equals:
            known = ", ".join(LIMITS)
            raise ValueError(f"is not on, off, or limits, each once, of {known}; such as run=256,tokens=1024")
        if not (number.isascii() and number.isdigit()):
            raise ValueError(f"has no whole number behind {name}")
        _, least, most = LIMITS[name]
        if not least <= int(number) <= most:
            raise ValueError(f"has a {name} that is not between {least} and {most}")
        given[name] = int(number)
    changed = [f"{name}={given[name]}" for name in LIMITS if name in given and given[name] != LIMITS[name][0]]
    return ",".join(changed) or "on"


def limits(guard: str) -> tuple[int, ...]:
    """The limits that a setting says, in order; empty: the guard is off."""
    if guard == "off":
        return ()
    found = {name: default for name, (default, _, _) in LIMITS.items()}
    for part in guard.split(",") if guard != "on" else ():
        name, _, number = part.partition("=")
        found[name] = int(number)
    return tuple(found.values())


def fit(values: tuple[int, ...]) -> bool:
    """Whether recorded limits are some that could have been set."""
    if not values:
        return True
    ranges = [(least, most) for _, least, most in LIMITS.values()]
    return len(values) == len(ranges) and all(
        least <= value <= most for value, (least, most) in zip(values, ranges, strict=True)
    )
