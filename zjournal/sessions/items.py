"""What a client sees of an answer, and what of it the client sends back: deltas to items, turns of items, changes.

A client may send an answer back in any form that its protocol has: calls before or behind the text, in one message or
in several items, with its thoughts or without. So an assistant's turn is compared in one form: the whole text as one
message, unless there are calls and no text, then the calls in their order. Pure.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from zjournal import ask
from zjournal.sessions import identity


class Unit(msgspec.Struct, frozen=True):
    """Items `start` to `end` of a conversation that belong together: one item, or an assistant's turn."""

    start: int
    end: int
    items: tuple[ask.Item, ...]  # of the turn, in the one form; thoughts left out
    thoughts: str = ""
    said: bool = False  # by the assistant

    @property
    def calls(self) -> tuple[ask.Call, ...]:
        return tuple(item for item in self.items if isinstance(item, ask.Call))


def items_of(
    deltas: Iterable[ask.Delta], call_id: Callable[[int], str], path: str = ""
) -> tuple[ask.Message | ask.Call, ...]:
    """The items of an answer. `call_id` gives the id of call 0, 1, …; `path` is what its texts are said to come from.

    A call that was cut, or has no sound arguments, is one as well: with the arguments that were told of it.
    """
    texts: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case ask.TextDelta(text=text):
                texts.append(text)
            case ask.CallStarted(index=index, name=name):
                names[index], arguments[index] = name, []
            case ask.CallArguments(index=index, text=text):
                arguments[index].append(text)
    calls = [ask.Call(call_id(index), name, "".join(arguments[index]), path) for index, name in names.items()]
    return _formed("".join(texts), calls, path)


def call_ids(secret: bytes, response: str, deltas: Sequence[ask.Delta], nameless: bool) -> Callable[[int], str]:
    """What gives the ids of an answer's calls; `secret` is the response's own. `nameless`: as in its acceptance."""
    if nameless:
        return lambda index: identity.named_call(_started(deltas, index).name)
    return lambda index: identity.call_id(secret, response, index)


def _started(deltas: Iterable[ask.Delta], index: int) -> ask.CallStarted:
    return next(delta for delta in deltas if isinstance(delta, ask.CallStarted) and delta.index == index)


def _formed(text: str, calls: Sequence[ask.Call], path: str) -> tuple[ask.Message | ask.Call, ...]:
    message = ask.Message("assistant", (ask.Text(text, path),))
    return (message, *calls) if text or not calls else tuple(calls)


def thoughts_of(deltas: Iterable[ask.Delta]) -> str:
    """What was thought in an answer."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ask.ReasoningDelta))


def units(items: Sequence[ask.Item], known: Sequence[Unit] = ()) -> list[Unit]:
    """The conversation in units, which cover all items in order.

    An assistant's items are one turn as far as there are calls among them; messages without calls are turns of their
    own, for two answers may follow each other. `known`: the units that these items begin with, see `settled`.
    """
    found = list(known)
    at = found[-1].end if found else 0
    while at < len(items):
        end = at + 1
        if _assistants(items[at]):
            while end < len(items) and _assistants(items[end]):
                end += 1
            found += _turns(items, at, end)
        else:
            found.append(Unit(at, end, (items[at],), said=isinstance(items[at], ask.Output)))
        at = end
    return found


def settled(found: Sequence[Unit], items: Sequence[ask.Item], count: int) -> int:
    """How many units of a conversation are units of each other one that begins with the same `count` of its `items`.

    What an assistant says goes on with its next item, so all that stands before the last other item is settled.
    """
    end = next((at for at in range(count - 1, -1, -1) if not _assistants(items[at])), 0)
    return bisect_right(found, end, key=lambda unit: unit.end)


def _assistants(item: ask.Item) -> bool:
    return isinstance(item, ask.Thought | ask.Call) or (isinstance(item, ask.Message) and item.role == "assistant")


def _turns(items: Sequence[ask.Item], start: int, end: int) -> Iterator[Unit]:
    """The turns of a run of an assistant's items."""
    if any(isinstance(item, ask.Call) for item in items[start:end]):
        yield _turn(items, start, end)
        return
    at = start
    for index in range(start, end):
        if isinstance(items[index], ask.Message) or index + 1 == end:
            yield _turn(items, at, index + 1)
            at = index + 1


def _turn(items: Sequence[ask.Item], start: int, end: int) -> Unit:
    run = items[start:end]
    calls = [item for item in run if isinstance(item, ask.Call)]
    messages = [item for item in run if isinstance(item, ask.Message)]
    formed: tuple[ask.Item, ...]
    if len(messages) == 1 and (messages[0].text or not calls):
        formed = (messages[0], *calls)
    else:
        formed = _formed("".join(message.text for message in messages), calls, "")
    thoughts = "".join(item.text for item in run if isinstance(item, ask.Thought))
    return Unit(start, end, formed, thoughts, said=True)


