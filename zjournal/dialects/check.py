"""What a dialect makes of one model: its tags under the tokenizer, and whether its operations undo each other there.

The self-test behind `zj dialect check`. Pure: everything is tried on small conversations of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from zjournal import ask
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect, Piece
from zjournal.dialects.fences.build import build
from zjournal.dialects.prompt import write
from zjournal.dialects.stability import Finding, prove
from zjournal.errors import BadRequest

_END = b"<|the end of the grammar|>"
_PROPERTIES = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "lines": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["path"], "additionalProperties": False}
TOOLS = (
    ask.ToolSpec("write_file", "Writes a file.", json.dumps(_SCHEMA).encode()),
    ask.ToolSpec("list-files.all", "Lists files.", b'{"type": "object", "properties": {}}'),
)
_HARD = 'a "b" \\ c\n\n    é 漢字 😀 </think> <|x|> &lt;'


class Literal(msgspec.Struct, frozen=True):
    """A tag and its ids; one id is a token of its own."""

    text: str
    ids: tuple[int, ...]


class Case(msgspec.Struct, frozen=True):
    """An answer that is written and read again."""

    name: str
    text: str = ""
    calls: tuple[ask.Call, ...] = ()
    thoughts: str = ""


class Result(msgspec.Struct, frozen=True):
    """What came of one test; `fault` is "" if it went well. `expected`: the fault is one that is known and declared."""

    name: str
    fault: str = ""
    expected: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The dialect, and the results of all tests. `kept`: which thoughts stay, "" if the model has none."""

    dialect: str
    kept: str
    literals: tuple[Literal, ...]
    triggers: tuple[Literal, ...]
    inverse: tuple[Result, ...]
    prefix: tuple[Result, ...]
    fence: tuple[Result, ...]

    @property
    def failed(self) -> list[Result]:
        """What went wrong and is not known to."""
        return [one for one in (*self.inverse, *self.prefix, *self.fence) if one.fault and not one.expected]


def check(template: Template, tokenizer: Tokenizer, dialect: Dialect) -> Report:
    """Tries everything. Takes a second or two, most of it for the fence's tokenizer."""
    reasoning = dialect.reasoning
    return Report(
        dialect=dialect.name,
        kept="" if reasoning is None else reasoning.kept,
        literals=tuple(Literal(text, ids) for text, ids in dialect.literals.items()),
        triggers=tuple(Literal(text, tuple(tokenizer.encode_trusted(text))) for text in dialect.form.triggers),
        inverse=tuple(_inverse(case, tokenizer, dialect) for case in cases(reasoning is not None)),
        prefix=tuple(_prefix(found, dialect) for found in prove(template, tokenizer, dialect)),
        fence=tuple(_fences(tokenizer, dialect)),
    )


def _prefix(found: Finding, dialect: Dialect) -> Result:
    """Thoughts that a dialect leaves out, or opens in the prompt, part prompts by design."""
    known = dialect.reasoning is not None and not found.refused and found.name.startswith(("thoughts", "resent"))
    return Result(found.name, found.parts or found.refused, known)


# --- parse(render(x)) = x -----------------------------------------------------------------------------


def _call(name: str, **arguments: object) -> ask.Call:
    return ask.Call("call", name, json.dumps(arguments, ensure_ascii=False))


def cases(thinks: bool) -> Iterator[Case]:
    """What is written and read again."""
    one, none = _call("write_file", path="a b.txt"), _call("list-files.all")
    values = _call("write_file", path="x", lines=[1, -2], options={"a": {"b": [None, "c"]}}, ratio=1.5, deep=True)
    hard = _call("write_file", path=_HARD, text=" \n" + _HARD + "\n ")
    yield Case("text", "Well.\n\n  a < b, é 😀")
    yield Case("a call", "", (one,))
    yield Case("a call without arguments", "", (none,))
    yield Case("text and a call", "Let me see.", (one,))
    yield Case("parallel calls", "", (one, none, values))
    yield Case("values of all types", "", (values,))
    yield Case("hard strings", "", (hard,))
    if thinks:
        yield Case("thoughts", "Well.", (), "Hm.\n\nSo.")
        yield Case("thoughts and calls", "", (one, none), "Hm.")


