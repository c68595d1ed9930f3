"""The operations on random ragged inputs with empties and duplicates: equal on all backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import poison
from support.gathering import gathered

globals().update(gathered("property.ops"))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that an operator allocates and does not write holds what no result holds."""
    with poison.poisoned():
        yield
