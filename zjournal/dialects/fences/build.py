"""The grammar of an answer: from tools, choice and format to what the engine enforces.

Pure: nothing here knows a vocabulary but for the tags that are tokens. `Bounds` is what crosses to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from llguidance import LLMatcher

from zjournal import ask
from zjournal.dialects.base import Dialect, parse_json
from zjournal.dialects.fences import arguments, custom
from zjournal.dialects.fences.arguments import Parameter
from zjournal.dialects.fences.calls import Calls, Piece, alone
from zjournal.dialects.fences.costs import Costs
from zjournal.dialects.fences.lark import Writer, pattern
from zjournal.dialects.fences.schema import Problem, Reader, Schema, endings, ends, parts
from zjournal.dialects.fences.trees import Trees
from zjournal.dialects.form import Objects, Tagged
from zjournal.dialects.values import TYPES, quoted
from zjournal.errors import BadRequest

TOOLS_MAX = 512
SCHEMA_BYTES_MAX = 1 << 20  # of all tools of a request, and of a format
WORDS_MAX = 100_000  # of a grammar: the engine has 65,525 symbols, of which each word makes one or less
TRIES_MAX = 4  # each leaves out what the engine refused
LOOKED_AT_MAX = 200  # schemas in one that is refused, to find the one at fault
NAME_CHARACTERS_MAX = 128


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer may be; as link.wire.Fence has it. Tags are texts, with the ids of those that are tokens, else -1.

    Where the grammar binds the whole answer, `triggers` may not stand in thoughts, and mean nothing else.
    """

    grammar: str = ""
    whole: bool = False
    triggers: tuple[tuple[str, int], ...] = ()
    thoughts: tuple[tuple[str, int], tuple[str, int]] | None = None
    begun: bool = False
    banned: tuple[int, ...] = ()


class Built(msgspec.Struct, frozen=True):
    """A fence, and what it cannot keep: `warnings` for a person, `loose` the paths that they speak of."""

    bounds: Bounds | None
    warnings: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()


def build(
    tools: Sequence[ask.ToolSpec],
    choice: ask.ToolChoice,
    form: ask.Format | None,
    dialect: Dialect,
    control: Mapping[str, int],
    begun: str = "",
) -> Built:
    """The fence of a request. `control`: the tokenizer's control tokens.

    Without tools and format it says where thoughts begin and end, no more; None if the model has none.
    `begun` is what the prompt has already said of the answer, see base.Reasoning.begun. Raises BadRequest that names
    the keyword: of a strict schema that cannot be kept, of tools that can never be called, and beyond the limits.
    """
    offered = _offered(tools, choice)
    tags = {tag: control[tag] for tag in dialect.literals if tag in control}
    thoughts = None
    if dialect.reasoning is not None:
        opening, closing = dialect.reasoning.opening, dialect.reasoning.closing
        thoughts = (opening, control.get(opening, -1)), (closing, control.get(closing, -1))
    closed = [tag for tag in tags if thoughts is None or tag not in dict(thoughts)]
    opened = thinking(dialect, begun)
    if not offered and form is None:
        bounds = Bounds(thoughts=thoughts, begun=opened, banned=_ids(tags, closed) if tools else ())
        return Built(bounds if bounds.thoughts or bounds.banned else None)
    _check(offered, form)
    work = _Work(offered, choice, form, dialect, tags, [tool.name for tool in tools])
    grammar = work.run()
    whole = work.whole
    triggers = () if not offered else tuple((tag, control.get(tag, -1)) for tag in dialect.form.triggers)
    bounds = Bounds(
        grammar=grammar,
        whole=whole,
        triggers=triggers,
        thoughts=thoughts,
        begun=opened,
        banned=_ids(tags, [tag for tag in closed if (tag, tags[tag]) not in triggers or whole]),
    )
    problems = dict.fromkeys(problem for _, problem in work.problems)
    return Built(bounds, tuple(problem.text for problem in problems), tuple(problem.path for problem in problems))


def thinking(dialect: Dialect, begun: str) -> bool:
    """Whether an answer begins in thoughts, by what the prompt has already said of it."""
    reasoning = dialect.reasoning
    return reasoning is not None and begun.rfind(reasoning.opening) > begun.rfind(reasoning.closing)


def _ids(tags: Mapping[str, int], chosen: Sequence[str]) -> tuple[int, ...]:
    return tuple(sorted(tags[tag] for tag in chosen))


