"""`make gpu` where there is no GPU: the whole script at toy sizes, over interpreted kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.parts import table
from benchmarks.parts.gpu import Run, Sick
from benchmarks.parts.gpu_numbers import _error
from zjournal.engine.device import Host

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 420
PARTS = {"numbers", "the same each time", "kernels", "model"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


def test_the_dry_run_finds_the_numbers_right_and_leaves_nothing_out(tmp_path: Path) -> None:
    done = run("--dry", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert (told["dry"], told["skipped"], set(told["seconds"])) == (True, [], PARTS)
    lines = {line["what"]: line for line in told["lines"]}
    proved = [what for what, line in lines.items() if line["reached"] is not None]
    assert all(lines[what]["reached"] for what in proved)
    assert sum(what.startswith("right: ") for what in proved) == 4
    assert sum(what.startswith("same: ") for what in proved) == 5
    assert len(proved) == 9, "times mean nothing here, so nothing is asked of them"


def test_what_fails_is_told_and_does_not_end_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    one = Run(Host(), True, float("inf"))
    with one.attempt("a kernel"):
        raise ValueError("needs\nmore")
    (line,) = one.lines
    assert (line.what, line.ours, line.peer, line.reached) == ("a kernel", "failed", "ValueError: needs more", False)
    assert "Traceback" in capsys.readouterr().err


def test_a_card_that_answers_nothing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(Host(), True, float("inf"))
    monkeypatch.setattr(Run, "_is_well", lambda self: False)
    with pytest.raises(Sick, match="a kernel"), one.attempt("all"), one.attempt("a kernel"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert [line.what for line in one.lines] == ["a kernel"]


def test_the_next_process_goes_on_behind_what_was_begun(tmp_path: Path) -> None:
    into = tmp_path / "gpu.json"
    first = Run(Host(), True, float("inf"), into)
    with pytest.raises(KeyboardInterrupt), first.part("kernels", 60.0):
        assert first.lets("one")
        first.say(table.Line("one", "5 GB/s"), rate=5.0)
        assert first.lets("two")
        raise KeyboardInterrupt
    gpu.note(into, None)
    second = Run(Host(), True, float("inf"), into)
    second.resume(json.loads(into.read_text()))
    with second.part("kernels", 60.0):
        assert [second.lets(what) for what in ("one", "two", "three")] == [False, False, True]
    told = json.loads(into.read_text())
    assert [(line["what"], line["ours"]) for line in told["lines"]] == [("one", "5 GB/s"), ("kernels", "failed")]
    assert (told["figures"], told["begun"], told["skipped"]) == ({"rate": 5.0}, ["one", "two", "three"], [])
    assert gpu.report(into) is False


def test_a_process_that_is_not_heard_of_is_killed_and_told_from_one_that_ends(tmp_path: Path) -> None:
    into = tmp_path / "gpu.json"
    silent = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert gpu.follow(silent, into, 0.1) is None
    assert silent.returncode is not None and silent.returncode < 0
    assert gpu.follow(subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]), into, None) == 7


def test_one_wrong_byte_is_no_rounding() -> None:
    right = torch.full((1000,), 255, dtype=torch.uint8)
    wrong = right.clone()
    wrong[7] = 254
    assert _error(right, right) == 0
    assert _error(wrong, right) == float("inf")
    assert _error(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")
    assert 0.9 < _error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2 + 2.0**-7])) < 1.1


def test_what_finds_no_time_is_named(tmp_path: Path) -> None:
    done = run("--dry", "--minutes", "0", "--json", str(tmp_path / "gpu.json"))
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"model", "attention", "draw"} <= set(told["skipped"])
    assert all(f"no time for: {what}" in done.stdout for what in told["skipped"])


def test_without_a_card_it_measures_nothing_and_says_so() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (
        0,
        "no CUDA device: nothing is measured; --dry runs everything at toy sizes\n",
    )


def test_it_needs_torch_and_triton_and_nothing_else_of_the_install() -> None:
    script = "import sys; from benchmarks.parts import gpu_model, gpu_numbers, gpu_speed; print(*sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert {"torch", "triton", "zjournal"} <= loaded
    assert not loaded & {"msgspec", "gguf", "xxhash", "zstandard", "litestar", "tokenizers"}
