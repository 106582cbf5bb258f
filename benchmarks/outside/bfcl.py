"""The Berkeley Function Calling Leaderboard's data against the fences of every dialect.

Each ground truth is rendered by each dialect and must be let through, in the order given and reversed, and parsed back
to itself; the same call with an invented name, without a required parameter or with a parameter twice must not. Types
are translated to JSON Schema's (`dict` is an object); a question whose ground truth breaks its own schema is left out.

    python benchmarks/outside/bfcl.py FOLDER [STEP]

FOLDER holds the unpacked data of the package bfcl-eval (`make bfcl` gets it). STEP takes every so manieth question.
"""

from __future__ import annotations

import collections
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jsonschema

from tests.unit.dialects.fencing import accepts, fence
from tests.unit.dialects.outputs import DIALECTS, Token, calls_of, dialect, parse, write
from zjournal import ask
from zjournal.dialects.fences.build import Built
from zjournal.errors import BadRequest

CATEGORIES = [
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
]
TYPES = {"dict": "object", "float": "number", "tuple": "array", "bool": "boolean", "int": "integer", "str": "string"}
KNOWN = ("object", "number", "array", "boolean", "integer", "string", "null")
COPIED = ("enum", "required", "minItems", "maxItems", "minimum", "maximum")

Calls = list[tuple[str, dict[str, Any]]]


def schema(told: Any) -> Any:
    """Its notation of a schema as JSON Schema. Raises ValueError for a type that is none."""
    if not isinstance(told, dict):
        return told
    out: dict[str, Any] = {key: told[key] for key in COPIED if key in told}
    kind = str(told.get("type", "any")).lower()
    kind = TYPES.get(kind, kind)
    if kind in KNOWN:
        out["type"] = kind
    elif kind != "any":
        raise ValueError(kind)
    if "properties" in told:
        out["properties"] = {key: schema(one) for key, one in told["properties"].items()}
        out["additionalProperties"] = False
    if isinstance(told.get("items"), dict):
        out["items"] = schema(told["items"])
    return out


def first(value: Any) -> Any:
    """The first of the possible answers that is not "may be left out"."""
    return next((one for one in value if one != ""), None) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """An answer, of whose inner values there are possible ones as well."""
    if isinstance(value, dict):
        return {key: plain(first(one)) for key, one in value.items() if first(one) is not None}
    return [plain(one) for one in value] if isinstance(value, list) else value


def questions(folder: Path, step: int) -> Iterator[tuple[list[ask.ToolSpec], Calls]]:
    """Tools and ground truth; an empty one where it is no use."""
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        lines = (folder / "possible_answer" / name).read_text().splitlines()
        answers = {told["id"]: told["ground_truth"] for told in map(json.loads, lines)}
        for line in (folder / name).read_text().splitlines()[::step]:
            question = json.loads(line)
            try:
                schemas = {one["name"]: schema(one["parameters"]) for one in question["function"]}
            except ValueError:
                yield [], []
                continue
            calls = [
                (name, {key: plain(first(value)) for key, value in given.items() if first(value) is not None})
                for answer in answers[question["id"]]
                for name, given in answer.items()
            ]
            tools = [
                ask.ToolSpec(name, None, json.dumps(one).encode(), f"tools[{at}]")
                for at, (name, one) in enumerate(schemas.items())
            ]
            yield tools, calls if all(name in schemas and fits(schemas[name], given) for name, given in calls) else []


def fits(told: Any, value: Any) -> bool:
    return not any(jsonschema.Draft202012Validator(told).iter_errors(value))


def rendered(name: str, calls: Calls) -> list[Token]:
    one = dialect(name)
    said = [ask.Call(f"c{at}", tool, json.dumps(given, ensure_ascii=False)) for at, (tool, given) in enumerate(calls)]
    return write(one, one.calls([], said))


def doubled(name: str, tool: str, given: dict[str, Any]) -> list[Token]:
    """A call that says its first parameter twice."""
    key = next(iter(given))
    call = ask.Call("c", tool, json.dumps({key: given[key], "\0": 0}, ensure_ascii=False))
    if name.startswith(("chatml", "llama3")):
        inner = json.dumps(given, ensure_ascii=False)
        pair = json.dumps({key: given[key]}, ensure_ascii=False)[1:-1]
        call = ask.Call("c", tool, f"{{{pair}, {inner[1:]}")
        return write(dialect(name), dialect(name).calls([], [call]))
    once = write(dialect(name), dialect(name).calls([], [ask.Call("c", tool, json.dumps({key: given[key]}))]))
    none = write(dialect(name), dialect(name).calls([], [ask.Call("c", tool, "{}")]))
    begin = next(at for at, (one, two) in enumerate(zip(once, none, strict=False)) if one != two)
    end = next(at for at, (one, two) in enumerate(zip(once[::-1], none[::-1], strict=False)) if one != two)
    return [*once[: len(once) - end], *once[begin:]]


def parameters(tools: list[ask.ToolSpec], name: str) -> Any:
    return next(json.loads(one.parameters) for one in tools if one.name == name)


def examine(name: str, tools: list[ask.ToolSpec], calls: Calls, count: collections.Counter[str], built: Built) -> None:
    """One question in one dialect."""
    told = rendered(name, calls)
    whole = accepts(name, built, told)
    count["accepted" if whole else "REFUSED"] += 1
    if not whole:
        count[f"refused in {name}: {json.dumps(calls, ensure_ascii=False)[:200]}"] += 1
    backwards = [(tool, dict(reversed(given.items()))) for tool, given in calls]
    count["accepted, reversed" if accepts(name, built, rendered(name, backwards)) else "REFUSED, REVERSED"] += 1
    count["parsed back" if calls_of(parse(dialect(name), tools, told)) == calls else "PARSED ELSE"] += 1
    tool, given = calls[0]
    invented = accepts(name, built, rendered(name, [(tool + "x", given), *calls[1:]]))
    count["INVENTED NAME ACCEPTED" if invented else "invented name refused"] += 1
    required = parameters(tools, tool).get("required", [])
    if required and required[0] in given:
        less = {key: value for key, value in given.items() if key != required[0]}
        missing = accepts(name, built, rendered(name, [(tool, less), *calls[1:]]))
        count["MISSING REQUIRED ACCEPTED" if missing else "missing required refused"] += 1
    if given:
        twice = accepts(name, built, doubled(name, tool, given))
        count["TWICE ACCEPTED" if twice else "twice refused"] += 1


def main() -> int:
    folder, step = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    counts = {name: collections.Counter[str]() for name in DIALECTS}
    begun = time.perf_counter()
    for tools, calls in questions(folder, step):
        for name, count in counts.items():
            count["questions"] += 1
            if not calls:
                count["left out"] += 1
                continue
            try:
                built = fence(name, tools)
            except BadRequest as fault:
                count["no fence"] += 1
                count[f"no fence: {fault.message[:120]}"] += 1
                continue
            examine(name, tools, calls, count, built)
    kinds = [kind for kind in dict.fromkeys(kind for count in counts.values() for kind in count) if ": " not in kind]
    print(f"{'':28}" + "".join(f"{name:>15}" for name in DIALECTS))
    for kind in kinds:
        print(f"{kind:28}" + "".join(f"{count[kind]:15}" for count in counts.values()))
    for count in counts.values():
        for kind, times in count.items():
            if ": " in kind:
                print(f"{times:5} {kind}")
    print(f"{time.perf_counter() - begun:.0f} s")
    return int(any(kind.isupper() and any(count[kind] for count in counts.values()) for kind in kinds))


if __name__ == "__main__":
    raise SystemExit(main())