def _offered(tools: Sequence[ask.ToolSpec], choice: ask.ToolChoice) -> list[ask.ToolSpec]:
    """The tools that may be called. Raises BadRequest for names that are none or no tool's."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise BadRequest(f"Two tools have the name {tool.name[:80]!r}.", param=f"{tool.path}.name")
        seen.add(tool.name)
    allowed = choice.allowed
    unknown = [name for name in allowed or () if name not in seen]
    if unknown:
        raise BadRequest(f"`{choice.path}`: there is no tool {unknown[0][:80]!r}.", param=choice.path)
    if choice.mode == "none":
        return []
    found = [tool for tool in tools if allowed is None or tool.name in allowed]
    if choice.mode == "required" and not found:
        raise BadRequest(f"`{choice.path}`: a call is required, and there is no tool.", param=choice.path)
    return found


def _check(tools: Sequence[ask.ToolSpec], form: ask.Format | None) -> None:
    """Raises BadRequest beyond the limits."""
    if len(tools) > TOOLS_MAX:
        raise BadRequest(f"There are {len(tools)} tools; at most {TOOLS_MAX} can be kept apart.", param="tools")
    if sum(len(tool.parameters) for tool in tools) > SCHEMA_BYTES_MAX:
        raise BadRequest(f"The schemas of the tools are longer than {SCHEMA_BYTES_MAX} bytes.", param="tools")
    if form is not None and len(form.schema) > SCHEMA_BYTES_MAX:
        raise BadRequest(f"The schema is longer than {SCHEMA_BYTES_MAX} bytes.", param=f"{form.path}.schema")
    for tool in tools:
        if not tool.name or len(tool.name) > NAME_CHARACTERS_MAX or _strange(tool.name):
            path = f"{tool.path}.name"
            raise BadRequest(f"`{path}`: {tool.name[:80]!r} cannot be a tool's name.", param=path)
        if tool.grammar is not None:
            custom.check(tool.grammar)


def _strange(name: str) -> bool:
    return any(c.isspace() or not c.isprintable() or c in '"\\<>' for c in name)


class _Work:
    """One grammar in the making: written, tried, and written again without what the engine refuses."""

    def __init__(
        self,
        tools: Sequence[ask.ToolSpec],
        choice: ask.ToolChoice,
        form: ask.Format | None,
        dialect: Dialect,
        tags: Mapping[str, int],
        names: Sequence[str],
    ) -> None:
        """`names`: of all tools of the request, also of those that may not be called."""
        self._tools, self._choice, self._format, self._names = tools, choice, form, names
        self._form: Objects | Tagged = dialect.form
        self._tags = tags
        reasoning = dialect.reasoning
        self._after = reasoning.after if reasoning is not None else ""
        bare = isinstance(self._form, Objects) and self._form.bare
        self.whole = not tools or choice.mode == "required" or form is not None or bare
        self.problems: list[tuple[bool, Problem]] = []  # whether it was to be kept strictly
        self._loose: set[str] = set()
        self._costs = Costs()
        self._plain = False

    def run(self) -> str:
        """The grammar. Raises BadRequest."""
        refused: list[tuple[bool, Problem]] = []
        for _ in range(TRIES_MAX):
            self.problems = list(refused)
            try:
                grammar, pieces = self._write()
            except RecursionError:  # definitions in each other, which no other limit finds
                raise BadRequest("The schemas are nested too deep.", param=self._field) from None
            for strict, problem in self.problems:
                if strict:
                    raise BadRequest(
                        f"{problem.text} The schema is strict, so nothing of it may be left out.", param=problem.path
                    )
            if grammar.count(" ") > WORDS_MAX:
                raise BadRequest(
                    f"`{self._field}`: the schemas have too many parts for one grammar.", param=self._field
                )
            error = LLMatcher.validate_grammar(grammar, None, limits=custom.limits())
            found = self._refused(pieces, bool(error))
            if not error and not found:
                return grammar
            if not found and self._plain:
                break
            self._plain = not found  # perhaps it can be said as a whole
            refused += found
        message = f"No grammar can be made of `{self._field}`: {custom.first_line(error)}"
        raise BadRequest(message, param=self._field)

    @property
    def _field(self) -> str:
        """What a fault is said to be of that no one part has."""
        return f"{self._format.path}.schema" if self._format is not None and not self._tools else "tools"

    def _write(self) -> tuple[str, list[Piece]]:
        writer = Writer(self._tags)
        calls = Calls(self._form, writer, self._plain)
        read = [arguments.read(tool, frozenset(self._loose), self._costs) for tool in self._tools]
        rules = [calls.call(one) for one in read]
        for one in read:
            self.problems += [(one.tool.strict, problem) for problem in one.problems]
        self.problems += [(tool.strict, problem) for tool, problem in calls.problems]
        ways = []
        if rules:
            ways.append(self._calls(calls, writer, rules))
        if self._format is not None and self._choice.mode != "required":
            ways.append(f"{self._lead(writer, 0)} {self._answer(calls, writer)}".strip())
        elif rules and self._choice.mode == "auto" and self.whole:
            ways.append(self._text(writer))
            ways.append(f"{self._before(writer)} {ways[0]}")
        writer.raw("start", " | ".join(ways))
        return writer.finished(), calls.pieces

    def _calls(self, calls: Calls, writer: Writer, rules: Sequence[str]) -> str:
        form = self._form
        written = calls.between(rules, self._choice.again, not self.whole)
        if isinstance(form, Objects) and form.bare:
            again = self._choice.again
            more = f" ({writer.text(form.gap)} ({' | '.join(rules)})){again}" if again else ""
            # Beside an answer that is an object itself, a call needs its tag.
            return written if self._format is not None else f"(({' | '.join(rules)}){more} | {written})"
        return f"{self._lead(writer, form.lead)} {written}".strip() if self.whole else written

    def _lead(self, writer: Writer, newlines: int) -> str:
        """The newlines that may stand before all, behind thoughts above all."""
        most = max(newlines, len(self._after))
        newline = writer.terminal(rf"/\n{{1,{most}}}/") if most else ""
        return f"({newline})?" if most else ""

    # --- Llama 3, whose calls begin with a brace ------------------------------------------------------------

    def _text(self, writer: Writer) -> str:
        """Free text that the parser does not take for a call, be it of a tool that may not be called."""
        assert isinstance(self._form, Objects)
        space = r"[\s\x1c-\x1f]*"
        names = "|".join(pattern(quoted(name)) for name in self._names)
        begin = rf'"type"{space}:{space}("([^"\\]|\\.)*"|[^\s,{{}}\[\]"]+){space},{space}'
        other = "arguments|parameters"
        known = rf'"name"{space}:{space}({names}){space}(\}}|,{space}"({other}|type|name)"{space}:)'
        called = rf'{space}\{{{space}({begin})?({known}|"({other})"{space}:)'
        return f"({writer.terminal(f'/(?s:.*)/ & ~/{called}(?s:.*)/')})?"

    def _before(self, writer: Writer) -> str:
        """Text before the tag of a call; it does not begin as an object does."""
        return writer.terminal(r"/[\s\x1c-\x1f]*[^\s\x1c-\x1f{](?s:.*)/")

    # --- formats --------------------------------------------------------------------------------------------

    def _answer(self, calls: Calls, writer: Writer) -> str:
        form = self._format
        assert form is not None
        path = f"{form.path}.schema" if form.path else "schema"
        origin = parse_json(form.schema, path) if form.kind == "json_schema" else {"type": "object"}
        reader = Reader(origin, path, self._costs)
        schema: Schema = True if path in self._loose else reader.read(origin, path)
        if form.kind == "json_object":
            schema = {"type": "object"}
        if not ends(schema, endings(reader.defs)):
            raise BadRequest(f"`{path}` allows no value.", param=path)
        self.problems += [(form.strict, problem) for problem in reader.problems]
        hidden = [tag for tag in self._form.triggers if not writer.split(tag)[1]] if self._tools else []
        whole = Parameter("", schema, True, TYPES, path, origin)
        calls.pieces.append(Piece(lambda: alone(schema, reader.defs, hidden), None, whole))
        trees = Trees(writer, hidden, ordered=True)
        return trees.whole(schema, reader.defs) if self._plain else trees.of(schema, reader.defs)

    # --- what the engine refuses ------------------------------------------------------------------------------

    def _refused(self, pieces: Sequence[Piece], broken: bool) -> list[tuple[bool, Problem]]:
        """Finds what the engine refuses, so that the next try leaves it out. Raises BadRequest where it must not.

        `broken`: it refuses the whole. Else only values are looked for that no text can be.
        """
        found: list[tuple[bool, Problem]] = []
        tried: dict[str, str] = {}
        for piece in pieces:
            if not (broken or piece.doubtful):
                continue
            one = piece.parameter
            if one.path in self._loose:
                continue
            grammar = piece.grammar()
            if grammar not in tried:
                tried[grammar] = custom.fault(grammar, piece.doubtful)
            error = tried[grammar]
            if not error:
                continue
            if "nsatisfiable" in error and one.required:
                if piece.tool is None:
                    raise BadRequest(f"`{one.path}` allows no value.", param=one.path)
                raise arguments.impossible(piece.tool, one.path)
            strict = piece.tool.strict if piece.tool is not None else bool(self._format and self._format.strict)
            path = self._at_fault(piece)
            self._loose.add(one.path)
            found.append((strict, Problem(path, f"cannot be kept by a grammar ({_reason(error)})")))
        return found

    def _at_fault(self, piece: Piece) -> str:
        """The path of the innermost keyword that the engine refuses."""
        root = parse_json(piece.tool.parameters, "") if piece.tool is not None else piece.parameter.origin
        for count, (schema, path) in enumerate(parts(piece.parameter.origin, piece.parameter.path)):
            if count >= LOOKED_AT_MAX:
                break
            reader = Reader(root, path, self._costs)
            read = reader.read(schema, path)
            if LLMatcher.validate_grammar(alone(read, reader.defs, ()), None, limits=custom.limits()):
                keys = ("pattern", "oneOf", "minProperties", "maxProperties", "patternProperties", "multipleOf", "enum")
                return next((f"{path}.{key}" for key in keys if key in schema), path)
        return piece.parameter.path


def _reason(error: str) -> str:
    line = custom.first_line(error)
    return line.rpartition("failed to compile JSON schema: ")[2]
