"""What tests of a server that serves a whole module share: messages that keep them apart."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def ask(request: pytest.FixtureRequest) -> Any:
    """A user's message that no other test sends; a scripted model answers the words that it ends with."""
    return lambda words: f"For {request.node.name}: {words}"
