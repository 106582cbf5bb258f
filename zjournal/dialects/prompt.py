"""Prompt assembly: a conversation becomes token ids, and every token knows the JSON path it came from.

There is one segmentation. Control literals that the template writes become their ids; each text between two
of them (or an earlier output, which is spliced in as the tokens that were sampled) is encoded as one piece.
So a longer conversation keeps the tokens of the shorter one, and a client's text never makes a control token.

The template is opaque code, so its output is traced: client texts are rendered between marks made of a
character that stands in no text. The marks are believed only if the rendering without them is equal to the
plain one. A template that trims its texts gets the marks inside their edges; one that looks into them in
other ways leaves no trace: its prompt is right and has no paths, and a client text with a control literal
is refused there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from zjournal import ask
from zjournal.checkpoint.template import Spelled, Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect, Piece, parse_json, tool_value
from zjournal.dialects.encoding import Encoded, Prompt, Run, encode
from zjournal.dialects.encoding import Span as Span
from zjournal.dialects.encoding import pack as pack
from zjournal.dialects.turns import Kept, Turn, client_texts, turns_of
from zjournal.errors import BadRequest
from zjournal.growing import Own

OUTPUT_PATH = "response:"  # before the response's id: the path of a spliced output
WRITTEN_PATH = "response["  # likewise: of an answer that is written anew from its items
DIGITS_MAX = 9  # of the number in a mark
_MARKS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # the private use areas of Unicode


def assemble(
    request: ask.Ask,
    template: Template,
    tokenizer: Tokenizer,
    dialect: Dialect,
    limit: int | None = None,
    all_thoughts: bool = False,
    known: Own[Encoded] | None = None,
) -> Prompt:
    """The prompt for `request`, whose items are the whole conversation, earlier outputs included.

    Thoughts stay where the dialect keeps them, or with `all_thoughts` everywhere: an output with thoughts that do not
    stay is written anew from its items.
    A prompt that is sure to have more than `limit` tokens is not encoded, which would take seconds and gigabytes
    for the largest bodies: ContextTooLong, which says what it has at least. One that turns out to be longer is
    returned, so its length can be told.
    `known`: prompts of the same tenant by this tokenizer; what they begin with alike is not encoded again.
    A message that the answer goes on with stands behind all else, as the beginning of that answer.
    Raises BadRequest if the template refuses the conversation, a text is not Unicode, the tools are malformed,
    or a client's text holds a control literal where the template leaves no trace of it.
    """
    request, begun = _begun(request)
    kept = Kept(request, dialect, all_thoughts)
    turns = turns_of(request, template, dialect, kept)
    tools = request.tools if template.uses_tools else ()
    said = _said_before(begun, template, dialect)
    texts = [*client_texts(turns, tools), *((run.text, run.path) for run in said if run.kind == "client")]
    everything = "".join(text for text, _ in texts)
    try:
        everything.encode("utf-16-le")  # half the time of UTF-8
    except UnicodeEncodeError:
        path = next((path for text, path in texts if not _is_unicode(text)), "")
        raise BadRequest("the text holds a lone surrogate, which is not Unicode", param=path or None) from None
    mark = next(
        (chr(code) for code in _MARKS if chr(code) not in everything and chr(code) not in template.source), None
    )
    if mark is None:
        raise BadRequest("the request uses every private character of Unicode")
    draw = _Draw(turns, tools, template, mark)
    runs = _trace(draw, tokenizer, tokenizer.control_pattern.search(everything) is not None)
    if runs is None:
        path = next((path for text, path in texts if tokenizer.control_pattern.search(text)), "")
        message = "the text would make a control token, for this model's template leaves no trace of it"
        raise BadRequest(message, param=path or None)
    return encode(_asked([*runs, *said], template), tokenizer, limit, kept.rewritten(), known)


def _begun(request: ask.Ask) -> tuple[ask.Ask, tuple[ask.Item, ...]]:
    """The request without the message that the answer goes on with, and that message with its thoughts."""
    if not request.goes_on:
        return request, ()
    at = len(request.items) - 1
    while at > 0 and isinstance(request.items[at - 1], ask.Thought):
        at -= 1
    return msgspec.structs.replace(request, items=request.items[:at]), request.items[at:]


def _said_before(begun: Sequence[ask.Item], template: Template, dialect: Dialect) -> list[Run]:
    """What stands of an answer before it is asked for. Thoughts that the template has opened by then are closed."""
    runs: list[Run] = []
    reasoning = dialect.reasoning
    thinks = reasoning is not None and bool(reasoning.begun(template.answers.asked))
    for item in begun:
        match item:
            case ask.Output():
                runs.append(Run("output", path=OUTPUT_PATH + item.response, output=item))
                thinks = False  # it was sampled behind what the template has opened
            case ask.Thought() if reasoning is not None:
                written = reasoning.written("")
                runs += [] if thinks else [Run("template", written[0].text)]
                runs += [Run("client", part.text, part.path) for part in item.parts]
                runs.append(Run("template", written[-1].text))
                thinks = False
            case ask.Message():
                if thinks and reasoning is not None:
                    runs.append(Run("template", reasoning.written("")[-1].text))
                runs += [Run("client", part.text, part.path) for part in item.parts]
    return [run for run in runs if run.text or run.output is not None]


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- rendering and tracing ----------------------------------------------------------------------------

_Mode = Literal["plain", "outer", "inner"]


class _Draw:
    """Renders the same messages in several spellings: plain, and with marks outside or inside the texts' edges."""

    def __init__(self, turns: Sequence[Turn], tools: Sequence[ask.ToolSpec], template: Template, mark: str) -> None:
        self._turns = turns
        self._tools = tools
        self._template = template
        self._mark = mark
        self._mode: _Mode = "plain"
        self._change: Callable[[str], str] = str
        self._paths: list[str] = []
        self.outputs = [turn.output for turn in turns if turn.output is not None]
        self.pattern = re.compile(f"{mark}([<>=])([0-9]*){mark}")

    def render(self, mode: _Mode, change: Callable[[str], str] = str) -> tuple[str, list[str]]:
        """The rendered text, outputs as marks `=N`, and the paths of the marks `<N`. `change` alters client texts."""
        self._mode, self._change, self._paths = mode, change, []
        spliced = iter(range(len(self.outputs)))
        messages = [self._message(turn, spliced) for turn in self._turns]
        tools = [self._spelled(tool_value(tool), tool.path) for tool in self._tools]
        return self._template.render(messages, tools or None), self._paths

    def output_mark(self, index: int) -> str:
        """What stands for the output of this number."""
        return f"{self._mark}={index}{self._mark}"

    def _message(self, turn: Turn, spliced: Iterator[int]) -> dict[str, Any]:
        if turn.output is not None:
            return {"role": turn.role, "content": self.output_mark(next(spliced))}
        message: dict[str, Any] = {"role": turn.role, "content": self._pieces(turn.content)}
        if turn.thoughts:
            message["reasoning_content"] = self._pieces(turn.thoughts)
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.call_id:
            message["tool_call_id"] = self._marked(self._change(turn.call_id), "")
        return message

    def _pieces(self, pieces: Sequence[Piece]) -> str:
        change, marked = self._change, self._marked
        if self._mode == "plain":  # as below, at a third of the time
            if change is str:
                return "".join([piece.text for piece in pieces])
            return "".join([piece.text if piece.trusted else change(piece.text) for piece in pieces])
        return "".join([piece.text if piece.trusted else marked(change(piece.text), piece.path) for piece in pieces])

    def _call(self, call: ask.Call) -> dict[str, Any]:
        arguments: Any = self._marked(self._change(call.arguments), call.path)
        try:
            value = parse_json(call.arguments or "{}", call.path)
        except BadRequest:
            value = None  # not JSON: the template gets the text
        if isinstance(value, dict):
            arguments = self._spelled(value, call.path, call.arguments or "{}")
        function = {"name": self._marked(self._change(call.name), call.path), "arguments": arguments}
        identity = self._marked(self._change(call.call_id), call.path)
        return {"id": identity, "type": "function", "function": function}

    def _spelled(self, value: dict[str, Any], path: str, raw: str | None = None) -> Spelled:
        spelled = Spelled(self._altered(value))
        spelled.opening, spelled.closing = self._pair(path)
        spelled.raw = None if raw is None else self._change(raw)
        return spelled

    def _altered(self, value: Any) -> Any:
        if self._change is str:
            return value
        if isinstance(value, str):
            return self._change(value)
        if isinstance(value, list):
            return [self._altered(inner) for inner in value]
        if isinstance(value, dict):
            return {self._change(key): self._altered(inner) for key, inner in value.items()}
        return value

    def _marked(self, text: str, path: str) -> str:
        """An empty text stays empty, for a template may ask whether there is any."""
        if self._mode == "plain":
            return text
        core = text.strip() if self._mode == "inner" else text
        if not core:
            return text
        opening, closing = self._pair(path)
        if len(core) == len(text):
            return f"{opening}{text}{closing}"
        before, _, after = text.partition(core)
        return f"{before}{opening}{core}{closing}{after}"

    def _pair(self, path: str) -> tuple[str, str]:
        if self._mode == "plain":
            return "", ""
        self._paths.append(path)
        return f"{self._mark}<{len(self._paths) - 1}{self._mark}", f"{self._mark}>{self._mark}"


