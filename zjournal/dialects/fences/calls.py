"""Rules for the calls of a dialect: each parameter once, in any order, the required ones before the call ends.

Which parameters have come is a set of bits in the rule's own parameter, so the grammar grows with the parameters and
not with their orders. There are 64 bits: tools with more parameters take the required ones first, else all of them in
the client's order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zjournal import ask
from zjournal.dialects.base import to_json
from zjournal.dialects.fences import texts
from zjournal.dialects.fences.arguments import INPUT, Arguments, Parameter, impossible
from zjournal.dialects.fences.closing import ANY, LEAST_MAX, Closing, long
from zjournal.dialects.fences.guard import guarded
from zjournal.dialects.fences.lark import WHITE, Writer, pattern, standing
from zjournal.dialects.fences.schema import Problem, Schema
from zjournal.dialects.fences.trees import BITS, KEY_CHARACTERS_MAX, Trees, all_of, once
from zjournal.dialects.form import Objects, Tagged
from zjournal.dialects.values import allowed, meant, quoted
from zjournal.errors import BadRequest

WORDS_MAX = 256  # of an enumeration that are strings of the grammar; more are one pattern


class Piece(msgspec.Struct, frozen=True):
    """A rule made of a client's schema or grammar: what is looked at if the engine refuses the whole."""

    grammar: Callable[[], str]  # of its own, to be tried alone
    tool: ask.ToolSpec | None
    parameter: Parameter
    doubtful: bool = False  # whether there may be no text for it, which the engine does not tell


