"""The routes of Responses over HTTP. What the protocol means is in responses.py and beside it."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Request, delete, get, post
from litestar.types import ASGIApp

from zjournal import errors
from zjournal.api import failure, fields, responses, responses_cache, responses_echo, responses_list
from zjournal.api.guard import Reply
from zjournal.api.http import body, enter, fold, stream, take_all
from zjournal.api.routes_conversations import joined
from zjournal.ask import Ask, Broke

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn

RESPONSE_PREFIX = "resp_"
DEFAULT_MODEL = "default"  # what is served, by whatever name


class _Previous(msgspec.Struct):
    previous_response_id: Any = None


_previous_decoder = msgspec.json.Decoder(_Previous)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@post("/v1/responses")
async def create(request: Request) -> ASGIApp:
    """A response: streamed, whole, or (in the background) only begun."""
    desk, tenant = enter(request)
    async with joined(desk, await inheriting(desk, await body(request), tenant), tenant) as (raw, join):
        asked: Ask = responses.decode(raw, request.headers, merged=True)
        turn = await desk.submit(asked, raw, tenant, responses.ENCODER_VERSION)
        await join(turn)
    told = await diagnostics(desk, turn)
    if asked.stream:
        encoder = responses.Encoder(turn, desk.item_id, desk.seal, told)
        return stream(desk, turn, encoder, kept=asked.detached)
    answer = responses.Answer(turn, desk.item_id, desk.seal, told)
    if not asked.detached:
        await fold(request, desk, turn, answer)
        if isinstance(answer.end, Broke):
            raise failure.fault_of(answer.end)
    return Reply(answer.body())


@get("/v1/responses/{response_id:str}")
async def retrieve(request: Request) -> ASGIApp:
    """A stored response as an object, or told again from its first event on or from a later one."""
    desk, tenant = enter(request)
    query = request.query_params
    replayed = responses_list.flag(query, "stream")
    after = responses_list.number(query, "starting_after", -1)
    responses_list.flag(query, "include_obfuscation")  # nothing is padded
    if "starting_after" in query and not replayed:
        raise errors.BadRequest("`starting_after` needs `stream=true`.", param="starting_after")
    turn = await recorded(desk, request.path_params["response_id"], tenant)
    told = await diagnostics(desk, turn)
    if replayed:
        return stream(desk, turn, responses.Encoder(turn, desk.item_id, desk.seal, told, after), kept=True)
    return Reply((await _answer(desk, turn, told)).body())


@delete("/v1/responses/{response_id:str}", status_code=200)
async def remove(request: Request) -> ASGIApp:
    """Deletes a stored response; its id behaves as one that never existed."""
    desk, tenant = enter(request)
    turn = await recorded(desk, request.path_params["response_id"], tenant)
    await desk.delete(turn.response, tenant)
    return Reply(responses.deleted(turn.response))


@post("/v1/responses/{response_id:str}/cancel", status_code=200)
async def cancel(request: Request) -> ASGIApp:
    """Gives up a response in the background; gives its object once that is written down. Once more does nothing."""
    desk, tenant = enter(request)
    response = request.path_params["response_id"]
    turn = await recorded(desk, response, tenant)
    if not responses_echo.decoder.decode(turn.raw).background:
        message = f"Response '{response}' cannot be cancelled: it was not created with `background`."
        raise errors.BadRequest(message, param="response_id")
    running = desk.running(turn)
    if running:
        desk.cancel(turn)
    answer = responses.Answer(turn, desk.item_id, desk.seal, await diagnostics(desk, turn))
    await take_all(desk, turn, answer)
    if not running and answer.status != "cancelled":
        raise errors.BadRequest(f"Response '{response}' has ended: it is {answer.status}.", param="response_id")
    return Reply(answer.body())


@get("/v1/responses/{response_id:str}/input_items")
async def input_items(request: Request) -> ASGIApp:
    """Everything that a response answers, a page at a time: its own input and, in a chain, all that was before it."""
    desk, tenant = enter(request)
    page = responses_list.Page.asked(request.query_params)
    turn = await recorded(desk, request.path_params["response_id"], tenant)
    return Reply(msgspec.json.encode(page.of(await context(desk, turn))))


@post("/v1/responses/input_tokens", status_code=200)
async def input_tokens(request: Request) -> ASGIApp:
    """How many tokens the prompt of this request would have."""
    desk, tenant = enter(request)
    parts = fields.parse(_object_decoder, await body(request))
    parts.setdefault("model", msgspec.Raw(msgspec.json.encode(DEFAULT_MODEL)))
    whole = await inheriting(desk, msgspec.json.encode(parts), tenant)
    async with joined(desk, whole, tenant) as (raw, _):
        asked = responses.decode(raw, request.headers, merged=True)
        tokens = await desk.count(asked, tenant)
    return Reply(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens}))


@post("/v1/responses/compact", status_code=200)
async def compact(request: Request) -> ASGIApp:
    """What can stand for a conversation from now on: its users' messages, and a summary that only we can read."""
    desk, tenant = enter(request)
    raw = _compacting(fields.parse(_object_decoder, await body(request)))
    raw = await inheriting(desk, raw, tenant)
    turn = await desk.submit(responses.decode(raw, request.headers), raw, tenant, responses.ENCODER_VERSION)
    answer = responses.Answer(turn, desk.item_id, desk.seal)
    items = [item for item in await context(desk, turn) if item["type"] == "message" and item.get("role") == "user"]
    await fold(request, desk, turn, answer)
    assert answer.end is not None
    if isinstance(answer.end, Broke):
        raise failure.fault_of(answer.end)
    whole = {
        "id": turn.response,
        "object": "response.compaction",
        "created_at": turn.created,
        "output": [*items, *answer.response()["output"]],
        "usage": responses.usage(answer.end.usage),
    }
    return Reply(msgspec.json.encode(whole))


