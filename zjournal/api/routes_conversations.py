"""Conversations over HTTP: `/v1/conversations`, their items, and what a response that is made in one answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Request, delete, get, post
from litestar.types import ASGIApp

from zjournal import errors
from zjournal.api import fields, responses, responses_echo, responses_list, tooling
from zjournal.api.guard import Reply
from zjournal.api.http import body, enter, take_all
from zjournal.api.responses_items import Input
from zjournal.sessions import conversations
from zjournal.sessions.conversations import Conversation, Payload

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn

PATH = "/v1/conversations"
ONE = PATH + "/{conversation_id:str}"
ITEMS = ONE + "/items"
ITEM = ITEMS + "/{item_id:str}"

Join = Callable[["Turn"], Awaitable[None]]


class _Create(msgspec.Struct):
    items: list[msgspec.Raw] | None = None
    metadata: fields.Metadata | None = None


class _Update(msgspec.Struct):
    metadata: fields.Metadata


class _Add(msgspec.Struct):
    items: list[msgspec.Raw]


_create_decoder = msgspec.json.Decoder(_Create)
_update_decoder = msgspec.json.Decoder(_Update)
_add_decoder = msgspec.json.Decoder(_Add)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
SHAPES: Mapping[str, type] = MappingProxyType({"create": _Create, "update": _Update, "add": _Add})  # for openapi


@post(PATH, status_code=200)
async def create(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    asked = fields.parse(_create_decoder, await body(request) or b"{}")
    name = conversations.PREFIX + secrets.token_hex(24)
    said = Payload(asked.metadata, _added(asked.items or [], set()))
    await _change(desk, name, tenant, conversations.CREATED, said)
    return Reply(_told(await _read(desk, name, tenant)))


@get(ONE)
async def retrieve(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    return Reply(_told(await _read(desk, request.path_params["conversation_id"], tenant)))


@post(ONE, status_code=200)
async def update(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    name = request.path_params["conversation_id"]
    asked = fields.parse(_update_decoder, await body(request))
    await _read(desk, name, tenant)
    await _change(desk, name, tenant, conversations.UPDATED, Payload(asked.metadata))
    return Reply(_told(await _read(desk, name, tenant)))


@delete(ONE, status_code=200)
async def remove(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    name = request.path_params["conversation_id"]
    await asyncio.to_thread(desk.conversations.delete, name, tenant, int(time.time()))
    return Reply(msgspec.json.encode({"id": name, "object": "conversation.deleted", "deleted": True}))


@get(ITEMS)
async def items_list(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    page = responses_list.Page.asked(request.query_params)
    found = await _read(desk, request.path_params["conversation_id"], tenant)
    return Reply(msgspec.json.encode(page.of(await _items(desk, found, tenant))))


@post(ITEMS, status_code=200)
async def items_create(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    name = request.path_params["conversation_id"]
    asked = fields.parse(_add_decoder, await body(request))
    async with _held(desk, name, tenant):
        found = await _read(desk, name, tenant)
        known = {item["id"] for item in await _items(desk, found, tenant, whole=True)}
        desk.conversations.check_items(len(known) + len(asked.items), "items")
        added = _added(asked.items, known)
        await _change(desk, name, tenant, conversations.ADDED, Payload(items=added))
    whole = responses_list.Page(limit=conversations.ITEMS_MAX, order="asc").of(added)
    return Reply(msgspec.json.encode(whole))


@get(ITEM)
async def item_retrieve(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    found = await _read(desk, request.path_params["conversation_id"], tenant)
    return Reply(msgspec.json.encode(_one(await _items(desk, found, tenant), request.path_params["item_id"])))


@delete(ITEM, status_code=200)
async def item_remove(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    name, item = request.path_params["conversation_id"], request.path_params["item_id"]
    found = await _read(desk, name, tenant)
    _one(await _items(desk, found, tenant), item)
    await _change(desk, name, tenant, conversations.REMOVED, Payload(item=item))
    return Reply(_told(found))


ROUTES = [create, retrieve, update, remove, items_list, items_create, item_retrieve, item_remove]


# --- responses in a conversation ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def joined(desk: Desk, raw: bytes, tenant: str) -> AsyncIterator[tuple[bytes, Join]]:
    """The body with all items of its conversation before its own, and what makes its response a part of that.

    Nobody else may add to the conversation before this ends. A body that names none comes out as it is.
    """
    echo = fields.parse(responses_echo.decoder, raw) if b"conversation" in raw else responses_echo.Echo()
    name = echo.conversation_id
    if not name or echo.previous_response_id is not None:  # both are refused
        yield raw, _nothing
        return
    async with _held(desk, name, tenant):
        whole, own = await merged(desk, raw, name, tenant)

        async def join(turn: Turn) -> None:
            try:
                await _change(desk, name, tenant, conversations.ANSWERED, Payload(), turn.response, own)
            except BaseException:
                desk.cancel(turn)
                raise

        yield whole, join


async def merged(desk: Desk, raw: bytes, name: str, tenant: str) -> tuple[bytes, int]:
    """The body with the items of a conversation before its own, and the number of those. Raises NotFound."""
    try:
        found = await _read(desk, name, tenant)
    except errors.NotFound as fault:
        raise errors.NotFound(fault.message, param="conversation") from None  # which is its name in this body
    parts = fields.parse(_object_decoder, raw)
    given = fields.exact_decoder.decode(parts["input"]) if "input" in parts else []
    own = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given or []
    if not isinstance(own, list):
        raise errors.BadRequest("Invalid value for `input`: expected `str | array`.", param="input")
    items = [*await _items(desk, found, tenant, whole=True), *own]
    desk.conversations.check_items(len(items), "conversation")
    return msgspec.json.encode({**parts, "input": items}), len(own)


async def _nothing(turn: Turn) -> None:
    """There is no conversation."""


@contextlib.asynccontextmanager
async def _held(desk: Desk, name: str, tenant: str) -> AsyncIterator[None]:
    """Another key that knows the name neither learns that something is added here, nor can stand in the way."""
    if (tenant, name) in desk.conversing:
        raise errors.BadRequest(f"Something else is being added to conversation '{name}'.", param="conversation")
    desk.conversing.add((tenant, name))
    try:
        yield
    finally:
        desk.conversing.discard((tenant, name))


async def _read(desk: Desk, name: str, tenant: str) -> Conversation:
    return await asyncio.to_thread(desk.conversations.read, name, tenant)


async def _change(
    desk: Desk, name: str, tenant: str, change: str, said: Payload, response: str = "", own: int = 0
) -> None:
    now = int(time.time())
    await asyncio.to_thread(desk.conversations.change, name, tenant, change, now, said, response, own)


async def _items(desk: Desk, found: Conversation, tenant: str, whole: bool = False) -> list[dict[str, Any]]:
    """All its items. A response that was deleted, failed or was cancelled has left nothing in it.

    Nor has one that still runs, yet: `whole` refuses that.
    """
    listed: list[dict[str, Any]] = []
    for entry in found.entries:
        listed += entry.items
        if not entry.response:
            continue
        try:
            turn = await desk.recorded(entry.response, tenant)
        except errors.NotFound:
            continue
        if desk.running(turn) and not whole:
            continue
        if desk.running(turn):
            raise errors.BadRequest(
                f"Response '{entry.response}' of conversation '{found.id}' is still running.", param="conversation"
            )
        answer = responses.Answer(turn, desk.item_id, desk.seal)
        await take_all(desk, turn, answer)
        if answer.status not in ("failed", "cancelled"):
            brought = list(responses_list.items(turn.raw, _namer(desk, turn)))
            listed += brought[len(brought) - entry.own :] + answer.response()["output"]
    return [item for item in listed if item["id"] not in found.removed]


def _namer(desk: Desk, turn: Turn) -> Callable[[int, str], str]:
    return lambda index, prefix: desk.item_id(turn, index, prefix)


def _added(raws: Sequence[msgspec.Raw], known: set[str]) -> tuple[dict[str, Any], ...]:
    """Items that are put in, each with its type, parts and an id. Raises BadRequest."""
    if len(raws) > conversations.ITEMS_MAX:
        raise errors.BadRequest(f"`items` takes at most {conversations.ITEMS_MAX} items at once.", param="items")
    found = Input("items")
    found.read(list(raws))
    for tools, at in found.tools:
        tooling.tools(tools, nested=False, at=at)
    whole = b'{"input":[%b]}' % b",".join(bytes(raw) for raw in raws)
    added = tuple(responses_list.items(whole, lambda _, prefix: f"{prefix}_{secrets.token_hex(20)}"))
    for index, item in enumerate(added):
        if item["id"] in known:
            raise errors.BadRequest(f"`items[{index}].id` is there already.", param=f"items[{index}].id")
        known.add(item["id"])
    return added


def _one(listed: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((item for item in listed if item["id"] == name), None)
    if found is None:
        raise errors.NotFound(f"Item with id '{name}' not found.", param="item_id")
    return found


def _told(found: Conversation) -> bytes:
    whole = {"id": found.id, "object": "conversation", "created_at": found.created, "metadata": found.metadata}
    return msgspec.json.encode(whole)
