"""Limits of conversations as their clients meet them, over the real routes and a real journal."""

import asyncio
from pathlib import Path

import openai
import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from tests.unit.journal.facts import open_journal
from zjournal.sessions.conversations import Conversations, Limits

ITEM = {"type": "message", "role": "user", "content": "hi"}


def test_items_and_conversations_end_where_the_error_says(tmp_path: Path) -> None:
    async def main(desk: FakeDesk) -> None:
        async with (
            serving(desk) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0) as client,
        ):
            made = await client.conversations.create(items=[ITEM, ITEM])
            await client.conversations.items.create(made.id, items=[ITEM])
            with pytest.raises(openai.BadRequestError, match="at most 3 items") as caught:
                await client.conversations.items.create(made.id, items=[ITEM])
            assert caught.value.param == "items"
            with pytest.raises(openai.BadRequestError, match="at most 3 items") as caught:
                await client.responses.create(model="smol", input="hi", conversation=made.id)
            assert caught.value.param == "conversation"
            assert not desk.asks
            await client.conversations.create()
            with pytest.raises(openai.BadRequestError, match="There are 2 conversations"):
                await client.conversations.create()
            await client.conversations.delete(made.id)
            await client.conversations.create()

    with open_journal(tmp_path) as journal:
        desk = FakeDesk(answer("Fine."))
        desk.conversations = Conversations(journal, Limits(conversations=2, items=3))
        desk.conversing = set()
        asyncio.run(main(desk))


def test_another_key_neither_learns_that_something_is_added_nor_stands_in_the_way(tmp_path: Path) -> None:
    async def main(desk: FakeDesk, url: str) -> None:
        keyed = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("sk-a", "sk-b")]
        async with keyed[0] as ours, keyed[1] as theirs:
            made = await ours.conversations.create()
            desk.conversing = {(desk.tenant_of("sk-a"), made.id)}  # something is being added
            with pytest.raises(openai.BadRequestError, match="Something else is being added"):
                await ours.conversations.items.create(made.id, items=[ITEM])
            with pytest.raises(openai.NotFoundError):
                await theirs.conversations.items.create(made.id, items=[ITEM])
            desk.conversing = {(desk.tenant_of("sk-b"), made.id)}  # another key tries
            await ours.conversations.items.create(made.id, items=[ITEM])

    async def served(desk: FakeDesk) -> None:
        async with serving(desk) as url:
            await main(desk, url)

    with open_journal(tmp_path) as journal:
        desk = FakeDesk(answer("Fine."), keys=True)
        desk.conversations, desk.conversing = Conversations(journal), set()
        asyncio.run(served(desk))