def _inverse(case: Case, tokenizer: Tokenizer, dialect: Dialect) -> Result:
    content = [Piece(case.text)]
    pieces = dialect.calls(content, case.calls) if case.calls else content
    if case.thoughts and dialect.reasoning is not None:
        pieces = [*dialect.reasoning.written(case.thoughts), *pieces]
    control = set(tokenizer.control.values())
    parser = dialect.parser(TOOLS)
    deltas = [one for i in write(pieces, tokenizer) for one in parser.feed(tokenizer.token_bytes(i), i in control)]
    deltas += parser.end()
    return Result(case.name, _differs(case, deltas))


def _differs(case: Case, deltas: Sequence[ask.Delta]) -> str:
    """How what was read differs from what was written."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ask.TextDelta))
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, ask.ReasoningDelta))
    started = [delta for delta in deltas if isinstance(delta, ask.CallStarted)]
    faults = [delta.fault or "truncated" for delta in deltas if isinstance(delta, ask.CallEnded) and _bad(delta)]
    for what, wrote, read in (("text", case.text, text), ("thoughts", case.thoughts, thoughts)):
        if wrote != read:
            return f"{what} {wrote!r} was read as {read!r}"
    if [call.name for call in case.calls] != [call.name for call in started]:
        return f"calls of {[call.name for call in case.calls]} were read as {[call.name for call in started]}"
    if faults:
        return "; ".join(faults)
    for call, begun in zip(case.calls, started, strict=True):
        told = "".join(d.text for d in deltas if isinstance(d, ask.CallArguments) and d.index == begun.index)
        if json.loads(told) != json.loads(call.arguments):
            return f"arguments {call.arguments} were read as {told}"
    return ""


def _bad(ended: ask.CallEnded) -> bool:
    return bool(ended.fault or ended.truncated)


# --- the fence ----------------------------------------------------------------------------------------


class _Words:
    """What the grammar library asks of a tokenizer. A token behind all others ends a grammar."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.tokens = [*(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), _END]
        self.eos_token_id = tokenizer.vocab_size
        self.special_token_ids = [*tokenizer.control.values(), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _fences(tokenizer: Tokenizer, dialect: Dialect) -> Iterator[Result]:
    """A required call: what the dialect writes is let through, and what no tool of the request is, is not."""
    try:
        bounds = build(TOOLS, ask.ToolChoice("required"), None, dialect, tokenizer.control).bounds
    except BadRequest as refusal:
        yield Result("grammar", refusal.message)
        return
    assert bounds is not None
    words = LLTokenizer(TokenizerWrapper(_Words(tokenizer)))
    for case in cases(False):
        if case.calls and not case.text:
            yield Result(f"accepts {case.name}", _stopped(words, bounds.grammar, case.calls, tokenizer, dialect))
    unknown = (_call("no_such_tool", path="x"),)
    bare = (_call("write_file"),)
    wrong = (_call("write_file", path="x", lines="none"),)
    for name, calls in (("an unknown tool", unknown), ("a missing parameter", bare), ("a wrong type", wrong)):
        passed = not _stopped(words, bounds.grammar, calls, tokenizer, dialect)
        yield Result(f"refuses {name}", "it was let through" if passed else "")


def _stopped(
    words: LLTokenizer, grammar: str, calls: Sequence[ask.Call], tokenizer: Tokenizer, dialect: Dialect
) -> str:
    """Where a grammar does not let calls through; "" if it does, to their end."""
    matcher = LLMatcher(words, grammar, log_level=0)
    if matcher.is_error():
        return "the grammar does not compile"
    ids = write(dialect.calls([], calls), tokenizer)
    passed = matcher.try_consume_tokens(ids)
    if passed < len(ids):
        return f"token {passed} of {len(ids)} is refused: {tokenizer.decode(ids[passed : passed + 4])!r}"
    return "" if matcher.is_accepting() else "the end is refused"
