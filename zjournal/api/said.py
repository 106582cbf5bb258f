"""What the engine says of a response, as the facts that the journal keeps of it. Pure."""

from __future__ import annotations

from zjournal import ask
from zjournal.journal import events
from zjournal.link import wire
from zjournal.sessions.follow import Tail


def matched(tenant: str, message: wire.Matched) -> events.CacheMatched:
    """The request was admitted."""
    return events.CacheMatched(
        tenant=tenant,
        response=message.request,
        tier=message.tier,
        cached=message.cached,
        prompt=message.prompt,
        reason=message.reason,
        nearest=message.nearest,
        restored=message.restored,
        restored_host=message.restored_host,
        estimate_us=message.estimate_us,
        recompute_us=message.recompute_us,
    )


def looped(tenant: str, message: wire.Looped) -> events.LoopMet:
    """The guard met a loop."""
    return events.LoopMet(
        tenant=tenant,
        response=message.request,
        kind=message.kind,
        action=message.action,
        at=message.at,
        begin=message.begin,
        period=message.period,
        times=message.times,
    )


def of_disk(tenant: str, message: wire.Restored | wire.NearMiss) -> events.AnyEvent:
    """The fact that tells what the disk gave a request, or nearly gave."""
    if isinstance(message, wire.NearMiss):
        return events.CacheNearlyMet(
            tenant=tenant,
            response=message.request,
            nearest=message.nearest,
            position=message.position,
            tokens=message.tokens,
        )
    return events.CacheRestored(
        tenant=tenant,
        response=message.request,
        tier=message.tier,
        tokens=message.tokens,
        file_bytes=message.file_bytes,
        end=message.end,
        space=message.space,
        read_us=message.read_us,
        estimate_us=message.estimate_us,
        recompute_us=message.recompute_us,
    )


def waited(accepted: events.RequestAccepted, waiting: ask.Waiting) -> events.Fact:
    """Its clients hear that it lives."""
    return events.Fact(
        events.ResponseWaited(
            tenant=accepted.tenant,
            response=accepted.response,
            position=waiting.position,
            done=waiting.done,
            queued=waiting.queued,
        )
    )


def sampled(accepted: events.RequestAccepted, tail: Tail, position: int) -> list[events.Fact]:
    """The fact that tells the output from `position` on; none where there is no more."""
    ids = tail.ids[position:]
    if not ids:
        return []
    event = events.TokensSampled(tenant=accepted.tenant, response=accepted.response, position=position, count=len(ids))
    return [events.Fact(event, payload=wire.pack_sampled(ids, tail.logprobs[position:]))]
