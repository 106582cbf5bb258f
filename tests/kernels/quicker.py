"""Triton's interpreter without what it does for nothing: for every test of a file that imports these two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def interpreter_leaves_memory_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter brings tensors from the device and back. On the CPU it copies each storage onto itself."""
    copy = torch.UntypedStorage.copy_

    def copy_to_another(self: torch.UntypedStorage, source: torch.UntypedStorage, *rest: Any) -> torch.UntypedStorage:
        return self if self.data_ptr() == source.data_ptr() else copy(self, source, *rest)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", copy_to_another)


@pytest.fixture(autouse=True)
def interpreter_prepares_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so at each call of a function inside a kernel, for nothing: a third of the time of a test.

    The kernel's own launch has done it for `tl`, and what the first call in a process does for `tl.core` stays.
    """
    patch, done = interpreter._patch_lang, set()

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in done:
            if not any(value is tl for value in self.fn.__globals__.values()):
                patch(self.fn)
            done.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
