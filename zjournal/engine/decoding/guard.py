"""The guard: finds out that an answer says the same again and again, and what to do about it.

Three things are loops: one token in a row (`token`), a run of tokens in a row (`pattern`), and thoughts that begin
again with the words they opened with (`restart`). First the token that would go on with the loop is excluded, a few
times; then, in thoughts whose closing tag is a token, that tag is forced; only then the answer ends, with the
reason `loop`. Inside tool calls and formats the limits are higher: tables of zeros and base64 are data there.

A pure function of the tokens that were chosen and where they stood: fed again, a guard is as it was. docs/guard.md has
the rules, loops.LIMITS the limits and their defaults.
"""

from __future__ import annotations

import copy
from typing import Literal

import msgspec
import numpy as np

from zjournal.link import wire

OPENING_TOKENS = 24  # of thoughts, by which their restart is known
OPENING_DISTINCT = 12  # different ones among them: a row of dashes is no opening
AGAIN_PART = 4  # after an exclusion, so much shorter a loop is one
TWICE = 2  # times the limit: the answer ends though a fence left no other token

Kind = Literal["token", "pattern", "restart"]
Action = Literal["excluded", "closed", "ended"]


class Evidence(msgspec.Struct, frozen=True):
    """A loop: it began with output token `begin`; what is `period` tokens long has come `times` times.

    Of a restart: thoughts that began at `begin` have begun `times` times, the last two `period` tokens apart.
    """

    kind: Kind
    begin: int
    period: int
    times: int


class Act(msgspec.Struct, frozen=True):
    """What was done, and from which output token on. `token`: that was excluded or closed the thoughts; -1: neither."""

    evidence: Evidence
    action: Action
    at: int
    token: int = -1

    def told(self, request: str) -> wire.Looped:
        """The message of the link about it."""
        found = self.evidence
        return wire.Looped(
            request=request,
            kind=found.kind,
            action=self.action,
            at=self.at,
            begin=found.begin,
            period=found.period,
            times=found.times,
        )


class Guard:
    """The guard of one request. `push` takes each token; the rest says what the next one may be."""

    def __init__(self, limits: wire.Guard, closing: int = -1) -> None:
        """`closing`: the token that closes thoughts; -1 if no single token does, or the model has none."""
        self._limits = limits
        self._closing = closing
        self._repeats = _Repeats(limits)
        self._restarts = _Restarts(limits.restarts)
        self._count = 0
        self._strikes = 0  # exclusions, since a while without any
        self._struck = 0  # tokens there were at the last one
        self._led = False  # whether thoughts that began again were led elsewhere
        self._wish = -1  # the token that is excluded or forced next
        self._forces = False
        self._found: Evidence | None = None  # why
        self._over: Evidence | None = None
        self._acts: list[Act] = []

    def copy(self) -> Guard:
        """Another guard at the same place, to try guesses on; it costs some microseconds."""
        other = copy.copy(self)
        other._repeats, other._restarts, other._acts = self._repeats.copy(), self._restarts.copy(), [*self._acts]
        return other

    def banned(self) -> tuple[int, ...]:
        """The tokens that may not come next: one, or none."""
        return (self._wish,) if self._wish >= 0 and not self._forces else ()

    def forced(self) -> int | None:
        """The token that has to come next, if there is one."""
        return self._wish if self._wish >= 0 and self._forces else None

    @property
    def over(self) -> Evidence | None:
        """Why the answer has to end with the last token; None while it may go on."""
        return self._over

    def take(self) -> list[Act]:
        """What was done since this was last asked."""
        acts, self._acts = self._acts, []
        return acts

    def push(self, token: int, thinking: bool = False, bound: bool = False) -> None:
        """Takes the next token of the answer, whether or not it is what was asked for: a fence goes before.

        `thinking`: it stands in the thoughts, tags excluded. `bound`: a matcher binds it, in a call or a format.
        """
        assert self._over is None, "the answer is over"
        closed = self._settle(token)
        self._count += 1
        if closed:
            self._repeats.clear()
            self._restarts.clear()
            return
        if self._strikes and self._count - self._struck > self._limits.tokens * (self._limits.values if bound else 1):
            self._strikes = 0
        repeat = self._repeats.push(token, self._count, bound, self._strikes > 0)
        restart = self._restarts.push(token, self._count, thinking)
        if repeat is not None:
            self._meet(*repeat, thinking)
        if restart is not None and self._over is None:
            self._meet(*restart, thinking)

    def _settle(self, token: int) -> bool:
        """Compares the token with what was asked for; whether it closed the thoughts as it was told to."""
        wish, forces, found = self._wish, self._forces, self._found
        self._wish, self._forces, self._found = -1, False, None
        if found is None or (token == wish) != forces:
            return False
        self._acts.append(Act(found, "closed" if forces else "excluded", self._count, wish))
        if not forces:
            self._strikes += 1
            self._struck = self._count
            return False
        self._strikes, self._led = 0, False
        return True

    def _meet(self, found: Evidence, successor: int, patience: float, thinking: bool) -> None:
        """What to do about a loop that `successor` would go on with.

        `patience`: its length in parts of the limit; from 2 on, nothing has helped.
        """
        if found.kind == "restart":  # thoughts as long as those are not to be had four times more
            excludes = self._limits.exclusions > 0 and not self._led
        else:
            excludes = self._strikes < self._limits.exclusions
        if patience >= TWICE:
            self._over = found
        elif excludes:
            self._led = self._led or found.kind == "restart"
            self._wish, self._forces, self._found = successor, False, found
        elif thinking and self._closing >= 0:
            self._wish, self._forces, self._found = self._closing, True, found
        else:
            self._over = found
        if self._over is not None:
            self._wish, self._forces, self._found = -1, False, None
            self._acts.append(Act(found, "ended", self._count))


