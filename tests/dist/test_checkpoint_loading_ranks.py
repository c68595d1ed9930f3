"""Loading on several ranks: what one of them finds wrong, all raise, and none keeps a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.storage import Storage
from shoal.comm import launch
from shoal.errors import CheckpointError
from shoal.placement import hash_ids
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.hosting import HostedTables, hosted_specs, plan_placement
from shoal.table.spec import Segment, TableSpec
from support.ranks import run_ranks
from support.saved_by_hand import HandTable, write_by_hand

pytestmark = pytest.mark.multiproc

SPEC = TableSpec(name="tags", segments=(Segment(dim=4, optimizer=Adagrad()),))
HALF = 1 << 63


def loaded(folder: str, newest_of_rank: dict[int, str]) -> tuple[str, int, dict[str, int], int]:
    """What went wrong, rows here, rows everywhere, version after it."""
    mesh = launch.init(device="cpu", timeout_s=120)
    try:
        placement = plan_placement((SPEC,), mesh.world_size)
        shard = CpuShard(hosted_specs((SPEC,), placement, mesh.rank))
        contents = Contents(
            tables={"b": HostedTables(specs=(SPEC,), shard=shard, placement=placement)}
        )
        where = newest_of_rank.get(mesh.rank, folder)
        try:
            found = load(where, contents, collectives=mesh.collectives("checkpoint"))
        except CheckpointError as error:
            return str(error), shard.size(0), {}, 0
        return found.manifest.id, shard.size(0), dict(found.rows), shard.close_version()
    finally:
        launch.shutdown()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, int]:
    """A store with rows of each half of the hashes in a file of its own; rows of the first."""
    table = Table(SPEC)
    ids = torch.arange(200)
    table.apply(ids, torch.randn(200, 4))
    rows = HandTable(SPEC, table.export(), cuts=(HALF,))
    write_by_hand(Storage(tmp_path), {"b": [rows]}, version=3)
    return tmp_path, int((hash_ids("tags", ids) >= 0).sum())


@pytest.mark.slow
def test_each_rank_loads_its_half(saved: tuple[Path, int]) -> None:
    root, low = saved
    first, second = run_ranks(2, loaded, str(root), {})
    assert (first[1], second[1]) == (low, 200 - low)
    assert first[2] == second[2] == {"b/tags": 200}
    assert first[3] == second[3] == 4


@pytest.mark.slow
def test_a_file_that_one_rank_reads_stops_all(saved: tuple[Path, int]) -> None:
    root, _ = saved
    file = root / "step-000000000001-full" / "rows" / "00001.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (here, rows, _, _), (there, others, _, _) = run_ranks(2, loaded, str(root), {})
    assert rows == others == 0
    assert "on rank 1" in here and "rows/00001.arrow" in here
    assert "rows/00001.arrow" in there and "checksum" in there


@pytest.mark.slow
def test_the_first_rank_says_which_is_newest(saved: tuple[Path, int]) -> None:
    root, _ = saved
    empty = str(root / "none")
    (text, rows, _, _), (other, _, _, _) = run_ranks(2, loaded, str(root), {1: empty})
    assert rows == 0 and "on rank 1" in text and "none" in text and "none" in other
    folder = str(root / "step-000000000001-full")
    found = run_ranks(2, loaded, str(root), {1: folder})
    assert [one[1] > 0 for one in found] == [True, True]
