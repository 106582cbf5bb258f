"""Facts for tests: a turn's life in a few words, and a journal with a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from zjournal.journal.events import (
    CacheMatched,
    Fact,
    PromptRendered,
    RequestAccepted,
    ResponseFailed,
    ResponseFinished,
    SessionOpened,
    TokensSampled,
)
from zjournal.journal.log import Journal

START_US = 1_700_000_000_000_000


def ticking(step_us: int = 1_000) -> Callable[[], int]:
    """A clock that goes on by one step with each look."""
    times = itertools.count(START_US, step_us)
    return lambda: next(times)


def open_journal(data_dir: Path, tenant: str = "local") -> Journal:
    """A journal with one tenant."""
    journal = Journal.open(data_dir, clock=ticking())
    journal.tenant(tenant)
    return journal


def session(name: str, key: bytes = b"", tenant: str = "local") -> Fact:
    return Fact(SessionOpened(tenant=tenant, session=name, key=key))


def accepted(
    journal: Journal,
    response: str,
    *,
    session: str = "s1",
    parent: str = "",
    stored: bool = True,
    tenant: str = "local",
    record: bytes | None = None,
    base: bytes = b"",
) -> list[Fact]:
    """RequestAccepted and PromptRendered. Each turn has a record of its own unless it says otherwise."""
    record = b"the record of " + response.encode() if record is None else record
    request = RequestAccepted(
        tenant=tenant,
        response=response,
        session=session,
        parent=parent,
        protocol="responses",
        model="smollm2",
        namespace="n",
        stored=stored,
        stream=True,
        created=START_US // 1_000_000,
        record=journal.digest(tenant, record),
        dialect="chatml.1",
        encoder=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=7,
        max_tokens=100,
    )
    rendered = PromptRendered(tenant=tenant, response=response, count=4)
    return [Fact(request, contents=(record,), base=base), Fact(rendered)]


def matched(response: str, cached: int = 3, tenant: str = "local") -> Fact:
    return Fact(CacheMatched(tenant=tenant, response=response, tier="device", cached=cached, prompt=4))


def sampled(response: str, position: int, count: int = 1, tenant: str = "local") -> Fact:
    event = TokensSampled(tenant=tenant, response=response, position=position, count=count)
    return Fact(event, payload=b"".join((1000 + position + k).to_bytes(4, "little") for k in range(count)))


def finished(response: str, reason: str = "stop", output: int = 2, history: bytes = b"", tenant: str = "local") -> Fact:
    return Fact(
        ResponseFinished(
            tenant=tenant,
            response=response,
            reason=reason,
            output=output,
            history=history,
            queue_us=10,
            prefill_us=200,
            decode_us=3_000,
        )
    )


def failed(response: str, tenant: str = "local") -> Fact:
    return Fact(ResponseFailed(tenant=tenant, response=response, code="engine_error", message="It died."))


def whole_turn(journal: Journal, response: str, **more: object) -> list[Fact]:
    """A turn that ran to its end with two tokens."""
    begin = accepted(journal, response, **more)  # type: ignore[arg-type]
    tenant = begin[0].event.tenant
    middle = [matched(response, tenant=tenant), sampled(response, 0, 2, tenant=tenant)]
    return [*begin, *middle, finished(response, history=b"h:" + response.encode(), tenant=tenant)]
