"""What each route answers: the schemas of whole answers, of errors, and the words for the streams.

They say which keys a client can count on, and of which types. What stands in them is in docs/api.md.
"""

from __future__ import annotations

from zjournal.api.openapi.shapes import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    either,
    listed,
    nullable,
    obj,
)

EVENT = obj({"data": STRING}, event=STRING)  # one of a stream

_COUNT: Schema = {"type": "integer", "minimum": 0}

ERROR = obj(
    {
        "error": obj(
            {"message": STRING, "type": STRING, "param": nullable(STRING), "code": STRING},
        )
    }
)
ANTHROPIC_ERROR = obj(
    {
        "type": {"const": "error"},
        "error": obj({"type": STRING, "message": STRING}, details=OBJECT),
        "request_id": STRING,
    }
)

_CHAT_USAGE = obj(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": obj({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "completion_tokens_details": obj({"reasoning_tokens": _COUNT}),
    }
)
CHAT = obj(
    {
        "id": STRING,
        "object": {"const": "chat.completion"},
        "created": INTEGER,
        "model": STRING,
        "choices": listed(
            obj(
                {
                    "index": _COUNT,
                    "message": obj({"role": {"const": "assistant"}, "content": nullable(STRING)}),
                    "logprobs": nullable(OBJECT),
                    "finish_reason": STRING,
                }
            )
        ),
        "usage": _CHAT_USAGE,
    }
)

USAGE = obj(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": obj({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": obj({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)
_ITEM = obj({"type": STRING, "id": STRING})
RESPONSE = obj(
    {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "incomplete_details": nullable(obj({"reason": STRING})),
        "model": STRING,
        "output": listed(_ITEM),
        "error": nullable(obj({"code": STRING, "message": STRING})),
        "usage": nullable(USAGE),
        "previous_response_id": nullable(STRING),
        "instructions": nullable(STRING),
        "tools": listed(OBJECT),
        "tool_choice": either(STRING, OBJECT),
        "truncation": {"const": "disabled"},
        "parallel_tool_calls": BOOLEAN,
        "text": obj({"format": obj({"type": STRING})}),
        "temperature": NUMBER,
        "top_p": NUMBER,
        "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER,
        "top_logprobs": _COUNT,
        "reasoning": nullable(OBJECT),
        "max_output_tokens": nullable(INTEGER),
        "max_tool_calls": nullable(INTEGER),
        "store": BOOLEAN,
        "background": BOOLEAN,
        "service_tier": {"enum": ["default", "flex"]},
        "metadata": {"type": "object", "additionalProperties": STRING},
        "user": nullable(STRING),
        "safety_identifier": nullable(STRING),
        "prompt_cache_key": nullable(STRING),
    }
)
COMPACTION = obj(
    {
        "id": STRING,
        "object": {"const": "response.compaction"},
        "created_at": INTEGER,
        "output": listed(_ITEM),
        "usage": USAGE,
    }
)
INPUT_TOKENS = obj({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT})


def deleted(kind: str) -> Schema:
    """What confirms that something is gone."""
    return obj({"id": STRING, "object": {"const": kind}, "deleted": {"const": True}})


def page(item: Schema = _ITEM) -> Schema:
    """A part of a list."""
    return obj(
        {
            "object": {"const": "list"},
            "data": listed(item),
            "first_id": nullable(STRING),
            "last_id": nullable(STRING),
            "has_more": BOOLEAN,
        }
    )


ITEM = _ITEM
CONVERSATION = obj(
    {"id": STRING, "object": {"const": "conversation"}, "created_at": INTEGER, "metadata": nullable(OBJECT)}
)

MESSAGE = obj(
    {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": listed(obj({"type": {"enum": ["text", "thinking", "tool_use"]}})),
        "stop_reason": {"enum": ["end_turn", "tool_use", "stop_sequence", "max_tokens"]},
        "stop_sequence": nullable(STRING),
        "diagnostics": nullable(OBJECT),
        "usage": obj(
            {
                "input_tokens": _COUNT,
                "cache_creation_input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
            }
        ),
    }
)
COUNTED = obj({"input_tokens": _COUNT})

MODEL = obj(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": STRING,
        "type": {"const": "model"},
        "display_name": STRING,
        "created_at": STRING,
        "lifecycle": {"const": "active"},
        "max_input_tokens": INTEGER,
        "max_tokens": INTEGER,
        "aliases": listed(STRING),
    }
)
MODELS = page(MODEL)
MODELS["properties"]["models"] = listed(OBJECT)

LIVE = obj({"status": {"const": "live"}})
READY = obj(
    {
        "status": {"enum": ["loading", "ready", "draining", "failed"]},
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
    },
    reason=STRING,
)
HELLO = obj({"message": STRING})
