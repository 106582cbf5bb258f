"""From a request to its prompt: where it stands, its tokens, its record, and the fence of its answer.

All of it takes long, so it is done in threads, one for each kind of work; the event loop only waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from zjournal import ask, errors
from zjournal.api import fitting
from zjournal.dialects import reminders
from zjournal.dialects.encoding import encodings
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.sessions import chain
from zjournal.sessions.fences import Fenced
from zjournal.sessions.reading import Terms, begun
from zjournal.sessions.record import pack, packings
from zjournal.sessions.served import Served
from zjournal.sessions.vocabulary import Spelling, Vocabulary

COUNTED_CONTEXTS_MAX = 8  # a prompt that is to be counted may have so many times the tokens that fit
BEGUN_TOKENS_MAX = 64  # of a prompt's end that are looked at for what it has said of the answer


class Placed(msgspec.Struct, frozen=True):
    """A request that was placed and rendered."""

    place: chain.Place
    prompt: Prompt
    record: bytes  # of its body and prompt, see sessions/record.py
    terms: Terms
    fenced: Fenced


class Rendering:
    """Renders for the model that is served. One per server; its methods belong to the event loop."""

    def __init__(self, served: Served, chains: chain.Chains, replay_all: bool) -> None:
        """`replay_all`: reasoning of earlier answers is told whatever the template thinks of it."""
        self._served = served
        self._chains = chains
        self._replay_all = replay_all
        self._words = Vocabulary(served.vocabulary)
        self._spelling = Spelling(self._words)
        self._encodings, self._packings = encodings(), packings()
        # One thread renders: tokenizer and chain caches have one user at a time.
        self._renderer = ThreadPoolExecutor(1, "render")
        self._fencer = ThreadPoolExecutor(1, "fence")  # so that who has no tools waits for nobody's schemas

    async def placed(self, request: ask.Ask, raw: bytes, tenant: str, limit: int) -> Placed:
        """Places and renders a request. Raises a Fault; a prompt that is sure to have over `limit` tokens is one."""
        loop = asyncio.get_running_loop()
        fenced = None
        if request.tools or request.format is not None:  # before the long work: a schema that is refused costs no more
            fenced = await loop.run_in_executor(self._fencer, self._served.fences.of, request)
        return await loop.run_in_executor(self._renderer, self._placed, request, raw, tenant, limit, fenced)

    async def counted(self, request: ask.Ask, tenant: str, limit: int) -> int:
        """The tokens of a request's prompt, where so many fit; far more are counted too. Raises as `placed`."""
        most = COUNTED_CONTEXTS_MAX * limit
        loop = asyncio.get_running_loop()
        _, prompt = await loop.run_in_executor(self._renderer, self._prompt, request, tenant, most)
        return len(prompt.tokens)

    def forget(self, response: str) -> None:
        """Forgets a turn, behind whatever is being rendered, which may be reading it right now."""
        self._renderer.submit(self._chains.forget, response)

    def forget_texts(self) -> None:
        """Has the texts forgotten that were told apart, encoded, decoded and packed."""
        self._renderer.submit(self._forget_texts)

    def accepted(self, request: ask.Ask, placed: Placed, record: bytes, responses: Sequence[str]) -> None:
        """A request is being accepted; `record` is the digest of its record, `responses` are its choices' ids."""
        self._chains.accepted(request, placed.place, record, responses, placed.terms)

    # --- in the thread ----------------------------------------------------------------------------------

    def _forget_texts(self) -> None:
        self._chains.forget_texts()
        self._encodings.clear()
        self._packings.clear()
        self._spelling.forget()
        self._served.tokenizer.forget()

    def _placed(self, request: ask.Ask, raw: bytes, tenant: str, limit: int, fenced: Fenced | None) -> Placed:
        place, prompt = self._prompt(request, tenant, limit)
        spelling, known = self._spelling.of(tenant), self._packings.of(tenant)
        record = pack(raw, prompt.tokens, prompt.spans, spelling, place.outputs(), known)
        fences, said = self._served.fences, self._begun(prompt)
        fenced = fences.of(request, said) if fenced is None else fences.begun(fenced, said)
        return Placed(place, prompt, record, Terms.of(request, said), fenced)

    def _prompt(self, request: ask.Ask, tenant: str, limit: int) -> tuple[chain.Place, Prompt]:
        """Where the request stands, and its prompt; one that is sure to have over `limit` tokens is refused."""
        place = self._chains.place(request, tenant)
        fitting.check_results(place, request)
        whole = reminders.placed(msgspec.structs.replace(request, items=place.items), self._served.template)
        try:
            return place, self._assembled(whole, tenant, limit)
        except errors.ContextTooLong as fault:
            told = 0
            if request.protocol == "messages":  # whose clients make a conversation shorter by what is told
                with suppress(errors.ContextTooLong):
                    told = len(self._assembled(whole, tenant, COUNTED_CONTEXTS_MAX * limit).tokens)
            field, least = fitting.prompt_field(request), fault.least
            raise errors.ContextTooLong(fault.message, param=field, prompt=told, limit=limit, least=least) from None

    def _assembled(self, whole: ask.Ask, tenant: str, limit: int) -> Prompt:
        served, known = self._served, self._encodings.of(tenant)
        return assemble(whole, served.template, served.tokenizer, served.dialect, limit, self._replay_all, known)

    def _begun(self, prompt: Prompt) -> str:
        """What the prompt has already said of the answer, by what the template wrote at its end."""
        end = prompt.spans[-1] if prompt.spans else None
        if end is None or end.path:
            return ""
        ids = prompt.tokens[end.start : end.end][-BEGUN_TOKENS_MAX:]
        return begun(self._served.dialect, self._words.decode(ids).decode("utf-8", "replace"))