Met = tuple[Evidence, int, float]  # with the token that would go on with it, and how long it is in parts of the limit


class _Repeats:
    """For each period up to the longest: how many tokens in a row equal the one that many before them."""

    def __init__(self, limits: wire.Guard) -> None:
        self._width = width = limits.period
        self._latest = np.empty(4 * width, dtype=np.int32)  # latest first from `_at` on, `width` of them
        self._runs = np.zeros(width, dtype=np.int32)
        self._needs = {
            (bound, again): _needs(limits, limits.values if bound else 1, AGAIN_PART if again else 1)
            for bound in (False, True)
            for again in (False, True)
        }
        self.clear()

    def copy(self) -> _Repeats:
        other = copy.copy(self)
        other._latest, other._runs = self._latest.copy(), self._runs.copy()
        return other

    def clear(self) -> None:
        """Forgets all tokens."""
        self._latest.fill(-1)
        self._runs.fill(0)
        self._at = len(self._latest) - self._width

    def push(self, token: int, count: int, bound: bool, again: bool) -> Met | None:
        """Takes a token, the `count`-th. Of several loops that are long enough the one with the shortest period."""
        at, width, runs = self._at, self._width, self._runs
        np.multiply(runs + 1, self._latest[at : at + width] == token, out=runs)
        if at == 0:
            at = len(self._latest) - width
            self._latest[at:] = self._latest[:width]
        self._at = at = at - 1
        self._latest[at] = token
        long = runs >= self._needs[bound, again]
        index = int(long.argmax())
        if not long[index]:
            return None
        period, run = index + 1, int(runs[index])
        kind: Kind = "token" if period == 1 else "pattern"
        found = Evidence(kind, count - run - period, period, run // period + 1)
        return found, int(self._latest[at + index]), run / int(self._needs[bound, False][index])


def _needs(limits: wire.Guard, times: int, part: int) -> np.ndarray:
    """For each period the least run that is a loop; int32 [period]. At `times` the limits, or a `part` of them."""
    period = np.arange(1, limits.period + 1, dtype=np.int64)
    covered = np.maximum(limits.tokens * times // part, limits.repeats * times * period // (1 if part == 1 else 2))
    covered[0] = limits.run * times // part or np.iinfo(np.int32).max
    return np.clip(covered - period, 1, np.iinfo(np.int32).max // TWICE).astype(np.int32)


class _Restarts:
    """Looks for the words that thoughts opened with, as Knuth, Morris and Pratt do: one step a token."""

    def __init__(self, most: int) -> None:
        """`most`: restarts that are a loop; 0: they are not looked for."""
        self._most = most
        self.clear()

    def copy(self) -> _Restarts:
        other = copy.copy(self)
        other._opening, other._border, other._begins = [*self._opening], [*self._border], [*self._begins]
        return other

    def clear(self) -> None:
        """The thoughts are over."""
        self._opening: list[int] = []
        self._border: list[int] = []  # of each beginning of the opening: its longest one that is its end as well
        self._matched = 0
        self._begins: list[int] = []  # where they began, and began again
        self._next = -1  # what followed the opening at first

    def push(self, token: int, count: int, thinking: bool) -> Met | None:
        """Takes a token, the `count`-th."""
        if not self._most:
            return None
        if not thinking:
            if self._begins:
                self.clear()
            return None
        if not self._begins:
            self._begins.append(count - 1)
        if len(self._opening) < OPENING_TOKENS:
            self._open(token)
            return None
        if len(set(self._opening)) < OPENING_DISTINCT:
            return None
        if self._next < 0:
            self._next = token
        if not self._step(token):
            return None
        self._begins.append(count - OPENING_TOKENS)
        again = len(self._begins) - 1
        if again < self._most:
            return None
        apart = self._begins[-1] - self._begins[-2]
        found = Evidence("restart", self._begins[0], apart, again + 1)
        return found, self._next, again / self._most

    def _open(self, token: int) -> None:
        """One more of the first tokens."""
        border = self._border[-1] if self._border else 0
        while border and self._opening[border] != token:
            border = self._border[border - 1]
        self._border.append(border + 1 if self._opening and self._opening[border] == token else 0)
        self._opening.append(token)

    def _step(self, token: int) -> bool:
        """Whether the opening ends with this token once more. Occurrences do not overlap."""
        while self._matched and self._opening[self._matched] != token:
            self._matched = self._border[self._matched - 1]
        if self._opening[self._matched] == token:
            self._matched += 1
        if self._matched < OPENING_TOKENS:
            return False
        self._matched = 0
        return True
