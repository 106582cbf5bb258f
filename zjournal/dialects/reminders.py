"""System messages behind the beginning, for models whose template has no place for them.

Clients put them into the middle of a conversation. Moved to its head they would change every prompt from there on, so
they stay where they are: in the words of the user, or of the tool's result that stands before them, marked as what
they are. Only what a conversation begins with is one system message. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zjournal import ask
from zjournal.checkpoint.template import Template

OPENING, CLOSING = "<system-reminder>\n", "\n</system-reminder>"
GAP = "\n\n"


def placed(request: ask.Ask, template: Template) -> ask.Ask:
    """The request as this template can render it; the same where the template renders system messages in place."""
    if template.places_system or not any(map(_system, request.items)):
        return request
    lead = 0
    while lead < len(request.items) and _system(request.items[lead]):
        lead += 1
    items: list[ask.Item] = list(_head(request.instructions, request.items[:lead]))
    for item in request.items[lead:]:
        if _system(item):
            _remind(items, item)
        else:
            items.append(item)
    return msgspec.structs.replace(request, instructions=None, items=tuple(items))


def _system(item: ask.Item) -> bool:
    return isinstance(item, ask.Message) and item.role in ("system", "developer")


def _head(instructions: ask.Text | None, lead: Sequence[ask.Item]) -> Sequence[ask.Item]:
    """What the conversation begins with, as at most one message."""
    texts: list[tuple[ask.Text, ...]] = [(instructions,)] if instructions is not None else []
    texts += [item.parts for item in lead if isinstance(item, ask.Message)]
    if not texts:
        return ()
    parts = [*texts[0]]
    for more in texts[1:]:
        parts += [ask.Text(GAP), *more]
    return (ask.Message("system", tuple(parts)),)


def _remind(items: list[ask.Item], system: ask.Item) -> None:
    """Adds a reminder to the user's words or the result that stand last, else as words of the user's own."""
    assert isinstance(system, ask.Message)
    reminder = (ask.Text(OPENING), *system.parts, ask.Text(CLOSING))
    last = items[-1] if items else None
    if isinstance(last, ask.Result) or (isinstance(last, ask.Message) and last.role == "user"):
        gap = (ask.Text(GAP),) if last.text else ()
        items[-1] = msgspec.structs.replace(last, parts=(*last.parts, *gap, *reminder))
    else:
        items.append(ask.Message("user", reminder))
