"""A lookup in one process is short: one way down and one way up."""

from __future__ import annotations

from support.trip import modules_on_the_trip

MOST = 9


def test_ids_pass_few_modules() -> None:
    passed = modules_on_the_trip()
    assert passed[0] == "shoal.embedding.collection"
    assert "shoal.table.cpu.shard" in passed
    assert len(passed) <= MOST, passed
