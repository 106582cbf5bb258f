"""One run on a machine with an NVIDIA GPU: are the numbers right, are they the same each time, and how fast is it.

Needs torch and triton and nothing else. Each part has its share of eight minutes; what found no time is named at the
end. Bandwidth and peak are measured in the same run, and each figure stands beside them.

    python benchmarks/gpu.py [--json FILE] [--minutes 8]     # or: make gpu
    python benchmarks/gpu.py --dry                           # or: make gpu DRY=1

The work is done in a process of its own, which writes down all that it knows as it comes. Where a kernel breaks its
hold on the card, or hangs, or kills it, the next one goes on behind that.

A dry run does all of it at toy sizes on the processor, where Triton interprets the kernels: its times mean nothing,
and everything else must hold. Exits with 1 where a number is wrong or a target is missed (in a dry run: a number).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MINUTES = 8.0  # with the time that compilation takes
RESTARTS_MAX = 10
STILL_SECONDS = 100  # without a word; then something hangs. A kernel compiles in a few, a prompt is read in ten
POLL_SECONDS = 0.5
KILL_SECONDS = 30
DONE, SICK, NO_CARD, NO_TRITON = 0, 3, 4, 5  # how the process of the work ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="toy sizes on the processor")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="where the figures go")
    parser.add_argument("--left", type=float, help=argparse.SUPPRESS)  # of the minutes, for the process of the work
    options = parser.parse_args()
    if options.left is not None:
        sys.exit(work(options.dry, options.minutes, options.left, options.json))
    sys.exit(watch(options.dry, options.minutes, options.json))


def watch(dry: bool, minutes: float, into: Path) -> int:
    """Keeps a process at the work until all is done or there is no time; the exit status of the script."""
    into.parent.mkdir(parents=True, exist_ok=True)
    into.unlink(missing_ok=True)
    until = time.monotonic() + minutes * 60
    command = [sys.executable, __file__, "--json", str(into), "--minutes", str(minutes), *(["--dry"] if dry else [])]
    for _ in range(1 + RESTARTS_MAX):
        left = max(until - time.monotonic(), 0) / 60
        status = follow(subprocess.Popen([*command, "--left", str(left)]), into, None if dry else STILL_SECONDS)
        if status == NO_CARD:
            return 0
        if status == NO_TRITON or not into.exists():
            return 1
        if status == DONE:
            break
        note(into, status)
        if time.monotonic() >= until:
            break
    return 0 if report(into) else 1


def follow(process: subprocess.Popen, into: Path, still: float | None) -> int | None:
    """The status that the process ends with; None if it wrote nothing for `still` seconds and was killed."""
    seen, since = 0, time.monotonic()
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        now = into.stat().st_mtime_ns if into.exists() else 0
        if now != seen:
            seen, since = now, time.monotonic()
        if still is not None and time.monotonic() - since > still:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs as well keeps it
                process.wait(KILL_SECONDS)
            return None


def note(into: Path, status: int | None) -> None:
    """What the process was at when it ended failed; Sick has said so itself."""
    told = json.loads(into.read_text())
    if status != SICK:
        from benchmarks.parts.table import Line, text

        how = "nothing was heard of it" if status is None else f"its process ended with {status}"
        line = Line(told["at"], "failed", how, None, "runs", False)
        told["lines"].append(line._asdict())
        print(text(line), flush=True)
    into.write_text(json.dumps(told, indent=1) + "\n")


def work(dry: bool, minutes: float, left: float, into: Path) -> int:
    """Does what no process before this one has begun, in the `left` ones of so many minutes; how it ended."""
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not dry and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured; --dry runs everything at toy sizes")
        return NO_CARD
    import triton

    from benchmarks.parts import gpu_model, gpu_numbers, gpu_speed, table
    from benchmarks.parts.gpu import Run, Sick
    from zjournal.engine import reach
    from zjournal.engine.device import Cuda, Host

    if not dry and (why := reach.without_triton()):
        print(why)
        return NO_TRITON
    run = Run(Host() if dry else Cuda(), dry, time.monotonic() + left * 60, into)
    run.told = {"versions": f"torch {torch.__version__}, triton {triton.__version__}", "card": card(dry)}
    if into.exists():
        run.resume(json.loads(into.read_text()))
    run.write("start")
    told = f"{run.told['versions']}; {run.told['card']}{', dry: times mean nothing' if dry else ''}"
    print(f"{run.device.name}, {told}\n{table.head()}", flush=True)
    share = minutes * 60 / 100  # the first part compiles most of the kernels, a hundred of them
    try:
        with run.part("numbers", 25 * share):
            gpu_numbers.right(run)
        with run.part("the same each time", 15 * share):
            gpu_numbers.same(run)
        with run.part("kernels", 25 * share), run.attempt("kernels"):
            gpu_speed.kernels(run)
        with run.part("model", 35 * share), run.attempt("model"):
            gpu_model.model(run)
    except Sick as what:
        print(f"the card is of no use to this process any more: {what}", flush=True)
        return SICK
    return DONE


def card(dry: bool) -> str:
    """What else there is to know of the card, for whoever reads the figures later."""
    if dry:
        return "no card"
    import torch

    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    kind = f"compute capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    return f"CUDA {torch.version.cuda}, {kind}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def report(into: Path) -> bool:
    """Prints the table as a whole; whether nothing is wrong and, on a card, no target missed."""
    from benchmarks.parts import table

    told = json.loads(into.read_text())
    lines = [table.Line(**line) for line in told["lines"]]
    print("\n" + "\n".join([table.head(), *map(table.text, lines)]))
    for what in told["skipped"]:
        print(f"no time for: {what}")
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in told["seconds"].items())
    print(f"took {sum(told['seconds'].values()):.0f} s: {spent}")
    print(f"figures: {into}")
    missed = [line.what for line in lines if line.reached is False]
    if missed:
        print(f"{len(missed)} not reached: {'; '.join(missed)}")
    return not missed


if __name__ == "__main__":
    main()
