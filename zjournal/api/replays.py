"""Replays as they run: recorded requests are asked again, one by one, of the engine that serves.

A turn of a replay is a response like any other: accepted before it is asked, journaled as it is sampled, counted in
`/metrics`, and in the background of whatever clients ask. It meets no KV but that of its own replay, so that the answer
is computed anew. The probes that measure a difference are no responses: they leave no token in the journal.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from concurrent.futures import Future

from zjournal import ask, errors
from zjournal.api.running import Runs
from zjournal.journal import events
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.journal.projections import Turn
from zjournal.link import wire
from zjournal.link.client import EngineClient, Listener
from zjournal.sessions import fences, identity, replay, sampling
from zjournal.sessions.follow import Tail
from zjournal.sessions.reading import Decoders, Terms
from zjournal.sessions.served import Served
from zjournal.sessions.vocabulary import Vocabulary

ALTERNATIVES = 20  # asked of a probe
FORCED = 1e9  # bias that leaves a token no rival
CANCEL_S_MAX = 5.0  # for a cancelled turn to be written down
PROBE_S_MAX = 600.0  # it may have to compute its prompt behind everybody else's

log = logging.getLogger("zjournal.api")


class Probes:
    """Stands between the engine and who listens to it, and keeps what the engine says of probes to itself."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._waiting: dict[str, asyncio.Future[tuple[int, bytes]]] = {}

    async def ask(self, engine: EngineClient, message: wire.Generate) -> tuple[int, bytes]:
        """The first token that the engine samples, and its logprobs as in wire.Tokens. Raises Unavailable."""
        assert message.max_tokens == 1, message
        done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[message.request] = done
        engine.generate(message)
        try:
            async with asyncio.timeout(PROBE_S_MAX):
                return await done
        except TimeoutError:
            raise errors.Unavailable("the engine did not answer a probe") from None
        finally:
            del self._waiting[message.request]
            if done.cancelled():  # whoever waits for a future and is cancelled takes it along
                engine.cancel(message.request)
            engine.forget((message.request,))

    def engine_loading(self, progress: float) -> None:
        self._listener.engine_loading(progress)

    def engine_ready(self, ready: wire.Ready, pid: int) -> None:
        self._listener.engine_ready(ready, pid)

    def engine_broken(self, broken: wire.Broken) -> None:
        self._listener.engine_broken(broken)

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None:
        for request in self._waiting.keys() & set(running):
            self._failed(request, "the engine stopped while it was asked")
        responses = tuple(request for request in running if not request.startswith(PROBE))
        self._listener.engine_crashed(pid, status, responses)

    def engine_stopped(self, pid: int, status: int) -> None:
        self._listener.engine_stopped(pid, status)

    def engine_said(self, message: wire.FromEngine) -> None:
        request = getattr(message, "request", "")
        if not request.startswith(PROBE) or isinstance(message, wire.CacheChanged | wire.BackedUp):
            self._listener.engine_said(message)
            return
        done = self._waiting.get(request)
        match message:
            case wire.Tokens() if done is not None and not done.done():
                done.set_result((wire.unpack_ids(message.ids)[0], message.logprobs))
            case wire.Failed():
                self._failed(request, message.message)
            case wire.Finished():
                self._failed(request, "the engine gave it up")  # nothing happens if it has said its token

    def _failed(self, request: str, reason: str) -> None:
        done = self._waiting.get(request)
        if done is not None and not done.done():
            done.set_exception(errors.Unavailable(reason))


PROBE = "probe_"  # what the requests of probes begin with; no response's id does


