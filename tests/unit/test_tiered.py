"""Rows in host memory behind a device cache: what is read and what stays, whatever the cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.row_cache import ABSENT, VACANT
from shoal.kernels.row_form import RowForm
from shoal.kernels.runs import Runs, runs_of
from shoal.kernels.table_layout import (
    CHUNK_BITS,
    CHUNK_CAPACITY,
    CHUNK_ROWS,
    CHUNK_STATE,
    CHUNK_TABLE,
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    COUNT_WORDS,
    TABLE_FORM,
    TABLE_STATE_BYTES,
    TABLE_WEIGHT_BYTES,
    TABLE_WORDS,
    ShardLayout,
    row_address,
)
from shoal.table.page_locked import PIECE_BYTES, PageLocked, grouped
from shoal.table.row_cache import CachedForm, RowCache

DEVICES = [
    pytest.param("cpu", id="interpreted")
    if not torch.cuda.is_available()
    else pytest.param("cuda", marks=pytest.mark.gpu, id="compiled")
]
PLAIN = RowForm(dim=4, state_width=0, dtype=torch.float32, segments=())
ODD = RowForm(dim=3, state_width=6, dtype=torch.float32, segments=())
WIDE = RowForm(dim=300, state_width=1, dtype=torch.float32, segments=())

_WEIGHTS, _STATE = tl.constexpr(CHUNK_WEIGHTS), tl.constexpr(CHUNK_STATE)


@triton.jit
def _touch(
    chunks_ptr,
    columns,
    payloads_ptr,
    seen_ptr,
    add,
    n,
    dim,
    state_width,
    WEIGHT_BYTES: tl.constexpr,
    STATE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads rows, weights [N, dim] and state [N, S] side by side, and adds a number to them."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = at < n
    payload = tl.load(payloads_ptr + at, mask=live, other=0)
    column = tl.arange(0, BLOCK)[None, :]
    weights = row_address(chunks_ptr, columns, payload, WEIGHT_BYTES, live, _WEIGHTS)[:, None]
    weights_at = weights.to(tl.pointer_type(tl.float32)) + column
    inside = live[:, None] & (column < dim)
    row = tl.load(weights_at, mask=inside, other=0.0)
    out = seen_ptr + at[:, None] * (dim + state_width) + column
    tl.store(out, row, mask=inside)
    tl.store(weights_at, row + add, mask=inside & (add != 0))
    if STATE_BYTES > 0:
        state = row_address(chunks_ptr, columns, payload, STATE_BYTES, live, _STATE)[:, None]
        state_at = state.to(tl.pointer_type(tl.float32)) + column
        inside = live[:, None] & (column < state_width)
        row = tl.load(state_at, mask=inside, other=0.0)
        tl.store(out + dim, row, mask=inside)
        tl.store(state_at, row + 2 * add, mask=inside & (add != 0))


class Homes:
    """Chunks of rows in host memory, one table a form; row of handle h starts as h mod 97."""

    def __init__(self, forms: Sequence[RowForm], device: str) -> None:
        self.forms, self.device = tuple(forms), torch.device(device)
        self.memory = PageLocked(self.device)
        self.columns = np.zeros((CHUNK_WORDS, 64), dtype=np.int64)
        self.chunks = 0
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        lines = torch.zeros(len(forms), TABLE_WORDS, dtype=torch.int64)
        for table, form in enumerate(forms):
            lines[table, TABLE_WEIGHT_BYTES] = form.weight_bytes
            lines[table, TABLE_STATE_BYTES] = form.state_bytes
            lines[table, TABLE_FORM] = table
        self._tables_KT = lines.to(device)
        self._counters_KC = torch.zeros(len(forms), COUNT_WORDS, dtype=torch.int64, device=device)

    @property
    def layout(self) -> ShardLayout:
        columns = torch.from_numpy(self.columns.copy()).to(self.device)
        return ShardLayout(self._tables_KT, self._counters_KC, columns)

    def lend(self, columns_WC: Any) -> int:
        first = self.chunks
        self.chunks += columns_WC.shape[1]
        self.columns[:, first : self.chunks] = columns_WC
        return first

    def add(self, table: int, rows: int) -> list[int]:
        """A chunk of a table; the handles of its rows."""
        form = self.forms[table]
        weights = self.memory.take(rows * form.weight_bytes).view(torch.float32).view(rows, -1)
        state = self.memory.take(rows * form.state_bytes).view(torch.float32)
        state = state.view(rows, form.state_bytes // 4)
        column = np.zeros((CHUNK_WORDS, 1), dtype=np.int64)
        column[CHUNK_WEIGHTS], column[CHUNK_STATE] = weights.data_ptr(), state.data_ptr()
        column[CHUNK_TABLE], column[CHUNK_CAPACITY] = table, rows
        chunk = self.lend(column)
        handles = [chunk << CHUNK_BITS | place for place in range(rows)]
        first = torch.tensor([handle % 97 for handle in handles], dtype=torch.float32)[:, None]
        weights.copy_(first + torch.arange(weights.shape[1]))
        state.copy_(first + torch.arange(state.shape[1]))
        self.rows[chunk] = (weights, state)
        return handles

    def at_home(self, handle: int) -> Tensor:
        """Weights and state as they lie in host memory, padding left out."""
        weights, state = self.rows[handle >> CHUNK_BITS]
        form = self.forms[int(self.columns[CHUNK_TABLE, handle >> CHUNK_BITS])]
        place = handle & (CHUNK_ROWS - 1)
        return torch.cat([weights[place, : form.dim], state[place, : form.state_width]])


class Trace:
    """A cache over homes, and what the rows must be: counts of additions by handle."""

    def __init__(
        self,
        forms: Sequence[RowForm],
        device: str,
        rows: int,
        cache_rows: float,
        policy: str = "lru",
    ) -> None:
        self.homes = Homes(forms, device)
        self.device = torch.device(device)
        self.handles = [self.homes.add(table, rows) for table in range(len(forms))]
        share = 1 / len(forms)
        cached = [CachedForm(form, table, share) for table, form in enumerate(forms)]
        size = max(item.row_bytes for item in cached) / share
        self.cache = RowCache(
            self.homes,
            cached,
            cache_bytes=math.ceil(cache_rows * size),
            policy=policy,
            device=self.device,
        )
        self.added: dict[int, int] = {}
        self.most = [1 << 20] * len(forms)

    def runs(self, handles: Sequence[int]) -> tuple[Tensor, Runs]:
        handles_N = torch.tensor(handles, dtype=torch.int32, device=self.device)
        tables = [int(self.homes.columns[CHUNK_TABLE, h >> CHUNK_BITS]) for h in handles if h >= 0]
        rooms = [tables.count(table) for table in range(len(self.homes.forms))]
        rooms[0] += sum(h < 0 for h in handles)
        return handles_N, runs_of(handles_N, self.homes.layout, rooms)

    def admit(self, handles: Sequence[int], keep_from: int | None = None) -> int:
        return self.cache.admit(self.runs(handles)[1], keep_from, most_F=self.most)

    def read(self, handles: Sequence[int]) -> None:
        """Every position reads its row."""
        wanted = [h for h in handles if h >= 0]
        for table, form in enumerate(self.homes.forms):
            mine = [h for h in wanted if self.homes.columns[CHUNK_TABLE, h >> CHUNK_BITS] == table]
            handles_N = torch.tensor(mine, dtype=torch.int32, device=self.device)
            seen = self.touch(form, self.cache.places_N(handles_N), 0)
            assert torch.equal(seen, self.expected(mine, form))

    def step(self, handles: Sequence[int], add: int = 1) -> None:
        """Every distinct row grows once, through the runs of the call."""
        _, runs = self.runs(handles)
        places = self.cache.places_of(runs, written=True)
        for number, form in enumerate(self.homes.forms):
            first, end = runs.first_run(number), int(runs.cursors_FW[number, 0])
            rows = runs.runs_WN[0, first:end].tolist()
            seen = self.touch(form, places[first:end].contiguous(), add)
            assert torch.equal(seen, self.expected(rows, form))
            for handle in rows:
                self.added[handle] = self.added.get(handle, 0) + add

    def touch(self, form: RowForm, payloads: Tensor, add: int) -> Tensor:
        n, columns = payloads.numel(), self.homes.layout.chunks_WC
        seen = torch.zeros(n, form.dim + form.state_width, device=self.device)
        if n:
            _touch[(triton.cdiv(n, 16),)](
                columns,
                columns.shape[1],
                payloads,
                seen,
                add,
                n,
                form.dim,
                form.state_width,
                WEIGHT_BYTES=form.weight_bytes,
                STATE_BYTES=form.state_bytes,
                ROWS=16,
                BLOCK=triton.next_power_of_2(max(form.dim, form.state_width)),
            )
        return seen.cpu()

    def expected(self, handles: Sequence[int], form: RowForm) -> Tensor:
        added = torch.tensor([self.added.get(h, 0) for h in handles], dtype=torch.float32)[:, None]
        first = torch.tensor([h % 97 for h in handles], dtype=torch.float32)[:, None]
        weights = first + torch.arange(form.dim) + added
        state = first + torch.arange(form.state_width) + 2 * added
        return torch.cat([weights, state], dim=1).reshape(len(handles), -1)

    def cached(self) -> set[int]:
        """Rows that have a slot; checks that rows and slots name each other."""
        maps = self.cache._maps
        payload_H, home_S = maps.payload_H.tolist(), maps.home_S.tolist()
        held = {h: p - maps.base for h, p in enumerate(payload_H) if p >= 0}
        assert len(set(held.values())) == len(held), "a slot serves two rows"
        assert {slot: h for h, slot in held.items()} == {
            slot: home for slot, home in enumerate(home_S) if home not in (VACANT, ABSENT)
        }
        return set(held)

    def assert_home(self) -> None:
        """All rows lie in host memory as a run without a cache leaves them, bit for bit."""
        self.cache.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for table, form in enumerate(self.homes.forms):
            for handle in self.handles[table]:
                assert torch.equal(self.homes.at_home(handle), self.expected([handle], form)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("cache_rows", [0, 5, 24, 64], ids=["none", "less", "batch", "all"])
def test_a_random_trace_leaves_the_rows_of_a_run_without_a_cache(
    device: str, policy: str, cache_rows: int
) -> None:
    trace = Trace([PLAIN, ODD], device, 32, cache_rows, policy)
    random = np.random.default_rng(cache_rows)
    everything = trace.handles[0] + trace.handles[1]
    for _ in range(6):
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


def test_chunks_are_grouped_by_piece() -> None:
    sizes = [256, 512, *[CHUNK_ROWS] * 20]
    groups = grouped(sizes, 512)
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group) * 512 <= PIECE_BYTES for group in groups)
    assert grouped([CHUNK_ROWS] * 2, PIECE_BYTES) == [[CHUNK_ROWS], [CHUNK_ROWS]]
