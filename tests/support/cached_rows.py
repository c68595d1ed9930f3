"""Rows in host memory behind a cache, without a shard, and their expected values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.cache import ABSENT, VACANT
from shoal.kernels.gradients import Runs, runs_of
from shoal.kernels.tables import (
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
    RowForm,
    ShardLayout,
    row_address,
)
from shoal.table.cuda.cache import CachedForm, RowCache
from shoal.table.cuda.memory import PageLocked

__all__ = ["ODD", "PLAIN", "WIDE", "Homes", "Trace"]

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
        """Weights and state in host memory, without padding."""
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
        """Add to every distinct row once, at the address that the cache reports."""
        payload_H = self.cache.written(self.runs(handles)[1])
        wanted = {h for h in handles if h >= 0}
        for table, form in enumerate(self.homes.forms):
            rows = [h for h in wanted if self.homes.columns[CHUNK_TABLE, h >> CHUNK_BITS] == table]
            homes = torch.tensor(rows, dtype=torch.int32, device=self.device)
            payloads = payload_H[homes.long()]
            seen = self.touch(form, torch.where(payloads < 0, homes, payloads), add)
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
        """Host memory equals that of a run without a cache, bit for bit."""
        self.cache.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for table, form in enumerate(self.homes.forms):
            homes = torch.stack([self.homes.at_home(handle) for handle in self.handles[table]])
            assert torch.equal(homes, self.expected(self.handles[table], form))
