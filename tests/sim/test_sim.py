"""The simulation in CI: twenty seeds, the same run from the same seed, and the proof that it notices a bad disk."""

from __future__ import annotations

import functools
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim import plan
from tests.sim.disk import Change, Disk, Op, Rule

ROOT = Path(__file__).parents[2]
SEEDS = range(20)

compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="faults of the disk need a C compiler"
)


def _sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@functools.cache
def _seed(seed: int) -> subprocess.CompletedProcess[str]:
    return _sim("--seed", str(seed))


def _met() -> Counter[str]:
    """What all seeds together met."""
    met: Counter[str] = Counter()
    for seed in SEEDS:
        told = next(line for line in _seed(seed).stdout.splitlines() if line.startswith("met: "))
        for part in told.removeprefix("met: ").split(", "):
            name, _, count = part.rpartition(" ")
            met[name] += int(count)
    return met


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_is_clean(seed: int) -> None:
    done = _seed(seed)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.removeprefix(done.stdout[: done.stdout.index("seed ")])
    assert told.startswith(str(plan.draw(seed)))


@compiler
def test_what_the_runs_are_for_came_about() -> None:
    """Segments above all: packed by themselves and on request, erased in, saved from logs that were cut."""
    met = _met()
    assert met["sealed facts"] > met["facts"] // 3
    assert met["segments"] > 2 * len(SEEDS)
    for name in ("erased in segments", "seal", "compact", "prune", "export", "cuts", "cuts refused", "salvaged"):
        assert met[name] > 2, (name, met)


@compiler
def test_what_can_happen_to_snapshots_came_about() -> None:
    """Each fact, each way for a chunk to go, damage, refusals; and that something was restored behind all of it."""
    met = _met()
    for name in (
        "CacheBackedUp",
        "CachePurged",
        "CacheQuarantined",
        "CacheReconciled",
        "CacheRestored",
        "CacheStopped",
        "collect",
        "damaged",
        "leftovers",
        "orphans",
        "pin",
        "refused",
        "restored after a start",
    ):
        assert met[name] > 1, (name, met)


@compiler
def test_two_runs_of_a_seed_are_the_same_run() -> None:
    first, second, other = _sim("--seed", "3"), _sim("--seed", "3"), _sim("--seed", "4")
    assert "digest" in first.stdout
    assert first.stdout == second.stdout
    assert first.stdout != other.stdout


@compiler
def test_a_disk_that_only_promises_to_sync_is_noticed() -> None:
    """The check has teeth: with syncs that do nothing, acknowledged facts go, and the run says which seed it was."""
    done = _sim("--seed", "0", "--runs", "10", "--lying-disk")
    assert done.returncode == 1, done.stdout
    assert "FAILED: " in done.stdout
    assert "acknowledged" in done.stdout or "the whole journal is gone" in done.stdout
    assert "repeat it with: python -m tests.sim --seed" in done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_and_torn_tails_run_without_a_compiler(seed: int) -> None:
    done = _sim("--seed", str(seed), "--no-shim", "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no disk faults in this run" in done.stdout


def test_plans_differ_and_hold_every_fault() -> None:
    plans = [plan.draw(seed) for seed in range(200)]
    assert plan.draw(7) == plan.draw(7)
    lives = [life for drawn in plans for life in drawn.lives]
    assert {rule.action for life in lives for rule in life.rules} == {
        "eio",
        "enospc",
        "short",
        "sync_eio",
        "kill_before",
        "kill_mid",
        "kill_after",
    }
    assert {life.end for life in lives} == set(plan.ENDS)
    assert {life.power for life in lives} == {True, False}
    assert all(rule == Rule(*rule) and rule.first >= 0 for life in lives for rule in life.rules)


def _disk(tmp_path: Path, *changes: Change) -> tuple[Disk, Path]:
    root = tmp_path / "root"
    (root / "home").mkdir(parents=True)
    disk = Disk(random.Random(1), "home")
    for change in (Change(Op.CREATE, "home/f", 0, b""), *changes):
        disk._take(change)
    return disk, root / "home" / "f"


def test_what_was_synced_survives_and_a_name_needs_its_folder_synced(tmp_path: Path) -> None:
    write, sync, names = (
        Change(Op.WRITE, "home/f", 0, b"kept"),
        Change(Op.SYNC, "home/f", 0, b""),
        Change(Op.SYNC, "home", 0, b""),
    )
    disk, file = _disk(tmp_path, write, sync, names, Change(Op.WRITE, "home/f", 4, b"x" * 4096))
    disk.lose_power(tmp_path / "root")
    assert file.read_bytes().startswith(b"kept")
    left = set()
    for number in range(12):
        disk, file = _disk(tmp_path / str(number), write, sync)
        disk._chance = random.Random(number)
        disk.lose_power(tmp_path / str(number) / "root")
        left.add(file.exists())
    assert left == {True, False}


def test_no_later_sync_brings_back_what_a_failed_one_lost(tmp_path: Path) -> None:
    left = set()
    for number in range(12):
        disk, file = _disk(tmp_path / str(number), Change(Op.SYNC, "home", 0, b""))
        disk._chance = random.Random(number)
        disk._take(Change(Op.WRITE, "home/f", 0, b"lost"))
        disk._take(Change(Op.SYNC_FAILED, "home/f", 0, b""))
        disk._take(Change(Op.SYNC, "home/f", 0, b""))
        disk.lose_power(tmp_path / str(number) / "root")
        left.add(file.read_bytes())
    assert left == {b"", b"lost"}
