"""The messages of a Chat request: each becomes neutral items, with the JSON path of every text in it.

A call of the older kind, `function_call`, has no id, and its result names the function. So both are known by that name
(`identity.named_call`), here and in the answers to requests with `functions`.
"""

from __future__ import annotations

import msgspec

from zjournal.api import blobs, fields, tooling
from zjournal.ask import Call, Item, Message, Result, Role, Text, Thought
from zjournal.errors import BadRequest
from zjournal.sessions import identity

FUNCTION_CALL = "function_call"

_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
_BLOBS = {"image_url": "image", "file": "file", "input_audio": "audio"}  # parts that are no text, and what they are


class _Url(msgspec.Struct):
    url: str


class _Sound(msgspec.Struct):
    data: str
    format: str = ""


class _File(msgspec.Struct):
    file_data: str | None = None
    file_id: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | _Url | None = None
    input_audio: _Sound | None = None
    file: _File | None = None


class _Called(msgspec.Struct):
    name: fields.Name
    arguments: str


class _CustomCalled(msgspec.Struct):
    name: fields.Name
    input: str


class _ToolCall(msgspec.Struct):
    id: fields.Name
    function: _Called | None = None
    custom: _CustomCalled | None = None


class ChatMessage(msgspec.Struct):
    """One message as it is sent."""

    role: str
    content: str | list[_Part] | None = None
    name: str | None = None  # of a function; other participants' names have no place in a template
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _Called | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same in the words of other servers
    audio: msgspec.Raw = msgspec.Raw()


def items_of(message: ChatMessage, at: str) -> list[Item]:
    """The items of a message that stands at the JSON path `at`: thoughts, a text, calls; or a result.

    Raises BadRequest with the path as `param`.
    """
    parts = _texts(message.content, f"{at}.content")
    if message.role == "tool":
        return [_result(message.tool_call_id, parts, f"{at}.tool_call_id", at)]
    if message.role == "function":
        name = message.name or ""
        return [_result(name and identity.named_call(name), parts, f"{at}.name")]
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join([*_ROLES, "tool", "function"])
        raise BadRequest(f"Invalid value for `{at}.role`: {message.role!r} is none of {known}.", param=f"{at}.role")
    if role != "assistant":
        if message.content is None:
            raise BadRequest(f"Missing required field `{at}.content`.", param=f"{at}.content")
        _refuse(message, ("tool_calls", FUNCTION_CALL, "refusal", "reasoning_content", "reasoning"), at)
        return [Message(role=role, parts=parts)]
    return _said(message, parts, at)


def nameless(item: Item) -> bool:
    """Whether an item is a call without an id."""
    return isinstance(item, Call) and item.path.endswith(f".{FUNCTION_CALL}")


def _result(call_id: str | None, parts: tuple[Text, ...], at: str, path: str = "") -> Result:
    """`at`: of the field with the id; `path`: of a result whose call must be there."""
    if not call_id:
        raise BadRequest(f"Missing required field `{at}`.", param=at)
    return Result(call_id=call_id, parts=parts, path=path)


def _refuse(message: ChatMessage, names: tuple[str, ...], at: str) -> None:
    """Raises BadRequest for what only an assistant can have said."""
    for name in names:
        if getattr(message, name):
            raise BadRequest(f"`{at}.{name}` belongs to an assistant message.", param=f"{at}.{name}")


def _said(message: ChatMessage, parts: tuple[Text, ...], at: str) -> list[Item]:
    """The items of an assistant's message."""
    if message.audio and bytes(message.audio) != b"null":
        raise BadRequest(f"`{at}.audio` names a sound that this server has not made.", param=f"{at}.audio")
    if message.refusal:
        parts = (*parts, Text(message.refusal, f"{at}.refusal"))
    calls = [_sent(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())]
    older = message.function_call
    if older is not None and calls:
        raise BadRequest(f"`{at}` has `tool_calls` and `function_call`; send one.", param=f"{at}.{FUNCTION_CALL}")
    if older is not None:
        calls = [Call(identity.named_call(older.name), older.name, older.arguments, f"{at}.{FUNCTION_CALL}")]
    items: list[Item] = _thoughts(message, at)
    if not calls or any(part.text for part in parts):
        items.append(Message(role="assistant", parts=parts))
    return [*items, *calls]


def _thoughts(message: ChatMessage, at: str) -> list[Item]:
    """What an assistant thought, as the client sends it back."""
    sent = {name: text for name in ("reasoning_content", "reasoning") if (text := getattr(message, name))}
    if not sent:
        return []
    name, text = next(iter(sent.items()))
    if len(set(sent.values())) > 1:
        raise BadRequest(f"`{at}.reasoning` and `{at}.reasoning_content` differ; send one.", param=f"{at}.reasoning")
    return [Thought((Text(text, f"{at}.{name}"),))]


def _sent(call: _ToolCall, at: str) -> Call:
    if call.custom is not None and call.function is None:
        return Call(call.id, call.custom.name, tooling.arguments_of(call.custom.input), f"{at}.custom")
    if call.function is None:
        raise BadRequest(f"Missing required field `{at}.function`.", param=f"{at}.function")
    return Call(call.id, call.function.name, call.function.arguments, f"{at}.function")


def _texts(content: str | list[_Part] | None, at: str) -> tuple[Text, ...]:
    """The texts of a content; an image, a file or a sound is told as what it is."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content, at),)
    texts = []
    for index, part in enumerate(content):
        path = f"{at}[{index}]"
        if part.type in _BLOBS:
            texts.append(_blob(part, path))
            continue
        if part.type not in ("text", "refusal"):
            raise BadRequest(f"`{path}` is of type {part.type!r}, which this server cannot read.", param=path)
        value = part.text if part.type == "text" else part.refusal
        if value is None:
            raise BadRequest(f"Missing required field `{path}.{part.type}`.", param=f"{path}.{part.type}")
        texts.append(Text(value, f"{path}.{part.type}"))
    return tuple(texts)


def _blob(part: _Part, at: str) -> Text:
    """What a text model is told of a part that is no text."""
    kind, missing = _BLOBS[part.type], f"{at}.{part.type}"
    if part.type == "input_audio" and (sound := part.input_audio) is not None:
        path = f"{missing}.data"
        return Text(blobs.encoded(kind, f"audio/{sound.format}", sound.data, path), path)
    if part.type == "image_url" and (image := part.image_url) is not None:
        url, path = (image, missing) if isinstance(image, str) else (image.url, f"{missing}.url")
        return Text(blobs.linked(kind, url, path), path)
    if part.type == "file" and (file := part.file) is not None:
        if file.file_data is not None:
            path, data = f"{missing}.file_data", file.file_data
            held = data.startswith("data:")
            return Text(blobs.linked(kind, data, path) if held else blobs.encoded(kind, "", data, path), path)
        if file.file_id is not None:
            return Text(blobs.linked(kind, file.file_id, f"{missing}.file_id"), f"{missing}.file_id")
        missing = f"{missing}.file_data"
    raise BadRequest(f"Missing required field `{missing}`.", param=missing)
