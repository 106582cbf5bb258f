"""Input items of the Responses protocol: each becomes neutral items with the paths they came from.

An item that another server's tools made (a shell, a search, an MCP server) is echoed by clients for ever, so none of
them ends a conversation: what a model can be told of it is told as a call and its result, under the name that the tool
has there. docs/api.md has the table. Types that nobody here knows are left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from zjournal.api import blobs, compaction, fields, tooling
from zjournal.ask import Call, Item, Message, Result, Role, Sealed, Text, Thought
from zjournal.errors import BadRequest

ROLES: Mapping[str, Role] = MappingProxyType(
    {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
)
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # and where it stands
_BLOBS = {"input_image": "image", "input_file": "file", "input_audio": "audio", "computer_screenshot": "image"}
_UNREADABLE = ("item_reference",)  # stands for text which only its server has
_SILENT = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")  # say nothing that a model was told

# Calls of tools that other servers run: the tool's name, and the field that holds what it was called with.
_FOREIGN_CALLS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "local_shell_call": ("local_shell", ("action",)),
        "shell_call": ("shell", ("action",)),
        "apply_patch_call": ("apply_patch", ("operation",)),
        "computer_call": ("computer", ("action", "actions")),
        "tool_search_call": ("tool_search", ("arguments",)),
        "web_search_call": ("web_search", ("action",)),
        "file_search_call": ("file_search", ("queries",)),
        "code_interpreter_call": ("code_interpreter", ("code",)),
        "image_generation_call": ("image_generation", ("revised_prompt",)),
        "program": ("program", ("code",)),
        "mcp_call": ("", ("arguments",)),
    }
)
# Their results, and the fields that may hold them; some stand in the call's own item.
_FOREIGN_RESULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "local_shell_call_output": ("output",),
        "shell_call_output": ("output",),
        "apply_patch_call_output": ("output", "status"),
        "tool_search_output": ("tools",),
        "program_output": ("result",),
        "mcp_call": ("output", "error"),
        "file_search_call": ("results",),
        "code_interpreter_call": ("outputs",),
    }
)
_PICTURES = ("computer_call_output", "image_generation_call")  # results that are an image
_PICTURE = "[image]"


class _Url(msgspec.Struct):
    url: str


class _Audio(msgspec.Struct):
    data: str
    format: str = ""


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | _Url | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    input_audio: _Audio | None = None


class _MessageItem(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _CallItem(msgspec.Struct):
    call_id: fields.Name
    name: fields.Name
    arguments: str
    namespace: str | None = None


class _CustomCallItem(msgspec.Struct):
    call_id: fields.Name
    name: fields.Name
    input: str
    namespace: str | None = None


class _ReasoningPart(msgspec.Struct):
    type: str
    text: str


class _ReasoningItem(msgspec.Struct):
    """`summary` and `encrypted_content` are not what was thought, and nothing that this server can read."""

    content: list[_ReasoningPart] | None = None


class _ResultItem(msgspec.Struct):
    call_id: fields.Name
    output: str | list[_Part]


class _CompactionItem(msgspec.Struct):
    encrypted_content: str


class _ToolsItem(msgspec.Struct):
    tools: list[msgspec.Raw]


class _UpdatedText(msgspec.Struct):
    format: msgspec.Raw = msgspec.Raw()


class _UpdateItem(msgspec.Struct):
    text: _UpdatedText | None = None


_message_decoder = msgspec.json.Decoder(_MessageItem)
_call_decoder = msgspec.json.Decoder(_CallItem)
_custom_call_decoder = msgspec.json.Decoder(_CustomCallItem)
_reasoning_decoder = msgspec.json.Decoder(_ReasoningItem)
_result_decoder = msgspec.json.Decoder(_ResultItem)
_compaction_decoder = msgspec.json.Decoder(_CompactionItem)
_tools_decoder = msgspec.json.Decoder(_ToolsItem)
_update_decoder = msgspec.json.Decoder(_UpdateItem)
_parts_decoder: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

# By the `type` of the item; for openapi.
SHAPES: Mapping[str, type] = MappingProxyType(
    {
        "message": _MessageItem,
        "function_call": _CallItem,
        "custom_tool_call": _CustomCallItem,
        "function_call_output": _ResultItem,
        "custom_tool_call_output": _ResultItem,
        "reasoning": _ReasoningItem,
        "compaction": _CompactionItem,
        "compaction_summary": _CompactionItem,
        "additional_tools": _ToolsItem,
        "configuration_update": _UpdateItem,
    }
)
PART = _Part


class Update(NamedTuple):
    """The format of the text that an item sets, and where it stands."""

    format: msgspec.Raw
    path: str


class Input:
    """What stands in an input, as it is read."""

    def __init__(self, path: str = "input") -> None:
        """`path`: of the list."""
        self._path = path
        self.items: list[Item] = []
        self.tools: list[tuple[Sequence[msgspec.Raw], str]] = []  # lists of tools, and where each stands
        self.sealed: list[Sealed] = []
        self.skipped: list[str] = []  # types
        self.update: Update | None = None  # the last one
        self.compacts = False  # it ends with the wish to be compacted

    def read(self, given: str | list[msgspec.Raw]) -> None:
        """Reads `input`. Raises BadRequest with the path of what is wrong."""
        if isinstance(given, str):
            self.items.append(Message(role="user", parts=(Text(given, self._path),)))
            return
        for index, raw in enumerate(given):
            at = f"{self._path}[{index}]"
            kind = fields.parse(fields.kind_decoder, raw, at).type
            if self.compacts:
                raise BadRequest("A `compaction_trigger` must be the last item.", param=f"{self._path}[{index - 1}]")
            if not self._settings(kind, raw, at):
                found = _items(kind, raw, at)
                self.items += found or ()
                if found is None and kind is not None:
                    self.skipped.append(kind)

    def _settings(self, kind: str | None, raw: msgspec.Raw, at: str) -> bool:
        """Takes an item that is not said by anybody; False for all others."""
        match kind:
            case "additional_tools":
                self.tools.append((fields.parse(_tools_decoder, raw, at).tools, f"{at}.tools"))
            case "configuration_update":
                text = fields.parse(_update_decoder, raw, at).text
                if text is not None and text.format:
                    self.update = Update(text.format, f"{at}.text.format")
                    tooling.text_format(*self.update, nested=False)  # wrong ones are told here, in a conversation too
            case "compaction" | "compaction_summary":
                blob, path = fields.parse(_compaction_decoder, raw, at).encrypted_content, f"{at}.encrypted_content"
                self.sealed.append(Sealed(blob, path))
                self.items.append(Message("user", (Text(compaction.told(blob, path), path),)))
            case "compaction_trigger":
                self.compacts = True
            case _:
                return False
        return True


def _items(kind: str | None, raw: msgspec.Raw, at: str) -> tuple[Item, ...] | None:
    """What a model can be told of an item; None for a type that is not known."""
    match kind:
        case None | "message":
            message = fields.parse(_message_decoder, raw, at)
            role = ROLES.get(message.role)
            if role is None:
                sentence = f"Invalid value for `{at}.role`: {message.role!r} is none of {', '.join(ROLES)}."
                raise BadRequest(sentence, param=f"{at}.role")
            return (Message(role=role, parts=texts(message.content, f"{at}.content")),)
        case "function_call":
            call = fields.parse(_call_decoder, raw, at)
            return (Call(call.call_id, tooling.joined(call.namespace, call.name), call.arguments, at),)
        case "custom_tool_call":
            custom = fields.parse(_custom_call_decoder, raw, at)
            name = tooling.joined(custom.namespace, custom.name)
            return (Call(custom.call_id, name, tooling.arguments_of(custom.input), at),)
        case "function_call_output" | "custom_tool_call_output":
            result = fields.parse(_result_decoder, raw, at)
            return (Result(result.call_id, texts(result.output, f"{at}.output"), at),)
        case "reasoning":
            parts = fields.parse(_reasoning_decoder, raw, at).content or []
            paths = (f"{at}.content[{index}].text" for index in range(len(parts)))
            thoughts = tuple(Text(part.text, path) for part, path in zip(parts, paths, strict=True) if part.text)
            return (Thought(thoughts),) if thoughts else ()
        case _ if kind in _UNREADABLE:
            raise BadRequest(f"`{at}` is of type {kind!r}, which this server cannot read.", param=at)
        case _ if kind in _SILENT:
            return ()
    return _foreign(kind, fields.parse(_parts_decoder, raw, at), at)


def texts(content: str | list[_Part], at: str) -> tuple[Text, ...]:
    """The texts of a message's content or of a result; an image, a file or a sound is told as what it is.

    Raises BadRequest for a part of a type that is not known, or without its content.
    """
    if isinstance(content, str):
        return (Text(content, at),)
    found = []
    for index, part in enumerate(content):
        path = f"{at}[{index}]"
        if part.type in _BLOBS:
            found.append(_blob(part, path))
            continue
        name = _TEXT_PARTS.get(part.type)
        if name is None:
            raise BadRequest(f"`{path}` is of type {part.type!r}, which this server cannot read.", param=path)
        value = part.refusal if name == "refusal" else part.text
        if value is None:
            raise BadRequest(f"Missing required field `{path}.{name}`.", param=f"{path}.{name}")
        found.append(Text(value, f"{path}.{name}"))
    return tuple(found)


def _blob(part: _Part, at: str) -> Text:
    """What a text model is told of a part that is no text."""
    kind = _BLOBS[part.type]
    url = part.image_url.url if isinstance(part.image_url, _Url) else part.image_url
    if part.input_audio is not None:
        path, sound = f"{at}.input_audio.data", part.input_audio
        return Text(blobs.encoded(kind, f"audio/{sound.format}", sound.data, path), path)
    if part.file_data is not None and not part.file_data.startswith("data:"):
        return Text(blobs.encoded(kind, "", part.file_data, f"{at}.file_data"), f"{at}.file_data")
    named = {"image_url": url, "file_data": part.file_data, "file_url": part.file_url, "file_id": part.file_id}
    for name, value in named.items():
        if value is not None:
            return Text(blobs.linked(kind, value, f"{at}.{name}"), f"{at}.{name}")
    missing = {"image": "image_url", "file": "file_data", "audio": "input_audio"}[kind]
    raise BadRequest(f"Missing required field `{at}.{missing}`.", param=f"{at}.{missing}")


# --- what other servers' tools have made --------------------------------------------------------------


def _foreign(kind: str, parts: Mapping[str, msgspec.Raw], at: str) -> tuple[Item, ...] | None:
    """A call, its result, or both in one item. Nothing in it is required, for it is an echo."""
    if kind == "agent_message":
        said = _loose_text(parts.get("content", msgspec.Raw()))
        return (Message("user", (Text(said, f"{at}.content"),)),) if said else ()
    call_id = _string(parts, "call_id") or _string(parts, "id") or at
    found: list[Item] = []
    if kind in _FOREIGN_CALLS:
        name, names = _FOREIGN_CALLS[kind]
        if kind == "mcp_call":
            name = tooling.joined(_string(parts, "server_label") or None, _string(parts, "name") or "mcp")
        found.append(Call(call_id, name, _arguments(parts, names), at))
    if kind in _FOREIGN_RESULTS and (name := _given(parts, _FOREIGN_RESULTS[kind])):
        found.append(Result(call_id, (Text(_loose_text(parts[name]), f"{at}.{name}"),)))
    if kind in _PICTURES:
        found.append(Result(call_id, (Text(_PICTURE, at),)))
    return tuple(found) or None


def _given(parts: Mapping[str, msgspec.Raw], names: Sequence[str]) -> str:
    """The first of these fields that is there; "" if none is."""
    return next((name for name in names if bytes(parts.get(name, b"null")) != b"null"), "")


def _string(parts: Mapping[str, msgspec.Raw], name: str) -> str:
    value = fields.exact_decoder.decode(parts[name]) if name in parts else None
    return value if isinstance(value, str) else ""


def _arguments(parts: Mapping[str, msgspec.Raw], names: Sequence[str]) -> str:
    """What a tool was called with: an object as it is, anything else under its field's name."""
    name = _given(parts, names)
    if not name:
        return "{}"
    value = fields.exact_decoder.decode(parts[name])
    if isinstance(value, dict):
        return bytes(parts[name]).decode()
    return value if name == "arguments" and isinstance(value, str) else _json({name: value})


def _loose_text(raw: msgspec.Raw) -> str:
    """A text wherever one may stand: a string, a list of parts with texts; else the JSON without its pictures."""
    value = fields.exact_decoder.decode(raw) if raw else ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    return _json(_without_pictures(value))


def _json(value: Any) -> str:
    """On one line, with a space behind commas and colons."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _without_pictures(value: Any) -> Any:
    """Data URLs are no text for a model: they would be a hundred thousand tokens."""
    if isinstance(value, str):
        return _PICTURE if value.startswith("data:") else value
    if isinstance(value, list):
        return [_without_pictures(inner) for inner in value]
    return {key: _without_pictures(inner) for key, inner in value.items()} if isinstance(value, dict) else value
