"""The desk: takes an Ask, resolves its chain, renders it, makes it a fact, and hands it to the engine.

A request is durable before the engine hears of it. What takes long (reading a chain, rendering, tokenising)
runs in a thread of its own; what the engine answers belongs to running.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from zjournal import ask, errors
from zjournal.api import compaction, limits
from zjournal.api.metrics import Metrics
from zjournal.api.running import Runs
from zjournal.api.sse import Cut
from zjournal.api.threads import Threads
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects import choose, reminders
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.journal import events, projections, retention
from zjournal.journal.log import SERVER_TENANT, Journal, Subscriber
from zjournal.journal.transaction import ParentErased
from zjournal.journal.written import Written
from zjournal.keys import ApiKeys, Limits
from zjournal.link import wire
from zjournal.sessions import chain, fences, identity, sampling
from zjournal.sessions.conversations import Conversations
from zjournal.sessions.diff import Rendered
from zjournal.sessions.fences import Check, Fenced
from zjournal.sessions.follow import Tail, follow, recorded_tail, without_end
from zjournal.sessions.items import orphaned
from zjournal.sessions.makers import Makers
from zjournal.sessions.prompts import Prompts
from zjournal.sessions.reading import Decoders, Model, Models, Terms, begun
from zjournal.sessions.record import pack
from zjournal.sessions.records import Records
from zjournal.sessions.served import Served
from zjournal.sessions.vocabulary import Vocabulary

QUEUE_ASKS_MAX = 256  # accepted and not ended
PLACING_TRIES_MAX = 3
COUNTED_CONTEXTS_MAX = 8  # a prompt that is to be counted may have so many times the tokens that fit
OPENED_MAX = 4096  # sessions opened lately that are remembered
BEGUN_TOKENS_MAX = 64  # of a prompt's end that are looked at for what it has said of the answer
FORGET_TEXTS_S = 10.0  # at least between two times that the tokenizer forgets, for it must read all that goes on anew
ACCEPTING_S = 0.01  # how often the drain looks at requests that are being accepted
SEED_BITS = 63
LOCAL = "local"
_TYPE = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_GONE = (events.ResponseDeleted, events.PayloadErased, events.SessionDeleted)

log = logging.getLogger("zjournal.api")


class Turn(msgspec.Struct, frozen=True):
    """An accepted request, running or recorded."""

    response: str
    created: int  # Unix seconds
    model: str  # as told to the client
    raw: bytes  # the body as received
    stored: bool
    tenant: str
    tail: Tail | None = None  # while it runs, and for who submitted it: its content may be erased at its end
    terms: Terms = Terms()
    maker: Model | None = None  # the model that made it; None: today's
    item_secret: bytes = b""  # of an imported turn


class ModelCard(msgspec.Struct, frozen=True):
    """What `/v1/models` tells of the model."""

    id: str
    created: int
    context: int
    aliases: tuple[str, ...]


class Desk:
    """Takes requests. One per server; all its methods belong to the event loop."""

    def __init__(
        self,
        journal: Journal,
        runs: Runs,
        metrics: Metrics,
        keys: ApiKeys | None,
        decoders: Decoders,
        queue_max: int = QUEUE_ASKS_MAX,
        guard: tuple[int, ...] = (),
        reasoning_replay: str = "auto",
        attribution: bool = False,
    ) -> None:
        """Without `keys` everyone is the tenant `local`; else a tenant belongs to a key's name, so keys can rotate.

        `decoders` read the items of recorded bodies, by protocol. `guard`: limits as in loops.LIMITS; empty: it is off.
        `attribution`: an attribution line at the head of a system prompt is a part of the prompt.
        """
        self.metrics = metrics
        self._journal = journal
        self._runs = runs
        self._keys = keys
        names = keys.names if keys is not None else (LOCAL,)
        self._tenants = {name: journal.tenant(name).id for name in names}
        now = time.monotonic()
        self._allowances = {
            self._tenants[name]: limits.Allowance(allowed, now)
            for name in names
            if keys is not None and (allowed := keys.limits(name)) != Limits()
        }
        self._accepting: Counter[str] = Counter()  # by tenant
        runs.spent = self._spend
        self._decoders = decoders
        self._queue_max = queue_max
        self._guard = guard
        self._reasoning_replay = reasoning_replay
        self.attribution = attribution
        self._served: Served | None = None
        self._models: Models | None = None
        self._chains: chain.Chains | None = None
        self._makers = Makers(journal)
        self.threads = Threads(journal, self._makers)
        self.conversations = Conversations(journal)
        self.conversing: set[str] = set()  # conversations that something is being added to
        self._vocabulary = b""  # digest of today's
        self._words: Vocabulary | None = None  # today's
        # Sessions opened lately and what writes that down, by the client's name for them.
        self._opened: OrderedDict[bytes, tuple[str, Written]] = OrderedDict()
        self._draining = False
        self._submitting = 0
        # One thread renders: tokenizer and chain caches have one user at a time.
        self._renderer = ThreadPoolExecutor(1, "render")
        self._fencer = ThreadPoolExecutor(1, "fence")  # so that who has no tools waits for nobody's schemas
        self._texts_forgotten = -math.inf  # on the loop's clock
        self._forgetting_texts: asyncio.TimerHandle | None = None

    # --- what the composition root sets -----------------------------------------------------------------

    def serve(self, served: Served) -> None:
        """Sets the model's API side. Until then requests are refused as loading."""
        self._served = served
        self._vocabulary = self._journal.digest(SERVER_TENANT, served.vocabulary)
        self._chains = chain.Chains(
            self._journal,
            self._journal.secret,
            self._makers,
            self._vocabulary,
            served.model,
            self._decoders,
            self._reasoning_replay != "off",
        )
        self._models = Models(self._makers, served.model, self._vocabulary)
        self._words = Vocabulary(served.vocabulary)
        self._journal.subscribe(self._forgetting(asyncio.get_running_loop(), self._chains, served.tokenizer))

    def _forgetting(self, loop: asyncio.AbstractEventLoop, chains: chain.Chains, tokenizer: Tokenizer) -> Subscriber:
        """Who hears of what was deleted, however that came about: it must not live on in memory."""

        def forget(responses: list[str], erased: tuple[str, ...], sessions: list[str]) -> None:
            self._runs.forget(erased)
            for key in [key for key, (session, _) in self._opened.items() if session in sessions]:
                del self._opened[key]
            for response in responses:  # behind whatever is being rendered, which may be reading it right now
                self._renderer.submit(chains.forget, response)
            if erased:
                self._forget_texts(loop, tokenizer)

        def hear(facts: Sequence[events.Recorded]) -> None:
            gone = [fact.event for fact in facts if isinstance(fact.event, _GONE)]
            responses = [event.response for event in gone if not isinstance(event, events.SessionDeleted)]
            sessions = [event.session for event in gone if isinstance(event, events.SessionDeleted)]
            erased = tuple(event.response for event in gone if isinstance(event, events.PayloadErased))
            if gone:
                loop.call_soon_threadsafe(forget, responses, erased, sessions)

        return hear

    def _forget_texts(self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer) -> None:
        """Has the tokenizer forget what it has encoded: now, or once FORGET_TEXTS_S have passed since the last time."""
        if self._forgetting_texts is not None:
            return

        def forget() -> None:
            self._forgetting_texts, self._texts_forgotten = None, loop.time()
            self._renderer.submit(tokenizer.forget)

        self._forgetting_texts = loop.call_at(max(self._texts_forgotten + FORGET_TEXTS_S, loop.time()), forget)

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

    def allowed(self, tenant: str) -> list[limits.Told]:
        """What the limits of this tenant's keys leave; empty where there are none."""
        allowance = self._allowances.get(tenant)
        return [] if allowance is None else allowance.told(time.monotonic())

    def _admit(self, tenant: str) -> None:
        """Raises RateLimited where the limits of this tenant's keys leave no request."""
        allowance = self._allowances.get(tenant)
        if allowance is None:
            return
        try:
            allowance.enter(self._runs.count(tenant) + self._accepting[tenant], time.monotonic())
        except errors.RateLimited as fault:
            self.metrics.limited(fault.limit)
            raise

    def _spend(self, tenant: str, tokens: int) -> None:
        allowance = self._allowances.get(tenant)
        if allowance is not None:
            allowance.spend(tokens, time.monotonic())

    def models(self) -> list[ModelCard]:
        """The one model that is served; empty while it loads."""
        if self._served is None:
            return []
        ready = self._runs.ready
        context = min(ready.context, ready.kv_tokens) if ready else self._served.context
        return [ModelCard(self._served.id, self._served.created, context, self._served.aliases)]

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
        served, ready = self._check_ready()
        self._check_model(request, served)
        self._check_sealed(request, tenant)
        if len(self._runs) + self._submitting >= self._queue_max:
            raise errors.Overloaded(f"{self._queue_max} requests are waiting or running; try again later.")
        self._journal.check_room()
        self._admit(tenant)
        self._submitting += 1
        self._accepting[tenant] += 1
        try:
            for _ in range(PLACING_TRIES_MAX):
                try:
                    return await self._accept(request, raw, tenant, encoder, served, ready)
                except ParentErased:
                    continue  # it was deleted after it had been found; now it is not found any more
            raise errors.Unavailable("The conversation is being deleted while it is continued.")
        finally:
            self._submitting -= 1
            self._accepting[tenant] -= 1

    async def count(self, request: ask.Ask, tenant: str) -> int:
        """The tokens that the prompt of this request would have, were it submitted now. Nothing is written down.

        Raises a Fault as `submit`, but for a prompt that is too long only where it is out of all proportion.
        """
        served, ready = self._check_ready()
        self._check_model(request, served)
        self._check_sealed(request, tenant)
        limit = COUNTED_CONTEXTS_MAX * min(ready.context, ready.kv_tokens)
        for _ in range(PLACING_TRIES_MAX):
            try:
                loop = asyncio.get_running_loop()
                _, prompt = await loop.run_in_executor(self._renderer, self._prompt, request, tenant, served, limit)
                return len(prompt.ids)
            except ParentErased:
                continue
        raise errors.Unavailable("The conversation is being deleted while it is counted.")

    async def compared(self, previous: str, turn: Turn) -> tuple[Rendered, Rendered] | None:
        """The prompts of an earlier turn and of this one, as the journal has them; None if it is not this tenant's."""
        return await asyncio.to_thread(self._compared, previous, turn)

    async def same_model(self, previous: str, response: str) -> bool:
        """Whether two turns that are there were made by the same model, so that one can reuse the KV of the other."""
        rows = await asyncio.to_thread(lambda: [self._journal.turn(name) for name in (previous, response)])
        records = Records(self._journal, self._makers)
        return len({records.accepted(row).namespace for row in rows if row is not None}) <= 1

    def _compared(self, previous: str, turn: Turn) -> tuple[Rendered, Rendered] | None:
        row, now = self._journal.turn(previous), self._journal.turn(turn.response)
        if row is None or now is None or not chain.visible(row, turn.tenant):
            return None
        prompts = Prompts(self._journal)
        try:
            return prompts.of(row), prompts.of(now)
        except (errors.NotFound, errors.JournalFault):
            if any(found is None or found.erased for found in map(self._journal.turn, (previous, turn.response))):
                return None
            raise

    async def follow(self, turn: Turn) -> AsyncIterator[ask.Step]:
        """The steps of a response from its beginning; waits for those of a running one."""
        if self._served is None:
            raise errors.Unavailable("The model is loading.")
        tail = turn.tail
        if tail is None:
            tail = recorded_tail(await asyncio.to_thread(self._journal.read_response, turn.response))
            if tail.end is None:
                row = await asyncio.to_thread(self._journal.turn, turn.response)
                if row is None or not chain.visible(row, turn.tenant):  # it was deleted since it was found
                    raise errors.NotFound(f"Response with id '{turn.response}' not found.", param="response_id")
                raise errors.Unavailable("The end of this response is not written down yet.")
        model = turn.maker or self._served.model
        if model.foreign:
            without_end(tail)
        async for step in follow(tail, model.reader(turn.terms)):
            yield step

    def running(self, turn: Turn) -> bool:
        """Whether the response has not ended yet."""
        return turn.response in self._runs

    async def recorded(self, response: str, tenant: str) -> Turn:
        """A stored response of this tenant. Raises NotFound for any other."""
        row, accepted, raw = await asyncio.to_thread(self._visible, response, tenant)
        tail = self._runs.tail(response)
        if tail is None:
            return await asyncio.to_thread(self._recorded, row, accepted, raw)
        model = self._served.id if self._served is not None else row.model
        terms = Terms.recorded(accepted, lambda: raw, self._decoders)
        return Turn(response, row.created, model, raw, True, tenant, tail, terms, None, accepted.item_secret)

    def _recorded(self, row: projections.Turn, accepted: events.RequestAccepted, raw: bytes) -> Turn:
        """A turn that has ended."""
        maker = self._makers.of(row)
        reads = self._models.of(row, accepted) if self._models is not None else None
        model = maker.model if maker is not None else self._served.id if self._served is not None else row.model
        terms = Terms.recorded(accepted, lambda: raw, self._decoders)
        return Turn(
            row.response, row.created, model, raw, row.stored, row.tenant, None, terms, reads, accepted.item_secret
        )

    async def ancestry(self, turn: Turn) -> list[Turn]:
        """The turns whose items are in this one's prompt by `previous_response_id`, oldest first, itself the last.

        One that was deleted is among them as long as its content is kept for this one.
        """
        return [*await asyncio.to_thread(self._ancestry, turn), turn]

    def _ancestry(self, turn: Turn) -> list[Turn]:
        records = Records(self._journal, self._makers)
        found: list[Turn] = []
        row = self._journal.turn(turn.response)
        while row is not None and (previous := records.accepted(row).previous) and len(found) < chain.CHAIN_TURNS_MAX:
            row = self._journal.turn(previous)
            if row is None or row.erased:
                break
            found.append(self._recorded(row, records.accepted(row), records.body(row)))
        return found[::-1]

    def seal(self, turn: Turn, summary: str) -> str:
        """A summary of a conversation as its client keeps it."""
        return compaction.seal(summary, self._journal.secret, turn.tenant)

    def _visible(self, response: str, tenant: str) -> tuple[projections.Turn, events.RequestAccepted, bytes]:
        """The row, the acceptance and the request body of a turn that this tenant may see. Raises NotFound."""
        missing = errors.NotFound(f"Response with id '{response}' not found.", param="response_id")
        row = self._journal.turn(response)
        if row is None or not chain.visible(row, tenant):
            raise missing
        records = Records(self._journal, self._makers)
        try:
            return row, records.accepted(row), records.body(row)
        except errors.JournalFault:
            now = self._journal.turn(response)
            if now is None or not chain.visible(now, tenant):  # it was deleted between the two reads
                raise missing from None
            raise

    async def delete(self, response: str, tenant: str) -> None:
        """Deletes a stored response: its id is gone at once, its content unless a living turn needs it."""
        if response in self._runs:
            raise errors.BadRequest(f"Response '{response}' is still running.", param="response_id")
        deleting = retention.delete(self._journal, tenant, response)
        if not await asyncio.shield(asyncio.wrap_future(deleting)):
            raise errors.NotFound(f"Response with id '{response}' not found.", param="response_id")

    def cancel(self, turn: Turn) -> None:
        """The client is gone: the engine stops working for it."""
        self._runs.cancel(turn.response)

    def cut(self, turn: Turn, cut: Cut) -> None:
        """The client did not read and was cut; that becomes a fact."""
        self._runs.reader_cut(turn.tenant, turn.response, cut)

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

    def _check_model(self, request: ask.Ask, served: Served) -> None:
        """Raises ModelNotFound, or BadRequest for a token that the model does not have."""
        if not served.accepts(request.model):
            names = ", ".join((served.id, *served.aliases))
            raise errors.ModelNotFound(
                f"The model '{request.model}' does not exist here; what is served goes by {names}.", param="model"
            )
        _check_bias(request, served.tokenizer.vocab_size)

    def _check_sealed(self, request: ask.Ask, tenant: str) -> None:
        """Raises BadRequest for a text that only we can write, and have not written for this tenant."""
        for sealed in request.sealed:
            compaction.genuine(sealed.blob, sealed.path, self._journal.secret, tenant)

    async def _accept(
        self, request: ask.Ask, raw: bytes, tenant: str, encoder: int, served: Served, ready: wire.Ready
    ) -> Turn:
        response = identity.response_id(request.protocol, secrets.token_bytes(16))
        loop = asyncio.get_running_loop()
        limit = min(ready.context, ready.kv_tokens)
        if request.tools or request.format is not None:  # before the long work: a schema that is refused costs no more
            await loop.run_in_executor(self._fencer, served.fences.of, request)
        place, prompt, record, fenced = await loop.run_in_executor(
            self._renderer, self._render, request, raw, tenant, served, limit
        )
        _, ready = self._check_ready()  # the engine may have died meanwhile, or be another one
        max_tokens = _output_limit(request, len(prompt.ids), ready)
        if request.sampling.min_tokens > max_tokens:
            raise errors.BadRequest(
                f"`min_tokens` is {request.sampling.min_tokens}, and there can be {max_tokens}.", param="min_tokens"
            )
        if prompt.dropped:
            log.warning("%s: %d bytes of its text have no token and were left out", response, prompt.dropped)
        if fenced.warnings:
            log.warning("%s: its fence leaves out %d keywords of its schemas", response, len(fenced.warnings))
        if request.skipped:
            log.warning("%s: no model is told of %s; they are left out", response, ", ".join(request.skipped))
        session, opened = self._session(place)
        facts, accepted = self._facts(
            request, record, tenant, encoder, response, place, prompt, fenced, max_tokens, session, ready
        )
        if opened is None and not place.session:
            facts.insert(0, events.Fact(events.SessionOpened(tenant=tenant, session=session, key=place.session_key)))
        written = self._journal.append_soon(facts, after=opened)
        self._remember_session(place.session_key, session, written)
        try:
            await written
        except asyncio.CancelledError:
            self._abandon(accepted, written)
            raise
        terms = Terms.of(request, accepted.begun)
        tail = self._runs.begin(
            accepted,
            len(prompt.ids),
            terms,
            wire.Generate(
                request=response,
                tokens=wire.pack_ids(prompt.ids),
                session=session,
                background=request.background,
                namespace=identity.kv_namespace(accepted.namespace, accepted.salt),
                sampling=sampling.sent(accepted, request.sampling.logit_bias),
                max_tokens=max(max_tokens, 1),
                end_tokens=tuple(sorted(served.end_tokens)),
                stop=tuple(text.encode() for text in request.stop),
                fence=None if request.warm else fenced.fence,
                guard=sampling.guarded(accepted),
            ),
            Check.of(request, fenced),
        )
        return Turn(response, accepted.created, served.id, raw, request.store, tenant, tail, terms)

    def _render(
        self, request: ask.Ask, raw: bytes, tenant: str, served: Served, limit: int
    ) -> tuple[chain.Place, Prompt, bytes, Fenced]:
        """Where the request stands, its prompt, the record of it and its body, and what its answer may be."""
        assert self._words is not None
        place, prompt = self._prompt(request, tenant, served, limit)
        record = pack(raw, prompt.ids, prompt.spans, self._words.decode, place.outputs())
        return place, prompt, record, served.fences.of(request, self._begun(served, prompt))

    def _prompt(self, request: ask.Ask, tenant: str, served: Served, limit: int) -> tuple[chain.Place, Prompt]:
        """Where the request stands, and its prompt; one that is sure to have over `limit` tokens is refused."""
        assert self._chains is not None
        place = self._chains.place(request, tenant)
        _refuse_orphans(place, request)
        whole = reminders.placed(msgspec.structs.replace(request, items=place.items), served.template)
        try:
            return place, self._assembled(whole, served, limit)
        except errors.ContextTooLong as fault:
            told = 0
            if request.protocol == "messages":  # whose clients make a conversation shorter by what is told
                with suppress(errors.ContextTooLong):
                    told = len(self._assembled(whole, served, COUNTED_CONTEXTS_MAX * limit).ids)
            raise errors.ContextTooLong(fault.message, param=_prompt_field(request), prompt=told, limit=limit) from None

    def _assembled(self, whole: ask.Ask, served: Served, limit: int) -> Prompt:
        kept = self._reasoning_replay == "all"
        return assemble(whole, served.template, served.tokenizer, served.dialect, limit, kept)

    def _session(self, place: chain.Place) -> tuple[str, Written | None]:
        """The id of a request's session, and the append that opens it if the journal did not have it yet."""
        if place.session:
            return place.session, None
        # The request of the same client that came just before may not have been committed when this one was placed.
        session, written = self._opened.get(place.session_key, ("", None))
        if written is not None and not (written.done() and written.exception()):
            return session, written
        return identity.session_id(secrets.token_bytes(8)), None

    def _remember_session(self, key: bytes, session: str, written: Written) -> None:
        if key and self._opened.get(key, ("", None))[0] != session:
            self._opened[key] = (session, written)
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)

    def _facts(
        self,
        request: ask.Ask,
        record: bytes,
        tenant: str,
        encoder: int,
        response: str,
        place: chain.Place,
        prompt: Prompt,
        fenced: Fenced,
        max_tokens: int,
        session: str,
        ready: wire.Ready,
    ) -> tuple[list[events.Fact], events.RequestAccepted]:
        """The facts that accept a request."""
        assert self._served is not None and self._chains is not None
        client = msgspec.msgpack.encode(request.client) if request.client else b""
        accepted = events.RequestAccepted(
            tenant=tenant,
            response=response,
            session=session,
            parent=place.parent,
            previous=request.previous or "",
            protocol=request.protocol,
            model=request.model,
            namespace=identity.namespace(ready.fingerprint, tenant),
            salt=identity.salt(self._journal.secret, tenant, request.cache_salt),
            stored=request.store,
            stream=request.stream,
            created=int(time.time()),
            record=self._journal.digest(tenant, record),
            client=self._journal.digest(tenant, client) if client else b"",
            history=place.history,
            dialect=choose.told(self._served.dialect),
            encoder=encoder,
            max_tokens=max_tokens,
            stop=len(request.stop),
            tools=len(Terms.of(request, "").tools),
            reasoning_replay=self._reasoning_replay,
            restored=place.replayed.restored,
            rewritten=len(prompt.rewritten),
            forks=place.replayed.forks,
            begun=self._begun(self._served, prompt),
            tagged=Terms.of(request, "").tagged,
            guard=self._guard,
            fence=fences.digest(fenced.fence, identity.item_secret(self._journal.secret, response)),
            skipped=tuple(map(_type_told, request.skipped)),
            ignored=request.ignored,
            loosened=len(fenced.warnings),
            **sampling.recorded(request.sampling, secrets.randbits(SEED_BITS)),
        )
        rendered = events.PromptRendered(
            tenant=tenant, response=response, count=len(prompt.ids), dropped=prompt.dropped
        )
        self._chains.accepted(place, accepted.record)
        warnings = "\n".join(fenced.warnings).encode("utf-8", "backslashreplace")
        facts = [
            events.Fact(accepted, warnings, contents=(record, client) if client else (record,), base=place.base),
            *self._results_seen(place, accepted),
            events.Fact(rendered),
        ]
        return facts, accepted

    def _begun(self, served: Served, prompt: Prompt) -> str:
        """What the prompt has already said of the answer, by what the template wrote at its end."""
        assert self._words is not None
        end = prompt.spans[-1] if prompt.spans else None
        if end is None or end.path:
            return ""
        ids = prompt.ids[end.start : end.end][-BEGUN_TOKENS_MAX:]
        return begun(served.dialect, self._words.decode(ids).decode("utf-8", "replace"))

    def _results_seen(self, place: chain.Place, accepted: events.RequestAccepted) -> list[events.Fact]:
        """The fact that names the calls whose results this request brought; none if it brought none."""
        secret, tenant = self._journal.secret, accepted.tenant
        results = [item for item in place.new if isinstance(item, ask.Result)]
        if not results:
            return []
        calls = tuple(identity.call_key(secret, tenant, result.call_id) for result in results)
        return [events.Fact(events.ToolResultSeen(tenant=tenant, response=accepted.response, calls=calls))]

    def _abandon(self, accepted: events.RequestAccepted, written: Written) -> None:
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
        self._journal.append([events.Fact(ended)], after=written)


