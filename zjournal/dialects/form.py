"""How a dialect writes calls, as data: what a grammar of its calls is made from (fences/).

Texts hold the dialect's tags as the model writes them; which of them are tokens, the tokenizer says.
"""

from __future__ import annotations

import msgspec


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """Calls as JSON objects `{"name": …, ARGUMENTS: {…}}`, each between `opening` and `closing`, `gap` between two.

    `bare`: the first object of an answer needs no `opening`, which then is for calls behind text.
    """

    triggers: tuple[str, ...]  # with what a call begins in text
    lead: int = 0  # newlines that may stand before the first call
    opening: str
    closing: str
    gap: str
    arguments: str = "arguments"
    bare: bool = False


class Tagged(msgspec.Struct, frozen=True, kw_only=True):
    """Calls whose parameters stand in tags of their own.

        opening  (head[0] NAME head[1]  (parameter KEY string value end)*  tail)  gap …  closing

    `string` is what follows a key where the value is a string, `other` where it is JSON; where the two are equal, the
    schema tells which it is. `followed`: the closing tag in `end` closes a value only before one of these.
    """

    triggers: tuple[str, ...]
    lead: int = 0
    opening: str = ""
    closing: str = ""
    gap: str
    head: tuple[str, str]
    tail: str
    parameter: str
    string: str
    other: str
    end: str
    empty: str = ""  # may stand in a call without parameters
    name: str  # pattern of the names that can be said, `key` of the parameters'
    key: str
    value_closing: str = ""  # the tag in `end`, where it is text
    followed: tuple[str, ...] = ()
    loose: tuple[str, str] = ("", "")  # what head and tail may lack

    @property
    def typed(self) -> bool:
        """Whether the form itself says which values are strings."""
        return self.string != self.other


Form = Objects | Tagged
