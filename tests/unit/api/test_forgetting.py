"""What is erased from the journal is forgotten by the desk: by its chains, its engine and its tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.api import forgetting
from zjournal.api.acceptance import Opened
from zjournal.api.rendering import Rendering
from zjournal.api.turns import Turn, Turns
from zjournal.errors import NotFound
from zjournal.growing import Beginning
from zjournal.journal import retention
from zjournal.sessions import vocabulary
from zjournal.sessions.makers import Makers


class Forgetful:
    """Stands for runs, chains and tokenizer: counts what it is told to forget."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.heard = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def forget(self, *what: Any) -> None:
        self.told.append(what)
        self._loop.call_soon_threadsafe(self.heard.set)

    def forget_texts(self) -> None:
        self.told.append("texts")


async def _told(who: Forgetful) -> None:
    async with asyncio.timeout(60):
        await who.heard.wait()
    who.heard.clear()


def test_the_tokenizer_forgets_texts_after_an_erasure_and_not_again_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        with open_journal(tmp_path / "data") as journal:
            responses = ("r1", "r2", "r3")
            journal.append([session("s1"), *(f for name in responses for f in whole_turn(journal, name))]).result()
            runs, chains, tokenizer = Forgetful(), Forgetful(), Forgetful()
            loop = asyncio.get_running_loop()
            served = SimpleNamespace(tokenizer=tokenizer, vocabulary=vocabulary.pack([], frozenset()))
            rendering = Rendering(served, chains, replay_all=False)  # type: ignore[arg-type]
            for memory in (rendering._encodings, rendering._packings):
                memory.put("local", "abcd", None, 4, Beginning())  # type: ignore[arg-type]
            forgetful = forgetting.Forgetting(loop, runs, Opened(), rendering)  # type: ignore[arg-type]
            journal.subscribe(forgetful.hear)
            tenant = journal.tenant("local").id
            assert retention.delete(journal, tenant, "r1").result()
            await _told(tokenizer)
            assert ("r1",) in chains.told and (("r1",),) in runs.told
            assert "texts" in chains.told and len(rendering._encodings) == len(rendering._packings) == 0
            began = loop.time()
            for name in ("r2", "r3"):  # both are one more time, later
                assert retention.delete(journal, tenant, name).result()
                runs.heard.clear()
                await _told(runs)
            waiting = forgetful.forgetting_texts
            assert waiting is not None and len(tokenizer.told) == 1
            assert began < waiting.when() <= began + forgetting.FORGET_TEXTS_S
            waiting.cancel()

    asyncio.run(main())


def test_a_response_that_is_deleted_between_two_looks_is_not_found(tmp_path: Path) -> None:
    """Not a server that is behind with its writing: the client may not be told to try again."""

    async def main() -> None:
        with open_journal(tmp_path / "data") as journal:
            journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
            tenant = journal.tenant("local").id
            turns = Turns(journal, Forgetful(), Makers(journal), {})  # type: ignore[arg-type]
            turns.serve(SimpleNamespace(model=None), b"")  # type: ignore[arg-type]
            found = Turn("r1", 0, "m", b"{}", True, tenant, None)
            assert retention.delete(journal, tenant, "r1").result()
            with pytest.raises(NotFound):
                await anext(turns.follow(found))

    asyncio.run(main())
