"""The sandbox that chat templates run in: jinja's own, and a bound on what a template can cost.

Each turn of a loop and each call is a step, and steps are counted, so that no template runs for ever. What grows by
doubling (sums, products, powers, `~`) and what takes a width is checked before it is made. A text that is replaced or
joined into a far longer one is not; there the output's own bound and the machine's memory are what is left.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

LENGTH_MAX = 64 << 20  # characters of a text, elements of a list
STEPS_MAX = 10_000_000  # of one rendering; a conversation of 10,000 messages with tools takes some 100,000
EXPONENT_MAX = 64
NUMBER_BITS_MAX = 4096
WIDTH_MAX = 4096  # what a text is padded or indented to, digits of a number
_WIDE = ("batch", "center", "indent", "round", "slice", "wordwrap")  # filters that take a width
_PADS = ("center", "expandtabs", "ljust", "rjust", "zfill")  # methods of a text that do
_FORMATS = ("format", "format_map")
_RANDOM_GLOBAL, _RANDOM_FILTER = "lipsum", "random"  # would make the same conversation another prompt
# Of a format: a width or precision of many digits, or one that is an argument.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*?(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r":[^{}]*(?:\{|\d{5})")
_MISSING = object()
_METERED, _JOINED, _SUMMED = "zj metered", "zj joined", "zj summed"  # no template can write these names


class _Metering(jinja2.visitor.NodeTransformer):
    """Puts the meter into loops, and `~` under the bound of sums; a sum of several values becomes one step of work."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, jinja2.nodes.Expr)
        node.iter = _filter(node.iter, _METERED, [])
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return _filter(first, _JOINED, rest)

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        values: list[jinja2.nodes.Expr] = []
        left: jinja2.nodes.Expr = node
        while isinstance(left, jinja2.nodes.Add):
            values.append(left.right)
            left = left.left
        if len(values) == 1:
            self.generic_visit(node)
            return node
        first, *rest = (self.visit(value) for value in (left, *reversed(values)))
        return _filter(first, _SUMMED, rest)


def _filter(node: jinja2.nodes.Expr, name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Filter:
    made = jinja2.nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)
    made.environment = node.environment
    return made


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment. One rendering at a time is counted exactly; several at once share the steps."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._steps = 0
        del self.globals[_RANDOM_GLOBAL], self.filters[_RANDOM_FILTER]
        for name in _WIDE:
            self.filters[name] = _narrow(self.filters[name])
        self.filters[_METERED], self.filters[_JOINED], self.filters[_SUMMED] = _metered, _joined, _summed

    def begin(self) -> None:
        """A rendering begins: it has all its steps."""
        self._steps = 0

    def step(self) -> None:
        """Counts one. Raises SecurityError over the limit."""
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise jinja2.sandbox.SecurityError(f"it takes more than {STEPS_MAX} steps")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, jinja2.nodes.Template)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.step()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja puts a format of its own in place of str's
        text = getattr(method, "__self__", None)
        if isinstance(text, str) and method.__name__ in _PADS:
            for value in (*args, *kwargs.values()):
                check_width(value)
        if isinstance(text, str) and method.__name__ in _FORMATS and _WIDE_BRACES.search(text):
            raise jinja2.sandbox.SecurityError("the width is over the limit")
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox has it; what a loop tells of itself is asked for each message, and is always safe."""
        if type(obj) is jinja2.runtime.LoopContext and not attribute.startswith("_"):
            found = getattr(obj, attribute, _MISSING)
            if found is not _MISSING:
                return found
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) <= LENGTH_MAX:
            return left + right  # nearly all there is
        refused = False
        if operator == "+":
            refused = _length(left) + _length(right) > LENGTH_MAX
        elif operator == "*":
            refused = any(
                isinstance(other, int) and _length(one) * other > LENGTH_MAX
                for one, other in ((left, right), (right, left))
            )
            refused |= _bits(left) + _bits(right) > NUMBER_BITS_MAX
        elif operator == "**":
            refused = abs(right) > EXPONENT_MAX or _bits(left) * abs(right) > NUMBER_BITS_MAX
        elif isinstance(left, str):
            refused = _WIDE_PERCENT.search(left) is not None
        if refused:
            raise jinja2.sandbox.SecurityError(f"what {operator!r} would make is over the limit")
        return super().call_binop(context, operator, left, right)


def check_width(value: object) -> None:
    """Raises SecurityError for a number that no text should be padded to."""
    if isinstance(value, int) and abs(value) > WIDTH_MAX:
        raise jinja2.sandbox.SecurityError("the width is over the limit")


def _length(value: object) -> int:
    if isinstance(value, str):  # asked first, for it is nearly always one, and the other question is slow
        return len(value)
    return len(value) if isinstance(value, Sequence) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing widths over the limit. What it is applied to comes first, or behind a context."""
    first = 2 if hasattr(function, "jinja_pass_arg") else 1

    @functools.wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[first:], *kwargs.values()):
            check_width(value)
        return function(*args, **kwargs)

    return narrow


@jinja2.pass_context
def _metered(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
    """The values, each a step. A filter with the context is never taken for a constant."""
    environment = context.environment
    assert isinstance(environment, Sandbox)
    for value in values:
        environment.step()
        yield value


@jinja2.pass_context
def _summed(context: jinja2.runtime.Context, *values: Any) -> Any:
    """`a + b + c`, added from the left."""
    length = 0
    for value in values:
        if type(value) is not str:
            break
        length += len(value)
    else:
        if length <= LENGTH_MAX:
            return "".join(values)  # what the sums would come to, and no sum on the way is longer
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return functools.reduce(functools.partial(environment.call_binop, context, "+"), values)


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, *values: Any) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > LENGTH_MAX:
        raise jinja2.sandbox.SecurityError("what '~' would make is over the limit")
    return "".join(texts)
