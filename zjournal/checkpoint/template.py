"""The model's own chat template, in a sandbox.

A template is code that came with a download: it runs in jinja's immutable sandbox (sandbox.py) with bounds on its
steps and its output, and gets neither clock nor dice, for a date in the prompt would make every day another prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import msgspec

from zjournal.checkpoint.gguf import Header
from zjournal.checkpoint.hfconfig import open_file, read_object
from zjournal.checkpoint.sandbox import WIDTH_MAX, Sandbox
from zjournal.errors import BadRequest, ModelFault

SOURCE_BYTES_MAX = 1 << 20
_PROBE_ANSWER = "\ue000answer\ue001"
OUTPUT_CHARACTERS_MAX = 64 << 20  # a prompt of 200,000 tokens has about one million

# What a template can raise: it is code, and applies Python's operators to what it is given.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


class _Refused(Exception):
    """The template's raise_exception."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what is trained on; a prompt has the body as it is."""

    tags = {"generation"}  # noqa: RUF012, as jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Answers(msgspec.Struct, frozen=True):
    """What the template writes before an answer: when it asks for one, and before one that is there, longest first.

    The two may differ, by the tags of thoughts. The model sampled behind `asked`, so that is what stands before an
    answer that is replayed.
    """

    asked: str = ""
    given: tuple[str, ...] = ()

    def settle(self, text: str) -> str:
        """`text`, which ends where an answer begins, as it was when the answer was asked for."""
        found = next((header for header in self.given if text.endswith(header)), None)
        return text if found is None else text[: len(text) - len(found)] + self.asked


class Template:
    """A compiled chat template.

    `uses_tools` and `uses_reasoning` say whether it renders tools, and the thoughts of a message, itself;
    `places_system` whether system messages stand where the conversation has them, or else are refused or moved.
    """

    def __init__(self, source: str, specials: Mapping[str, str] | None = None) -> None:
        """`specials` are the texts of the roles bos, eos. Raises ModelFault if the source is no valid template."""
        if len(source) > SOURCE_BYTES_MAX:
            raise ModelFault(f"the chat template has {len(source)} characters, the limit is {SOURCE_BYTES_MAX}")
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        self.uses_reasoning = "reasoning_content" in source
        self._environment = environment
        self._specials = {f"{role}_token": text for role, text in (specials or {}).items()}
        try:
            self._template = environment.from_string(source)
            self.uses_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except _TEMPLATE_ERRORS as error:
            raise ModelFault(f"the chat template is not valid: {error}") from error
        self.default_system = self._default_system()
        self.answers = self._answers()
        self.places_system = self._places_system()

    @classmethod
    def from_header(cls, header: Header, specials: Mapping[str, str] | None = None) -> Template:
        """The template in the GGUF's metadata. Raises ModelFault if there is none or it is not valid."""
        try:
            return cls(header.value("tokenizer.chat_template", str), specials)
        except ModelFault as fault:
            named = fault.message.startswith(str(header.path))
            raise ModelFault(fault.message if named else f"{header.path}: {fault.message}") from fault

    @classmethod
    def from_folder(cls, folder: Path, specials: Mapping[str, str] | None = None) -> Template:
        """The template of a Hugging Face folder: chat_template.jinja, else the one in tokenizer_config.json.

        Of several named ones it is `default`. Raises ModelFault if there is none or it is not valid.
        """
        path = folder / "chat_template.jinja"
        try:
            if path.exists():
                return cls(_read_text(path), specials)
            path = folder / "tokenizer_config.json"
            told = read_object(path).get("chat_template") if path.exists() else None
            if isinstance(told, list):
                named = {one.get("name"): one.get("template") for one in told if isinstance(one, dict)}
                told = named.get("default")
            if not isinstance(told, str):
                raise ModelFault("there is no chat template: neither chat_template.jinja nor one in the config")
            return cls(told, specials)
        except ModelFault as fault:
            named_already = fault.message.startswith(str(folder))
            raise ModelFault(fault.message if named_already else f"{path}: {fault.message}") from fault

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises BadRequest if the template refuses the messages or cannot render them."""
        try:
            parts: list[str] = []
            size = 0
            self._environment.begin()
            for part in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._specials
            ):
                size += len(part)
                if size > OUTPUT_CHARACTERS_MAX:
                    raise BadRequest(f"the rendered prompt is over {OUTPUT_CHARACTERS_MAX} characters")
                parts.append(part)
            return "".join(parts)
        except _Refused as refusal:
            raise BadRequest(f"the model's chat template refuses this conversation: {refusal}") from refusal
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(f"the model's chat template cannot render this conversation: {error}") from error

    def _default_system(self) -> str:
        """The system text that the template puts in when the conversation has none; found by rendering both."""
        probe = "\ue000probe\ue001"
        user = {"role": "user", "content": "x"}
        try:
            without = self.render([user])
            before, found, after = self.render([{"role": "system", "content": probe}, user]).partition(probe)
        except BadRequest:
            return ""  # no system message, or not without one
        fits = found and len(without) >= len(before) + len(after)
        if fits and without.startswith(before) and without.endswith(after):
            return without[len(before) : len(without) - len(after)]
        return ""

    def _places_system(self) -> bool:
        """Whether a system message behind the beginning is rendered, and where it stands."""
        roles = ("system", "user", "system", "assistant", "user", "system", "user")
        said = [{"role": role, "content": f"\ue000{index}\ue001"} for index, role in enumerate(roles)]
        try:
            text = self.render(said)
        except BadRequest:
            return False
        places = [text.find(message["content"]) for message in said]
        return -1 not in places and places == sorted(places)

    def _answers(self) -> Answers:
        """What stands before answers; found by rendering one where it may stand: last, before a user, before a result.

        Empty if the template does not put it between the messages.
        """
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE_ANSWER}
        result = {"role": "tool", "content": "y", "tool_call_id": "c"}
        try:
            before, asking = self.render([user], add_generation_prompt=False), self.render([user])
        except BadRequest:
            return Answers()
        if not asking.startswith(before) or asking == before:
            return Answers()
        given = set()
        for behind in ([], [user], [result]):
            try:
                text = self.render([user, answer, *behind], add_generation_prompt=False)
            except BadRequest:
                continue
            header, found, _ = text.partition(_PROBE_ANSWER)
            if found and header.startswith(before) and header != before:
                given.add(header[len(before) :])
        return Answers(asking[len(before) :], tuple(sorted(given, key=len, reverse=True)))


def _read_text(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read(SOURCE_BYTES_MAX + 1).decode()
    except UnicodeDecodeError as error:
        raise ModelFault(f"{path}: not UTF-8") from error
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error


def _refuse(message: object = "") -> NoReturn:
    raise _Refused(str(message))


class Spelled(dict):
    """A dict that knows how its JSON is to be written: between two marks, and as `raw` if that is given.

    The marks let its place in the rendered prompt be found; `raw` keeps a client's own spelling.
    """

    opening = ""
    closing = ""
    raw: str | None = None


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """jinja's own filter escapes for HTML and sorts keys; a prompt wants neither."""
    raw = value.raw if isinstance(value, Spelled) else None
    if isinstance(indent, int) and indent > WIDTH_MAX:
        raise ValueError(f"an indent of {indent}")
    text = raw if raw is not None else json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii")), indent=indent)
    return value.opening + text + value.closing if isinstance(value, Spelled) else text
