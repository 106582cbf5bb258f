"""Messages and their content blocks as neutral items.

A string and a list with that one text are the same. Blocks of a kind that the model can read become text; images and
files become placeholders; what only another server can read is left out and named. `cache_control` may stand anywhere
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from zjournal.api import blobs
from zjournal.api.fields import any_decoder, kind_decoder, parse
from zjournal.ask import Call, Item, Message, Result, Role, Text, Thought
from zjournal.errors import BadRequest

ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
ERROR = "Error: "  # before the result of a tool that failed
_STRING = ""  # the type of a content that is a string
_UNREADABLE = ("redacted_thinking", "fallback")  # blocks that never are text for a model


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw


class _Text(msgspec.Struct):
    text: str


class _Thinking(msgspec.Struct):
    """The signature is whoever's: thoughts are text, and need no proof here."""

    thinking: str = ""


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _ToolResult(msgspec.Struct):
    tool_use_id: str
    content: msgspec.Raw = msgspec.Raw(b'""')
    is_error: bool | None = None


class _Blob(msgspec.Struct):
    source: msgspec.Raw
    title: str | None = None
    context: str | None = None


class _Source(msgspec.Struct):
    type: str
    media_type: str = ""
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    content: msgspec.Raw = msgspec.Raw(b'""')


class _SearchResult(msgspec.Struct):
    content: list[_Text]
    source: str = ""
    title: str = ""


class _Reference(msgspec.Struct):
    tool_name: str


class _Named(msgspec.Struct):
    type: str
    name: str | None = None


class _Change(msgspec.Struct):
    tool: _Named


class _Compaction(msgspec.Struct):
    content: str | None = None


_message = msgspec.json.Decoder(_Message)
_text = msgspec.json.Decoder(_Text)
_thinking = msgspec.json.Decoder(_Thinking)
_tool_use = msgspec.json.Decoder(_ToolUse)
_tool_result = msgspec.json.Decoder(_ToolResult)
_blob = msgspec.json.Decoder(_Blob)
_source = msgspec.json.Decoder(_Source)
_search_result = msgspec.json.Decoder(_SearchResult)
_reference = msgspec.json.Decoder(_Reference)
_change = msgspec.json.Decoder(_Change)
_compaction = msgspec.json.Decoder(_Compaction)
_blocks = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)

# By the `type` of the block; for openapi.
SHAPES: Mapping[str, type] = MappingProxyType(
    {
        "text": _Text,
        "image": _Blob,
        "document": _Blob,
        "search_result": _SearchResult,
        "tool_reference": _Reference,
        "tool_addition": _Change,
        "tool_removal": _Change,
        "compaction": _Compaction,
        "thinking": _Thinking,
        "tool_use": _ToolUse,
        "tool_result": _ToolResult,
    }
)
MESSAGE, SOURCE = _Message, _Source

Block = tuple[str, msgspec.Raw, str]  # its type, its JSON, its path


