"""The distribution operations: each of Monolith's pairs (`-k pair`), on every implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import poison
from support.gathering import gathered

globals().update(gathered("parity.distribution_ops"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that an operator allocates and does not write holds what no result holds."""
    with poison.poisoned():
        yield
