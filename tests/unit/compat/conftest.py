"""Parameter servers for Monolith's tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.monolith_cluster import Cluster, Clusters


@pytest.fixture
def clusters() -> Iterator[Clusters]:
    """Makes clusters of any number of servers; all end with the test."""
    with ExitStack() as stack:
        yield lambda num_ps: Cluster(num_ps, stack)


@pytest.fixture(params=[0, 1, 2, 3])
def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> Cluster:
    """0 servers are a shard of this process."""
    return clusters(request.param)