class Calls:
    """Writes the calls of one dialect into a grammar."""

    def __init__(self, form: Objects | Tagged, writer: Writer, plain: bool = False) -> None:
        """`plain`: JSON is left to the grammar engine as a whole."""
        self._form, self._writer, self._plain = form, writer, plain
        self.problems: list[tuple[ask.ToolSpec, Problem]] = []
        self.pieces: list[Piece] = []
        if isinstance(form, Tagged) and form.followed:
            text = [tag for tag in form.followed if not writer.split(tag)[1]]  # a token is in no value
            before, rest = writer.split(form.end)
            assert not rest, form.end
            self._closing: Closing | None = Closing(form.value_closing, before, tuple(text))
            behind = "|".join(map(re.escape, text))
            self._hidden: tuple[str, ...] = (form.value_closing,)
            self._closes = re.compile(rf"(?i:{re.escape(form.value_closing)}\s*({behind}))")
        else:
            self._closing, self._closes, self._hidden = None, re.compile("(?!)"), ()
        self._trees = Trees(writer, self._hidden)

    def call(self, arguments: Arguments) -> str:
        """The name of a rule for one call, without what stands around it."""
        if isinstance(self._form, Objects):
            return self._object(self._form, arguments)
        return self._tagged(self._form, arguments)

    def between(self, calls: Sequence[str], again: str, triggered: bool) -> str:
        """An expression for one call of these, or for several, with all that stands around them.

        `again`: how often one may follow the first, as a grammar repeats it; "" for not at all.
        `triggered`: it begins where the parser takes a call to begin, in free text.
        """
        form, w = self._form, self._writer
        one = f"({' | '.join(calls)})"
        if isinstance(form, Objects):
            first = _joined(w.text(form.opening, any_case=triggered), one, w.text(form.closing))
            next_one = one if form.bare else _joined(w.text(form.opening), one, w.text(form.closing))
            return _joined(first, f"({w.text(form.gap)} {next_one}){again}" if again else "")
        before, behind = form.loose
        begins, ends = form.head[0], form.closing
        first = _joined(w.text(form.opening + begins, any_case=triggered), one, w.text(behind))
        if triggered and before:
            first = f"({first} | {w.text(begins.removeprefix(before), any_case=True)} {one})"
        more = f"({_joined(w.text(form.gap + begins), one, w.text(behind))}){again}" if again else ""
        return _joined(first, more, w.text(ends))

    # --- JSON objects ---------------------------------------------------------------------------------------

    def _object(self, form: Objects, arguments: Arguments) -> str:
        w = self._writer
        name, key = to_json(arguments.tool.name), quoted(form.arguments)
        if form.bare:  # one terminal up to where it is clear that this is a call, for text may begin as well
            white = f"({WHITE})?"
            begin = rf'\{{{white}"name"{white}:{white}{pattern(name)}{white}'
            head = w.terminal(f"/{begin},{white}{pattern(key)}{white}:{white}/")
        else:
            head = f"{w.open} {w.text(quoted('name'))} {w.colon} {w.text('', name)} {w.comma} {w.text(key)} {w.colon}"
        return w.rule(f"{head} {self._members(arguments)} {w.close}")

    def _members(self, arguments: Arguments) -> str:
        """The object of the arguments."""
        members = [(one.key, self._json(arguments, one, one.schema), one.required) for one in arguments.parameters]
        extra = arguments.extra
        return self._trees.members(members, None if extra is None else self._json(arguments, extra, extra.schema))

    def _json(self, arguments: Arguments, parameter: Parameter, schema: Schema) -> str:
        """A rule for a value as JSON."""
        grammar = arguments.tool.grammar
        if arguments.tool.kind == "custom" and parameter.key == INPUT and grammar is not None:
            if grammar.syntax == "regex":
                schema = {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
            else:
                why = "cannot be kept where a dialect writes the input as a JSON string"
                self.problems.append((arguments.tool, Problem(grammar.path or parameter.path, why)))
        self.pieces.append(Piece(lambda: alone(schema, arguments.defs, self._hidden), arguments.tool, parameter))
        return self.json(schema, arguments.defs)

    def json(self, schema: Schema, defs: Mapping[str, Schema]) -> str:
        """A rule for the JSON of a schema."""
        return self._trees.whole(schema, defs) if self._plain else self._trees.of(schema, defs)

    # --- tags -----------------------------------------------------------------------------------------------

    def _tagged(self, form: Tagged, arguments: Arguments) -> str:
        w, tool = self._writer, arguments.tool
        if not re.fullmatch(form.name, tool.name):
            path = f"{tool.path}.name"
            raise BadRequest(f"`{path}`: the model's dialect cannot say the name {tool.name[:80]!r}.", param=path)
        head = w.text("", tool.name, form.head[1])
        tail = w.text(form.tail.removesuffix(form.loose[1]))
        values, required = [], 0
        for one in arguments.parameters:
            value = self._parameter(form, arguments, one)
            values += [value] if value else []
            required += one.required
        if arguments.extra is not None:
            values += [self._extra(form, arguments, arguments.extra)]
        rest = w.fresh("a")
        if not values:
            body = f"({w.text(form.empty)})? {tail}" if form.empty else tail
        elif len(values) > BITS:
            body = " ".join(value if at < required else f"({value})?" for at, value in enumerate(values)) + f" {tail}"
        else:
            w.parametric(rest, [f"{tail}{all_of(required)}", *once(values, "", rest)])
            blank = f"({w.text(form.empty)} {tail} | {rest}::0x0)" if form.empty and not required else f"{rest}::0x0"
            body = blank
        return w.rule(f"{head} {body}")

    def _parameter(self, form: Tagged, arguments: Arguments, one: Parameter) -> str:
        """A rule for a parameter with its tags; "" if the dialect has no way to say it."""
        if not re.fullmatch(form.key, one.key):
            if one.required:
                raise impossible(arguments.tool, one.path)
            where = Problem(one.path, "has a name that the model's dialect cannot say")
            self.problems.append((arguments.tool, where))
            return ""
        begin = self._writer.text
        return self._value(form, arguments, one, lambda behind: begin(form.parameter, one.key, behind))

    def _extra(self, form: Tagged, arguments: Arguments, one: Parameter) -> str:
        """A parameter that the schema does not name. Tags cannot keep two of them apart, so one may come."""
        w = self._writer
        taken = "|".join(pattern(other.key) for other in arguments.parameters)
        key = rf"/[^<>\"\s]{{1,{KEY_CHARACTERS_MAX}}}/" + (f" & ~/({taken})/" if taken else "")
        name = w.terminal(key)
        return self._value(form, arguments, one, lambda behind: f"{w.text(form.parameter)} {name} {w.text(behind)}")

    def _value(self, form: Tagged, arguments: Arguments, one: Parameter, begin: Callable[[str], str]) -> str:
        """A rule for a parameter's tags and value; "" if there is no value that can be said."""
        w = self._writer
        ways = []
        if "string" in one.types:
            bare = self._bare(form, arguments, one)
            ways += [f"{begin(form.string)} {bare}"] if bare else []
        others = one.types - {"string"}
        if "string" in one.types and not form.typed:
            others &= {"array", "object"}  # the rest is in what stands bare
        others &= allowed(one.schema, {"$defs": arguments.defs})
        if others:
            schema = one.schema
            if "string" in one.types:
                schema = {"type": sorted(others)} if schema is True else {"allOf": [schema, {"type": sorted(others)}]}
            ways.append(f"{begin(form.other)} {self._json(arguments, one, schema)} {w.text(form.end)}")
        if not ways and one.required:
            raise impossible(arguments.tool, one.path)
        return w.rule(" | ".join(ways)) if ways else ""

    def _bare(self, form: Tagged, arguments: Arguments, one: Parameter) -> str:
        """An expression for what stands bare, with its end: strings, and JSON's scalars where they look like strings.

        It is one terminal, for two that begin alike would be taken for the longer one. "" if there is nothing.
        """
        w, tool = self._writer, arguments.tool
        if tool.kind == "custom" and one.key == INPUT and tool.grammar is not None:
            return self._own(form, arguments, one, tool.grammar)
        try:
            found = texts.texts(one.schema, arguments.defs)
        except texts.Kept as error:
            self.problems.append((tool, Problem(one.path, str(error))))
            found = [texts.Text()]
        if self._closing is not None and any(long(text.patterns) for text in found):
            why = f"asks for more than {LEAST_MAX} characters, which are not counted before a tag that is text"
            self.problems.append((tool, Problem(f"{one.path}.minLength", why)))
            found = [texts.Text()]
        mixed = not form.typed and one.types != {"string"}
        told = [(word, text.patterns) for text in found if text.words is not None for word in text.words]
        told = [each for each in told if self._sayable(each[0], one.types if mixed else None)]
        words = [word for word, kept in told if not kept]
        loose = [text.patterns for text in found if text.words is None]
        loose += [(pattern(word) or "()", *kept) for word, kept in told if kept]
        if len(words) > WORDS_MAX:
            loose.append(("|".join(map(pattern, words)),))
            words = []
        if not loose and not mixed:
            return f"({' | '.join(dict.fromkeys(w.text('', word, form.end) for word in words))})" if words else ""
        unlike = texts.unlike(one.types) if mixed else []
        scalars: list[str] = []
        if mixed:
            try:
                scalars = texts.scalars(one.schema, arguments.defs, one.types)
            except texts.Kept as error:
                self.problems.append((tool, Problem(one.path, str(error))))
                scalars = texts.scalars(True, {}, one.types)
        return self._ended(form, arguments, one, words, loose, unlike, scalars)

    def _sayable(self, word: str, types: frozenset[str] | None) -> bool:
        """Whether a word of an enumeration can stand bare. `types`: those that a reader tells apart by their looks."""
        if any("\ud800" <= c <= "\udfff" for c in word) or self._closes.search(word):
            return False
        return types is None or meant(word, types) == quoted(word)

    def _ended(
        self,
        form: Tagged,
        arguments: Arguments,
        one: Parameter,
        words: Sequence[str],
        kept: Sequence[Sequence[str]],
        unlike: Sequence[str] = (),
        scalars: Sequence[str] = (),
    ) -> str:
        """A bare value and, with it, the end that stands behind it as far as that is text; "" if there is none.

        It is one of `words`, or matches all of one of `kept` and none of `unlike`, or matches one of `scalars`.
        """
        if not words and not kept and not scalars:
            return ""
        w = self._writer
        if self._closing is not None:
            bodies = self._closing.terminals(words, kept, unlike, scalars)
            doubtful, ended = any(kept), w.rule(" | ".join(map(w.terminal, bodies)))
        else:
            ways = [f"/{pattern(word)}/" if word else '""' for word in words]
            no = [f"~/{each}/" for each in unlike]
            ways += [f"({' & '.join([*(f'/{each}/' for each in some or [ANY]), *no])})" for some in kept]
            ways += [f"/{scalar}/" for scalar in scalars]
            body = " | ".join(dict.fromkeys(ways))
            before, rest = w.split(form.end)
            bodies, doubtful = [body], " & " in body
            name = w.terminal(f"({body}) {w.text(before)}" if before else body)
            ended = f"{name} {w.text(rest)}"
        lines = "".join(f"T{at}: {body}\n" for at, body in enumerate(bodies))
        start = " | ".join(f"T{at}" for at in range(len(bodies)))
        self.pieces.append(Piece(lambda: f"%llguidance {{}}\nstart: {start}\n{lines}", arguments.tool, one, doubtful))
        return ended

    def _own(self, form: Tagged, arguments: Arguments, one: Parameter, grammar: ask.Grammar) -> str:
        """The input of a custom tool in a grammar of the client's."""
        before, _ = self._writer.split(form.end)
        if grammar.syntax == "lark" and not before:
            return f"{self._writer.lark(grammar.definition)} {self._writer.text(form.end)}"
        if grammar.syntax == "lark":  # its last terminal would take the end for more of itself
            why = "cannot be kept where a dialect closes a value with ordinary text"
            self.problems.append((arguments.tool, Problem(grammar.path or one.path, why)))
            return self._ended(form, arguments, one, (), ((),))
        try:
            kept = texts.whole(grammar.definition)
        except texts.Kept as error:
            raise BadRequest(f"`{grammar.path}` {error}.", param=grammar.path) from error
        return self._ended(form, arguments, one, (), ((kept,),))


def alone(schema: Schema, defs: Mapping[str, Schema], hidden: Sequence[str]) -> str:
    """A grammar of a schema's JSON and nothing else."""
    writer = Writer({})
    told = standing(*(guarded(schema, defs, hidden) if hidden else (schema, defs)))
    writer.raw("start", writer.json(told))
    return writer.finished()


def _joined(*parts: str) -> str:
    """A sequence; what is empty is left out."""
    return " ".join(part for part in parts if part)
