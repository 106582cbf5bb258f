"""The traffic: what happens next, drawn from a seed and from what the model knows. Sensible mostly, odd at times."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from tests.sim import model
from tests.sim.model import (
    Append,
    Collect,
    Command,
    Compact,
    Delete,
    Erase,
    Export,
    Model,
    Pin,
    Prune,
    Rebuild,
    Request,
    Seal,
    Sweep,
    TenantNamed,
)
from tests.sim.plan import Plan
from tests.sim.tier import Ask
from zjournal.dialects.prompt import OUTPUT_PATH, Span
from zjournal.journal import chain, events
from zjournal.journal.events import Fact
from zjournal.link import wire
from zjournal.sessions import identity, record

START_US = 1_700_000_000_000_000
DAY_US = 86_400_000_000
RETENTION_S = 3_600
GROUP_MAX = 6
LARGE_BYTES_MAX = 120_000
SEAL_MAX = 60
IDS_END = 1 << 17  # of token ids; most are below 65,536 in a real vocabulary as well
STATE_TOKENS_MAX = 700  # of what the engine is asked
STEMS = 3  # beginnings that states share
VOCABULARY = range(10, 1_000)  # of the engine; the lower ones end an answer
TENANTS = ("local", "ann", "bob", "eve")


class Traffic:
    """Draws steps. Holds the clock, and numbers for names; knows the rest from the model."""

    def __init__(self, plan: Plan) -> None:
        self._chance = random.Random(f"traffic {plan.seed}")
        self._plan = plan
        # Requests that many turns share, records and all: bodies and prompts.
        self._pool = [(self._body(), self._ids(9)) for _ in range(4)]
        self._stems = [self._words(STATE_TOKENS_MAX) for _ in range(STEMS)]
        self.now = START_US

    def tick(self) -> int:
        """The clock of the next step: a little later, as long as nobody sets it."""
        self.now += self._chance.randint(0, 2_000_000)
        return self.now

    def kind(self) -> str:
        kinds = list(self._plan.weights)
        return self._chance.choices(kinds, list(self._plan.weights.values()))[0]

    def jump(self) -> None:
        """Someone sets the clock, forwards or back."""
        self.now = max(0, self.now + self._chance.choice((-40, -3, 3, 40)) * DAY_US // self._chance.randint(1, 50))

    def commands(self, kind: str, known: Model) -> tuple[Command, ...]:
        """The commands of a step; () when nothing of this kind can happen now."""
        match kind:
            case "rebuild":
                return (Rebuild(),)
            case "sweep":
                return (Sweep(self._chance.choice((0, RETENTION_S))),)
            case "tenant":
                return (TenantNamed(self._chance.choice(TENANTS)),)
            case "group":
                return self._group(known)
            case "seal":
                return (Seal(self._chance.randint(1, SEAL_MAX)),)
            case "compact":
                return (Compact(),)
            case "prune" | "export":
                return self._with_session(kind, known)
            case "pin":
                if not known.kept.snapshots:
                    return ()
                name = self._chance.choice(list(known.kept.snapshots))
                return (Pin(name, self._chance.random() < 0.5),)
            case "collect":
                return self._collect(known)
            case _:
                one = self._one(kind, known)
                return () if one is None else (one,)

    def ask(self, known: Model) -> Ask | None:
        """What the engine does next: a turn that it has not had yet; at times one that is gone by then."""
        new = [name for name in known.turns if name not in known.states]
        there = [name for name in new if not known.turns[name].erased]
        if not new:
            return None
        response = self._chance.choice(there if there and self._chance.random() < 0.9 else new)
        accepted = known.turns[response].accepted
        above = known.states.get(accepted.parent)
        if above and self._chance.random() < 0.8:
            cut = len(above) if self._chance.random() < 0.7 else self._chance.randint(1, len(above))
            prompt = above[:cut] + self._words(self._chance.randint(1, 120))
        else:
            cut = self._chance.choice((20, 256, 300, 512, 600))
            prompt = self._chance.choice(self._stems)[:cut] + self._words(self._chance.randint(0, 60))
        prompt = prompt[:STATE_TOKENS_MAX]
        says = self._words(self._chance.randint(1, 20))
        known.states[response] = (prompt + says)[:-1]  # of the last token nothing is computed
        return Ask(response, accepted.session, prompt, says)

    def _collect(self, known: Model) -> tuple[Command, ...]:
        """Some chunks as a plan may name them, which is of a moment ago: some must stay by now."""
        if not known.kept.chunks:
            return ()
        at = self._chance.choice(list(known.kept.chunks))
        space = known.kept.chunks[at].space
        hashes: list[bytes] = []
        while at in known.kept.chunks and len(hashes) < self._chance.randint(1, 3):
            hashes.append(at)
            at = known.kept.chunks[at].parent
        return (Collect(space, tuple(hashes)),)

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.choice(VOCABULARY) for _ in range(count))

    def append(self, known: Model) -> Append:
        """A whole append, whatever it is."""
        return self._open(known)

    def _with_session(self, kind: str, known: Model) -> tuple[Command, ...]:
        there = [name for name, session in known.sessions.items() if kind == "prune" or not session.deleted]
        if not there:
            return ()
        session = self._chance.choice(there)
        if kind == "export":
            return (Export(session),)
        used = self._chance.random() < 0.1  # since somebody looked
        return (Prune(session, known.sessions[session].last_seq - used),)

    def _group(self, known: Model) -> tuple[Command, ...]:
        ahead = known.copy()
        commands: list[Command] = []
        for _ in range(self._chance.randint(2, GROUP_MAX)):
            kind = self._chance.choice(("open", "sample", "sample", "end", "delete", "wrong"))
            # What is wrong must be so whatever becomes of the commands before it: a disk may fail the delete alone.
            one = self._one(kind, known if kind == "wrong" else ahead)
            if one is not None and not _goes_on(one, commands):
                commands.append(one)
                ahead.apply(one, self.now)
        return tuple(commands)

    def _one(self, kind: str, known: Model) -> Command | None:
        running = [name for name, turn in known.turns.items() if turn.finished_us is None]
        if kind in ("sample", "end") and not running:
            kind = "open"
        match kind:
            case "open":
                return self._open(known)
            case "sample":
                return self._sample(self._chance.choice(running), known)
            case "end":
                # At times something ends twice, such as by a cancel and by a crash: the first end counts.
                again = self._chance.random() < 0.1
                return self._end(self._chance.choice(list(known.turns) if again else running), known)
            case "wrong":
                return self._wrong(known)
        if not known.turns:
            return None
        response = self._chance.choice(list(known.turns))
        tenant = known.turns[response].accepted.tenant
        if kind == "delete":
            foreign = self._chance.random() < 0.1
            return Delete("t_nobody" if foreign else tenant, response)
        assert kind == "erase", kind
        return Erase(response, self._chance.choice(("deleted", "unstored")))

    def _wrong(self, known: Model) -> Append:
        """A turn that continues what is gone, or one that comes with contents which are nowhere."""
        erased = [name for name, turn in known.turns.items() if turn.erased]
        if erased and self._chance.random() < 0.5:
            return Append(self._open(known, self._chance.choice(erased)).facts, wrong=True)
        return Append((*self._open(known).facts, *self._nameless(known)), wrong=True)

    def _open(self, known: Model, parent: str = "") -> Append:
        response = identity.response_id("responses", self._chance.randbytes(16))
        tenant = self._chance.choice(list(known.tenants.values()))
        parents = [name for name, turn in known.turns.items() if self._can_continue(turn, tenant.id, known)]
        if parents and not parent and self._chance.random() < 0.7:
            parent = self._chance.choice(parents)
        above = known.turns.get(parent)
        session = above.accepted.session if above else identity.session_id(self._chance.randbytes(8))
        request, packed = self._request(response, parent, above.sampled if above else ())
        accepted = events.RequestAccepted(
            tenant=tenant.id,
            response=response,
            session=session,
            parent=parent,
            protocol="responses",
            model="m",
            namespace="n",
            stored=self._chance.random() < 0.7,
            stream=True,
            created=self.now // 1_000_000,
            record=chain.content_digest(tenant.secret, packed),
            dialect="chatml",
            encoder=1,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=1,
            max_tokens=100,
        )
        rendered = events.PromptRendered(tenant=tenant.id, response=response, count=len(request.ids))
        base = above.accepted.record if above else b""
        facts = [Fact(accepted, contents=(packed,), base=base), Fact(rendered)]
        if not parent:
            facts.insert(0, Fact(events.SessionOpened(tenant=tenant.id, session=session)))
        return Append(tuple(facts), request=request)

    def _can_continue(self, turn: model.TurnState, tenant: str, known: Model) -> bool:
        return (
            turn.accepted.tenant == tenant
            and turn.finished_us is not None
            and not turn.erased
            and not known.sessions[turn.accepted.session].deleted
        )

    def _request(self, response: str, parent: str, said: tuple[int, ...]) -> tuple[Request, bytes]:
        """A body and a prompt, which at times goes on from what the parent said; and the record of both."""
        body, ids = self._body(), self._ids(self._chance.randint(1, 90))
        if self._chance.random() < 0.3:
            body, ids = self._chance.choice(self._pool)
        spans = [Span(0, len(ids), "input")]
        if said and self._chance.random() < 0.7:
            spans.append(Span(len(ids), len(ids) + len(said), OUTPUT_PATH + parent))
            ids += said
        packed = record.pack(body, ids, spans, None, lambda _: said)
        return Request(response, body, ids), packed

    def _body(self) -> bytes:
        large = self._chance.random() < self._plan.large
        size = self._chance.randint(1, LARGE_BYTES_MAX // 2 if large else 300)
        return msgspec.json.encode({"input": self._chance.randbytes(size).hex()})

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(IDS_END) for _ in range(count))

    def _sample(self, response: str, known: Model) -> Append:
        turn = known.turns[response]
        tenant = turn.accepted.tenant
        if turn.output == 0 and turn.cached == 0 and self._chance.random() < 0.5:
            cached = self._chance.randint(1, max(turn.prompt, 1))
            match = events.CacheMatched(
                tenant=tenant, response=response, tier="device", cached=cached, prompt=turn.prompt
            )
            return Append((Fact(match),))
        count = self._chance.randint(1, 12)
        event = events.TokensSampled(tenant=tenant, response=response, position=turn.output, count=count)
        return Append((Fact(event, payload=wire.pack_ids(self._ids(count))),))

    def _end(self, response: str, known: Model) -> Append:
        turn = known.turns[response]
        tenant = turn.accepted.tenant
        if self._chance.random() < 0.15:
            failed = events.ResponseFailed(tenant=tenant, response=response, code="engine_error", message="It died.")
            return Append((Fact(failed),))
        finished = events.ResponseFinished(
            tenant=tenant,
            response=response,
            reason=self._chance.choice(("stop", "stop_string", "length", "cancelled")),
            output=turn.output,
            history=self._chance.randbytes(32),
            queue_us=1,
            prefill_us=2,
            decode_us=3,
        )
        return Append((Fact(finished),))

    def _nameless(self, known: Model) -> tuple[Fact, ...]:
        """A request whose record is neither stored nor offered."""
        (request,) = [fact.event for fact in self._open(known).facts if isinstance(fact.event, events.RequestAccepted)]
        return (Fact(msgspec.structs.replace(request, record=self._chance.randbytes(32))),)


def _goes_on(one: Command, commands: Sequence[Command]) -> bool:
    """Whether an append goes on behind one of these: if the disk failed that alone, nobody would append this."""
    return bool(_responses(one) & {response for command in commands for response in _responses(command)})


def _responses(command: Command) -> set[str]:
    facts = command.facts if isinstance(command, Append) else ()
    return {getattr(fact.event, "response", "") for fact in facts}
