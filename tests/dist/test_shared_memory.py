"""Collectives through shared memory: what arrives, who is told of a rank that stops, what stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm import LocalCollectives, Part, TorchCollectives
from shoal.comm.backends import shared_memory
from shoal.comm.backends.shared_memory import SharedMemoryCollectives
from shoal.errors import CollectiveFailed, ConfigError, ShapeError
from support.collective_checks import check_collectives
from support.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.multiproc

TIMEOUT_S = 60.0
LATE_S = 10.0  # in its place, where a test waits until it is over
SHARED = Path("/dev/shm")


def left_in_shared() -> list[str]:
    """Names that stay; those of groups that are just being made, here or elsewhere, go soon."""
    found, ends = set(SHARED.glob("shoal-*")), time.monotonic() + 60
    while found and time.monotonic() < ends:
        time.sleep(0.05)
        found = {path for path in found if path.exists()}
    return [path.name for path in found]


@contextmanager
def shared(timeout_s: float = TIMEOUT_S) -> Iterator[SharedMemoryCollectives]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD
    assert group is not None
    bootstrap = TorchCollectives(group, torch.device("cpu"), TIMEOUT_S)
    collectives = SharedMemoryCollectives(bootstrap, timeout_s=timeout_s)
    dist.destroy_process_group()  # used for the beginning only
    yield collectives
    collectives.close()


def all_checks() -> list[str]:
    with shared() as collectives:
        left = left_in_shared()  # the name is gone while the memory is in use
        check_collectives(collectives)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective(world_size: int) -> None:
    assert run_ranks(world_size, all_checks) == [[]] * world_size


def values_of(seed: int, source: int, target: int, most: int, dtype: torch.dtype) -> torch.Tensor:
    """What `source` sends to `target`: every rank can work it out."""
    random = torch.Generator().manual_seed(seed * 64 + source * 8 + target)
    kinds = [0, 1, int(torch.randint(most, (), generator=random))]
    rows = kinds[int(torch.randint(3, (), generator=random))]
    return torch.randint(-100, 100, (rows, 3), generator=random).to(dtype)


def random_part(
    collectives: SharedMemoryCollectives, seed: int, most: int, dtype: torch.dtype
) -> tuple[Part, torch.Tensor]:
    ranks, me = range(collectives.world_size), collectives.rank
    out = [values_of(seed, me, other, most, dtype) for other in ranks]
    into = [values_of(seed, other, me, most, dtype) for other in ranks]
    part = Part(torch.cat(out), tuple(map(len, out)), tuple(map(len, into)))
    return part, torch.cat(into)


def uneven_sizes(rounds: int, most: int) -> None:
    dtypes = (torch.int64, torch.float32, torch.int8, torch.float64, torch.bfloat16)
    with shared() as collectives:
        for seed in range(rounds):
            pairs = [
                random_part(collectives, seed * 10 + i, most, dtypes[(seed + i) % len(dtypes)])
                for i in range(1 + seed % 3)
            ]
            got = collectives.all_to_all([part for part, _ in pairs], what="uneven").wait()
            for values, (_, wanted) in zip(got, pairs, strict=True):
                assert values.dtype == wanted.dtype
                assert torch.equal(values, wanted)


@pytest.mark.slow
def test_uneven_sizes() -> None:
    run_ranks(3, uneven_sizes, 60, 2000)
    run_ranks(2, uneven_sizes, 8, 300_000)  # larger than the rings


def large_values() -> None:
    with shared() as collectives:
        ranks, me = collectives.world_size, collectives.rank
        values = torch.arange(100_003, dtype=torch.float64) * (me + 1)
        wanted = torch.arange(100_003, dtype=torch.float64) * sum(range(1, ranks + 1))
        assert torch.equal(collectives.all_reduce(values, "sum", what="sum").wait()[0], wanted)
        thirds = torch.full((60_001,), 1 / 3) * (me + 1)  # the order of a sum shows in its bits
        (total,) = collectives.all_reduce(thirds, "sum", what="thirds").wait()
        for other in collectives.gather_objects(total, what="totals"):
            assert torch.equal(other, total)
        big = torch.full((700_000,), float(me))
        collectives.broadcast(big, 1, what="big")
        assert torch.equal(big, torch.ones(700_000))
        texts = collectives.gather_objects("x" * (me * 2_000_000), what="texts")
        assert [len(text) for text in texts] == [2_000_000 * rank for rank in range(ranks)]


@pytest.mark.slow
def test_large_values_are_combined_in_parts() -> None:
    run_ranks(3, large_values)


def many_under_way() -> None:
    """Calls begun before others are waited for, waited for in any order, or never."""
    with shared() as collectives:
        for turn in range(4):
            pairs = [
                random_part(collectives, 100 * turn + i, 90_000 if i % 3 == 0 else 50, torch.int64)
                for i in range(12)
            ]
            pendings = [
                collectives.all_to_all([part], what=f"call {i}")
                for i, (part, _) in enumerate(pairs)
            ]
            sizes_WX = torch.full((collectives.world_size, 2), collectives.rank)
            sizes = collectives.exchange_sizes(sizes_WX, what="sizes").wait()
            assert sizes.received_WX[:, 0].tolist() == list(range(collectives.world_size))
            order = torch.randperm(12, generator=torch.Generator().manual_seed(turn)).tolist()
            for i in order[:9]:
                assert torch.equal(pendings[i].wait()[0], pairs[i][1])
        collectives.barrier(what="all done")


def test_calls_overlap_in_order() -> None:
    run_ranks(3, many_under_way)


def moves_beside_the_caller() -> None:
    """A message larger than the rings arrives while nobody waits for it."""
    with shared() as collectives:
        if collectives.rank == 0:
            part = Part(torch.ones(1_000_000, dtype=torch.int64), (0, 1_000_000), (0, 0))
            pending = collectives.all_to_all([part], what="large")
            time.sleep(0.7)  # no wait: a thread of the collectives sends
            pending.wait()
            return
        part = Part(torch.ones(0, dtype=torch.int64), (0, 0), (1_000_000, 0))
        (got,) = collectives.all_to_all([part], what="large").wait()
        assert bool((got == 1).all())


def test_large_messages_move_beside_the_caller() -> None:
    run_ranks(2, moves_beside_the_caller)


def loop_until(stops: str) -> dict[str, Any]:
    """Exchanges in a loop; at step 3 rank 1 stops in the way named. What the others saw."""
    with shared(limit_of(stops)) as collectives:
        splits = (200_000,) * collectives.world_size
        data = torch.zeros(sum(splits))
        try:
            for step in range(1000):
                collectives.step = step
                if step == 3 and collectives.rank == 1:
                    stop(stops, collectives)
                collectives.all_to_all([Part(data, splits, splits)], what="rows").wait()
        except CollectiveFailed as error:
            with pytest.raises(CollectiveFailed) as later:
                collectives.barrier(what="after it")
            return {"error": str(error), "later": str(later.value)}
    return {}


def limit_of(stops: str) -> float:
    return LATE_S if stops == "late" else TIMEOUT_S


def stop(how: str, collectives: SharedMemoryCollectives) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        try:
            raise ValueError("a batch is wrong")
        finally:
            collectives.close()
    if how == "late":
        time.sleep(1.5 * LATE_S)
        os._exit(0)
    collectives.all_to_all([Part(torch.zeros(6), (2, 2, 2), (2, 2, 2))], what="other").wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "is gone"),
        ("raises", "left"),
        ("late", "did not come"),
        ("mistaken", "not in the same call"),
    ],
)
def test_a_rank_that_stops_ends_the_others(how: str, words: str) -> None:
    found = start_ranks(3, loop_until, how).outcomes()
    saw = {rank: found[rank][1] for rank in (0, 2)}
    for rank in (0, 2):
        assert found[rank][0], saw[rank]
        for part in ("step 3", f"rank {rank} of 3", f"within {limit_of(how)} s", "'rows'"):
            assert part in saw[rank]["error"]
        assert "rank 1" in saw[rank]["error"]
        assert saw[rank]["later"] == saw[rank]["error"], "the first error, at once"
    assert any(words in saw[rank]["error"] for rank in (0, 2))
    assert left_in_shared() == []


def dropped() -> str:
    """Rank 0 forgets its collectives in the middle of a message; rank 1 is told."""
    with shared() as collectives:
        bootstrap, rows = collectives, 2_000_000
        collectives = SharedMemoryCollectives(bootstrap, timeout_s=TIMEOUT_S)
        if collectives.rank == 0:
            part = Part(torch.ones(rows), (0, rows), (0, 0))
            pending = collectives.all_to_all([part], what="rows")
            del part, pending, collectives
            bootstrap.barrier(what="end")
            return "left"
        part = Part(torch.ones(0), (0, 0), (rows, 0))
        pending = collectives.all_to_all([part], what="rows")
        bootstrap.barrier(what="end")
        with pytest.raises(CollectiveFailed) as raised:
            pending.wait()
        return str(raised.value)


def test_collectives_that_are_dropped_are_closed() -> None:
    assert "left" in run_ranks(2, dropped)[1]


def in_a_child() -> str:
    """A forked child can neither use nor harm the collectives."""
    with shared() as collectives:
        part = Part(torch.zeros(2, 300_000), (1, 1), (1, 1))
        collectives.all_to_all([part], what="starts the thread").wait()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                collectives.barrier(what="in the child")
                told = b"went through"
            except CollectiveFailed as error:
                told = str(error).encode()
            collectives.close()
            os.write(write, told)
            os._exit(0)
        os.close(write)
        told = os.read(read, 10_000).decode()
        os.waitpid(child, 0)
        collectives.all_to_all([part], what="after the child").wait()
        collectives.barrier(what="end")
    return told


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_no_harm() -> None:
    for told in run_ranks(2, in_a_child):
        assert "another process" in told


def opened_and_closed() -> tuple[int, int]:
    """Open files and mappings before and after many groups."""

    def held() -> int:
        maps = Path("/proc/self/maps").read_text().count("shoal-")
        return len(os.listdir("/proc/self/fd")) + maps + len(os.listdir("/proc/self/task"))

    with shared() as bootstrap:
        part = Part(torch.zeros(2, 300_000), (1, 1), (1, 1))
        bootstrap.all_to_all([part], what="warm").wait()
        before = held()
        for _ in range(5):
            collectives = SharedMemoryCollectives(bootstrap, timeout_s=TIMEOUT_S)
            collectives.all_to_all([part], what="rows").wait()
            collectives.barrier(what="end")
            collectives.close()
            collectives.close()
            with pytest.raises(CollectiveFailed, match="closed"):
                collectives.barrier(what="too late")
        ends = time.monotonic() + 60  # a thread that was joined may be in /proc for a while
        while (after := held()) > before and time.monotonic() < ends:
            time.sleep(0.05)
        return before, after


def test_close_gives_everything_back() -> None:
    for before, after in run_ranks(2, opened_and_closed):
        assert after <= before


def other_host() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    assert dist.group.WORLD is not None
    bootstrap = TorchCollectives(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S)
    if bootstrap.rank == 1:
        shared_memory.socket.gethostname = lambda: "elsewhere"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="one host") as raised:
        SharedMemoryCollectives(bootstrap, timeout_s=TIMEOUT_S)
    bootstrap.barrier(what="nobody goes early")
    dist.destroy_process_group()
    return str(raised.value)


def test_ranks_on_other_hosts_are_refused_everywhere() -> None:
    for told in run_ranks(2, other_host):
        assert "elsewhere" in told
    assert left_in_shared() == []


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="cpu"):
        SharedMemoryCollectives(LocalCollectives(), timeout_s=1, device="cuda")
    collectives = SharedMemoryCollectives(LocalCollectives(), timeout_s=1)
    with pytest.raises(ShapeError, match="from itself"):
        collectives.all_to_all([Part(torch.zeros(2), (2,), (1,))], what="mistake")
    collectives.close()


def test_little_room_gives_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    create = shared_memory._core.SharedRegion.create

    def scarce(name: str, token: int, world_size: int, slot_bytes: int) -> Any:
        tried.append(slot_bytes)
        if slot_bytes > 64 << 10:
            raise OSError(28, "no space left")
        return create(name, token, world_size, slot_bytes)

    class Core:
        SharedGroup = shared_memory._core.SharedGroup

        class SharedRegion:
            unlink = staticmethod(shared_memory._core.SharedRegion.unlink)

    Core.SharedRegion.create = staticmethod(scarce)  # type: ignore[attr-defined]
    monkeypatch.setattr(shared_memory, "_core", Core)
    SharedMemoryCollectives(LocalCollectives(), timeout_s=1).close()
    assert tried[-1] == 64 << 10
    assert left_in_shared() == []


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_timeout_beyond_all_clocks_does_not_pass_at_once(timeout_s: float) -> None:
    run_ranks(2, late_barrier, timeout_s)


def late_barrier(timeout_s: float) -> None:
    with shared(timeout_s) as collectives:
        if collectives.rank == 1:
            time.sleep(0.3)
        collectives.barrier(what="late")
