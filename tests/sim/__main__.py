"""`python -m tests.sim --seed N`: prints the plan, runs it, and says how to repeat a run that failed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.sim import disk, plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=plan.STEPS)
    parser.add_argument("--runs", type=int, default=1, help="this many seeds, one after the other, until one fails")
    parser.add_argument("--lying-disk", action="store_true", help="syncs do nothing: the simulation must notice")
    parser.add_argument("--no-shim", action="store_true", help="as on a machine without a C compiler")
    arguments = parser.parse_args()
    if not arguments.no_shim and not disk.preloaded():
        with tempfile.TemporaryDirectory(prefix="zjournal-sim-") as folder:
            library = disk.build(Path(folder))
            if library is not None:
                return _with_shim(library)
    if arguments.no_shim or not disk.preloaded():
        print("no disk faults in this run: they need a C compiler; kills and torn tails are simulated")
    logging.disable(logging.CRITICAL)  # the journal reports every fault that was ordered
    started = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        if not _run(plan.draw(seed, arguments.steps), arguments):
            return 1
    if arguments.runs > 1:
        print(f"{arguments.runs} seeds clean in {time.monotonic() - started:.0f} s")
    return 0


def _with_shim(library: Path) -> int:
    command = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
    return os.spawnve(os.P_WAIT, sys.executable, command, os.environ | {"LD_PRELOAD": str(library)})


def _run(drawn: plan.Plan, arguments: argparse.Namespace) -> bool:
    from tests.sim import run  # all of zjournal: not for the process that only starts one with the shim

    print(drawn, flush=True)
    shim = disk.preloaded() and not arguments.no_shim
    with tempfile.TemporaryDirectory(prefix="zjournal-sim-") as folder:
        place = Path(folder).resolve()
        try:
            played = run.Run(drawn, place, shim=shim, lying=arguments.lying_disk, say=print)
            digest = played.run()
        except Exception as error:
            if not isinstance(error, run.Mismatch):
                traceback.print_exc()
            print(f"FAILED: {error}\nrepeat it with: python -m tests.sim --seed {drawn.seed} --steps {arguments.steps}")
            return False
    print("met: " + ", ".join(f"{name} {count}" for name, count in sorted(played.met.items())))
    print(f"digest {digest}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
