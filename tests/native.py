"""The C kernels for tests: the installed library, or one built for the occasion where there is a compiler."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zjournal.kernels import cpu

ROOT = Path(__file__).resolve().parent.parent
ISAS = ("avx512", "avx2", "portable")


@functools.cache
def library() -> ctypes.CDLL:
    """Skips the test where there is no library and no compiler."""
    found, why = cpu.open_library()
    if found is None:
        folder = Path(tempfile.mkdtemp(prefix="zjcpu-"))
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            folder,
            "--build-temp",
            folder / "temp",
        ]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        found, why = cpu.open_library(folder / "zjournal" / "kernels" / "cpu")
        why += built.stdout + built.stderr
        shutil.rmtree(folder)  # what is loaded stays
        if found is None and shutil.which("cc"):
            pytest.fail(f"there is a compiler, but the C kernels do not build: {why}")
    if found is None:
        pytest.skip(f"no C kernels: {why}")
    return found


def kernels(isa: str, threads: int = 2) -> cpu.Kernels:
    """The kernels of one instruction set; skips the test where this CPU lacks it."""
    try:
        return cpu.Kernels(library(), threads, isa)
    except ValueError as error:
        pytest.skip(str(error))
