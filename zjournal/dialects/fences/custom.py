"""Grammars of a client's own, for the input of a custom tool: checked before they become part of ours."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from zjournal import ask
from zjournal.dialects.fences import costs
from zjournal.errors import BadRequest

DEFINITION_BYTES_MAX = 1 << 16
CROSSED_MAX = 8  # `&` and `~`: the engine's work doubles with each, and no limit of its own ends it

_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')


def limits() -> LLParserLimits:
    """What a client's schema or grammar may cost. The rest are the engine's own."""
    return LLParserLimits(verbose_errors=False)


def check(grammar: ask.Grammar) -> None:
    """Raises BadRequest if the engine cannot read a grammar, or it asks for what a client must not have: tokens."""
    path = grammar.path or "grammar"
    try:
        length = len(grammar.definition.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"`{path}`: the grammar is not Unicode.", param=path) from None
    if length > DEFINITION_BYTES_MAX:
        raise BadRequest(f"`{path}`: the grammar is longer than {DEFINITION_BYTES_MAX} bytes.", param=path)
    if grammar.syntax == "lark":
        plain = _QUOTED.sub("", grammar.definition)
        named = set(re.findall(r"%\s*\w*", plain)) - {"%ignore", "%import"}
        if "<" in plain or named or "@" in plain:
            raise BadRequest(f"`{path}`: a grammar may name no tokens, options or other grammars.", param=path)
        if len(re.findall("[&~]", plain)) > CROSSED_MAX:
            raise BadRequest(f"`{path}`: more than {CROSSED_MAX} `&` and `~`.", param=path)
    error = LLMatcher.validate_grammar(source(grammar), None, limits=limits())
    if error:
        raise BadRequest(f"`{path}`: {first_line(error)}", param=path)
    letters = "".join(_QUOTED.findall(grammar.definition)) if grammar.syntax == "lark" else grammar.definition
    error = costs.tried(source(grammar), letters)
    if error:
        raise BadRequest(f"`{path}`: the grammar would cost the engine too much ({error}).", param=path)
    if empty(source(grammar)):
        raise BadRequest(f"`{path}`: no text is of this grammar.", param=path)


def source(grammar: ask.Grammar) -> str:
    """A client's grammar as the engine reads it."""
    return LLMatcher.grammar_from_regex(grammar.definition) if grammar.syntax == "regex" else grammar.definition


class _Bytes:
    """A vocabulary of bytes alone: byte b is the token b + 1."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
    tokens = (b"<end>", *(bytes([byte]) for byte in range(256)))

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


def matcher(grammar: str) -> LLMatcher:
    """What reads a text byte by byte."""
    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes()), slices=[]), grammar, log_level=0, limits=limits())


def fault(grammar: str, doubtful: bool) -> str:
    """What is wrong with a grammar; "" if nothing is. `doubtful`: perhaps it is that nothing is of it."""
    error = LLMatcher.validate_grammar(grammar, None, limits=limits())
    return error or ("Unsatisfiable: no text is of it" if doubtful and empty(grammar) else "")


def empty(grammar: str) -> bool:
    """Whether nothing at all may come first. A grammar that begins and never ends is not found."""
    one = matcher(grammar)
    return not one.is_accepting() and int.from_bytes(one.compute_bitmask(), "little") in (0, 1)


def first_line(error: str) -> str:
    """What the engine says of a grammar, without the grammar."""
    return error.strip().splitlines()[0][:300] if error.strip() else "it cannot be read"
