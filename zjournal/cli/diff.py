"""How a Diff is told: as lines for people, as JSON for programs, and redacted for a bug report."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zjournal.journal.events import CacheNearlyMet
    from zjournal.journal.projections import Turn
    from zjournal.sessions.diff import Diff, Side

DIGEST_HEX = 16


class Secret:
    """Replaces a text by its digest under the journal's secret: equal texts stay equal, and nobody can guess one."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __call__(self, text: bytes) -> str:
        return "hmac:" + hmac.digest(self._key, b"diff\0" + text, "sha256").hex()[:DIGEST_HEX]


def as_json(
    diff: Diff, turns: tuple[Turn, Turn], near: CacheNearlyMet | None, secret: Secret, redact: bool
) -> dict[str, Any]:
    """The keys that docs/diff.md promises; all of them are always there. `near`: what B nearly met."""
    resync, moved = diff.resync, diff.moved
    differs = diff.comparable and diff.verdict != "identical"
    return {
        "verdict": diff.verdict,
        "reason": diff.reason,
        "shared_tokens": diff.shared if diff.comparable else None,
        "lost_tokens": diff.lost if diff.comparable else None,
        "first": {"token": diff.shared, "byte": diff.byte} if differs else None,
        "a": _side_json(diff.a, turns[0], secret, redact),
        "b": _side_json(diff.b, turns[1], secret, redact),
        "resync": None
        if resync is None
        else {
            "kind": resync.kind,
            "removed_tokens": resync.removed,
            "inserted_tokens": resync.inserted,
            "matching_tokens": resync.matching,
        },
        "moved": None
        if moved is None
        else {"from": moved.old, "to": moved.new, "tokens": moved.tokens, "digest": secret(moved.text.encode())},
        "near_miss": None if near is None else {**near_json(near), "reason": _why(near, diff, turns)},
        "redacted": redact,
    }


def near_json(near: CacheNearlyMet) -> dict[str, Any]:
    """A snapshot that was nearly met."""
    return {"response": near.nearest, "at_token": near.position, "tokens": near.tokens}


def _why(near: CacheNearlyMet, diff: Diff, turns: tuple[Turn, Turn]) -> str:
    from zjournal.sessions import nearly

    return nearly.why(near, diff, turns)


def _side_json(side: Side, turn: Turn, secret: Secret, redact: bool) -> dict[str, Any]:
    def shown(text: bytes | None) -> str | None:
        if text is None:
            return None
        return secret(text) if redact else visible(text)

    return {
        "response": turn.response,
        "session": turn.session,
        "tokens": side.tokens,
        "path": side.path or None,
        "turn": side.turn or None,
        "role": side.role or None,
        "token_id": None if redact else side.token,
        "before": shown(side.before),
        "after": shown(side.after),
    }


def lines(diff: Diff, turns: tuple[Turn, Turn], near: CacheNearlyMet | None, secret: Secret, redact: bool) -> list[str]:
    """A Diff for people, one finding a line. `near`: what B nearly met."""
    told = _fork(diff, turns, secret, redact)
    if near is not None:
        whose = "A" if near.nearest == turns[0].response else near.nearest
        left = f"B left the snapshot of {whose} at token {near.position:,} of {near.tokens:,}"
        told.append(f"snapshot  {left}: {_why(near, diff, turns)}")
    return told


def _fork(diff: Diff, turns: tuple[Turn, Turn], secret: Secret, redact: bool) -> list[str]:
    a, b = diff.a, diff.b
    told = [f"verdict   {diff.verdict}: {diff.reason}"]
    told += [f"{name}         {turn.response}  {side.tokens:,} tokens" for name, turn, side in _sides(diff, turns)]
    if not diff.comparable or diff.verdict == "identical":
        return told
    if not diff.forked:
        return [*told, f"shared    {diff.shared:,} tokens, all of {'A' if a.tokens < b.tokens else 'B'}"]
    place = "its bytes are the same" if diff.byte is None and a.after is not None else f"byte {_number(diff.byte)}"
    share = f"shared {100 * diff.shared / a.tokens:.1f} %"
    told.append(f"first     token {diff.shared:,} of {a.tokens:,}   {place}   {share}   lost {diff.lost:,} tokens")
    old, new = (_place(side, turn) for _, turn, side in _sides(diff, turns))
    told.append(f"where     {old}" if old == new else f"where     {old}  ->  {new}")
    told += [f"  {name}: {_text(side, secret, redact)}" for name, _, side in _sides(diff, turns)]
    if diff.moved is not None:
        moved = diff.moved
        told.append(
            f"moved     {moved.old} -> {moved.new}: same text, {moved.tokens:,} tokens ({secret(moved.text.encode())})"
        )
    return [*told, f"resync    {_resync(diff)}"]


def _sides(diff: Diff, turns: tuple[Turn, Turn]) -> list[tuple[str, Turn, Side]]:
    return [("a", turns[0], diff.a), ("b", turns[1], diff.b)]


def _number(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _place(side: Side, turn: Turn) -> str:
    """The JSON path with its role, and the request it belongs to if that is an earlier one of the chain."""
    if not side.path:
        return "the end of the conversation"
    earlier = bool(side.turn) and side.turn not in (turn.response, side.path.partition(":")[2])
    told = [word for word in (side.role, f"of {side.turn}" if earlier else "") if word]
    return f"{side.path} ({' '.join(told)})" if told else side.path


def _text(side: Side, secret: Secret, redact: bool) -> str:
    if side.before is None or side.after is None:
        return f"token {side.token} (the journal has no vocabulary for it)"
    if redact:
        return f"{secret(side.before)}|{secret(side.after)}"
    before, after = (visible(text).replace('"', '\\"') for text in (side.before, side.after))
    return f'"{before}"|"{after}"'


def _resync(diff: Diff) -> str:
    found = diff.resync
    if found is None:
        return "no, nothing behind the fork matches again"
    change = {
        "insertion": f"an insertion of {found.inserted:,} tokens",
        "deletion": f"a deletion of {found.removed:,} tokens",
        "replacement": f"a replacement of {found.removed:,} tokens by {found.inserted:,}",
    }[found.kind]
    return f"yes, after {change}; then {found.matching:,} tokens match"


def visible(text: bytes) -> str:
    """Text on one line in which nothing hides: `\\n`, `\\u00a0`, `\\xe2` for half a character."""
    return "".join(map(_visible, text.decode("utf-8", "surrogateescape")))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\r\t\\":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}[character]
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
