"""A Messages request becomes an Ask.

Bodies are open: fields and betas that this version does not know pass. A field that is known and of a wrong type is
400 with its path. docs/messages.md lists every field and what it does here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from zjournal import ask
from zjournal.api import fields
from zjournal.api.fields import parse
from zjournal.api.messages import blocks, tools
from zjournal.errors import BadRequest, ThreadMismatch

ENCODER_VERSION = 1
BUDGET_MIN = 1024  # tokens of thoughts
ATTRIBUTION = "attribution_line"  # the name of the rule in the journal

# A whole block of which nothing but the sender's version and a token of the request is told. It is no rule for the
# model, and where the token changes with each request it would change the prompt from its first line on.
_ATTRIBUTION = re.compile(r"\s*x-anthropic-billing-header:(?:\s*[a-z_]+=[^;\r\n]*;)+\s*")
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")  # in a user id that is no JSON

# What these fields may hold when they ask for nothing; anything else is refused by name. A client that sends one
# counts on it.
NEUTRAL: dict[str, tuple[Any, ...]] = {"compaction": (), "stop": (), "top_logprobs": (0,)}


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: msgspec.Raw = msgspec.Raw()


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Thread(msgspec.Struct):
    type: Literal["create", "continue"]
    previous_message_id: fields.Name | None = None


class _Body(fields.SamplingFields, kw_only=True):
    model: fields.Name
    messages: list[msgspec.Raw]
    max_tokens: int | None = None
    system: msgspec.Raw = msgspec.Raw()
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw()
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: msgspec.Raw = msgspec.Raw()
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: _Metadata | None = None
    thread: _Thread | None = None
    cache_salt: fields.CacheSalt | None = None
    service_tier: str | None = None  # type: ignore[assignment]
    compaction: Any = None
    mcp_servers: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    container: str | dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    fallbacks: str | list[Any] | None = None
    fallback_credit_token: str | dict[str, Any] | None = None
    billing_policy: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: list[str] | None = None


class _UserId(msgspec.Struct):
    session_id: str | None = None


class _Held(msgspec.Struct):
    """What a thread keeps of the body that it was created with, beside its messages."""

    tools: msgspec.Raw = msgspec.Raw()


class _Repeated(msgspec.Struct):
    """What a continuation must not say again."""

    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


class Diagnostics(msgspec.Struct):
    """`previous_message_id` may be anything: an id that is none is one that is not found."""

    previous_message_id: Any = None


class _Wanted(msgspec.Struct):
    diagnostics: Diagnostics | None = None


_body = msgspec.json.Decoder(_Body)
SHAPES: Mapping[str, type] = MappingProxyType({"body": _Body, "wanted": _Wanted})  # for openapi
_user_id = msgspec.json.Decoder(_UserId)
_held = msgspec.json.Decoder(_Held)
_repeated = msgspec.json.Decoder(_Repeated)
_wanted = msgspec.json.Decoder(_Wanted)


def decode(raw: bytes, headers: Mapping[str, str], *, attribution: bool = False, counted: bool = False) -> ask.Ask:
    """The Ask of a request body; header names are lower-case. Raises BadRequest, with the JSON path as `param`.

    `attribution`: the line of that name stays in the prompt. `counted`: no answer is asked for, only a number.
    """
    body = parse(_body, raw)
    fields.require_neutral(body, NEUTRAL | fields.FOREIGN)
    if not body.messages:
        raise BadRequest("At least one message is required.", param="messages")
    reader = blocks.Reader()
    system, ignored = _system(body.system, reader, attribution)
    items = [*system, *reader.items(body.messages)]
    blocks.refuse_doubled(items)
    if isinstance(items[-1], ask.Call):
        raise BadRequest(
            "There is nothing to answer: `tool_use` blocks stand last, without their `tool_result` blocks.",
            param=f"messages[{len(body.messages) - 1}]",
        )
    offered = tools.tools(body.tools or (), reader.skipped)
    if body.mcp_servers:
        reader.skipped.append("mcp_servers")  # whose tools only the maker's server calls
    if isinstance(body.container, dict) and body.container.get("skills"):
        reader.skipped.append("container.skills")  # likewise
    warm, max_tokens = _max_tokens(body, counted)
    return ask.Ask(
        protocol="messages",
        model=body.model,
        items=tuple(items),
        tools=offered,
        choice=tools.choice(body.tool_choice, offered),
        format=_format(body),
        sampling=ask.Sampling() if warm else fields.sampling(body, -1),
        max_tokens=max_tokens,
        stop=() if warm else _stops(body.stop_sequences),
        stream=bool(body.stream),
        previous=_previous(body.thread),
        session_key=fields.session_key(headers, _session(body.metadata)),
        cache_salt=body.cache_salt,
        background=fields.background(body),
        warm=warm,
        goes_on=isinstance(items[-1], ask.Message) and items[-1].role == "assistant",
        ignored=ignored,
        skipped=tuple(dict.fromkeys(reader.skipped)),
        client=fields.client(headers),
    )


def joined(raw: bytes, previous: bytes) -> bytes:
    """The body of a continuation with the tools of its thread, so that it can be read alone.

    `previous`: the body that the continued reply answers, likewise. Raises ThreadMismatch where the continuation says
    again what belongs to the thread.
    """
    said = parse(_repeated, raw)
    again = [name for name in ("system", "tools") if bytes(getattr(said, name)) not in (b"", b"null")]
    if again:
        names = " and ".join(f"`{name}`" for name in again)
        raise ThreadMismatch(
            f"{names}: the thread keeps what it was created with; leave it out, or send the whole conversation with "
            '`thread: {"type": "create"}`.'
        )
    kept = bytes(_held.decode(previous).tools)
    if kept in (b"", b"null"):
        return raw
    return b'%b,"tools":%b}' % (raw.rstrip()[:-1].rstrip(), kept)


def diagnostics(raw: bytes) -> Diagnostics | None:
    """What the request asks to be told of the cache."""
    return parse(_wanted, raw).diagnostics


def _system(raw: msgspec.Raw, reader: blocks.Reader, attribution: bool) -> tuple[list[ask.Item], tuple[str, ...]]:
    """The system message, and the names of the rules by which a part of it is not in the prompt."""
    if bytes(raw) in (b"", b"null"):
        return [], ()
    found = list(blocks.blocks_of(raw, "system"))
    texts = list(reader.texts(found))
    ignored: tuple[str, ...] = ()
    first = found[0][0] if found else ""
    if not attribution and first == "text" and _ATTRIBUTION.fullmatch(texts[0].text):
        texts, ignored = texts[1:], (ATTRIBUTION,)
    if not any(text.text for text in texts):
        return [], ignored
    return [ask.Message("system", tuple(texts))], ignored


def _max_tokens(body: _Body, counted: bool) -> tuple[bool, int | None]:
    """Whether only the prompt is to be read, and how many tokens may be said."""
    most = body.max_tokens
    if most is None:
        if counted:
            return False, None
        raise BadRequest("Missing required field `max_tokens`.", param="max_tokens")
    if not 0 <= most <= fields.TOKENS_MAX:
        raise BadRequest(f"Expected an integer from 0 to {fields.TOKENS_MAX}.", param="max_tokens")
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        at = "thinking.budget_tokens"
        if thinking.budget_tokens is None:
            raise BadRequest(f"Missing required field `{at}`.", param=at)
        if thinking.budget_tokens < BUDGET_MIN:
            raise BadRequest(f"Expected an integer of at least {BUDGET_MIN}.", param=at)
        if thinking.budget_tokens >= most:
            raise BadRequest("`max_tokens` must be greater than `thinking.budget_tokens`.", param="max_tokens")
    return (True, None) if most == 0 else (False, most)


def _format(body: _Body) -> ask.Format | None:
    """`output_config.format`, or its older place."""
    config = body.output_config
    if config is not None and (found := tools.text_format(config.format, "output_config.format")) is not None:
        return found
    return tools.text_format(body.output_format, "output_format")


def _stops(sequences: list[str] | None) -> tuple[str, ...]:
    try:
        return fields.stop_strings(sequences)
    except BadRequest as fault:
        at = str(fault.param).replace("stop", "stop_sequences", 1)
        raise BadRequest(fault.message.replace("`stop", "`stop_sequences", 1), param=at) from None


def _previous(thread: _Thread | None) -> str | None:
    if thread is None or thread.type == "create":
        return None
    if thread.previous_message_id is None:
        at = "thread.previous_message_id"
        raise BadRequest(f"Missing required field `{at}`.", param=at)
    return thread.previous_message_id


def _session(metadata: _Metadata | None) -> str | None:
    """The session in a user id: coding agents write it there, as JSON or behind a word."""
    user = metadata.user_id if metadata is not None else None
    if not user:
        return None
    if user.lstrip().startswith("{"):
        try:
            return _user_id.decode(user).session_id or None
        except (msgspec.MsgspecError, RecursionError):
            return None
    found = _SESSION.search(user)
    return found[1] if found else None
