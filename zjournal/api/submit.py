"""The desk: takes an Ask, has it placed and rendered, makes it a fact, and hands it to the engine.

A request is durable before the engine hears of it. What the engine answers belongs to running.py. The desk is also the
front for what the protocols ask of its rooms: tenants.py, fitting.py, rendering.py, acceptance.py and turns.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec

from zjournal import ask, errors
from zjournal.api import compaction, fitting, limits
from zjournal.api.acceptance import Acceptance, Opened, Submitted, abandoned
from zjournal.api.forgetting import Forgetting
from zjournal.api.metrics import Metrics
from zjournal.api.refusals import Refusals
from zjournal.api.rendering import Placed, Rendering
from zjournal.api.running import Runs
from zjournal.api.sse import Cut
from zjournal.api.tenants import Tenants
from zjournal.api.threads import Threads
from zjournal.api.turns import Turn, Turns, not_found
from zjournal.journal import events, retention
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.journal.transaction import ParentErased
from zjournal.keys import KeyFile
from zjournal.link import wire
from zjournal.sessions import chain, identity
from zjournal.sessions.conversations import Conversations
from zjournal.sessions.diff import Rendered
from zjournal.sessions.fences import Check
from zjournal.sessions.makers import Makers
from zjournal.sessions.reading import Decoders
from zjournal.sessions.served import Served

QUEUE_ASKS_MAX = 256  # accepted and not ended
PLACING_TRIES_MAX = 3
ACCEPTING_S = 0.01  # how often the drain looks at requests that are being accepted

log = logging.getLogger("zjournal.api")


class ModelCard(msgspec.Struct, frozen=True):
    """What `/v1/models` tells of the model."""

    id: str
    created: int
    context: int
    aliases: tuple[str, ...]


class _Loaded(msgspec.Struct, frozen=True):
    """What takes requests for the model that is served."""

    served: Served
    rendering: Rendering
    acceptance: Acceptance


class Desk:
    """Takes requests. One per server; all its methods belong to the event loop."""

    def __init__(
        self,
        journal: Journal,
        runs: Runs,
        metrics: Metrics,
        keys: KeyFile | None,
        decoders: Decoders,
        queue_max: int = QUEUE_ASKS_MAX,
        guard: tuple[int, ...] = (),
        reasoning_replay: str = "auto",
        attribution: bool = False,
    ) -> None:
        """`keys` as for Tenants.

        `decoders` read the items of recorded bodies, by protocol. `guard`: limits as in loops.LIMITS; empty: it is off.
        `attribution`: an attribution line at the head of a system prompt is a part of the prompt.
        """
        self.metrics = metrics
        self.refused = Refusals()
        self._journal = journal
        self._runs = runs
        self._tenants = Tenants(journal, keys)
        self._accepting: Counter[str] = Counter()  # by tenant
        runs.spent = self._tenants.spend
        self._decoders = decoders
        self._queue_max = queue_max
        self._guard = guard
        self._reasoning_replay = reasoning_replay
        self.attribution = attribution
        self._loaded: _Loaded | None = None
        self._makers = Makers(journal)
        self._turns = Turns(journal, runs, self._makers, decoders)
        self.threads = Threads(journal, self._makers)
        self.conversations = Conversations(journal)
        self.conversing: set[tuple[str, str]] = set()  # tenants' conversations that something is being added to
        self._opened = Opened()
        self._draining = False
        self._submitting = 0

    # --- what the composition root sets -----------------------------------------------------------------

    def serve(self, served: Served) -> None:
        """Sets the model's API side. Until then requests are refused as loading."""
        vocabulary = self._journal.digest(SERVER_TENANT, served.vocabulary)
        chains = chain.Chains(
            self._journal,
            self._journal.secret,
            self._makers,
            vocabulary,
            served.model,
            self._decoders,
            self._reasoning_replay != "off",
        )
        rendering = Rendering(served, chains, self._reasoning_replay == "all")
        acceptance = Acceptance(self._journal, served, self._guard, self._reasoning_replay)
        self._loaded = _Loaded(served, rendering, acceptance)
        self._turns.serve(served, vocabulary)
        forgetting = Forgetting(asyncio.get_running_loop(), self._runs, self._opened, rendering)
        self._journal.subscribe(forgetting.hear)

    def drain(self) -> None:
        """Takes no more requests; those that run go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Returns once nothing is being accepted or running."""
        while self._submitting or len(self._runs):
            await self._runs.idle.wait()
            await asyncio.sleep(ACCEPTING_S)

    # --- what the protocols call ------------------------------------------------------------------------

    def status(self) -> tuple[str, float]:
        """loading, ready, draining or failed, and how far the load is (0 to 1)."""
        if self._runs.broken is not None:  # then the server ends, and this is why
            return "failed", 0.0
        if self._draining:
            return "draining", 1.0
        if self._runs.ready is None or self._loaded is None:
            return "loading", min(self._runs.progress, 0.99)
        return "ready", 1.0

    def failure(self) -> str:
        """Why the engine cannot start; "" while it can."""
        return self._runs.broken.message if self._runs.broken is not None else ""

    def tenant_of(self, key: str | None) -> str:
        """The tenant whose key this is. Raises Unauthorized."""
        return self._tenants.of(key)

    def key_name(self, tenant: str) -> str:
        """The name beside the keys of this tenant."""
        return self._tenants.name_of(tenant)

    def allowed(self, tenant: str) -> list[limits.Told]:
        """What the limits of this tenant's keys leave; empty where there are none."""
        return self._tenants.allowed(tenant)

    def models(self) -> list[ModelCard]:
        """The one model that is served; empty while it loads."""
        if self._loaded is None:
            return []
        served, ready = self._loaded.served, self._runs.ready
        return [ModelCard(served.id, served.created, fitting.room(ready) if ready else served.context, served.aliases)]

    def item_id(self, turn: Turn, index: int, prefix: str) -> str:
        """The id of an output item; the same whenever it is derived again, and wherever the turn was imported.

        With the prefix `call` it is that of the answer's call `index`.
        """
        secret = turn.item_secret or identity.item_secret(self._journal.secret, turn.response)
        if prefix == "call":
            return identity.call_id(secret, turn.response, index)
        return identity.item_id(secret, index, prefix)

    async def submit(self, request: ask.Ask, raw: bytes, tenant: str, encoder: int) -> Turn:
        """Accepts a request: durable, then told to the engine. Raises a Fault when it cannot be taken.

        `encoder` is the version of the protocol's encoder that will tell the response.
        """
        loaded, ready = self._check_ready()
        fitting.check_model(request, loaded.served)
        fitting.check_sealed(request, self._journal.secret, tenant)
        if request.choices > self._queue_max:
            message = f"`n` is {request.choices}, and this server makes {self._queue_max} answers at the same time."
            raise errors.BadRequest(message, param="n")
        if len(self._runs) + self._submitting + request.choices > self._queue_max:
            raise errors.Overloaded(f"{self._queue_max} requests are waiting or running; try again later.")
        self._journal.check_room()
        self._admit(tenant)
        self._submitting += request.choices
        self._accepting[tenant] += 1
        try:
            for _ in range(PLACING_TRIES_MAX):
                response, *others = (
                    identity.response_id(request.protocol, secrets.token_bytes(16)) for _ in range(request.choices)
                )
                submitted = Submitted(request, raw, tenant, encoder, response, tuple(others))
                try:
                    return await self._accept(submitted, loaded, ready)
                except ParentErased:
                    continue  # it was deleted after it had been found; now it is not found any more
            raise errors.Unavailable("The conversation is being deleted while it is continued.")
        finally:
            self._submitting -= request.choices
            self._accepting[tenant] -= 1

    async def count(self, request: ask.Ask, tenant: str) -> int:
        """The tokens that the prompt of this request would have, were it submitted now. Nothing is written down.

        It is a request like any other to the limits of the tenant's keys. Raises a Fault as `submit`, but for a prompt
        that is too long only where it is out of all proportion.
        """
        loaded, ready = self._check_ready()
        fitting.check_model(request, loaded.served)
        fitting.check_sealed(request, self._journal.secret, tenant)
        self._admit(tenant, answered=False)
        for _ in range(PLACING_TRIES_MAX):
            try:
                return await loaded.rendering.counted(request, tenant, fitting.room(ready))
            except ParentErased:
                continue
        raise errors.Unavailable("The conversation is being deleted while it is counted.")

    def seal(self, turn: Turn, summary: str) -> str:
        """A summary of a conversation as its client keeps it."""
        return compaction.seal(summary, self._journal.secret, turn.tenant)

    def running(self, turn: Turn) -> bool:
        """Whether the response has not ended yet."""
        return turn.response in self._runs

    def cancel(self, turn: Turn) -> None:
        """The client is gone: the engine stops working for it."""
        self._runs.cancel(turn.response)

    def cut(self, turn: Turn, cut: Cut) -> None:
        """The client did not read and was cut; that becomes a fact."""
        self._runs.reader_cut(turn.tenant, turn.response, cut)

    def hold(self, turn: Turn) -> None:
        """The connection that made a response may continue it although it is not stored, until it is released."""
        if not turn.stored:
            self._runs.hold(turn.response)

    def release(self, responses: Sequence[str]) -> None:
        """They, the oldest first, cannot be continued any more, unless they are stored."""
        self._runs.release(responses)

    async def delete(self, response: str, tenant: str) -> None:
        """Deletes a stored response: its id is gone at once, its content unless a living turn needs it."""
        if response in self._runs:
            raise errors.BadRequest(f"Response '{response}' is still running.", param="response_id")
        deleting = retention.delete(self._journal, tenant, response)
        if not await asyncio.shield(asyncio.wrap_future(deleting)):
            raise not_found(response)

    # --- reading: see turns.py --------------------------------------------------------------------------

    def follow(self, turn: Turn) -> AsyncIterator[ask.Step]:
        """The steps of a response from its beginning; waits for those of a running one."""
        return self._turns.follow(turn)

    async def recorded(self, response: str, tenant: str, local: bool = False) -> Turn:
        """A response of this tenant, stored or `local`. Raises NotFound for any other."""
        return await self._turns.recorded(response, tenant, local)

    async def ancestry(self, turn: Turn) -> list[Turn]:
        """The turns whose items are in this one's prompt by `previous_response_id`, oldest first, itself the last."""
        return await self._turns.ancestry(turn)

    async def compared(self, previous: str, turn: Turn) -> tuple[Rendered, Rendered] | None:
        """The prompts of an earlier turn and of this one, as the journal has them; None if it is not this tenant's."""
        return await self._turns.compared(previous, turn)

    async def same_model(self, previous: str, response: str) -> bool:
        """Whether two turns that are there were made by the same model, so that one can reuse the KV of the other."""
        return await self._turns.same_model(previous, response)

    # --- accepting --------------------------------------------------------------------------------------

    def _check_ready(self) -> tuple[_Loaded, wire.Ready]:
        status, progress = self.status()
        if status == "ready":
            assert self._loaded is not None and self._runs.ready is not None
            return self._loaded, self._runs.ready
        reason = {
            "loading": f"The model is loading ({progress:.0%}).",
            "draining": "The server is shutting down.",
            "failed": f"The engine could not start: {self.failure()}",
        }[status]
        raise errors.Unavailable(reason)

    def _admit(self, tenant: str, answered: bool = True) -> None:
        """Raises RateLimited where the limits of this tenant's keys leave no request, or no answer that it asks for."""
        try:
            self._tenants.enter(tenant, self._runs.count(tenant) + self._accepting[tenant] if answered else None)
        except errors.RateLimited as fault:
            self.metrics.limited(fault.limit)
            raise

    async def _accept(self, submitted: Submitted, loaded: _Loaded, ready: wire.Ready) -> Turn:
        request, tenant = submitted.ask, submitted.tenant
        placed = await loaded.rendering.placed(request, submitted.raw, tenant, fitting.room(ready))
        _, ready = self._check_ready()  # the engine may have died meanwhile, or be another one
        place, prompt = placed.place, placed.prompt
        max_tokens = fitting.output_limit(request, len(prompt.tokens), ready)
        _warn(submitted, placed)
        session, opened = self._opened.of(place)
        facts, choices = loaded.acceptance.facts(submitted, placed, session, max_tokens, ready)
        loaded.rendering.accepted(request, placed, choices[0].record, [one.response for one in choices])
        if opened is None and not place.session:
            facts.insert(0, events.Fact(events.SessionOpened(tenant=tenant, session=session, key=place.session_key)))
        written = self._journal.append_soon(facts, after=opened)
        self._opened.remember(place.session_key, session, written)
        try:
            await written
        except asyncio.CancelledError:
            self._runs.abandon(choices, [abandoned(one) for one in choices], written)
            raise
        first, *others = [self._begin(submitted, placed, loaded, one) for one in choices]
        return msgspec.structs.replace(first, others=tuple(others))

    def _begin(self, submitted: Submitted, placed: Placed, loaded: _Loaded, accepted: events.RequestAccepted) -> Turn:
        """Starts one choice of a request that is durable."""
        request, terms = submitted.ask, placed.terms
        generate = loaded.acceptance.generate(request, placed, accepted)
        check = Check.of(request, placed.fenced)
        tail = self._runs.begin(accepted, len(placed.prompt.tokens), terms, generate, check)
        name, told = accepted.response, loaded.served.id
        return Turn(name, accepted.created, told, submitted.raw, request.store, accepted.tenant, tail, terms)


def _warn(submitted: Submitted, placed: Placed) -> None:
    """Tells the log of what of a request its model is not told, or its fence does not keep."""
    request, response, fenced = submitted.ask, submitted.response, placed.fenced
    if placed.prompt.dropped:
        log.warning("%s: %d bytes of its text have no token and were left out", response, placed.prompt.dropped)
    if fenced.warnings:
        log.warning("%s: its fence leaves out %d keywords of its schemas", response, len(fenced.warnings))
    if request.skipped:
        log.warning("%s: no model is told of %s; they are left out", response, ", ".join(request.skipped))
