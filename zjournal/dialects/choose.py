"""Which dialect a model speaks: told by its own chat template and the tokens of its tokenizer."""

from __future__ import annotations

from zjournal.checkpoint.template import Template
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.base import Dialect
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.literals import Tokens
from zjournal.dialects.qwen_xml import QwenXml
from zjournal.errors import BadRequest

_PROBE = (
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}],
    },
)


def choose(template: Template, tokenizer: Tokens) -> Dialect:
    """The dialect: that of the template, else the one that the tokenizer has tags for.

    A model of which nothing is known gets ChatML, which is explained to it in its system message. Raises ModelFault
    that names the literal if the tokenizer cannot write the dialect that the template asks for.
    """
    source, control = template.source, tokenizer.control
    if dsml.MARKER in source:
        return dsml.Dsml(tokenizer, _version(template))
    if "<arg_key>" in source:
        return glm.Glm(tokenizer, newlines="probe\n" in _written(template))
    thinks = "<think>" in source or "<think>" in control
    if "<tool_call>" in source:
        coder = "<function=" in source and "<parameter=" in source
        return QwenXml(tokenizer, thinks) if coder else ChatML(tokenizer, thinks)
    if dsml.MARKER in control:
        return dsml.Dsml(tokenizer)  # DeepSeek's own models come without a template that says it
    if llama3.TAG in control and "<function=" not in source:
        return llama3.Llama3(tokenizer)
    return ChatML(tokenizer, thinks)


def _written(template: Template) -> str:
    """What the template makes of a call, for source code says little of it; "" if it makes nothing of this one."""
    try:
        return template.render(_PROBE, add_generation_prompt=False)
    except BadRequest:
        return ""


def _version(template: Template) -> dsml.Version:
    """By the name of the block; V4 where it is not named."""
    for text in (_written(template), template.source):
        for version in (dsml.V32, dsml.V41, dsml.V4):
            if f"<{dsml.MARKER}{version.space}{version.block}>" in text:
                return version
    return dsml.V4