ROUTES = [create, retrieve, remove, cancel, input_items, input_tokens, compact]


# --- what they share ----------------------------------------------------------------------------------


async def recorded(desk: Desk, response_id: str, tenant: str, local: bool = False) -> Turn:
    """A turn of this protocol, stored or `local`; answers of the other ones have no such resource. Raises NotFound."""
    if not response_id.startswith(RESPONSE_PREFIX):
        raise errors.NotFound(f"Response with id '{response_id}' not found.", param="response_id")
    return await desk.recorded(response_id, tenant, local)


async def inheriting(desk: Desk, raw: bytes, tenant: str, local: Container[str] = ()) -> bytes:
    """A body with the tools in the input of the response that it continues. What is wrong with it is found later.

    `local`: responses that can be continued although they are not stored.
    """
    if b"previous_response_id" not in raw:
        return raw
    previous = fields.parse(_previous_decoder, raw).previous_response_id
    if not isinstance(previous, str):
        return raw
    try:
        continued = await recorded(desk, previous, tenant, previous in local)
        return responses_echo.inherits(raw, continued.raw)
    except (errors.NotFound, msgspec.MsgspecError):
        return raw


async def diagnostics(desk: Desk, turn: Turn) -> dict[str, Any] | None:
    """How the prompt of a turn compares with that of the response that it names; None if it names none."""
    if b"comparison_response_id" not in turn.raw:  # before a long body is read once more
        return None
    named = responses_echo.decoder.decode(turn.raw).compared_with
    if not named:
        return None
    try:
        found = await desk.compared(named, turn)
        if found is None:
            return responses_cache.NOT_FOUND
        return responses_cache.diagnose(*found, await desk.same_model(named, turn.response))
    except errors.JournalFault:
        return responses_cache.UNAVAILABLE


async def context(desk: Desk, turn: Turn) -> list[dict[str, Any]]:
    """All items that a turn's prompt is made of, in the order in which they were said."""
    found: list[dict[str, Any]] = []
    for one in await desk.ancestry(turn):

        def item_id(index: int, prefix: str, one: Turn = one) -> str:
            return desk.item_id(one, index, prefix)

        own = responses_list.items(one.raw, item_id)
        # Tools that a body has of the one before it are listed there.
        found += (item for item in own if not found or item["type"] != responses_echo.TOOLS)
        if one is not turn:
            answer = responses.Answer(one, desk.item_id, desk.seal)
            await take_all(desk, one, answer)
            found += answer.response()["output"]
    return found


async def _answer(desk: Desk, turn: Turn, told: dict[str, Any] | None) -> responses.Answer:
    """The answer of a turn; as it stands, if it is running."""
    answer = responses.Answer(turn, desk.item_id, desk.seal, told)
    if not desk.running(turn):
        await take_all(desk, turn, answer)
    elif turn.tail is not None and turn.tail.progress is not None:
        answer.take(turn.tail.progress)
    return answer


def _compacting(parts: dict[str, msgspec.Raw]) -> bytes:
    """The body of the turn that makes the summary: the client's, with the wish for one at its end, and not stored."""
    given = fields.exact_decoder.decode(parts["input"]) if "input" in parts else None
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if given is not None and not isinstance(given, list):
        raise errors.BadRequest("Invalid value for `input`: expected `str | array`.", param="input")
    items = [*(given or []), {"type": responses_echo.TRIGGER}]
    for name in ("stream", "background", "generate", "prompt_cache_options"):
        parts.pop(name, None)
    return msgspec.json.encode({**parts, "input": items, "store": False})