def _trace(draw: _Draw, tokenizer: Tokenizer, suspicious: bool) -> list[Run] | None:
    """The rendered prompt in runs; None if a client's text would be taken for a control token.

    `suspicious`: some client text holds a control literal. Then, and wherever there is no trace, the literals in
    the template's own text must be as many as in a rendering in which no client text can hold one.
    """
    plain, _ = draw.render("plain")
    own = None
    modes: tuple[_Mode, ...] = ("outer", "inner", "plain")
    for mode in modes:
        runs = _runs(draw, mode, plain)
        if runs is None:
            continue
        if mode != "plain" and not suspicious:
            return runs
        own = _own_literals(draw, tokenizer) if own is None else own
        written = Counter([run.text for run in runs if run.kind == "template"])  # few, again and again
        if own == sum(len(tokenizer.control_pattern.findall(text)) * count for text, count in written.items()):
            return runs
    return None


def _runs(draw: _Draw, mode: _Mode, plain: str) -> list[Run] | None:
    """The prompt in runs, as one mode finds them; None if its marks changed the prompt."""
    if mode == "plain":
        return _split(draw, plain, [])
    try:
        text, paths = draw.render(mode)
    except BadRequest:
        return None  # the plain rendering went through, so the marks are to blame
    runs = _split(draw, text, paths)
    return runs if runs is not None and _joined(draw, runs) == plain else None


