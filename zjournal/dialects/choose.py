"""Which dialect a model speaks: told by its own chat template and the tokens of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from zjournal.checkpoint.template import Template
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.base import Dialect
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.literals import Tokens
from zjournal.dialects.qwen_xml import QwenXml
from zjournal.errors import BadRequest, JournalFault

_THINKS = "+think"  # behind the name of a dialect whose models think or not
_MADE: Mapping[str, Callable[[Tokens], Dialect]] = MappingProxyType(
    {
        "chatml": ChatML,
        "chatml" + _THINKS: lambda tokenizer: ChatML(tokenizer, thinks=True),
        "glm-4.5": lambda tokenizer: glm.Glm(tokenizer, newlines=True),
        "glm-4.7": glm.Glm,
        "dsml-v3.2": lambda tokenizer: dsml.Dsml(tokenizer, dsml.V32),
        "dsml-v4": lambda tokenizer: dsml.Dsml(tokenizer, dsml.V4),
        "dsml-v4.1": lambda tokenizer: dsml.Dsml(tokenizer, dsml.V41),
        "qwen-xml": QwenXml,
        "qwen-xml" + _THINKS: lambda tokenizer: QwenXml(tokenizer, thinks=True),
        "llama3": llama3.Llama3,
    }
)
NAMES = tuple(_MADE)

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
    thinks = _thinks(template, tokenizer)
    if "<tool_call>" in source:
        coder = "<function=" in source and "<parameter=" in source
        return QwenXml(tokenizer, thinks) if coder else ChatML(tokenizer, thinks)
    if dsml.MARKER in control:
        return dsml.Dsml(tokenizer)  # DeepSeek's own models come without a template that says it
    if llama3.TAG in control and "<function=" not in source:
        return llama3.Llama3(tokenizer)
    return ChatML(tokenizer, thinks)


def guessed(template: Template, tokenizer: Tokens) -> bool:
    """Whether nothing says how the model writes calls, so that `choose` takes ChatML and hopes."""
    source, control = template.source, tokenizer.control
    said = any(tag in source for tag in (dsml.MARKER, "<arg_key>", "<tool_call>"))
    held = dsml.MARKER in control or (llama3.TAG in control and "<function=" not in source)
    return not said and not held and "<tool_call>" not in control


def settled(setting: str, template: Template, tokenizer: Tokens) -> Dialect:
    """The dialect of a setting: `auto`, or the name of one. Whether the model thinks is always the model's to say.

    Raises ModelFault as `choose`.
    """
    if setting == "auto":
        return choose(template, tokenizer)
    thinks = setting + _THINKS
    return named(thinks if thinks in _MADE and _thinks(template, tokenizer) else setting, tokenizer)


def _thinks(template: Template, tokenizer: Tokens) -> bool:
    return "<think>" in template.source or "<think>" in tokenizer.control


def told(dialect: Dialect) -> str:
    """The name by which `named` makes this dialect again."""
    thinks = dialect.name + _THINKS
    return thinks if thinks in _MADE and dialect.reasoning is not None else dialect.name


def named(name: str, tokenizer: Tokens) -> Dialect:
    """The dialect of this name, one of NAMES.

    Raises JournalFault for a name that this version does not know, ModelFault as `choose`.
    """
    made = _MADE.get(name)
    if made is None:
        raise JournalFault(f"the dialect {name!r} is none of those that this zjournal knows: {', '.join(NAMES)}")
    return made(tokenizer)


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
