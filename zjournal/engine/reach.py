"""Why triton does not reach a card. Imports triton when it is asked, and nothing else.

Before its first launch triton compiles a module in C, against Python's headers and the driver's library, and keeps it
in its folder. Any of them may be missing where torch alone works.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

SAID_MAX = 200  # of what a driver or a compiler says


def without_triton() -> str:
    """What is missing, "" if triton reaches the card."""
    error = failure(_start)
    if error is None:
        return ""
    if "C compiler" in str(error):
        return "there is no C compiler (gcc or clang), which triton needs"
    headers = Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")
    hint = "" if headers.exists() else f" (there is no {headers}: the package is often called python3-dev)"
    return f"triton does not reach the card{first_line(error)}{hint}"


def failure(work: Callable[[], object]) -> Exception | None:
    """What it raises. Drivers and compilers fail in every way there is, assertions of theirs among them."""
    try:
        work()
    except Exception as error:
        return error
    return None


def first_line(error: Exception | None) -> str:
    """Of what it says, behind a colon; "" if it says nothing."""
    said = str(error).strip().partition("\n")[0].removesuffix(".") if error is not None else ""
    return f": {said[:SAID_MAX]}" if said else ""


def _start() -> None:
    from triton.runtime.driver import driver

    driver.active.get_current_target()
