"""Checkpoints on file systems behind fsspec: memory, objects in buckets, and one as hdfs:// is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.remote_life import store_life, training_life
from support.remote_stores import REMOTE, remote_url


@pytest.mark.parametrize("kind", REMOTE)
def test_a_store_from_first_to_last(kind: str, tmp_path: Path):
    store_life(remote_url(kind, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objects", "arrow"])
def test_a_run_goes_on_from_a_store(kind: str, tmp_path: Path):
    training_life(remote_url(kind, tmp_path), tmp_path / "runs")
