"""Why the cache could not give all of an earlier prompt: `diagnostics.cache_miss_reason`, by the journal. Pure.

Both prompts are compared token by token; the client's own texts where they part say what was changed.
"""

from __future__ import annotations

from typing import Any

from zjournal.sessions.diff import Rendered, compare

NOT_FOUND = {"cache_miss_reason": {"type": "previous_message_not_found"}}
_PARTS = (("tools", "tools_changed"), ("system", "system_changed"), ("messages", "messages_changed"))


def told(before: Rendered, now: Rendered, same_model: bool) -> dict[str, Any] | None:
    """The `diagnostics` of the later message; None: the earlier prompt is the beginning of the later one."""
    if not same_model or before.vocabulary_name != now.vocabulary_name:
        return _missed("model_changed", before.count)
    diff = compare(before, now, context=0)
    if not diff.forked:
        return None
    paths = (diff.a.path, diff.b.path)
    found = next((kind for part, kind in _PARTS if any(path.startswith(part) for path in paths)), None)
    if diff.verdict != "client-changed" or found is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return _missed(found, diff.lost)


def _missed(kind: str, tokens: int) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": tokens}}