class Replays:
    """Runs replays, one at a time. All its methods belong to the event loop."""

    def __init__(self, journal: Journal, runs: Runs, probes: Probes, model: str, decoders: Decoders) -> None:
        """`model` is the path of what is served."""
        self._journal = journal
        self._decoders = decoders
        self._runs = runs
        self._probes = probes
        self._model = model
        self._served: tuple[Served, EngineClient] | None = None
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._stopping = False

    def serve(self, served: Served, engine: EngineClient) -> None:
        """Sets the model's API side and the engine. Until then replays are refused as loading."""
        self._served = served, engine

    def stop(self) -> None:
        """Gives up what runs, and takes no more."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    async def run(self, arguments: replay.Replay) -> replay.Replayed:
        """Asks a session's requests again and compares. Cancelling it gives up the turn that is asked.

        Raises NotFound and BadRequest as replay.chosen; Unavailable while there is no engine or the server stops.
        """
        task = asyncio.ensure_future(self._waited(arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._stopping:
                raise errors.Unavailable("The server is shutting down; the replay was given up.") from None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    async def _waited(self, arguments: replay.Replay) -> replay.Replayed:
        async with self._one:
            if self._stopping:
                raise errors.Unavailable("The server is shutting down.")
            if arguments.model and arguments.model != self._model:
                raise errors.BadRequest(
                    f"the server that owns this journal serves {self._model}, not {arguments.model}: stop it, or "
                    "replay on what it serves, without --model",
                    param="model",
                )
            if arguments.settings:
                given = ", ".join(arguments.settings)
                raise errors.BadRequest(
                    f"the engine of the server that owns this journal runs already: leave out {given}"
                )
            if self._served is None or self._runs.ready is None:
                raise errors.Unavailable("The model is loading.")
            turns = await asyncio.to_thread(replay.chosen, self._journal, arguments.session, arguments.response)
            tenant = turns[0][0].tenant
            one = _Replay(self._journal, self._runs, self._probes, *self._served, arguments, tenant, self._decoders)
            try:
                return await one.run(turns)
            finally:
                one.forget()


class _Replay:
    """One replay, from its first turn to the measure of the first difference."""

    def __init__(
        self,
        journal: Journal,
        runs: Runs,
        probes: Probes,
        served: Served,
        engine: EngineClient,
        arguments: replay.Replay,
        tenant: str,
        decoders: Decoders,
    ) -> None:
        assert runs.ready is not None
        self._journal = journal
        self._runs = runs
        self._probes = probes
        self._served = served
        self._engine = engine
        self._arguments = arguments
        self._session = identity.session_id(secrets.token_bytes(8))
        self._vocabulary = journal.digest(SERVER_TENANT, served.vocabulary)
        self._template = journal.digest(SERVER_TENANT, served.template.source.encode())
        self._words = Vocabulary(served.vocabulary)
        self._recordings = replay.Recordings(journal, self._vocabulary, self._words, decoders)
        self._fingerprint = runs.ready.fingerprint
        self._parts = replay.parts_now(runs.ready, self._vocabulary, self._template)
        self._namespace = identity.namespace(self._fingerprint, tenant)
        self._salt = identity.salt(journal.secret, tenant, self._session)
        self._kv_namespace = identity.kv_namespace(self._namespace, self._salt)
        self._asked: list[str] = []  # responses of this replay
        self._first: tuple[replay.Asked, replay.Difference] | None = None
        self._told: tuple[replay.Part, ...] = ()

    async def run(self, turns: list[tuple[Turn, str]]) -> replay.Replayed:
        """Asks these turns again, but for those with a reason not to."""
        found = [
            replay.TurnReplayed(response=turn.response, status=replay.SKIPPED, reason=reason, recorded=turn.output)
            if reason
            else await self._turn(turn)
            for turn, reason in turns
        ]
        first = await self._measured()
        return replay.Replayed(
            session=self._arguments.session,
            replay=self._session if self._asked else "",
            model=self._served.id,
            turns=tuple(found),
            first=first,
            parts=self._told,
        )

    def forget(self) -> None:
        """The engine keeps nothing of a replay."""
        self._runs.forget(tuple(self._asked))

    async def _turn(self, turn: Turn) -> replay.TurnReplayed:
        told = functools.partial(replay.TurnReplayed, response=turn.response, recorded=turn.output)
        try:
            asked = await asyncio.to_thread(self._recordings.asked, turn)
            self._check(asked)
            fence, changed = await asyncio.to_thread(self._fence, asked)
            self._journal.check_room()
            place = self._place(turn)
            accepted, tail = await self._ask(asked, place, fence)
        except errors.Fault as fault:
            return told(status=replay.FAILED, reason=fault.message)
        parts = (*replay.parts_that_differ(asked.maker, self._parts, self._fingerprint), *changed)
        names = tuple(part.name for part in parts)
        told = functools.partial(told, replay=place.response, differs=names)
        if not self._told and self._first is None:
            self._told = parts
        equal = replay.equal_tokens(asked.output, tail.ids)
        if isinstance(tail.end, ask.Broke):
            return told(status=replay.FAILED, equal=equal, reason=tail.end.message)
        found = replay.difference(asked.output, tail.ids, self._recordings.words_of(turn), self._words)
        if found is not None and self._first is None:
            self._first, self._told = (asked, found), parts
        compared = events.ReplayCompared(
            tenant=turn.tenant,
            response=accepted.response,
            source=turn.response,
            equal=equal,
            diverged=found is not None,
            differs=names,
        )
        await asyncio.wrap_future(self._journal.append([events.Fact(compared)]))
        return told(status=replay.EQUAL if found is None else replay.DIVERGED, equal=equal)

    def _check(self, asked: replay.Asked) -> None:
        """Raises a Fault when the engine cannot take this turn, or is not the one it was."""
        ready = self._runs.ready
        if ready is None or ready.fingerprint != self._fingerprint:
            raise errors.Unavailable("the engine is gone")
        limit = min(ready.context, ready.kv_tokens)
        if len(asked.ids) + len(asked.output) > limit:
            raise errors.ContextTooLong(
                f"its prompt of {len(asked.ids)} tokens and its answer of {len(asked.output)} do not fit the context "
                f"of {limit}"
            )

    def _fence(self, asked: replay.Asked) -> tuple[wire.Fence | None, tuple[replay.Part, ...]]:
        """The fence of a turn, derived again from its body, and whether it is another one now.

        A turn that had none gets none. Raises BadRequest where there is none to be had any more.
        """
        recorded = asked.accepted.fence
        if not recorded:
            return None, ()
        fence = self._served.fences.of(asked.ask, asked.accepted.begun).fence
        secret = asked.accepted.item_secret or identity.item_secret(self._journal.secret, asked.turn.response)
        return fence, replay.fence_part(recorded, fences.digest(fence, secret))

    def _place(self, turn: Turn) -> replay.Place:
        return replay.Place(
            response=identity.response_id(turn.protocol, secrets.token_bytes(16)),
            session=self._session,
            namespace=self._namespace,
            salt=self._salt,
            created=int(time.time()),
            opening=not self._asked,
            only=self._arguments.response,
        )

    async def _ask(
        self, asked: replay.Asked, place: replay.Place, fence: wire.Fence | None
    ) -> tuple[events.RequestAccepted, Tail]:
        """Writes the request down, asks it, and waits for the end of the answer."""
        tenant = asked.turn.tenant
        record = self._journal.digest(tenant, asked.record) if asked.record else asked.accepted.record
        digest = fences.digest(fence, identity.item_secret(self._journal.secret, place.response))
        accepted = replay.accepted_again(asked, place, record, digest)
        write = functools.partial(replay.write, asked=asked, place=place, accepted=accepted)
        cancelled = await _through(self._journal.run(write))  # what is written down needs an end
        self._asked.append(place.response)
        terms = Terms.of(asked.ask, accepted.begun)
        tail = self._runs.begin(accepted, len(asked.ids), terms, self._generate(asked, accepted, fence))
        try:
            if cancelled:
                raise asyncio.CancelledError
            await _ended(tail)
        except asyncio.CancelledError:
            self._runs.cancel(place.response)
            async with asyncio.timeout(CANCEL_S_MAX):
                await _ended(tail)
            raise
        return accepted, tail

    def _generate(
        self, asked: replay.Asked, accepted: events.RequestAccepted, fence: wire.Fence | None
    ) -> wire.Generate:
        return wire.Generate(
            request=accepted.response,
            session=self._session,
            background=True,
            tokens=wire.pack_ids(asked.ids),
            namespace=self._kv_namespace,
            sampling=sampling.sent(accepted, asked.logit_bias),
            max_tokens=accepted.max_tokens,
            end_tokens=tuple(sorted(self._served.end_tokens)),
            stop=tuple(text.encode() for text in asked.stop),
            fence=fence,
            guard=sampling.guarded(accepted),
        )

    # --- measuring ----------------------------------------------------------------------------------------

    async def _measured(self) -> replay.Difference | None:
        """The first difference with the logprobs of both tokens, as the model that replayed has them."""
        if self._first is None:
            return None
        asked, found = self._first
        tokens = [said.token for said in (found.recorded, found.replayed) if said.token is not None]
        known: dict[int, float] = {}
        try:
            known = await self._probe(asked, found.position, None)
            for token in tokens:
                if token not in known and known and token < len(self._words):
                    known |= await self._probe(asked, found.position, token)
        except errors.Fault as fault:
            log.warning("the difference at token %d could not be measured: %s", found.position, fault.message)
        return replay.measured(found, known)

    async def _probe(self, asked: replay.Asked, position: int, token: int | None) -> dict[int, float]:
        """Logprobs of the tokens that could follow what both answers say: the likeliest, or the one that is asked for.

        Empty if the engine tells none.
        """
        bias = () if token is None else ((token, FORCED),)
        message = wire.Generate(
            request=PROBE + secrets.token_hex(8),
            session=self._session,
            background=True,
            tokens=wire.pack_ids([*asked.ids, *asked.output[:position]]),
            namespace=self._kv_namespace,
            sampling=wire.Sampling(0.0, 1.0, 0, 0, logit_bias=bias, logprobs=ALTERNATIVES if token is None else 0),
            max_tokens=1,
        )
        if self._runs.ready is None:
            raise errors.Unavailable("the engine is gone")
        chosen, logprobs = await self._probes.ask(self._engine, message)
        if not logprobs:
            return {}
        own, others = wire.unpack_logprobs(logprobs)
        return {**dict(others), chosen: own}


async def _through(work: Future[None]) -> bool:
    """Waits for work that cannot be taken back; True if the waiter was cancelled meanwhile."""
    waited = asyncio.wrap_future(work)
    cancelled = False
    while True:
        try:
            await asyncio.shield(waited)
            return cancelled
        except asyncio.CancelledError:
            cancelled = True


async def _ended(tail: Tail) -> None:
    while tail.end is None:
        await tail.wait()
