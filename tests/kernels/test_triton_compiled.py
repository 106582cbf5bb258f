"""The kernels as machine code for GPUs that are not here: nothing spills, and what they take is written down.

The figures of resources.json hold for the minor version of triton that the file names. With another version, whose
compiler gives others, only the absolute rules hold.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from zjournal.kernels.build import impossible

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_name("resources.json")
REWRITE = "python benchmarks/kernels.py --compile-only --write"
SECONDS_MAX = 900
LAUNCH = re.compile(r"^\s+(_\w+)\[", re.MULTILINE)  # _kernel[grid](...)

# Says which builds there are, and what is expected of each.
LIST = """
import json, sys
from zjournal.kernels import build
builds = {
    name: {
        "kernel": each.kernel.__name__,
        "dot": each.dot,
        "sweep": each.sweep,
        "on": [str(capability) for capability in each.capabilities],
    }
    for name, each in build.all_builds().items()
}
print(json.dumps({"builds": builds, "shared": build.SHARED_MAX}))
"""


def compiled(tmp_path: Path, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is expected, and what the compiler gave. In processes without the interpreter."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = tmp_path / "resources.json"
    listed = _run([sys.executable, "-c", LIST], surroundings)
    program = [sys.executable, "benchmarks/kernels.py", "--compile-only", "--jobs", "2", "--json", str(out), *flags]
    _run(program, surroundings)
    return json.loads(listed), json.loads(out.read_text())


def _run(command: list[str], surroundings: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def faults(name: str, capability: str, taken: dict[str, Any], dot: bool, shared_max: int) -> list[str]:
    """What no build may do, whatever compiled it."""
    found = []
    if taken["spills"] or taken["stack"]:
        found.append(f"{taken['spills']} spills, {taken['stack']} bytes of stack")
    if taken["shared"] > shared_max:
        found.append(f"{taken['shared']} bytes of shared memory, a block has {shared_max}")
    if bool(taken["tensor_core"]) != dot:
        found.append(f"tensor-core instruction: {taken['tensor_core'] or 'none'}, expected: {dot}")
    return [f"{name} on sm_{capability}: {each}" for each in found]


def changes(held: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where `now` differs from the figures that are held to, one line each, better or worse."""
    found = []
    for name, by in now.items():
        for capability, taken in by.items():
            was = held.get(name, {}).get(capability)
            if was is None:
                found.append(f"{name} on sm_{capability} is not in the table")
                continue
            found += [
                f"{name} on sm_{capability}: {figure} {was[figure]} -> {value}"
                for figure, value in taken.items()
                if was[figure] != value
            ]
    return found


def check(listed: dict[str, Any], now: dict[str, Any], sweep: bool) -> None:
    expected = {name: each for name, each in listed["builds"].items() if sweep or not each["sweep"]}
    assert expected
    assert {name: list(by) for name, by in now["builds"].items()} == {name: by["on"] for name, by in expected.items()}
    wrong = [
        fault
        for name, by in now["builds"].items()
        for capability, taken in by.items()
        for fault in faults(name, capability, taken, expected[name]["dot"], listed["shared"][capability])
    ]
    assert not wrong, "\n".join(wrong)
    held = json.loads(TABLE.read_text())
    if held["triton"] == now["triton"]:
        changed = changes(held["builds"], now["builds"])
        changed += [f"{name} is no more" for name in held["builds"] if name not in listed["builds"]]
        assert not changed, "\n".join([*changed, f"If this is meant: {REWRITE}"])


def test_every_kernel_compiles_and_takes_what_the_table_says(tmp_path: Path) -> None:
    listed, now = compiled(tmp_path)
    launched = {name for path in (ROOT / "kernels").glob("*.py") for name in LAUNCH.findall(path.read_text())}
    assert launched, "the pattern of a launch finds none"
    left_out = launched - {each["kernel"] for each in listed["builds"].values() if not each["sweep"]}
    assert not left_out, f"kernels that are launched and have no builds(): {sorted(left_out)}"
    check(listed, now, sweep=False)


@pytest.mark.soak
def test_long_sweep(tmp_path: Path) -> None:
    check(*compiled(tmp_path, "--sweep"), sweep=True)


GOOD = {"registers": 64, "spills": 0, "stack": 0, "shared": 1024, "tensor_core": ""}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 3}, "3 spills"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"shared": 4097}, "4097 bytes of shared"),
        ({"tensor_core": "HMMA"}, "expected: False"),
    ],
)
def test_rules_see_what_they_are_for(change: dict[str, Any], said: str) -> None:
    assert not faults("one", "90", GOOD, False, 4096)
    assert said in faults("one", "90", GOOD | change, False, 4096)[0]


def test_a_dot_without_tensor_cores_is_a_fault() -> None:
    assert "none, expected: True" in faults("one", "90", GOOD, True, 4096)[0]


def test_a_changed_figure_is_told_better_or_worse() -> None:
    held = {"one": {"90": GOOD}}
    assert changes(held, held) == []
    assert changes(held, {"one": {"90": GOOD | {"registers": 65}}}) == ["one on sm_90: registers 64 -> 65"]
    assert changes(held, {"one": {"90": GOOD | {"registers": 63}}}) == ["one on sm_90: registers 64 -> 63"]
    assert changes(held, {"two": {"90": GOOD}}) == ["two on sm_90 is not in the table"]


def test_products_that_tensor_memory_does_not_have_are_seen() -> None:
    said = "#tmem = #ttng.tensor_memory_encoding<blockM = {}, blockN = {}, colStride = 1>".format
    fine = "\n".join(said(*shape) for shape in ((64, 8), (64, 64), (128, 16), (128, 256)))
    assert impossible(fine) == []
    assert impossible("\n".join((fine, said(128, 8), said(64, 12), said(128, 512)))) == [
        f"tcgen05.mma has no {shape}" for shape in ("64 x 12", "128 x 8", "128 x 512")
    ]


def test_tests_run_in_the_interpreter() -> None:
    """If triton had been imported before the variable was set, kernels here would ask for a GPU."""
    assert triton.knobs.runtime.interpret
    assert "Interpreted" in type(triton.language.sum).__name__
