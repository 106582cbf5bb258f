"""One run on a machine with an NVIDIA GPU: are the numbers right, are they the same each time, and how fast is it.

Needs torch and triton and nothing else. Each part has its share of eight minutes; what found no time is named at the
end. Bandwidth and peak are measured in the same run, and each figure stands beside them.

    python benchmarks/gpu.py [--json FILE] [--minutes 8]     # or: make gpu
    python benchmarks/gpu.py --dry                           # or: make gpu DRY=1

A dry run does all of it at toy sizes on the processor, where Triton interprets the kernels: its times mean nothing,
and everything else must hold. Exits with 1 where a number is wrong or a target is missed (in a dry run: a number).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MINUTES = 8.0  # with the time that compilation takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="toy sizes on the processor")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="where the figures go")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured; --dry runs everything at toy sizes")
        return
    sys.exit(0 if measure(options.dry, options.minutes, options.json) else 1)


def measure(dry: bool, minutes: float, into: Path) -> bool:
    """Runs all parts; whether all is as it must be."""
    import torch
    import triton

    from benchmarks.parts import gpu_model, gpu_numbers, gpu_speed, table
    from benchmarks.parts.gpu import Run
    from zjournal.engine.device import Cuda, Host

    begun = time.monotonic()
    run = Run(Host() if dry else Cuda(), dry, begun + minutes * 60)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{run.device.name}, {versions}{', dry: times mean nothing' if dry else ''}\n{table.head()}", flush=True)
    share = minutes * 60 / 100
    with run.part("numbers", 20 * share):
        gpu_numbers.right(run)
    with run.part("the same each time", 15 * share):
        gpu_numbers.same(run)
    with run.part("kernels", 25 * share), run.attempt("kernels"):
        gpu_speed.kernels(run)
    with run.part("model", 40 * share), run.attempt("model"):
        gpu_model.model(run)
    return report(run, versions, into)


def report(run, versions: str, into: Path) -> bool:
    """Prints the table as a whole, writes the JSON; whether nothing is wrong and, on a card, no target missed."""
    from benchmarks.parts import table

    print("\n" + "\n".join([table.head(), *map(table.text, run.lines)]))
    for what in run.skipped:
        print(f"no time for: {what}")
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.spent.items())
    print(f"took {sum(run.spent.values()):.0f} s: {spent}")
    told = {"device": run.device.name, "versions": versions, "dry": run.dry}
    told |= {"figures": run.figures, "skipped": run.skipped, "seconds": run.spent}
    told["lines"] = [line._asdict() for line in run.lines]
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(told, indent=1) + "\n")
    print(f"figures: {into}")
    missed = [line.what for line in run.lines if line.reached is False]
    if missed:
        print(f"{len(missed)} not reached: {'; '.join(missed)}")
    return not missed


if __name__ == "__main__":
    main()
