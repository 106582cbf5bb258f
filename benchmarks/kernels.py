"""What the Triton kernels take of a GPU: registers, spills, stack, shared memory and tensor-core instructions.

Compiles every build of every kernel for sm_80, sm_90 and sm_100; no GPU is needed. `occupancy` is how many warps a
multiprocessor can hold at once, out of 64, as far as registers and shared memory allow. How fast the kernels are is
for a machine with a GPU to say: `make gpu`.

    python benchmarks/kernels.py --compile-only [--sweep] [--only FILE] [--json FILE] [--write]

--write puts the figures into tests/kernels/resources.json, which the tests hold the kernels to. Builds that were not
compiled keep theirs; those that are no more lose them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# What belongs to a multiprocessor (CUDA C programming guide, table of technical specifications).
REGISTERS, WARPS, BLOCKS = 65536, 64, 32
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
SHARED_RESERVED = 1024  # of each block, by the system
TABLE = ROOT / "tests" / "kernels" / "resources.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="nothing else is done; accepted for clearness")
    parser.add_argument("--sweep", action="store_true", help="the builds that are left to the long sweep as well")
    parser.add_argument("--only", default="", help="builds of this file: gate, or gate.silu alone")
    parser.add_argument("--jobs", type=int, default=min(len(os.sched_getaffinity(0)), 8))
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    parser.add_argument("--write", action="store_true", help=f"writes them to {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    from zjournal.kernels import build

    builds = [
        each
        for name, each in build.all_builds(options.only.partition(".")[0]).items()
        if ("." not in options.only or options.only in name) and (options.sweep or not each.sweep)
    ]
    figures = _measure(builds, options.only.partition(".")[0], options.jobs)
    _print(builds, figures, build.CAPABILITIES)
    if options.json:
        options.json.write_text(_text(figures))
    if options.write:
        TABLE.write_text(_text(_held(set(build.all_builds())) | figures))
    if not options.compile_only:
        print("\nSpeed is measured on a GPU: make gpu")


def _measure(builds: list, only: str, jobs: int) -> dict[str, dict[str, dict[str, object]]]:
    """Resources by build and capability. A build that does not compile ends the program with triton's words."""
    work = [(only, each.name, capability) for each in builds for capability in each.capabilities]
    figures: dict[str, dict[str, dict[str, object]]] = {each.name: {} for each in builds}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for (_, name, capability), taken in zip(work, pool.map(_compile, work, chunksize=4), strict=True):
            figures[name][str(capability)] = taken
    return figures


def _compile(work: tuple[str, str, int]) -> dict[str, object]:
    """One build for one capability, in a process of the pool."""
    from zjournal.kernels import build

    only, name, capability = work
    try:
        return asdict(build.compile_for(build.all_builds(only)[name], capability))
    except Exception as error:  # triton's own errors cannot be sent between processes
        said = "\n".join(f"{type(each).__name__}: {each}" for each in (error, error.__cause__) if each)
        raise RuntimeError(f"{name} does not compile for sm_{capability}: {said}") from None


def _print(builds: list, figures: dict, capabilities: tuple[int, ...]) -> None:
    import triton

    print(f"triton {triton.__version__}: registers, bytes of shared memory, occupancy, tensor-core instruction")
    width = max((len(each.name) for each in builds), default=0) + 2
    print(f"{'':{width}}{'warps':>6}" + "".join(f"{f'sm_{capability}':>34}" for capability in capabilities))
    for each in builds:
        cells = []
        for capability in capabilities:
            taken = figures[each.name].get(str(capability))
            if taken is None:
                cells.append("-")
                continue
            full = occupancy(taken["registers"], taken["shared"], each.num_warps, capability)
            bad = f" {taken['spills']} SPILLS" if taken["spills"] else ""
            bad += f" STACK {taken['stack']}" if taken["stack"] else ""
            core = taken["tensor_core"] or "-"
            cells.append(f"{taken['registers']:>4} {taken['shared']:>7} {full:>3}/64 {core}{bad}")
        print(f"{each.name:{width}}{each.num_warps:>6}" + "".join(f"{cell:>34}" for cell in cells))


def occupancy(registers: int, shared: int, warps: int, capability: int) -> int:
    """Warps that a multiprocessor holds: registers go to warps in units of 256, memory to blocks."""
    of_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        BLOCKS, WARPS // warps, REGISTERS // (of_warp * warps), SHARED[capability] // (shared + SHARED_RESERVED)
    )
    return blocks * warps


def _minor() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def _held(names: set[str]) -> dict:
    """What the table says of builds that still are, by this minor version of triton."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"triton": ""}
    return {name: by for name, by in table["builds"].items() if name in names} if table["triton"] == _minor() else {}


def _text(figures: dict) -> str:
    """The table as JSON, one line for each build and capability, so that a diff shows what changed."""
    rows = [
        f'    "{name}": {{\n'
        + ",\n".join(f'      "{capability}": {json.dumps(taken)}' for capability, taken in by.items())
        + "\n    }"
        for name, by in sorted(figures.items())
    ]
    return f'{{\n  "triton": "{_minor()}",\n  "builds": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


if __name__ == "__main__":
    main()
