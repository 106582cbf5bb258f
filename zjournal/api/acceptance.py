"""What is written down of a request that is accepted, and what the engine is told of it."""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection

import msgspec

from zjournal.api.rendering import Placed
from zjournal.ask import Ask, Result
from zjournal.dialects import choose
from zjournal.journal import events
from zjournal.journal.log import Journal
from zjournal.journal.written import Written
from zjournal.link import wire
from zjournal.sessions import chain, fences, identity, sampling
from zjournal.sessions.served import Served

OPENED_MAX = 4096  # sessions opened lately that are remembered
SEED_BITS = 63
_TYPE = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class Submitted(msgspec.Struct, frozen=True):
    """A request as it was submitted."""

    ask: Ask
    raw: bytes  # the body as received
    tenant: str
    encoder: int  # version of the protocol's encoder that will tell the response
    response: str  # its id
    others: tuple[str, ...] = ()  # of its further choices


class Acceptance:
    """Makes the facts of requests for the model that is served."""

    def __init__(self, journal: Journal, served: Served, guard: tuple[int, ...], reasoning_replay: str) -> None:
        self._journal = journal
        self._dialect = choose.told(served.dialect)
        self._end_tokens = tuple(sorted(served.end_tokens))
        self._guard = guard
        self._reasoning_replay = reasoning_replay

    def facts(
        self, submitted: Submitted, placed: Placed, session: str, max_tokens: int, ready: wire.Ready
    ) -> tuple[list[events.Fact], tuple[events.RequestAccepted, ...]]:
        """The facts that accept a request, and of them, without its contents, the acceptance of each choice."""
        request, tenant, response = submitted.ask, submitted.tenant, submitted.response
        place, prompt, fenced = placed.place, placed.prompt, placed.fenced
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
            record=self._journal.digest(tenant, placed.record),
            client=self._journal.digest(tenant, client) if client else b"",
            history=place.history,
            dialect=self._dialect,
            encoder=submitted.encoder,
            max_tokens=max_tokens,
            stop=len(request.stop),
            tools=len(placed.terms.tools),
            reasoning_replay=self._reasoning_replay,
            restored=place.replayed.restored,
            rewritten=len(prompt.rewritten),
            forks=place.replayed.forks,
            begun=placed.terms.begun,
            tagged=placed.terms.tagged,
            guard=self._guard,
            fence=fences.digest(fenced.fence, identity.item_secret(self._journal.secret, response)),
            skipped=tuple(map(_type_told, request.skipped)),
            ignored=request.ignored,
            loosened=len(fenced.warnings),
            nameless=request.nameless,
            **sampling.recorded(request.sampling, secrets.randbits(SEED_BITS)),
        )
        choices = (accepted, *(self._choice(accepted, *one, fenced) for one in enumerate(submitted.others, 1)))
        warnings = "\n".join(fenced.warnings).encode("utf-8", "backslashreplace")
        contents = (placed.record, client) if client else (placed.record,)
        facts: list[events.Fact] = []
        for one in choices:
            rendered = events.PromptRendered(
                tenant=tenant, response=one.response, count=len(prompt.tokens), dropped=prompt.dropped
            )
            stored, base = ((), b"") if one.choice else (contents, place.base)  # they stand once for all
            accepting = events.Fact(one, warnings, contents=stored, base=base)
            facts += [accepting, *self._results_seen(place, one), events.Fact(rendered)]
        return facts, choices

    def _choice(
        self, accepted: events.RequestAccepted, choice: int, response: str, fenced: fences.Fenced
    ) -> events.RequestAccepted:
        """The acceptance of a further choice: a response of its own, beside the first one."""
        return msgspec.structs.replace(
            accepted,
            response=response,
            choice=choice,
            first=accepted.response,
            seed=sampling.choice_seed(accepted.seed, choice),
            fence=fences.digest(fenced.fence, identity.item_secret(self._journal.secret, response)),
        )

    def _results_seen(self, place: chain.Place, accepted: events.RequestAccepted) -> list[events.Fact]:
        """The fact that names the calls whose results this request brought; none if it brought none."""
        secret, tenant = self._journal.secret, accepted.tenant
        results = [item for item in place.new if isinstance(item, Result)]
        if not results:
            return []
        calls = tuple(identity.call_key(secret, tenant, result.call_id) for result in results)
        return [events.Fact(events.ToolResultSeen(tenant=tenant, response=accepted.response, calls=calls))]

    def generate(self, request: Ask, placed: Placed, accepted: events.RequestAccepted) -> wire.Generate:
        """What the engine is told of a request that was accepted."""
        return wire.Generate(
            request=accepted.response,
            tokens=wire.pack_ids(placed.prompt.tokens),
            session=accepted.session,
            background=request.background,
            namespace=identity.kv_namespace(accepted.namespace, accepted.salt),
            sampling=sampling.sent(accepted, request.sampling.logit_bias),
            max_tokens=max(accepted.max_tokens, 1),
            end_tokens=self._end_tokens,
            stop=tuple(text.encode() for text in request.stop),
            fence=None if request.warm else placed.fenced.fence,
            guard=sampling.guarded(accepted),
        )


class Opened:
    """Sessions opened lately and what writes that down, by the client's name for them.

    The request of the same client that came just before may not have been committed when the next one was placed.
    """

    def __init__(self) -> None:
        self._opened: OrderedDict[bytes, tuple[str, Written]] = OrderedDict()

    def of(self, place: chain.Place) -> tuple[str, Written | None]:
        """The id of a request's session, and the append that opens it if the journal did not have it yet."""
        if place.session:
            return place.session, None
        session, written = self._opened.get(place.session_key, ("", None))
        if written is not None and not (written.done() and written.exception()):
            return session, written
        return identity.session_id(secrets.token_bytes(8)), None

    def remember(self, key: bytes, session: str, written: Written) -> None:
        """The session that this append opens, or one that is remembered already."""
        if key and self._opened.get(key, ("", None))[0] != session:
            self._opened[key] = (session, written)
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)

    def forget(self, sessions: Collection[str]) -> None:
        """They were deleted."""
        for key in [key for key, (session, _) in self._opened.items() if session in sessions]:
            del self._opened[key]


def abandoned(accepted: events.RequestAccepted) -> events.Fact:
    """Of one choice: the client left while its request was being written down: it ends without having begun."""
    return events.Fact(
        events.ResponseFinished(
            tenant=accepted.tenant,
            response=accepted.response,
            reason="cancelled",
            output=0,
            queue_us=0,
            prefill_us=0,
            decode_us=0,
        )
    )


def _type_told(kind: str) -> str:
    """A type as a fact may name it for ever: it is the client's word, so only what looks like a type is kept."""
    return kind if _TYPE.fullmatch(kind) else "other"
