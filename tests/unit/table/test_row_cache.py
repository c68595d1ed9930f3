"""The device cache of rows in host memory: what is read and what stays, whatever its size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shoal.errors import OutOfDeviceMemory
from shoal.kernels.tables import CHUNK_ROWS
from shoal.table.cuda.cache import RowCache
from shoal.table.cuda.memory import PIECE_BYTES, PageLocked, grouped
from support.cached_rows import ODD, PLAIN, WIDE, Trace

DEVICES = [
    pytest.param("cpu", id="interpreted")
    if not torch.cuda.is_available()
    else pytest.param("cuda", marks=pytest.mark.gpu, id="compiled")
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cache_rows", "policy"),
    [(0, "lru"), (5, "lru"), (5, "lfu"), (24, "lru"), (24, "lfu"), (64, "lru")],
)
def test_a_random_trace_leaves_the_rows_of_a_run_without_a_cache(
    device: str, policy: str, cache_rows: int
) -> None:
    trace = Trace([PLAIN, ODD], device, 32, cache_rows, policy)
    random = np.random.default_rng(cache_rows)
    everything = trace.handles[0] + trace.handles[1]
    for _ in range(4):
        batch = [everything[at] for at in random.zipf(1.3, 40) % len(everything)] + [-1]
        trace.admit(batch)
        trace.read(batch)
        trace.step(batch)
        trace.cache.settle(None)
        trace.cached()
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_wide_rows_move_whole(device: str) -> None:
    trace = Trace([WIDE], device, 12, 4)
    for start in (0, 4, 8, 0):
        batch = trace.handles[0][start : start + 4]
        trace.admit(batch)
        trace.step(batch)
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_the_rows_used_longest_ago_go_first(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 6)
    rows = trace.handles[0]
    trace.admit(rows[:2])
    trace.admit(rows[2:4])
    trace.admit(rows[4:6])
    trace.admit(rows[:2])
    trace.admit(rows[6:9])  # takes 2 and 3, and one of 4 and 5
    held = trace.cached()
    assert held >= set(rows[:2] + rows[6:9])
    assert len(held & set(rows[4:6])) == 1
    assert trace.cache.stats().hits == 2
    assert trace.cache.stats().misses == 9


@pytest.mark.parametrize("device", DEVICES)
def test_the_rows_used_least_often_go_first(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 4, "lfu")
    rows = trace.handles[0]
    for _ in range(4):
        trace.admit(rows[:2])
    trace.admit(rows[2:4])  # lately, but once
    trace.admit(rows[4:6])
    assert trace.cached() == set(rows[:2] + rows[4:6])


@pytest.mark.parametrize("device", DEVICES)
def test_counts_of_uses_fade(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 4, "lfu")
    rows = trace.handles[0]
    for _ in range(4):
        trace.admit(rows[:2])
    trace.cache._tick += 64 * 4
    for _ in range(2):
        trace.admit(rows[2:4])
    trace.admit(rows[4:6])
    assert trace.cached() == set(rows[2:6])


@pytest.mark.parametrize("device", DEVICES)
def test_changed_rows_survive_losing_their_slot(device: str) -> None:
    trace = Trace([ODD], device, 32, 4)
    rows = trace.handles[0]
    trace.admit(rows[:4])
    trace.step(rows[:4])
    trace.admit(rows[4:8])
    assert trace.cached() == set(rows[4:8])
    assert trace.cache.stats().written_back == 4
    trace.read(rows[:8])
    trace.admit(rows[8:12])  # these victims are clean
    assert trace.cache.stats().written_back == 4
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_live_batches_keep_their_slots(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 4)
    rows = trace.handles[0]
    first = trace.admit(rows[:3])
    trace.admit(rows[3:6], keep_from=first)
    assert trace.cached() >= set(rows[:3])
    assert len(trace.cached()) == 4
    assert trace.cache.stats().in_place == 2
    trace.step(rows[:6])
    trace.read(rows[:6])
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_in_place_may_get_a_slot_before_it_is_changed(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 2)
    rows = trace.handles[0]
    trace.admit(rows[:4])
    before = trace.cache.moves
    trace.admit(rows[:4])
    trace.admit([row for row in rows[:4] if row not in trace.cached()])
    assert trace.cache.moves != before
    trace.step(rows[:4])
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_no_more_leave_no_trace(device: str) -> None:
    trace = Trace([PLAIN], device, 32, 8)
    rows = trace.handles[0]
    trace.admit(rows[:6])
    trace.step(rows[:6])
    gone = torch.tensor([*rows[2:4], rows[9], 0], dtype=torch.int32, device=device)
    trace.cache.drop(gone, torch.tensor([3], device=device))
    assert trace.cached() == set(rows[:2] + rows[4:6])
    for row in rows[2:4]:
        trace.added[row] = 0  # what the cache knew better is lost
    trace.assert_home()
    trace.admit(rows[:8])
    trace.step(rows[:8])
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_may_be_added_while_rows_are_cached(device: str) -> None:
    trace = Trace([PLAIN, ODD], device, 16, 12)
    for _ in range(3):
        trace.handles[0] += trace.homes.add(0, 16)
        trace.handles[1] += trace.homes.add(1, 16)
        batch = trace.handles[0][-20:-8] + trace.handles[1][-20:-8]
        trace.admit(batch)
        trace.read(batch)
        trace.step(batch)
    trace.cached()
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_cache_nothing_stays_on_the_device(device: str) -> None:
    trace = Trace([PLAIN], device, 64, 0)
    rows = trace.handles[0]
    for size in (8, 30, 12):
        trace.admit(rows[:size])
        assert trace.cached() == set(rows[:size])
        trace.read(rows[:size])
        trace.step(rows[:size])
        trace.cache.settle(None)
        assert trace.cached() == set()
        for row in rows[:size]:
            assert torch.equal(trace.homes.at_home(row), trace.expected([row], PLAIN)[0])
    stats = trace.cache.stats()
    assert (stats.hits, stats.misses, stats.in_place) == (0, 50, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_that_are_too_large_to_stage_work_in_place(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace([PLAIN], device, 64, 0)
    rows = trace.handles[0]
    trace.admit(rows[:8])

    def refuse(*_: object) -> list[torch.Tensor]:
        raise OutOfDeviceMemory("no room")

    monkeypatch.setattr(RowCache, "_allocated", refuse)
    for _ in range(2):
        trace.admit(rows[4:30])
        trace.read(rows[4:30])
        trace.step(rows[4:30])
        trace.cache.settle(None)
    assert trace.cache.stats().in_place == 2 * (26 - 8)
    assert caplog.text.count("partly staged") == 1
    trace.assert_home()


@pytest.mark.parametrize("device", DEVICES)
def test_emptied_caches_start_anew(device: str) -> None:
    trace = Trace([PLAIN], device, 16, 8)
    rows = trace.handles[0]
    trace.admit(rows[:8])
    trace.step(rows[:8])
    trace.cache.empty()
    assert trace.cached() == set()
    trace.read(rows)
    trace.assert_home()


def test_page_locked_pieces_waste_little() -> None:
    memory = PageLocked(torch.device("cpu"))
    parts = [memory.take(size) for size in (1000, 3 << 20, 10, 5 << 20, 2 << 20, 0)]
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in parts[:-1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)  # 512 where it is page-locked
    assert memory.bytes_held <= 2 * sum(part.numel() for part in parts) + (1 << 20)


def test_too_much_page_locked_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: int, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nlong explanations")

    memory = PageLocked(torch.device("cpu"))
    memory.take(100)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfDeviceMemory, match=r"4194304 bytes wanted, 1048576 held.*ulimit -l"):
        memory.take(3 << 20)
    assert memory.bytes_held == 1 << 20


def test_chunks_are_grouped_by_piece() -> None:
    sizes = [256, 512, *[CHUNK_ROWS] * 20]
    groups = grouped(sizes, 512)
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group) * 512 <= PIECE_BYTES for group in groups)
    assert grouped([CHUNK_ROWS] * 2, PIECE_BYTES) == [[CHUNK_ROWS], [CHUNK_ROWS]]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("cache_rows", [0, 5_000, 100_000])
def test_large_traces_compiled(policy: str, cache_rows: int) -> None:
    trace = Trace([PLAIN, ODD], "cuda", CHUNK_ROWS, cache_rows, policy)
    random = np.random.default_rng(cache_rows)
    everything = np.array(trace.handles[0] + trace.handles[1])
    for step in range(5):
        batch = everything[random.zipf(1.1, 100_000) % len(everything)].tolist()
        trace.admit(batch)
        trace.read(batch)
        trace.step(batch)
        trace.cache.settle(None)
        trace.cached()
        if step == 2:
            trace.cache.flush()
    trace.assert_home()
