"""Checkpoints of GPU shards over ranks: the bytes that CPU shards write, loaded by either.

The ranks share one GPU and speak over gloo; without a GPU kernels are interpreted, and few
placements and rows are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.resharding import STEPS, Groups, Part, check_same_files, load_all, on_ranks, save_all
from support.saved_jobs import FEW, KINDS, MANY, SPECS, Home, Job, Sizes

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    pytest.importorskip("triton")

pytestmark = [pytest.mark.multiproc] + ([pytest.mark.gpu] if ON_GPU else [])

SAVERS = (1, 2, 4)
LOADERS = (1, 2, 3, 4)
HOMES: tuple[Home, ...] = ("cuda", "tiered")
LONG_S = 540
Stores = dict[Home, dict[int, list[Path]]]


@pytest.mark.parametrize("home", HOMES)
def test_rows_are_stamped_as_on_the_cpu(home: Home) -> None:
    """Versions, last sights and counts too; they are in the files."""
    sizes: Sizes = MANY if ON_GPU else FEW
    there, here = Job(home=home, sizes=sizes), Job(sizes=sizes)
    for job in (there, here):
        for _ in range(STEPS):
            job.step()
        job.shard.cut()
        job.step()
        job.evict()
    found, want = there.outcome(), here.outcome()
    assert found.sights == want.sights
    assert set(want.rows["users"].versions.tolist()) == {1, 2}
    for name, rows in want.rows.items():
        assert rows.ids.numel()
        for field in fields(rows)[1:]:
            got = getattr(found.rows[name], field.name)
            assert torch.equal(got, getattr(rows, field.name)), (name, field.name)


@pytest.mark.parametrize(
    ("home", "kind"), [("cuda", "row_wise"), ("cuda", "column_wise"), ("tiered", "row_wise")]
)
def test_two_ranks_write_and_load_what_a_cpu_does(tmp_path: Path, home: Home, kind: str) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    saving = {
        1: [Part(str(cpu), "row_wise", "cpu", FEW)],
        2: [Part(str(gpu), kind, home, FEW)],
    }
    loading = {
        1: [Part(str(gpu), "row_wise", "cpu", FEW)],
        2: [Part(str(cpu), kind, home, FEW)],
    }
    run_ranks(2, on_ranks, save_and_load, saving, loading, timeout_s=120)
    check_same_files(gpu, cpu, least=len(SPECS))


@pytest.mark.gpu
@pytest.mark.timeout(LONG_S + 60)
class TestEveryPlacement:
    """All that ranks may save by all that others may load."""

    @pytest.fixture(scope="class")
    def stores(self, tmp_path_factory: pytest.TempPathFactory) -> Stores:
        root = tmp_path_factory.mktemp("stores")
        homes: tuple[Home, ...] = ("cpu", *HOMES)
        cases: dict[int, list[Part]] = {
            size: [
                Part(str(root / f"{home}-{size}-{kind}"), kind, home)
                for home, kind in itertools.product(homes, KINDS)
            ]
            for size in SAVERS
        }
        run_ranks(4, on_ranks, save_all, cases, timeout_s=LONG_S)
        return {
            home: {
                size: [Path(part.root) for part in parts if part.home == home]
                for size, parts in cases.items()
            }
            for home in homes
        }

    def test_files_do_not_show_the_device(self, stores: Stores) -> None:
        first, *others = (
            root for by_size in stores.values() for roots in by_size.values() for root in roots
        )
        assert len(others) == 3 * len(SAVERS) * len(KINDS) - 1
        for root in others:
            check_same_files(root, first)

    @pytest.mark.parametrize("home", ["cpu", "cuda", "tiered"])
    @pytest.mark.parametrize("world_size", LOADERS)
    def test_all_load_all(self, stores: Stores, world_size: int, home: Home) -> None:
        """What either device saved, less what `test_reshard` loads."""
        every = [
            Part(str(root), kind, home)
            for saver, by_size in stores.items()
            if saver != "tiered" and (home, saver) != ("cpu", "cpu")
            for root, kind in itertools.product(itertools.chain(*by_size.values()), KINDS)
        ]
        run_ranks(4, on_ranks, load_all, {world_size: every}, timeout_s=LONG_S)


def save_and_load(
    groups: Groups, saving: Mapping[int, Sequence[Part]], loading: Mapping[int, Sequence[Part]]
) -> None:
    save_all(groups, saving)
    dist.barrier()
    load_all(groups, loading)
