"""What a key's name may use: requests and tokens a minute, and answers at the same time. Pure; a clock is handed in.

A minute's worth may be used at once, and comes back evenly. A request needs one request and a token that are left; what
it takes is known later, so a name may owe tokens, and waits until they are paid.
"""

from __future__ import annotations

import dataclasses
import datetime
import math

from zjournal.errors import RateLimited
from zjournal.keys import Limits

ALLOWED = "zj_allowed"  # key of the ASGI scope: what tells what is left to the key of a request
MINUTE_S = 60.0
STREAM_RETRY_S = 1  # when an answer may have ended


class Bucket:
    """So much a minute; full at first."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at = now

    def left(self, now: float) -> float:
        """What is left; below 0 it is owed."""
        self._left = min(float(self.limit), self._left + max(now - self._at, 0.0) * self.limit / MINUTE_S)
        self._at = max(now, self._at)
        return self._left

    def take(self, amount: float, now: float) -> None:
        """Takes so much, whether it is there or not."""
        self._left = self.left(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """How long until so much is left."""
        return max(amount - self.left(now), 0.0) * MINUTE_S / self.limit


@dataclasses.dataclass(frozen=True)
class Told:
    """What a client is told of one limit, before the next request."""

    name: str  # requests or tokens
    limit: int
    remaining: int
    reset_s: float  # until all of it is left


class Allowance:
    """What one name has left."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._streams = limits.streams
        self._buckets = {
            name: Bucket(limit, now)
            for name, limit in (("requests", limits.requests), ("tokens", limits.tokens))
            if limit
        }

    def enter(self, running: int | None, now: float) -> None:
        """A request comes while `running` answers are being made for the name; None: it asks for no answer.

        Raises RateLimited.
        """
        if self._streams and running is not None and running >= self._streams:
            raise RateLimited(
                f"This key may have {self._streams} answers at the same time, and has as many. "
                f"Please try again in {STREAM_RETRY_S}s.",
                "streams",
                STREAM_RETRY_S,
            )
        for name, bucket in self._buckets.items():
            if wait := math.ceil(bucket.wait_s(1.0, now)):
                used = f"This key may use {bucket.limit} {name} a minute, and has."
                raise RateLimited(f"{used} Please try again in {wait}s.", name, wait)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1.0, now)

    def spend(self, tokens: int, now: float) -> None:
        """So many tokens were read or written for the name."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens, now)

    def told(self, now: float) -> list[Told]:
        """What is left of each limit."""
        return [
            Told(name, bucket.limit, max(math.floor(bucket.left(now)), 0), bucket.wait_s(bucket.limit, now))
            for name, bucket in self._buckets.items()
        ]


def headers(told: list[Told], wall: float | None = None) -> list[tuple[bytes, bytes]]:
    """The headers that tell it as OpenAI does; with `wall`, the time in Unix seconds, as Anthropic does."""
    found: list[tuple[str, str]] = []
    for one in told:
        if wall is None:
            start = f"x-ratelimit-{{}}-{one.name}"
            reset = f"{math.ceil(one.reset_s * 1000)}ms" if one.reset_s < 1 else f"{math.ceil(one.reset_s)}s"
        else:
            start = f"anthropic-ratelimit-{one.name}-{{}}"
            at = datetime.datetime.fromtimestamp(math.ceil(wall + one.reset_s), datetime.UTC)
            reset = at.isoformat().replace("+00:00", "Z")
        values = (("limit", str(one.limit)), ("remaining", str(one.remaining)), ("reset", reset))
        found += [(start.format(kind), value) for kind, value in values]
    return [(name.encode(), value.encode()) for name, value in found]
