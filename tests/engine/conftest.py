"""What tests of an engine without a socket share: the demo model, loaded once for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import fenced, native
from zjournal.engine.runner import Runner
from zjournal.kernels import cpu


@pytest.fixture(scope="module")
def loaded() -> Iterator[Runner]:
    """The demo model over the C kernels."""
    found = native.library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "open_library", lambda: (found, ""))
        one = fenced.runner(threads=1)  # a second one takes a third more time of processors, which others need
    yield one
    one.close()
