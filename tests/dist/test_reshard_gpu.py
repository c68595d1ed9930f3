"""Checkpoints of GPU shards over ranks: the bytes that CPU shards write, loaded by either.

The ranks share one GPU and speak over gloo; without a GPU kernels are interpreted, and few
placements and rows are tried.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import Ranks, run_ranks, start_ranks
from support.resharding import (
    NAMES,
    STEPS,
    TIMEOUT_S,
    Groups,
    Part,
    check_same_files,
    load_all,
    on_ranks,
    save_all,
)
from support.saved_jobs import FEW, KINDS, MANY, SPECS, Home, Job, Sizes, row_bytes
from support.shares import SHARE

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    pytest.importorskip("triton")

pytestmark = [*([pytest.mark.multiproc] + ([pytest.mark.gpu] if ON_GPU else [])), pytest.mark.slow]

SAVERS = (1, 2, 4)[::-SHARE]
LOADERS = (1, 2, 3, 4)[::-SHARE]
HOMES: tuple[Home, ...] = ("cuda", "tiered")
LONG_S = TIMEOUT_S + 60  # a rank that is late is told by the others
Stores = dict[Home, dict[int, list[Path]]]
Loading = dict[int, tuple[Ranks, list[Part]]]


@pytest.mark.parametrize("home", HOMES)
def test_rows_are_stamped_as_on_the_cpu(home: Home) -> None:
    """Versions, last occurrences and counts too; they are in the files."""
    sizes: Sizes = MANY if ON_GPU else FEW
    there, here = Job(home=home, sizes=sizes), Job(sizes=sizes)
    for job in (there, here):
        for _ in range(STEPS):
            job.step()
        job.shard.close_version()
        job.step()
        job.evict()
    found, want = there.outcome(), here.outcome()
    assert found.admission == want.admission
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
    run_ranks(2, on_ranks, save_and_load, saving, loading, timeout_s=LONG_S)
    check_same_files(gpu, cpu, least=len(SPECS))


@pytest.mark.gpu
@pytest.mark.timeout(2 * LONG_S)
class TestEveryPlacement:
    """All that ranks may save by all that others may load.

    Jobs of several sizes run side by side: most of their time goes into kernels that are compiled
    and into files.
    """

    def test_files_do_not_show_the_device(
        self, stores: Stores, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, *others = (
            root for by_size in stores.values() for roots in by_size.values() for root in roots
        )
        assert len(others) == 3 * len(SAVERS) * len(KINDS) - 1
        for root in others:
            check_same_files(root, first)
        files = {name: len(row_bytes(first / name)) for name in NAMES}
        with capsys.disabled():
            print(
                f"\nequal bytes: {len(others) + 1} stores of {', '.join(stores)} tables,"
                f" {SAVERS} ranks, {len(KINDS)} sharding types; files: {files}"
            )

    @pytest.mark.parametrize("loading", ["cpu", *HOMES], indirect=True, scope="module")
    @pytest.mark.parametrize("world_size", LOADERS)
    def test_all_load_all(
        self, loading: Loading, world_size: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What either device saved, less what `test_reshard` loads."""
        job, parts = loading[world_size]
        job.finish()
        pairs = Counter(
            f"{Path(part.root).name.partition('-')[0]} -> {part.home}" for part in parts
        )
        with capsys.disabled():
            print(f"\nequal rows and state on {world_size} of {LOADERS} ranks: {dict(pairs)}")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("stores")
    homes: tuple[Home, ...] = ("cpu", *HOMES)
    cases: dict[int, list[Part]] = {
        size: [
            Part(str(root / f"{home}-{size}-{kind}"), kind, home)
            for home, kind in itertools.product(homes, KINDS)
        ]
        for size in SAVERS
    }
    for job in side_by_side(save_all, cases).values():
        job.finish()
    return {
        home: {
            size: [Path(part.root) for part in parts if part.home == home]
            for size, parts in cases.items()
        }
        for home in homes
    }


@pytest.fixture(scope="module")
def loading(stores: Stores, request: pytest.FixtureRequest) -> Loading:
    """Ranks that load into one kind of tables, by how many they are, and what they load."""
    parts = {size: parts_of(stores, request.param, size) for size in LOADERS}
    jobs = side_by_side(load_all, parts)
    return {size: (job, parts[size]) for size, job in jobs.items()}


def parts_of(stores: Stores, home: Home, world_size: int) -> list[Part]:
    """What so many ranks load.

    Across devices each sharding type loads every one. Files on one side are those on the other
    to the byte, so that a device loads what it saved, and a cache what both saved, with one type
    a store, another on each number of ranks.
    """
    found = []
    for saver, by_size in stores.items():
        if saver == "tiered" or saver == home == "cpu":
            continue
        for number, root in enumerate(itertools.chain.from_iterable(by_size.values())):
            turned = (KINDS[(number + number // len(KINDS) + world_size) % len(KINDS)],)
            kinds = KINDS if {saver, home} == {"cpu", "cuda"} else turned
            found += [Part(str(root), kind, home) for kind in kinds]
    return found


def side_by_side(act: Callable[..., None], cases: Mapping[int, Sequence[Part]]) -> dict[int, Ranks]:
    """Running jobs of so many ranks each; one rank has an idle one beside it."""
    return {
        size: start_ranks(max(size, 2), on_ranks, act, {size: parts}, timeout_s=LONG_S)
        for size, parts in cases.items()
    }


def save_and_load(
    groups: Groups, saving: Mapping[int, Sequence[Part]], loading: Mapping[int, Sequence[Part]]
) -> None:
    save_all(groups, saving)
    dist.barrier()
    load_all(groups, loading)
