"""What tests of Triton kernels share: storages that are not copied onto themselves, and memory that passes 2^31."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.quicker import (  # noqa: F401 (fixtures of all tests here)
    interpreter_leaves_memory_where_it_is,
    interpreter_prepares_the_language_once,
)


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[[int], torch.Tensor]:
    """Gives uint8 tensors of any size that take memory and disk only where they are written; zeros elsewhere."""
    made = 0

    def make(size: int) -> torch.Tensor:
        nonlocal made
        made += 1
        return torch.from_file(str(tmp_path / f"sparse{made}"), shared=True, size=size, dtype=torch.uint8)

    return make