class Reader:
    """Reads the messages of one request. `skipped` are the types of the blocks that were left out."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def items(self, raws: Sequence[msgspec.Raw]) -> list[Item]:
        """All items in order. Raises BadRequest with the path of what is wrong."""
        found: list[Item] = []
        for index, raw in enumerate(raws):
            at = f"messages[{index}]"
            message = parse(_message, raw, at)
            role = ROLES.get(message.role)
            if role is None:
                known = ", ".join(ROLES)
                sentence = f"Invalid value for `{at}.role`: {message.role!r} is none of {known}."
                raise BadRequest(sentence, param=f"{at}.role")
            blocks = list(blocks_of(message.content, f"{at}.content"))
            if role == "assistant":
                found += self._said(blocks)
            elif role == "user":
                found += self._asked(blocks)
            else:
                found.append(Message(role, tuple(self.texts(blocks))))
        return found

    def texts(self, blocks: Sequence[Block]) -> Iterator[Text]:
        """The texts of blocks that hold nothing else: of system messages, of results."""
        for block in blocks:
            yield from self._read(*block)

    def _asked(self, blocks: Sequence[Block]) -> list[Item]:
        """A user's message: results of tools, and words, in their order."""
        items: list[Item] = []
        words: list[Text] = []
        for kind, raw, at in blocks:
            if kind != "tool_result":
                words += self._read(kind, raw, at)
                continue
            if words:
                items.append(Message("user", tuple(words)))
                words = []
            items.append(self._result(parse(_tool_result, raw, at), at))
        if words or not items:
            items.append(Message("user", tuple(words)))
        return items

    def _result(self, result: _ToolResult, at: str) -> Result:
        if not result.tool_use_id:
            raise BadRequest(f"`{at}.tool_use_id` is empty.", param=f"{at}.tool_use_id")
        parts = tuple(self.texts(list(blocks_of(result.content, f"{at}.content"))))
        if result.is_error:
            parts = (Text(ERROR), *parts)
        return Result(result.tool_use_id, parts, at)

    def _said(self, blocks: Sequence[Block]) -> list[Item]:
        """An assistant's message in the one form of its kind: thoughts, the whole text, calls."""
        thoughts: list[Text] = []
        words: list[Text] = []
        calls: list[Item] = []
        for kind, raw, at in blocks:
            if kind == "thinking":
                text = parse(_thinking, raw, at).thinking
                thoughts += [Text(text, f"{at}.thinking")] if text else []
            elif kind == "tool_use":
                calls.append(_call(parse(_tool_use, raw, at), at))
            elif kind in (_STRING, "text", "compaction"):
                words += self._read(kind, raw, at)
            else:  # what another server's tools did; a placeholder would teach the model to write such things
                self.skipped.append(kind)
        items: list[Item] = [Thought(tuple(thoughts))] if thoughts else []
        if words or not calls:
            items.append(Message("assistant", tuple(words)))
        return items + calls

    def _read(self, kind: str, raw: msgspec.Raw, at: str) -> Iterator[Text]:
        """One block as text."""
        match kind:
            case _ if kind == _STRING:
                yield Text(parse(_string, raw, at), at)
            case "text":
                yield Text(parse(_text, raw, at).text, f"{at}.text")
            case "image" | "document":
                yield from self._file(kind, parse(_blob, raw, at), at)
            case "search_result":
                found = parse(_search_result, raw, at)
                for name in ("title", "source"):
                    if value := getattr(found, name):
                        yield Text(value, f"{at}.{name}")
                        yield Text("\n")
                for index, part in enumerate(found.content):
                    yield Text(part.text, f"{at}.content[{index}].text")
            case "tool_reference":
                yield Text("[tool: ")
                yield Text(parse(_reference, raw, at).tool_name, f"{at}.tool_name")
                yield Text("]")
            case "tool_addition" | "tool_removal":
                yield from self._changed(kind, parse(_change, raw, at).tool, f"{at}.tool")
            case "compaction":
                if summary := parse(_compaction, raw, at).content:
                    yield Text(summary, f"{at}.content")
            case "tool_use" | "tool_result" | "thinking":
                raise BadRequest(f"`{at}` is of type {kind!r}, which does not belong here.", param=f"{at}.type")
            case _:
                self.skipped.append(kind)
                if kind not in _UNREADABLE:
                    yield Text(f"[{kind}]")

    def _changed(self, kind: str, tool: _Named, at: str) -> Iterator[Text]:
        """All tools stand in the prompt from the beginning, so what changes is said where it is said."""
        if tool.type == "tool_definition":
            raise BadRequest("This server takes definitions of tools in `tools` only.", param=f"{at}.type")
        yield Text("[tool added: " if kind == "tool_addition" else "[tool removed: ")
        yield Text(tool.name or tool.type, f"{at}.{'name' if tool.name else 'type'}")
        yield Text("]")

    def _file(self, kind: str, file: _Blob, at: str) -> Iterator[Text]:
        """An image or a document: its text if it has one, else its placeholder."""
        where = f"{at}.source"
        source = parse(_source, file.source, where)
        for name in ("title", "context"):
            if value := getattr(file, name):
                yield Text(value, f"{at}.{name}")
                yield Text("\n")
        match source.type:
            case "base64":
                yield Text(
                    blobs.encoded(kind, source.media_type, _there(source.data, f"{where}.data"), f"{where}.data")
                )
            case "url":
                yield Text(blobs.linked(kind, _there(source.url, f"{where}.url"), f"{where}.url"))
            case "text":
                yield Text(_there(source.data, f"{where}.data"), f"{where}.data")
            case "content":
                yield from self.texts(list(blocks_of(source.content, f"{where}.content")))
            case "file":
                raise BadRequest("This server keeps no files.", param=f"{where}.file_id")
            case other:
                raise BadRequest(f"Invalid value for `{where}.type`: {other!r} is not known.", param=f"{where}.type")


def blocks_of(raw: msgspec.Raw, at: str) -> Iterator[Block]:
    """The blocks of a content, which may be a string. Raises BadRequest."""
    value = bytes(raw).lstrip()
    if value.startswith(b'"'):
        yield _STRING, raw, at
        return
    if not value.startswith(b"["):
        found = parse(any_decoder, raw, at)
        got = "null" if found is None else type(found).__name__
        raise BadRequest(f"Invalid value for `{at}`: expected a string or a list of blocks, got {got}.", param=at)
    found_blocks: list[msgspec.Raw] = parse(_blocks, raw, at)
    for index, block in enumerate(found_blocks):
        where = f"{at}[{index}]"
        kind = parse(kind_decoder, block, where).type
        if not kind:
            raise BadRequest(f"Missing required field `{where}.type`.", param=f"{where}.type")
        yield kind, block, where


def refuse_doubled(items: Sequence[Item]) -> None:
    """Raises BadRequest where two calls of one assistant's turn have the same id: results could belong to either."""
    seen: set[str] = set()
    for item in items:
        if isinstance(item, Call):
            if item.call_id in seen:
                at = f"{item.path}.id"
                raise BadRequest(f"`tool_use` ids must be unique: {item.call_id!r} was used before.", param=at)
            seen.add(item.call_id)
        elif not isinstance(item, Thought) and not (isinstance(item, Message) and item.role == "assistant"):
            seen.clear()


def _call(use: _ToolUse, at: str) -> Call:
    """The client's JSON, byte for byte."""
    for name in ("id", "name"):
        if not getattr(use, name):
            raise BadRequest(f"`{at}.{name}` is empty.", param=f"{at}.{name}")
    value: Any = parse(any_decoder, use.input, f"{at}.input")
    if not isinstance(value, dict):
        raise BadRequest(f"Invalid value for `{at}.input`: expected an object.", param=f"{at}.input")
    return Call(use.id, use.name, bytes(use.input).decode(), at)


def _there(value: str | None, at: str) -> str:
    if value is None:
        raise BadRequest(f"Missing required field `{at}`.", param=at)
    return value
