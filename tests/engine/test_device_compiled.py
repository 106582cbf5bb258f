"""No request waits for a compiler: what a start compiles is all that later steps launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 420


def test_a_start_compiles_all_that_later_steps_launch() -> None:
    """Real shapes, random steps, triton's own keys; in a process without the interpreter, which has none."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.compilations"]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert len(told) == 6
    assert all(before > 20 for before, _ in told.values()), told
    assert not {name: kernels for name, (_, kernels) in told.items() if kernels}
