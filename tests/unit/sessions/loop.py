"""A tool loop on a real journal without a server: what desk and engine do with a request, in a few lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests import smollm2
from tests.unit.journal.facts import ticking
from zjournal import ask
from zjournal.api.recorded import DECODERS
from zjournal.dialects.base import Piece
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.prompt import Prompt, assemble, write
from zjournal.journal import events
from zjournal.journal.events import Fact
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.link import wire
from zjournal.sessions import identity, vocabulary
from zjournal.sessions.chain import Chains, Place
from zjournal.sessions.items import items_of, thoughts_of
from zjournal.sessions.makers import Makers
from zjournal.sessions.reading import Model, Terms
from zjournal.sessions.record import pack

TOKENIZER = smollm2.tokenizer()
DIALECT = ChatML(TOKENIZER, thinks=True)
END = TOKENIZER.control["<|im_end|>"]
WORDS = vocabulary.pack((TOKENIZER.token_bytes(i) for i in range(TOKENIZER.vocab_size)), TOKENIZER.control.values())
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


class Said(msgspec.Struct, frozen=True):
    """What the model says."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    thoughts: str = ""


class Asked(msgspec.Struct, frozen=True):
    """A turn: where it stood, its prompt, what was sampled, and the message that a client got."""

    place: Place
    prompt: Prompt
    response: str
    ids: list[int]
    message: dict[str, Any]

    @property
    def whole(self) -> list[int]:
        """The tokens that the next prompt begins with, if nothing was changed."""
        return [*self.prompt.ids, *self.ids]

    @property
    def replayed(self) -> set[str]:
        """The responses that are in the prompt as they were sampled."""
        return {span.path.removeprefix("response:") for span in self.prompt.spans if span.path.startswith("response:")}


class Loop:
    """A journal that is asked Chat Completions. Use as a context manager."""

    def __init__(self, data_dir: Path, restores: bool = True, all_thoughts: bool = False) -> None:
        self.journal = Journal.open(data_dir, clock=ticking())
        self.tenant = self.journal.tenant("local").id
        self.journal.tenant(SERVER_TENANT)
        self._all_thoughts = all_thoughts
        self._words = vocabulary.Vocabulary(WORDS)
        name = self.journal.digest(SERVER_TENANT, WORDS)
        engine = {"pid": 1, "model": "m", "fingerprint": "f", "kernels": "k", "context": 9, "kv_tokens": 9}
        started = events.EngineStarted(tenant=SERVER_TENANT, vocabulary=name, **engine)  # type: ignore[arg-type]
        self.journal.append([Fact(started, contents=(WORDS,))]).result()
        self._model = Model.today(TOKENIZER, DIALECT, frozenset(TOKENIZER.eos_ids))
        self._name, self._restores = name, restores
        self.chains = self.fresh()
        self._made = 0

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def fresh(self) -> Chains:
        """Chains that remember nothing."""
        makers, secret = Makers(self.journal), self.journal.secret
        return Chains(self.journal, secret, makers, self._name, self._model, DECODERS, self._restores)

    def ask(self, messages: Sequence[dict[str, Any]], said: Said = Said()) -> Asked:  # noqa: B008
        """One turn."""
        raw = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
        request = DECODERS["chat"](raw)
        place = self.chains.place(request, self.tenant)
        whole = msgspec.structs.replace(request, items=place.items)
        prompt = assemble(whole, smollm2.template(), TOKENIZER, DIALECT, all_thoughts=self._all_thoughts)
        self._made += 1
        response = identity.response_id("chat", hashlib.sha256(b"%d" % self._made).digest()[:16])
        ids = [*_sampled(said), END]
        reader = self._model.reader(Terms.of(request, ""))
        deltas = [delta for token in ids for delta in reader.feed(token)] + reader.end()
        secret = identity.item_secret(self.journal.secret, response)
        items = items_of(deltas, lambda index: identity.call_id(secret, response, index))
        record = pack(raw, prompt.ids, prompt.spans, self._words.decode, place.outputs())
        self._commit(place, prompt, response, record, ids, items)
        self.chains.accepted(
            request, place, self.journal.digest(self.tenant, record), (response,), Terms.of(request, "")
        )
        return Asked(place, prompt, response, ids, _message(items, thoughts_of(deltas)))

    def _commit(
        self, place: Place, prompt: Prompt, response: str, record: bytes, ids: list[int], items: Sequence[ask.Item]
    ) -> None:
        own: dict[str, Any] = {"tenant": self.tenant, "response": response}
        session = place.session or f"s_{self._made:016x}"
        asked = {"protocol": "chat", "model": "m", "stored": True, "stream": False, "created": 1, "encoder": 1}
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "max_tokens": 9}
        accepted = events.RequestAccepted(
            **own,
            **asked,
            **settings,
            session=session,
            parent=place.parent,
            namespace=identity.namespace("f", self.tenant),
            record=self.journal.digest(self.tenant, record),
            history=place.history,
            dialect="chatml+think",
            tools=len(TOOLS),
        )
        rendered = Fact(events.PromptRendered(**own, count=len(prompt.ids)))
        facts = [Fact(accepted, contents=(record,), base=place.base), rendered]
        if not place.session:
            facts.insert(0, Fact(events.SessionOpened(tenant=self.tenant, session=session)))
        times = {"queue_us": 0, "prefill_us": 0, "decode_us": 0}
        history = identity.history(place.history, items)
        finished = events.ResponseFinished(**own, **times, reason="stop", output=len(ids), history=history)
        sampled = Fact(events.TokensSampled(**own, position=0, count=len(ids)), payload=wire.pack_ids(ids))
        self.journal.append([*facts, sampled, Fact(finished)]).result()


def _sampled(said: Said) -> list[int]:
    """As a model writes it."""
    calls = [ask.Call("", name, arguments) for name, arguments in said.calls]
    pieces = DIALECT.calls([Piece(said.text)], calls) if calls else [Piece(said.text)]
    if said.thoughts and DIALECT.reasoning is not None:
        pieces = [*DIALECT.reasoning.written(said.thoughts), *pieces]
    return write(pieces, TOKENIZER)


def _message(items: Sequence[ask.Item], thoughts: str) -> dict[str, Any]:
    """The answer as a client of Chat Completions gets it."""
    text = next((item.text for item in items if isinstance(item, ask.Message)), None)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [
        {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        for item in items
        if isinstance(item, ask.Call)
    ]
    return message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})
