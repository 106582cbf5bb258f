"""Turns as the protocols tell them: the one that was just accepted, and those that the journal has.

Nothing here changes a turn. Whose a turn is, and whether it was deleted meanwhile, is looked at with each read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from zjournal import ask, errors
from zjournal.api.running import Runs
from zjournal.journal import events, projections
from zjournal.journal.log import Journal
from zjournal.sessions import chain
from zjournal.sessions.diff import Rendered
from zjournal.sessions.follow import Tail, follow, recorded_tail, without_end
from zjournal.sessions.makers import Makers
from zjournal.sessions.prompts import Prompts
from zjournal.sessions.reading import Decoders, Model, Models, Terms
from zjournal.sessions.records import Records
from zjournal.sessions.served import Served


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
    others: tuple[Turn, ...] = ()  # the further choices of a request that was just accepted, in order

    @property
    def choices(self) -> tuple[Turn, ...]:
        """All choices of the request, itself the first."""
        return (self, *self.others)


def not_found(response: str) -> errors.NotFound:
    """The same for a response that never was, one of another tenant's, and one that is gone."""
    return errors.NotFound(f"Response with id '{response}' not found.", param="response_id")


class Turns:
    """Reads turns. One per server; all its methods belong to the event loop."""

    def __init__(self, journal: Journal, runs: Runs, makers: Makers, decoders: Decoders) -> None:
        self._journal = journal
        self._runs = runs
        self._makers = makers
        self._decoders = decoders
        self._served: Served | None = None
        self._models: Models | None = None

    def serve(self, served: Served, vocabulary: bytes) -> None:
        """Sets the model's API side, and the digest of its vocabulary. Until then nothing can be followed."""
        self._served = served
        self._models = Models(self._makers, served.model, vocabulary)

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
                    raise not_found(turn.response)
                raise errors.Unavailable("The end of this response is not written down yet.")
        model = turn.maker or self._served.model
        if model.foreign:
            without_end(tail)
        async for step in follow(tail, model.reader(turn.terms)):
            yield step

    async def recorded(self, response: str, tenant: str, local: bool = False) -> Turn:
        """A response of this tenant, stored or `local`. Raises NotFound for any other."""
        row, accepted, raw = await asyncio.to_thread(self._visible, response, tenant, local)
        tail = self._runs.tail(response)
        if tail is None:
            return await asyncio.to_thread(self._recorded, row, accepted, raw)
        model = self._served.id if self._served is not None else row.model
        terms = Terms.recorded(accepted, lambda: raw, self._decoders)
        return Turn(response, row.created, model, raw, row.stored, tenant, tail, terms, None, accepted.item_secret)

    def _visible(
        self, response: str, tenant: str, local: bool
    ) -> tuple[projections.Turn, events.RequestAccepted, bytes]:
        """The row, the acceptance and the request body of a turn that this tenant may see. Raises NotFound."""
        row = self._journal.turn(response)
        if row is None or not chain.visible(row, tenant, local):
            raise not_found(response)
        records = self._records()
        try:
            return row, records.accepted(row), records.body(row)
        except errors.JournalFault:
            now = self._journal.turn(response)
            if now is None or not chain.visible(now, tenant, local):  # it was deleted between the two reads
                raise not_found(response) from None
            raise

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
        records = self._records()
        found: list[Turn] = []
        row = self._journal.turn(turn.response)
        while row is not None and (previous := records.accepted(row).previous) and len(found) < chain.CHAIN_TURNS_MAX:
            row = self._journal.turn(previous)
            if row is None or row.erased:
                break
            found.append(self._recorded(row, records.accepted(row), records.body(row)))
        return found[::-1]

    async def compared(self, previous: str, turn: Turn) -> tuple[Rendered, Rendered] | None:
        """The prompts of an earlier turn and of this one, as the journal has them; None if it is not this tenant's."""
        return await asyncio.to_thread(self._compared, previous, turn)

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

    async def same_model(self, previous: str, response: str) -> bool:
        """Whether two turns that are there were made by the same model, so that one can reuse the KV of the other."""
        rows = await asyncio.to_thread(lambda: [self._journal.turn(name) for name in (previous, response)])
        records = self._records()
        return len({records.accepted(row).namespace for row in rows if row is not None}) <= 1

    def _records(self) -> Records:
        return Records(self._journal, self._makers)
