"""A desk without journal and engine: it answers each request with the steps a test gives it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from zjournal import ask, errors
from zjournal.api import limits
from zjournal.api.metrics import Metrics
from zjournal.api.refusals import Refusals
from zjournal.api.sse import Cut
from zjournal.api.submit import ModelCard
from zjournal.api.turns import Turn

CREATED = 1_764_000_000


def item_id(turn: Turn, index: int, prefix: str) -> str:
    digest = hashlib.sha256(f"{turn.response}/{index}".encode()).hexdigest()
    return f"{prefix}_{digest[:24]}"


def answer(*texts: str, prompt: int = 12, cached: int = 4, reason: ask.EndReason = "stop") -> list[ask.Step]:
    """The steps of an answer that goes well."""
    usage = ask.Usage(prompt=prompt, cached=cached, output=len(texts) + 1)
    deltas = [ask.TextDelta(text) for text in texts]
    return [ask.Progress(cached=cached, prompt=prompt), *deltas, ask.Ended(reason, usage, at=CREATED + 2)]


class FakeDesk:
    """Keys: "sk-a" and "sk-b" when `keys` is set. A step that is an asyncio.Event is waited for."""

    def __init__(self, steps: list, *, keys: bool = False, fault: Exception | None = None) -> None:
        self.steps = steps
        self.keys = keys
        self.fault = fault
        self.attribution = False
        self.state = ("ready", 1.0)
        self.metrics = Metrics()
        self.refused = Refusals()
        self.asks: list[ask.Ask] = []
        self.turns: dict[str, Turn] = {}
        self.cancelled: list[str] = []
        self.left: list[limits.Told] = []
        self.held: list[str] = []
        self.cuts: list[tuple[str, Cut]] = []
        self.cancel_seen = asyncio.Event()
        self.told = asyncio.Event()  # the first delta was taken from us

    async def submit(self, request: ask.Ask, raw: bytes, tenant: str, encoder: int) -> Turn:
        if self.fault is not None:
            raise self.fault
        self.asks.append(request)
        prefix = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}[request.protocol]
        number = len(self.asks)
        first, *others = (
            Turn(f"{prefix}{index:016x}{number:016x}", CREATED, "smol", raw, request.store, tenant)
            for index in range(request.choices)
        )
        turn = msgspec.structs.replace(first, others=tuple(others))
        self.turns[turn.response] = turn
        return turn

    async def count(self, request: ask.Ask, tenant: str) -> int:
        if self.fault is not None:
            raise self.fault
        self.asks.append(request)
        return sum(len(part.text) for item in request.items for part in item.parts)

    async def follow(self, turn: Turn) -> AsyncIterator[ask.Step]:
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                self.told.set()
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def recorded(self, response: str, tenant: str, local: bool = False) -> Turn:
        turn = self.turns.get(response)
        if turn is None or not (turn.stored or local) or turn.tenant != tenant:
            raise errors.NotFound(f"Response with id '{response}' not found.", param="response_id")
        return turn

    async def delete(self, response: str, tenant: str) -> None:
        await self.recorded(response, tenant)
        del self.turns[response]

    def running(self, turn: Turn) -> bool:
        return any(isinstance(step, asyncio.Event) and not step.is_set() for step in self.steps)

    def cancel(self, turn: Turn) -> None:
        self.cancelled.append(turn.response)
        self.cancel_seen.set()

    def key_name(self, tenant: str) -> str:
        return tenant

    def allowed(self, tenant: str) -> list[limits.Told]:
        return self.left

    def hold(self, turn: Turn) -> None:
        if not turn.stored:
            self.held.append(turn.response)

    def release(self, responses: Sequence[str]) -> None:
        self.held = [one for one in self.held if one not in responses]

    def cut(self, turn: Turn, cut: Cut) -> None:
        self.cuts.append((turn.response, cut))

    def item_id(self, turn: Turn, index: int, prefix: str) -> str:
        return item_id(turn, index, prefix)

    def seal(self, turn: Turn, summary: str) -> str:
        return f"sealed({summary})"

    async def ancestry(self, turn: Turn) -> list[Turn]:
        return [turn]

    async def compared(self, previous: str, turn: Turn) -> None:
        return None

    def models(self) -> list[ModelCard]:
        return [ModelCard("smol", CREATED, 8192, ("org/smol", "gpt-4o"))]

    def failure(self) -> str:
        return ""

    def status(self) -> tuple[str, float]:
        return self.state

    def tenant_of(self, key: str | None) -> str:
        if not self.keys:
            return "local"
        if key not in ("sk-a", "sk-b"):
            raise errors.Unauthorized("The API key is missing or wrong.")
        return key[-1]
