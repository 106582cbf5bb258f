"""The garbage collector around a start: paused for imports, on again whatever happens, and settled once."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from zjournal import collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What these tests froze is collected with the rest again."""
    yield
    gc.unfreeze()
    gc.enable()


def test_it_is_off_inside_and_on_again_behind_a_failure() -> None:
    with pytest.raises(ImportError), collector.paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_was_made_inside_is_not_looked_through_again() -> None:
    with collector.paused():
        kept = [[] for _ in range(1000)]
    assert gc.get_freeze_count() > len(kept)
    assert not any(found is kept[0] for found in gc.get_objects())


def test_settling_frees_what_imports_left_and_looks_through_nothing_that_stays() -> None:
    class Node:
        other: Node

    with collector.paused():
        node = Node()
        node.other = node
        gone = weakref.ref(node)
        del node
    gc.collect()
    assert gone() is not None, "what is frozen is nobody's garbage yet"
    collector.settle()
    assert gone() is None
    assert gc.isenabled() and gc.get_freeze_count() > 1000


def test_a_server_imports_neither_numpy_nor_what_its_framework_would_add() -> None:
    """Each is some hundredths of a second of every start. What a command line needs of them is its own."""
    script = (
        "import sys, zjournal.server, zjournal.api.recorded, zjournal.api.replays, zjournal.api.intake\n"
        "from zjournal.api import app\n"
        "print([type(plugin).__name__ for plugin in app._App([]).plugins if 'Pydantic' in type(plugin).__name__])\n"
        "print(sorted({'numpy', 'pydantic', 'attr', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stdout + done.stderr