def _type_told(kind: str) -> str:
    """A type as a fact may name it for ever: it is the client's word, so only what looks like a type is kept."""
    return kind if _TYPE.fullmatch(kind) else "other"


def _refuse_orphans(place: chain.Place, request: ask.Ask) -> None:
    """Raises BadRequest for the result of a call that is nowhere in the conversation, in protocols that say so."""
    continues = request.previous is not None
    orphan = orphaned(place.items, place.new if continues else request.items, continues)
    if orphan is not None and request.protocol == "messages":
        raise errors.BadRequest(
            f"Unexpected `tool_use_id` in a `tool_result` block: {orphan.call_id}. There is no `tool_use` block of it.",
            param=f"{orphan.path}.tool_use_id",
        )
    if orphan is not None:
        raise errors.BadRequest(
            f"No tool call found for function call output with call_id {orphan.call_id}.",
            param=f"{orphan.path}.call_id",
        )


def _check_bias(request: ask.Ask, vocab_size: int) -> None:
    """Raises BadRequest for a bias of a token that the model does not have."""
    for token, _ in request.sampling.logit_bias:
        if token >= vocab_size:
            raise errors.BadRequest(
                f"`logit_bias` names token {token}; this model's tokens are 0 to {vocab_size - 1}.",
                param=f"logit_bias.{token}",
            )


def _prompt_field(request: ask.Ask) -> str:
    """Where the prompt stands in the client's body."""
    return "input" if request.protocol == "responses" else "messages"


def _output_limit(request: ask.Ask, prompt: int, ready: wire.Ready) -> int:
    """How many tokens may be sampled: what was asked, else what fits. Raises ContextTooLong; never cuts."""
    field = _prompt_field(request)
    limit = min(ready.context, ready.kv_tokens)
    place = "model's context window" if ready.context <= ready.kv_tokens else "server's KV memory (`kv_memory`)"
    if prompt + 1 > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens; this {place} holds {limit}, the answer included.",
            param=field,
            prompt=prompt,
            limit=limit,
        )
    if request.warm:
        return 0
    if request.max_tokens is None:
        return limit - prompt
    if prompt + request.max_tokens > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens and up to {request.max_tokens} were asked for; "
            f"this {place} holds {limit}.",
            param=field,
            prompt=prompt,
            asked=request.max_tokens,
            limit=limit,
        )
    return request.max_tokens