def _own_literals(draw: _Draw, tokenizer: Tokenizer) -> int:
    """How many control literals the template writes by itself: client texts lose every character that begins one."""
    firsts = sorted({literal[0] for literal in tokenizer.control})

    def without(text: str) -> str:
        for first in firsts:  # a few; `translate` looks up every character of the text
            text = text.replace(first, "x")
        return text

    harmless, _ = draw.render("plain", without)
    return len(tokenizer.control_pattern.findall(harmless))


def _joined(draw: _Draw, runs: Sequence[Run]) -> str:
    """The rendered text without the marks around client texts: runs as the plain rendering has them."""
    spliced = iter(range(len(draw.outputs)))
    return "".join([draw.output_mark(next(spliced)) if run.kind == "output" else run.text for run in runs])


def _split(draw: _Draw, text: str, paths: Sequence[str]) -> list[Run] | None:
    """Cuts at the marks. None if they do not pair, or an output is missing, doubled or out of order."""
    runs: list[Run] = []
    opened: list[str] = []
    spliced = 0
    first, *rest = draw.pattern.split(text)
    if first:
        runs.append(Run("template", first))
    for kind, digits, behind in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        number = int(digits) if 0 < len(digits) <= DIGITS_MAX else -1  # a template may have cut into a mark
        if kind == "<":
            if not 0 <= number < len(paths):
                return None
            opened.append(paths[number])
        elif kind == ">":
            if not opened:
                return None
            opened.pop()
        else:
            if opened or number != spliced:
                return None
            output = draw.outputs[spliced]
            runs.append(Run("output", path=OUTPUT_PATH + output.response, output=output))
            spliced += 1
        if behind:
            runs.append(Run("client", behind, opened[0]) if opened else Run("template", behind))
    return None if opened or spliced != len(draw.outputs) else runs


# --- runs to tokens -----------------------------------------------------------------------------------


def _asked(runs: list[Run], template: Template) -> list[Run]:
    """The runs, with what the template wrote before each output as it was when the output was asked for."""
    for index, run in enumerate(runs[1:], 1):
        before = runs[index - 1]
        if run.output is not None and before.kind == "template":
            runs[index - 1] = Run("template", template.answers.settle(before.text))
    return runs


def write(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[int]:
    """The ids of pieces: control literals of trusted ones become ids, other text is encoded as in a prompt."""
    runs = [Run("template" if piece.trusted else "client", piece.text, piece.path) for piece in pieces]
    return encode(runs, tokenizer).ids
