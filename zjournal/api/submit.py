"""The desk: takes an Ask, resolves its chain, renders it, makes it a fact, and hands it to the engine.

A request is durable before the engine hears of it. What takes long (reading a chain, rendering, tokenising)
runs in a thread of its own; what the engine answers belongs to running.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from zjournal import ask, errors
from zjournal.api.metrics import Metrics
from zjournal.api.running import Runs
from zjournal.config import ApiKeys
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.journal import events, projections, retention
from zjournal.journal.log import Journal
from zjournal.link import wire
from zjournal.sessions import chain, identity
from zjournal.sessions.follow import follow, recorded_tail
from zjournal.sessions.served import Served

QUEUE_ASKS_MAX = 256  # accepted and not ended
ACCEPTING_S = 0.01  # how often the drain looks at requests that are being accepted
SEED_BITS = 63
LOCAL = "local"


class Turn(msgspec.Struct, frozen=True):
    """An accepted request, running or recorded."""

    response: str
    created: int  # Unix seconds
    model: str  # as told to the client
    raw: bytes  # the body as received
    stored: bool
    tenant: str


class ModelCard(msgspec.Struct, frozen=True):
    """What `/v1/models` tells of the model."""

    id: str
    created: int
    context: int
    aliases: tuple[str, ...]


class Desk:
    """Takes requests. One per server; all its methods belong to the event loop."""

    def __init__(
        self, journal: Journal, runs: Runs, metrics: Metrics, keys: ApiKeys | None, queue_max: int = QUEUE_ASKS_MAX
    ) -> None:
        """Without `keys` everyone is the tenant `local`; else a tenant belongs to a key's name, so keys can rotate."""
        self.metrics = metrics
        self._journal = journal
        self._runs = runs
        self._keys = keys
        names = keys.names if keys is not None else (LOCAL,)
        self._tenants = {name: journal.tenant(name).id for name in names}
        self._queue_max = queue_max
        self._served: Served | None = None
        self._chains: chain.Chains | None = None
        self._opened: dict[bytes, str] = {}  # sessions that this process opened, by the client's name for them
        self._draining = False
        self._submitting = 0
        # One thread renders: tokenizer and chain caches have one user at a time.
        self._renderer = ThreadPoolExecutor(1, "render")

    # --- what the composition root sets -----------------------------------------------------------------

    def serve(self, served: Served) -> None:
        """Sets the model's API side. Until then requests are refused as loading."""
        self._served = served
        self._chains = chain.Chains(
            self._journal, self._journal.secret, served.tokenizer, served.dialect, served.end_tokens
        )

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
        if self._draining:
            return "draining", 1.0
        if self._runs.broken is not None:
            return "failed", 0.0
        if self._runs.ready is None or self._served is None:
            return "loading", min(self._runs.progress, 0.99)
        return "ready", 1.0

    def tenant_of(self, key: str | None) -> str:
        """The tenant whose key this is. Raises Unauthorized."""
        if self._keys is None:
            return self._tenants[LOCAL]
        if key is None:
            raise errors.Unauthorized("An API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        name = self._keys.name_of(key)
        if name is None:
            raise errors.Unauthorized("The API key is not known.")
        return self._tenants[name]

    def models(self) -> list[ModelCard]:
        """The one model that is served; empty while it loads."""
        if self._served is None:
            return []
        ready = self._runs.ready
        context = ready.context if ready else self._served.context
        return [ModelCard(self._served.id, self._served.created, context, self._served.aliases)]

    def item_id(self, response: str, index: int, prefix: str) -> str:
        """The id of an output item; the same whenever it is derived again."""
        return identity.item_id(self._journal.secret, response, index, prefix)

    async def submit(self, request: ask.Ask, raw: bytes, tenant: str, encoder: int) -> Turn:
        """Accepts a request: durable, then told to the engine. Raises a Fault when it cannot be taken.

        `encoder` is the version of the protocol's encoder that will tell the response.
        """
        served, ready = self._check_ready()
        if not served.accepts(request.model):
            raise errors.ModelNotFound(f"The model '{request.model}' does not exist here.", param="model")
        if len(self._runs) + self._submitting >= self._queue_max:
            raise errors.Overloaded(f"{self._queue_max} requests are waiting or running; try again later.")
        self._submitting += 1
        try:
            return await self._accept(request, raw, tenant, encoder, served, ready)
        finally:
            self._submitting -= 1

    async def follow(self, turn: Turn) -> AsyncIterator[ask.Step]:
        """The steps of a response from its beginning; waits for those of a running one."""
        if self._served is None:
            raise errors.Unavailable("The model is loading.")
        tail = self._runs.tail(turn.response)
        if tail is None:
            tail = recorded_tail(await asyncio.to_thread(self._journal.read_response, turn.response))
        async for step in follow(tail, self._runs.reader(chain.stop_strings(turn.raw))):
            yield step

    def running(self, turn: Turn) -> bool:
        """Whether the response has not ended yet."""
        return turn.response in self._runs

    async def recorded(self, response: str, tenant: str) -> Turn:
        """A stored response of this tenant. Raises NotFound for any other."""
        row = await asyncio.to_thread(self._journal.turn, response)
        if row is None or not chain.visible(row, tenant):
            raise errors.NotFound(f"Response with id '{response}' not found.", param="response_id")
        raw = await asyncio.to_thread(self._raw, row)
        model = self._served.id if self._served is not None else row.model
        return Turn(response, row.created, model, raw, True, tenant)

    def _raw(self, row: projections.Turn) -> bytes:
        (accepted,) = self._journal.read(after=row.accepted_seq - 1, limit=1)
        assert isinstance(accepted.event, events.RequestAccepted), accepted
        return self._journal.content(row.tenant, accepted.event.raw)

    async def delete(self, response: str, tenant: str) -> None:
        """Deletes a stored response: its id is gone at once, its content unless a living turn needs it."""
        if response in self._runs:
            raise errors.BadRequest(f"Response '{response}' is still running.", param="response_id")
        deleting = retention.delete(self._journal, tenant, response)
        if not await asyncio.shield(asyncio.wrap_future(deleting)):
            raise errors.NotFound(f"Response with id '{response}' not found.", param="response_id")
        if self._chains is not None:
            self._chains.forget(response)

    def cancel(self, turn: Turn) -> None:
        """The client is gone: the engine stops working for it."""
        self._runs.cancel(turn.response)

    # --- accepting --------------------------------------------------------------------------------------

    def _check_ready(self) -> tuple[Served, wire.Ready]:
        status, progress = self.status()
        if status == "ready":
            assert self._served is not None and self._runs.ready is not None
            return self._served, self._runs.ready
        broken = self._runs.broken
        reason = {
            "loading": f"The model is loading ({progress:.0%}).",
            "draining": "The server is shutting down.",
            "failed": f"The engine could not start: {broken.message if broken else ''}",
        }[status]
        raise errors.Unavailable(reason)

    async def _accept(
        self, request: ask.Ask, raw: bytes, tenant: str, encoder: int, served: Served, ready: wire.Ready
    ) -> Turn:
        response = identity.response_id(request.protocol, secrets.token_bytes(16))
        loop = asyncio.get_running_loop()
        place, prompt = await loop.run_in_executor(self._renderer, self._render, request, tenant, served)
        max_tokens = _output_limit(request, len(prompt.ids), ready)
        facts, accepted = self._facts(request, raw, tenant, encoder, response, place, prompt, max_tokens)
        try:
            await asyncio.shield(asyncio.wrap_future(self._journal.append(facts)))
        except asyncio.CancelledError:
            self._abandon(accepted)
            raise
        self._runs.begin(
            accepted,
            len(prompt.ids),
            request.stop,
            wire.Generate(
                request=response,
                tokens=wire.pack_ids(prompt.ids),
                namespace=accepted.namespace,
                sampling=wire.Sampling(accepted.temperature, accepted.top_p, accepted.top_k, accepted.seed),
                max_tokens=max_tokens,
                end_tokens=tuple(sorted(served.end_tokens)),
                stop=tuple(text.encode() for text in request.stop),
            ),
        )
        return Turn(response, accepted.created, served.id, raw, request.store, tenant)

    def _render(self, request: ask.Ask, tenant: str, served: Served) -> tuple[chain.Place, Prompt]:
        assert self._chains is not None
        place = self._chains.place(request, tenant)
        whole = msgspec.structs.replace(request, items=place.items)
        return place, assemble(whole, served.template, served.tokenizer, served.dialect)

    def _facts(
        self,
        request: ask.Ask,
        raw: bytes,
        tenant: str,
        encoder: int,
        response: str,
        place: chain.Place,
        prompt: Prompt,
        max_tokens: int,
    ) -> tuple[list[events.Fact], events.RequestAccepted]:
        """The transaction that accepts a request."""
        ready = self._runs.ready
        assert self._served is not None and ready is not None
        items = chain.encode_items(request.items)
        tokens = wire.pack_ids(prompt.ids)
        spans = msgspec.msgpack.encode(prompt.spans)
        session = place.session or self._opened.get(place.session_key, "")
        opening = not session
        if opening:
            session = identity.session_id(secrets.token_bytes(8))
            if place.session_key:  # the same client's next request may be here before this one is committed
                self._opened[place.session_key] = session
        seed = request.sampling.seed
        accepted = events.RequestAccepted(
            tenant=tenant,
            response=response,
            session=session,
            parent=place.parent,
            previous=request.previous or "",
            protocol=request.protocol,
            model=request.model,
            namespace=identity.namespace(ready.fingerprint, tenant),
            stored=request.store,
            stream=request.stream,
            created=int(time.time()),
            raw=self._journal.digest(tenant, raw),
            items=self._journal.digest(tenant, items),
            history=place.history,
            dialect=self._served.dialect.name,
            encoder=encoder,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=secrets.randbits(SEED_BITS) if seed is None else seed,
            max_tokens=max_tokens,
            stop=len(request.stop),
        )
        rendered = events.PromptRendered(
            tenant=tenant,
            response=response,
            count=len(prompt.ids),
            tokens=self._journal.digest(tenant, tokens),
            spans=self._journal.digest(tenant, spans),
        )
        facts = [events.Fact(accepted, contents=(raw, items)), events.Fact(rendered, contents=(tokens, spans))]
        if opening:
            opened = events.SessionOpened(tenant=tenant, session=session, key=place.session_key)
            facts.insert(0, events.Fact(opened))
        return facts, accepted

    def _abandon(self, accepted: events.RequestAccepted) -> None:
        """The client left while its request was being written down: it ends without having begun."""
        ended = events.ResponseFinished(
            tenant=accepted.tenant,
            response=accepted.response,
            reason="cancelled",
            output=0,
            queue_us=0,
            prefill_us=0,
            decode_us=0,
        )
        self._journal.append([events.Fact(ended)])


def _output_limit(request: ask.Ask, prompt: int, ready: wire.Ready) -> int:
    """How many tokens may be sampled: what was asked, else what fits. Raises ContextTooLong; never cuts."""
    field = "messages" if request.protocol == "chat" else "input"
    limit = min(ready.context, ready.kv_tokens)
    if prompt + 1 > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens; this model's context window holds {limit}, the answer included.",
            param=field,
        )
    if request.max_tokens is None:
        return limit - prompt
    if prompt + request.max_tokens > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens and up to {request.max_tokens} were asked for; "
            f"this model's context window holds {limit}.",
            param=field,
        )
    return request.max_tokens