def orphaned(items: Sequence[ask.Item], new: Sequence[ask.Item], continues: bool) -> ask.Result | None:
    """The first result that a request is asked to go on with and whose call is nowhere among its items.

    Those that do not say where they stand do not count. In a history that a client resends whole, one that is not at
    the end is what a crash has left behind long ago; it does not count either. `continues`: it names a response.
    """
    end = list(itertools.takewhile(lambda item: isinstance(item, ask.Result), reversed(new)))
    results = [item for item in (new if continues else end[::-1]) if isinstance(item, ask.Result) and item.path]
    if not results:
        return None
    made = {call.call_id for call in _all_calls(items)}
    return next((result for result in results if result.call_id not in made), None)


def unrepeated(earlier: Sequence[ask.Item], items: Sequence[ask.Item]) -> tuple[ask.Item, ...]:
    """The items of a request without those that a client sends although the response that it continues has them.

    Calls are known by their ids, and so are results that say the same; the thoughts and texts of an assistant that come
    with such calls are left out if they say what was said before.
    """
    sent = {item.call_id for item in items if isinstance(item, ask.Call)}
    if not sent:  # nearly always: what was said earlier, turn after turn, need not be looked through for nothing
        return tuple(items)
    made = {call.call_id for call in _all_calls(earlier)}
    if sent.isdisjoint(made):
        return tuple(items)
    came = {(item.call_id, item.text) for item in earlier if isinstance(item, ask.Result)}
    whole = [item for out in earlier if isinstance(out, ask.Output) for item in out.items]
    said = {item.text for item in (*earlier, *whole) if isinstance(item, ask.Message) and item.role == "assistant"}
    left: list[ask.Item] = []
    for unit in units(items):
        again = any(call.call_id in made for call in unit.calls)
        for item in items[unit.start : unit.end]:
            match item:
                case ask.Call(call_id=call_id) if call_id in made:
                    continue
                case ask.Result() if (item.call_id, item.text) in came:
                    continue
                case ask.Thought() if again:
                    continue
                case ask.Message(role="assistant") if again and item.text in said:
                    continue
            left.append(item)
    return tuple(left)


def _all_calls(items: Sequence[ask.Item]) -> Iterator[ask.Call]:
    for item in items:
        if isinstance(item, ask.Output):
            yield from (call for call in item.items if isinstance(call, ask.Call))
        elif isinstance(item, ask.Call):
            yield item


def digests(found: Sequence[Unit], start: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """The rolling digest after each unit; that of nothing, `start`, if there is none. `known`: those of the first."""
    behind = list(known)
    for unit in found[len(known) :]:
        behind.append(identity.history(behind[-1] if behind else start, unit.items))
    return behind or [start]


def change(ours: ask.Output, theirs: Unit | None, known: bool = False) -> str:
    """What a client changed of an answer of ours, in a few words; "" if nothing. None: it is not there at all.

    `known`: their digests are equal, so that only thoughts can differ.
    """
    if theirs is None:
        return "left out"
    if known:
        return "thoughts" if theirs.thoughts and theirs.thoughts != ours.thoughts else ""
    found = _calls_changed([item for item in ours.items if isinstance(item, ask.Call)], theirs.calls)
    text, other = _text(ours.items), _text(theirs.items)
    if text != other:
        found.append("white space of the text" if "".join(text.split()) == "".join(other.split()) else "text")
    if theirs.thoughts and theirs.thoughts != ours.thoughts:
        found.append("thoughts")
    return ", ".join(found)


def _text(items: Sequence[ask.Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, ask.Message))


def _calls_changed(ours: Sequence[ask.Call], theirs: Sequence[ask.Call]) -> list[str]:
    own, sent = [call.call_id for call in ours], [call.call_id for call in theirs]
    if own != sent:
        if [_value(call) for call in ours] == [_value(call) for call in theirs]:
            return ["call ids"]
        if sorted(own) == sorted(sent):
            return ["order of calls"]
        missing, added = set(own) - set(sent), set(sent) - set(own)
        return ["calls left out"] * bool(missing) + ["calls added"] * bool(added) or ["calls repeated"]
    found = []
    for index, (call, other) in enumerate(zip(ours, theirs, strict=True)):
        if call.name != other.name:
            found.append(f"name of call {index}")
        same = call.arguments == other.arguments
        if not same and identity.canonical(call.arguments) != identity.canonical(other.arguments):
            found.append(f"arguments of call {index}")
    return found


def _value(call: ask.Call) -> tuple[str, str]:
    return call.name, identity.canonical(call.arguments)
