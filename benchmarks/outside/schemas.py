"""The official JSON Schema test suite against what fences let through as the JSON of an answer.

Each schema is that of a format, in both ways: strict, where what cannot be kept is refused, and not strict, where it is
left out and told. A strict fence lets no invalid instance through; one that leaves nothing out neither. Valid instances
that are refused, and schemas that are, are counted, by file; the counts may only shrink (RATCHET).

    python benchmarks/outside/schemas.py FOLDER [update]

FOLDER is a checkout of JSON-Schema-Test-Suite (`make schemas` gets it).
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.unit.dialects.fencing import accepts, fence
from zjournal import ask
from zjournal.dialects.fences.build import Built
from zjournal.errors import BadRequest

DRAFTS = ("draft2020-12", "draft7")
RATCHET = Path(__file__).with_suffix(".json")
DIALECT = "chatml"


def built(schema: Any, strict: bool) -> Built | None:
    """The fence of a format; None where it is refused."""
    form = ask.Format("json_schema", "x", json.dumps(schema).encode(), strict, "text.format")
    try:
        return fence(DIALECT, [], ask.ToolChoice(), form)
    except BadRequest:
        return None


def spelled(value: Any) -> list[str]:
    """An instance in the spellings of JSON that models write."""
    return [json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))]


def examine(tests: Any, count: collections.Counter[str]) -> list[str]:
    """One schema and its instances; what was let through against the rules."""
    wrong = []
    strict, loose = built(tests["schema"], True), built(tests["schema"], False)
    count["schemas"] += 1
    count["refused, strict"] += strict is None
    count["refused"] += loose is None
    count["left something out"] += loose is not None and bool(loose.warnings)
    for test in tests["tests"]:
        for one, kind in ((strict, "strict"), (loose, "not strict")):
            if one is None:
                continue
            through = any(accepts(DIALECT, one, text) for text in spelled(test["data"]))
            if test["valid"]:
                count[f"valid, {kind}"] += 1
                count[f"valid kept out, {kind}"] += not through
            else:
                count[f"invalid, {kind}"] += 1
                count[f"invalid let through, {kind}"] += through
                if through and not one.warnings:
                    wrong.append(f"{tests['description']}: {test['description']}: {json.dumps(test['data'])[:80]}")
    return wrong


def main() -> int:
    folder = Path(sys.argv[1]) / "tests"
    found: dict[str, dict[str, int]] = {}
    total = {draft: collections.Counter[str]() for draft in DRAFTS}
    wrong = []
    for draft in DRAFTS:
        for file in sorted((folder / draft).glob("*.json")):
            count: collections.Counter[str] = collections.Counter()
            for tests in json.loads(file.read_text()):
                wrong += [f"{draft}/{file.name}: {one}" for one in examine(tests, count)]
            kept = ("refused, strict", "refused", "valid kept out, strict", "valid kept out, not strict")
            found[f"{draft}/{file.name}"] = {key: count[key] for key in kept if count[key]}
            total[draft] += count
    for draft, count in total.items():
        print(draft, *(f"  {key}: {value}" for key, value in sorted(count.items())), sep="\n")
    print("let through against the rules:", *(wrong or ["nothing"]), sep="\n  ")
    if sys.argv[2:] == ["update"]:
        RATCHET.write_text(json.dumps(found, indent=1) + "\n")
        return int(bool(wrong))
    before = json.loads(RATCHET.read_text())
    worse = [
        f"{name}: {key}: {times}, was {before.get(name, {}).get(key, 0)}"
        for name, counts in found.items()
        for key, times in counts.items()
        if times > before.get(name, {}).get(key, 0)
    ]
    print("more than before:", *(worse or ["nothing"]), sep="\n  ")
    return int(bool(wrong or worse))


if __name__ == "__main__":
    raise SystemExit(main())
