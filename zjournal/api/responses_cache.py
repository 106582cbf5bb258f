"""`prompt_cache_diagnostics`: why a prompt could not reuse that of an earlier response, by their very tokens. Pure."""

from __future__ import annotations

from typing import Any

from zjournal.sessions import diff
from zjournal.sessions.diff import Rendered

NOT_FOUND: dict[str, Any] = {"type": "comparison_response_not_found"}
UNAVAILABLE: dict[str, Any] = {"type": "unavailable"}
_HIT: dict[str, Any] = {"type": "cache_hit"}


def diagnose(earlier: Rendered, now: Rendered, same_model: bool) -> dict[str, Any]:
    """The diagnostics of prompt `now` beside `earlier`. How much was still in the cache is told by the usage.

    `cache_missed_tokens` are those of this prompt behind the first difference, `comparison_reusable_tokens` those
    before it, exactly. Only what is rendered can be a reason here: neither effort nor verbosity nor a format of the
    text changes a prompt.
    """
    if not same_model:
        return _missed("model_changed", now.count, 0)
    found = diff.compare(earlier, now, context=0)
    if not found.comparable:
        return _missed("model_changed", now.count, 0)
    if not found.forked:
        return _HIT
    return _missed(_reason(found), now.count - found.shared, found.shared)


def _missed(reason: str, missed: int, reusable: int) -> dict[str, Any]:
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": reusable,
    }


def _reason(found: diff.Diff) -> str:
    """By the texts that face each other at the fork; a compacted conversation is one on either side."""
    paths = (found.a.path, found.b.path)
    if any(path.startswith("tools") or ".tools[" in path for path in paths):
        return "tools_changed"
    if found.b.path.endswith(".encrypted_content"):
        return "context_compacted"
    return "input_changed"
