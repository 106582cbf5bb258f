"""What the official clients do with refusals that pass: they wait as long as they are told, and ask again.

Their sleep is noted and not slept: whether it is what `Retry-After` said is no matter of time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import anyio
import openai
import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CLIENTS = ("chat", "responses", "messages")

PASSING = {
    "full": errors.Overloaded("Full."),
    "over a limit": errors.RateLimited("Too many.", "requests", 7),
    "loading": errors.Unavailable("Loading."),
    "no journal": errors.JournalUnavailable("Disk full."),
}
LASTING = {
    "malformed": errors.BadRequest("No.", param="input"),
    "too long": errors.ContextTooLong("Too long.", param="input", prompt=9, limit=8),
    "no model": errors.ModelNotFound("No.", param="model"),
    "no key": errors.Unauthorized("No."),
    "too large": errors.BodyTooLarge("No."),
}


class Refusing(FakeDesk):
    """Refuses so many times, then answers."""

    def __init__(self, fault: errors.Fault, times: int) -> None:
        super().__init__(answer("Tide"))
        self.refusal, self.refusals = fault, times
        self.tries = 0

    async def submit(self, *arguments: Any, **options: Any) -> Any:
        self.tries += 1
        if self.refusals:
            self.refusals -= 1
            raise self.refusal
        return await super().submit(*arguments, **options)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a client would have waited, one after the other."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return found


def said(desk: FakeDesk, which: str, stream: bool, retries: int) -> str:
    """What one of the clients hears of a live server."""

    async def ask(url: str) -> str:
        settings: dict[str, Any] = {"api_key": "sk-a", "max_retries": retries}
        if which == "messages":
            async with anthropic.AsyncAnthropic(base_url=url, **settings) as client:
                asked: dict[str, Any] = {"model": "smol", "max_tokens": 9, "messages": MESSAGES}
                if stream:
                    async with client.messages.stream(**asked) as told:
                        return (await told.get_final_message()).content[0].text  # type: ignore[union-attr]
                return (await client.messages.create(**asked)).content[0].text  # type: ignore[union-attr]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **settings) as other:
            if which == "chat":
                if stream:
                    async with other.chat.completions.stream(model="smol", messages=MESSAGES) as chunks:
                        return (await chunks.get_final_completion()).choices[0].message.content or ""
                return (await other.chat.completions.create(model="smol", messages=MESSAGES)).choices[0].message.content
            if stream:
                async with other.responses.stream(model="smol", input="hi") as events:
                    return (await events.get_final_response()).output_text
            return (await other.responses.create(model="smol", input="hi")).output_text

    async def main() -> str:
        async with serving(desk) as url:
            return await asyncio.wait_for(ask(url), 30)

    return asyncio.run(main())


@pytest.mark.parametrize("which", CLIENTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again_after_as_long_as_was_said(
    slept: list[float], which: str, stream: bool, fault: errors.Fault
) -> None:
    desk = Refusing(fault, times=2)
    assert said(desk, which, stream, retries=2) == "Tide"
    assert slept == [fault.retry_after_s] * 2
    assert desk.tries == 3


@pytest.mark.parametrize("which", CLIENTS)
@pytest.mark.parametrize("fault", LASTING.values(), ids=LASTING)
def test_what_lasts_is_asked_once(slept: list[float], which: str, fault: errors.Fault) -> None:
    desk = Refusing(fault, times=9)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        said(desk, which, stream=False, retries=2)
    assert caught.value.status_code == fault.status
    assert (slept, desk.tries) == ([], 1)


@pytest.mark.parametrize("which", CLIENTS)
def test_who_gives_up_hears_the_last_refusal(slept: list[float], which: str) -> None:
    desk = Refusing(errors.Overloaded("Full."), times=9)
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError), match="Full"):
        said(desk, which, stream=True, retries=2)
    assert (len(slept), desk.tries) == (2, 3)
