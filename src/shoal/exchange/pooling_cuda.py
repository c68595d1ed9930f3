"""Received rows pooled, and their gradients summed, by the kernels of a GPU shard.

A buffer whose rows are all as wide is a shard's memory to those kernels: rows by number, in chunks
that follow one another. Loaded where kernels run, for it needs Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal.kernels import gradients
from shoal.kernels import pool as row_pool
from shoal.kernels.gradients import Runs, runs_of
from shoal.kernels.host_copies import staged
from shoal.kernels.step_sums import sum_rows
from shoal.kernels.tables import CHUNK_ROWS, CallGroups, RowForm, ShardLayout
from shoal.lookup import PoolPlan
from shoal.ragged import KeyedRagged
from shoal.table import checks
from shoal.table.cuda.calls import DevicePlan, PlanCache
from shoal.table.cuda.side_stream import SideStream

_ALIGNED = 15


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Which row each position of a batch reads, in the order of the batch.

    batch: its features are those of the plan. handles_N: int32 [N], numbers of rows. groups: the
    batch as kernels take it. bags_N: int32 [N], each position's example; runs: gives the positions
    by row to a stream. Both are None where no gradients will come back.
    """

    batch: KeyedRagged
    handles_N: Tensor
    groups: CallGroups
    bags_N: Tensor | None
    runs: Callable[[torch.cuda.Stream | None], Runs] | None


class DenseRows:
    """A pool plan over one buffer of rows of `dim` columns, for one device; thread-safe.

    A row may be a table's, or a column slice of it.

    Args:
        tables_G: of each feature.
        dim, real: floats of a row, a multiple of 16 bytes, and their dtype.
        device: where rows and batches are.
    """

    def __init__(
        self,
        plan: PoolPlan,
        tables_G: Sequence[int],
        dim: int,
        real: torch.dtype,
        device: torch.device,
    ) -> None:
        self._form = _form(dim, real)
        numbers = {table: k for k, table in enumerate(dict.fromkeys(tables_G))}
        tables = tuple(numbers[table] for table in tables_G)
        cached = PlanCache((self._form,), (0,) * len(numbers), device)
        self._plan: DevicePlan = cached.of(plan, tables)
        self._tables_G = torch.tensor(tables, dtype=torch.int32, device="cpu").to(device)
        self._widths = tuple(output.width for output in plan.outputs)
        self._device = device
        self._side: SideStream | None = None
        self._last: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    def places(
        self,
        offsets_N: Tensor,
        ordered: KeyedRagged,
        lengths_K: Sequence[int],
        order_G: Sequence[int] | None,
        *,
        backward: bool,
    ) -> Places:
        """Number the rows and, with `backward`, start to sort the positions parallel to the stream.

        Args:
            offsets_N: as `ReceivedRows.pool` takes them.
            lengths_K: positions of each block of them.
            order_G: each feature's block; None where blocks lie as the features do.
        """
        handles_N = torch.empty(offsets_N.shape, dtype=torch.int32, device=self._device)
        torch.floor_divide(offsets_N, self._form.dim, out=handles_N)
        if order_G is not None:
            blocks = torch.split(handles_N, list(lengths_K))
            handles_N = torch.cat([blocks[k] for k in order_G])
        splits_G1 = staged(ordered.host_splits.numpy(), self._device)
        groups = CallGroups(ordered.values_N, splits_G1, self._tables_G)
        if not backward:
            return Places(ordered, handles_N, groups, None, None)
        sizes = (handles_N.numel(),)
        main = self._present()
        # Events and side streams go by the present device.
        here: AbstractContextManager[object]
        here = nullcontext() if main is None else torch.cuda.device(self._device)
        with self._lock, here:
            if self._side is None:
                self._side = SideStream(self._device)
            if main is not None and self._last is not None:
                # What is recorded is written again only after who has read it.
                main.wait_stream(self._last)
            lease = self._side.lease(*sizes, sizes, main)
            if lease is not None:
                handles_N = lease.handles_N.copy_(handles_N)
            runs = self._side.start(lambda: runs_of(handles_N), (handles_N,), lease, main)
        bags_N = gradients.bags_of(ordered.offsets_FB1, ordered.batch_size, sizes[0])
        return Places(ordered, handles_N, groups, bags_N, runs)

    def pool(self, rows_E: Tensor, places: Places) -> tuple[Tensor, ...]:
        """One [B, width] per output, as a shard pools them."""
        self._last = self._present()
        if rows_E.data_ptr() & _ALIGNED:
            rows_E = rows_E.clone()
        size = CHUNK_ROWS * self._form.weight_bytes
        chunks = max(-(-rows_E.numel() * rows_E.element_size() // size), 1)
        start = rows_E.data_ptr()
        chunks_C = torch.arange(start, start + chunks * size, size, device=self._device)
        chunks_1C = chunks_C[None]
        return row_pool.gather_pooled(
            ShardLayout(chunks_1C, chunks_1C, chunks_1C),
            self._plan.lines,
            places.groups,
            places.handles_N,
            places.batch.offsets_FB1,
            _weights(places.batch),
        )

    def spread(self, grads: Sequence[Tensor], size: int, places: Places) -> Tensor:
        """Gradients of `size` floats of rows, each of which some position reads."""
        ordered = places.batch
        shapes = [
            ((ordered.batch_size, width), dtype)
            for width, dtype in zip(self._widths, self._plan.dtypes, strict=True)
        ]
        ready = checks.grads(grads, shapes, self._device)
        stream = self._present()
        self._last = stream
        runs = runs_of(places.handles_N) if places.runs is None else places.runs(stream)
        groups = gradients.pooled(
            self._plan.groups,
            ready,
            ordered.offsets_FB1,
            ordered.host_splits.diff().tolist(),
            bags_N=places.bags_N,
            weights_N=_weights(ordered),
        )
        sources = gradients.sources_of(runs, [groups])
        return sum_rows(self._form, runs, sources, size // self._form.dim).view(-1)

    def _present(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None


def _weights(ordered: KeyedRagged) -> Tensor | None:
    """float32 [N], as kernels take them."""
    weights_N = ordered.weights_N
    return None if weights_N is None else weights_N.detach().to(torch.float32).contiguous()


@cache
def _form(dim: int, real: torch.dtype) -> RowForm:
    return RowForm(dim, 0, real, ())
