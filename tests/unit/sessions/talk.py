"""Whole conversations for tests: turns whose contents, prompts and answers fit, as submit and the engine write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.unit.journal.facts import ticking
from zjournal import ask
from zjournal.dialects.prompt import Span
from zjournal.journal import events
from zjournal.journal.events import Fact
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.sessions import identity, vocabulary
from zjournal.sessions.record import pack

WORDS = (b"<|end|>", *(bytes([letter]) for letter in range(97, 123)))
END = 0  # the token that ends an answer
VOCABULARY = vocabulary.pack(WORDS)
FINGERPRINT = "weights-1"


def ids(text: str, ended: bool = True) -> list[int]:
    """The tokens of a text of small letters."""
    return [ord(letter) - 96 for letter in text] + [END] * ended


def packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


class Talk:
    """A journal that a server has served, told in few words."""

    def __init__(self, data_dir: Path, tenant: str = "local", fingerprint: str = FINGERPRINT) -> None:
        self.journal = Journal.open(data_dir, clock=ticking())
        self.data_dir = data_dir
        self.tenant = self.journal.tenant(tenant).id
        self.namespace = identity.namespace(fingerprint, self.tenant)
        self.histories: dict[str, bytes] = {"": identity.history_start(self.journal.secret)}
        self.journal.tenant(SERVER_TENANT)
        digest = self.journal.digest
        started = events.EngineStarted(
            tenant=SERVER_TENANT,
            pid=1,
            model="m",
            fingerprint=fingerprint,
            kernels="k",
            context=1000,
            kv_tokens=1000,
            vocabulary=digest(SERVER_TENANT, VOCABULARY),
            template=digest(SERVER_TENANT, b"template"),
        )
        self.journal.append([Fact(started, contents=(VOCABULARY, b"template"))])

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def open(self, session: str) -> None:
        self.journal.append([Fact(events.SessionOpened(tenant=self.tenant, session=session, key=b"k" * 32))]).result()

    def turn(
        self,
        response: str,
        text: str = "hi",
        answer: str | None = "yes",
        *,
        previous: str = "",
        session: str = "s_1",
        stored: bool = True,
        ended: bool = True,
    ) -> None:
        """One turn; `answer` None: the engine failed. Its prompt is its text alone."""
        facts = self.facts(response, text, answer, previous, session, stored)[: None if ended else -1]
        done = [self.journal.append([fact] if isinstance(fact, Fact) else fact) for fact in facts]
        for written in done:
            written.result()

    def facts(
        self,
        response: str,
        text: str,
        answer: str | None,
        previous: str,
        session: str,
        stored: bool,
        told: Any = None,
        parent: str = "",
    ) -> list[Fact | list[Fact]]:
        """`told`: what the client sent as `input`, where that is not the text alone."""
        items = (ask.Message("user", (ask.Text(text, "input"),)),)
        body: dict = {"model": "m", "input": text if told is None else told}
        body |= {"previous_response_id": previous} if previous else {}
        prompt = ids(text)
        decode = vocabulary.Vocabulary(VOCABULARY).decode
        spans = (Span(0, len(prompt), "input"),)
        record = pack(msgspec.json.encode(body), prompt, spans, decode, lambda response: ())
        before = identity.history(self.histories[previous], items)
        own = {"tenant": self.tenant, "response": response}
        accepted = events.RequestAccepted(
            **own,
            session=session,
            parent=parent or previous,
            previous=previous,
            protocol="responses",
            model="m",
            namespace=self.namespace,
            stored=stored,
            stream=False,
            created=1_700_000_000,
            record=self.journal.digest(self.tenant, record),
            history=before,
            dialect="chatml",
            encoder=1,
            temperature=0.5,
            top_p=1.0,
            top_k=0,
            seed=1 << 62,
            max_tokens=10,
        )
        rendered = events.PromptRendered(**own, count=len(prompt))
        facts: list[Fact | list[Fact]] = [
            [Fact(accepted, contents=(record,)), Fact(rendered)],
            Fact(events.CacheMatched(**own, tier="device", cached=1, prompt=len(prompt))),
        ]
        if answer is None:
            return [*facts, Fact(events.ResponseFailed(**own, code="engine_error", message="It died."))]
        output = ids(answer)
        for at, token in enumerate(output):  # one by one, so that a turn has many facts
            sampled = events.TokensSampled(**own, position=at, count=1)
            facts.append(Fact(sampled, payload=packed([token])))
        said = ask.Message("assistant", (ask.Text(answer),))
        self.histories[response] = identity.history_step(before, said)
        times = {"queue_us": 10, "prefill_us": 200, "decode_us": 3_000}
        return [
            *facts,
            Fact(events.CacheAdmitted(response=response, namespace=self.namespace, tokens=3, blocks=1)),
            Fact(
                events.ResponseFinished(
                    **own, reason="stop", output=len(output), history=self.histories[response], **times
                )
            ),
        ]
