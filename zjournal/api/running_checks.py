"""The results of a running response, looked at beside the event loop: its whole calls, and its answer.

A call becomes a fact once it was looked at, and calls become facts in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from zjournal.api.running_one import ANSWER, Running
from zjournal.journal import events
from zjournal.sessions import identity

UNCHECKED = "it was not checked"

log = logging.getLogger("zjournal.api")

Then = Callable[[Running], None]  # hears that something was found, of a response that goes on


def look(running: Running, then: Then) -> None:
    """Has calls that are whole looked at."""
    if running.looked == len(running.whole):
        return
    check = running.check
    for ended in running.whole[running.looked :]:
        if check is not None and not ended.fault and check.concerns(running.deltas, ended.index):
            _beside(running, ended.index, partial(check.call, tuple(running.deltas), ended.index), then)
    running.looked = len(running.whole)


def look_at_answer(running: Running, then: Then) -> None:
    """Has the text of the answer looked at, where the request gave a format for it."""
    check = running.check
    if check is not None and check.format is not None:
        _beside(running, ANSWER, partial(check.answer, tuple(running.deltas)), then)


def _beside(running: Running, index: int, work: Callable[[], str], then: Then) -> None:
    """Looks at a call or the answer in a thread: a client's schema or grammar must hold up nobody else."""

    def done(found: asyncio.Future[str]) -> None:
        running.looking.discard(index)
        if running.ending or found.cancelled():
            return
        error = found.exception()
        if error is not None:
            log.error("%s: a result could not be checked", running.accepted.response, exc_info=error)
        running.wrong[index] = UNCHECKED if error is not None else found.result()
        then(running)

    running.looking.add(index)
    asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(done)


def called(running: Running, secret: bytes) -> list[events.Fact]:
    """The facts of the calls that are whole and are no facts yet; what is wrong with one is its fact's payload.

    `secret` is the journal's, which keys of calls are made of.
    """
    tenant, response = running.accepted.tenant, running.accepted.response
    facts = []
    whole = running.whole if running.ending else running.whole[: running.told]
    for ended in whole[running.calls :]:
        key = identity.call_key(secret, tenant, running.call_id(ended.index))
        event = events.ToolCalled(tenant=tenant, response=response, call=key, index=ended.index)
        unknown = UNCHECKED if ended.index in running.looking else ""  # it ends without having been looked at
        wrong = ended.fault or running.wrong.get(ended.index, unknown)
        facts.append(events.Fact(event, payload=wrong.encode("utf-8", "backslashreplace")))
    return facts
