"""`Table`: the methods of one table, for people, tests and small jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError
from shoal.table import checks
from shoal.table import shard as scalars
from shoal.table.factory import make_shard
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups, RowsById, Shard, StepContext, Ticket
from shoal.table.spec import HostRows, TableSpec
from shoal.table.values import Entry, RowChunk, TableStats
from shoal.uncompiled import uncompiled

Ids = Tensor | Sequence[int]
Rows = Tensor | Sequence[Sequence[float]]
Rates = float | Sequence[float]

_SPLITS_KEPT = 256


@uncompiled
class Table:
    """One table of a shard.

    Ids are int64 [N] tensors or lists of Python ints; rows are [N, D] tensors in the table's
    compute dtype (float32, or float64 for float64 rows) or nested lists. Duplicate ids are fine
    everywhere; their gradients and deltas add up. Many threads may call.

    On CUDA, what is given on the CPU is sent there; weights and flags come back on the device,
    `entry` and `export` on the CPU.

    Args:
        spec: the table.
        seed: of the initial values, when a shard is made.
        device: where a new shard lives: "cpu", "cuda" or "cuda:N".
        host_rows: keep a new shard's rows in host memory, for a table larger than the GPU's.
        shard: use the table of that name of this shard instead of making one.

    Raises:
        ConfigError: no such device, host_rows on a CPU, or another spec of that name in the shard.
        UnknownName: the shard has no such table.
        DeviceUnavailable: the device is not here.
    """

    __slots__ = ("_device", "_dtype", "_index", "_shard", "_spec", "_splits", "_tables_G")

    def __init__(
        self,
        spec: TableSpec,
        *,
        seed: int = 0,
        device: str = "cpu",
        host_rows: HostRows | None = None,
        shard: RowsById | None = None,
    ) -> None:
        if shard is None:
            shard = make_shard((spec,), seed=seed, device=device, host_rows=host_rows)
        self._shard: RowsById = shard
        hosted = checks.hosted_tables(shard, [spec])
        self._index = list(hosted).index(spec.name)
        self._spec = hosted[spec.name]
        home = shard.device
        # None: nothing is moved, and the shard says what it thinks of tensors on a device.
        self._device = None if home.type == "cpu" else home
        self._dtype = real_dtype(self._spec)
        self._tables_G = torch.tensor([self._index], dtype=torch.int32, device="cpu")
        self._splits: dict[int, Tensor] = {}

    @property
    def spec(self) -> TableSpec:
        """What the table is."""
        return self._spec

    @property
    def shard(self) -> RowsById:
        """The owner of the rows: a `Shard`, or the shards of all ranks."""
        return self._shard

    def __len__(self) -> int:
        """Rows."""
        return self._shard.size(self._index)

    def __repr__(self) -> str:
        # Counting rows of several ranks is a collective call: a debugger must not make one.
        rows = "" if getattr(self._shard, "collective", False) else f", rows={len(self)}"
        return f"Table({self._spec.name!r}, dim={self._spec.dim}{rows})"

    def find(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Read rows: weights [N, D], zeros where missing, and bool [N]; never inserts."""
        weights, found_N = self._shard.find(self._groups(ids))
        return weights[0], found_N

    def lookup(self, ids: Ids) -> Tensor:
        """`find` without the flags: weights [N, D], zeros where missing."""
        return self._shard.find(self._groups(ids)).weights[0]

    def find_or_init(
        self, ids: Ids, counts: Ids | None = None, *, global_step: int = 0, event_time_s: int = 0
    ) -> Ticket:
        """Admit and insert what is missing; the ticket holds the rows.

        Args:
            ids: int64 [N].
            counts: how many occurrences each position stands for, int64 [N]; default 1.
            global_step: for rules that depend on the step.
            event_time_s: when the ids were seen, whole seconds since 1970.

        Raises:
            TableFull: no room; nothing was inserted.
        """
        groups = self._groups(ids)
        ctx = StepContext(global_step=global_step, event_time_s=event_time_s)
        return self._own().find_or_init(groups, self._counts(counts, groups), ctx=ctx)

    def gather(self, ticket: Ticket, *, global_step: int = 0) -> Tensor:
        """Rows of a ticket as they are now, [N, D]; initial values of ids not admitted.

        Raises:
            TicketError: the ticket has ended, or is another shard's.
        """
        return self._own().gather(ticket, ctx=StepContext(global_step=global_step))[0]

    def apply(
        self,
        ids: Ids,
        grads: Rows,
        *,
        counts: Ids | None = None,
        global_step: int = 0,
        event_time_s: int = 0,
        learning_rates: Rates | None = None,
    ) -> None:
        """Sum gradients per id and take one optimizer step; inserts what is missing.

        Args:
            ids: int64 [N], duplicates allowed.
            grads: [N, D], of the table's compute dtype.
            counts: occurrences per position for admission, int64 [N]; default 1.
            global_step: of schedules, and of rules that depend on the step.
            event_time_s: when the ids were seen, whole seconds since 1970.
            learning_rates: one for all segments or one per segment; default the spec's at the step.

        Raises:
            NonFiniteGradient: a gradient or an id's sum is NaN or infinite; nothing was changed. On
                CUDA its row is left alone and a later method raises, `check` at the latest.
            TableFull: no room; nothing was changed.
        """
        groups = self._groups(ids)
        ctx = StepContext(
            global_step=global_step,
            event_time_s=event_time_s,
            learning_rates=self._rates(learning_rates),
        )
        rows = self._rows(grads, groups, "grads")
        self._shard.apply_ids(groups, (rows,), self._counts(counts, groups), ctx=ctx)

    def assign(self, ids: Ids, weights: Rows, *, event_time_s: int = 0) -> None:
        """Upsert weights [N, D]; optimizer state stays. The last of duplicate ids wins.

        Raises:
            ShapeError: not N rows of D.
            TableFull: no room; nothing was changed.
        """
        groups = self._groups(ids)
        ctx = StepContext(event_time_s=event_time_s)
        self._shard.assign(groups, (self._rows(weights, groups, "weights"),), ctx=ctx)

    def assign_add(self, ids: Ids, deltas: Rows, *, event_time_s: int = 0) -> None:
        """Add deltas [N, D] to rows; a missing id is initialised first.

        Raises:
            ShapeError: not N rows of D.
            TableFull: no room; nothing was changed.
        """
        groups = self._groups(ids)
        ctx = StepContext(event_time_s=event_time_s)
        self._shard.assign_add(groups, (self._rows(deltas, groups, "deltas"),), ctx=ctx)

    def reinitialize(self, ids: Ids, *, event_time_s: int = 0) -> Tensor:
        """Initial weights and state again: int32 [N], 1 existed, 0 inserted, in input order."""
        ctx = StepContext(event_time_s=event_time_s)
        return self._shard.reinitialize(self._groups(ids), ctx=ctx)

    def evict(self, now_s: int) -> int:
        """Drop expired rows and rows above the budget, of the whole shard; how many went.

        Args:
            now_s: event time, whole seconds, 0..2^32-1.

        Raises:
            InputError: now_s is no such time; nothing was dropped.
        """
        scalars.event_time(now_s, "now_s")
        return self._shard.evict(now_s)

    def close_version(self) -> int:
        """Close the shard's version and open the next; returns the closed one."""
        return self._shard.close_version()

    def entry(self, id: int) -> Entry | None:
        """One row with its state and metadata, or None.

        Raises:
            InputError: not an int64.
        """
        remedy = "Ids are int64: map unsigned ones with id - 2**64."
        scalars.whole("id", id, scalars.MIN_ID, scalars.MAX_ID, remedy=remedy)
        return self._shard.entry(self._index, id)

    def export(self) -> RowChunk:
        """All rows, ordered by hash."""
        return self._shard.export(self._index)

    def load(self, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata."""
        # Of our own, whatever another thread does: what is checked is what gets loaded.
        own = replace(chunk, ids=chunk.ids.clone(), versions=chunk.versions.clone())
        self._own().load(self._index, own)

    def clear(self) -> None:
        """Drop all rows.

        Raises:
            TicketError: a live ticket holds some.
        """
        self._shard.clear(self._index)

    def check(self) -> None:
        """Raise what kernels found since the last call; waits for a CUDA device.

        Raises:
            NonFiniteGradient: a gradient held NaN or infinity.
        """
        self._shard.check()

    def stats(self) -> TableStats:
        """Counters and bytes."""
        return self._shard.stats()[self._index]

    def _own(self) -> Shard:
        """The shard of this process, which has lookups and rows in bulk too."""
        if getattr(self._shard, "collective", False):
            raise ConfigError(
                f"table {self._spec.name!r} over ranks",
                got="a ticket, or rows in bulk",
                allowed="rows by id, export, size, stats",
                remedy="Call the collection to look up for training; load into each rank's shard.",
            )
        return cast(Shard, self._shard)

    def _groups(self, ids: Ids) -> IdGroups:
        # As a shard can read them: every other form is looked at closely.
        if type(ids) is Tensor and ids.dtype is torch.int64 and ids.layout is torch.strided:
            ids_N = ids
        else:
            ids_N = _checked_ids(ids)
        if ids_N.dim() != 1 or not ids_N.is_contiguous() or ids_N.is_neg():
            ids_N = _checked_ids(ids_N)
        if self._device is not None:
            ids_N = _sent(ids_N, self._device)
        n = ids_N.shape[0]
        # A small tensor costs more to build than the lookup of a small batch.
        splits = self._splits.get(n)
        if splits is None:
            splits = torch.tensor([0, n], device="cpu")
            if len(self._splits) >= _SPLITS_KEPT:
                self._splits.clear()
            self._splits[n] = splits
        return IdGroups(ids_N, splits, self._tables_G)

    def _rows(self, rows: Rows, groups: IdGroups, name: str) -> Tensor:
        want = (groups.ids_N.shape[0], self._spec.dim)
        return self._given(name, rows, self._dtype, want, "[N, D]")

    def _counts(self, counts: Ids | None, groups: IdGroups) -> Tensor | None:
        if counts is None:
            return None
        return self._given("counts", counts, torch.int64, groups.ids_N.shape, "[N]")

    def _given(
        self, name: str, given: Rows | Ids, dtype: torch.dtype, want: tuple[int, ...], form: str
    ) -> Tensor:
        """Numbers as the shard takes them."""
        tensor = given if isinstance(given, Tensor) else _as_tensor(name, given, dtype)
        check_dense(name, tensor)
        if tensor.dtype is not dtype:
            raise _dtype(name, tensor, dtype)
        if not isinstance(given, Tensor) and want[0] == tensor.numel() == 0:
            tensor = tensor.reshape(want)
        if tensor.shape != want:
            raise _shape(name, tensor, f"{form} = {list(want)}")
        tensor = tensor.detach().resolve_neg().contiguous()
        return tensor if self._device is None else _sent(tensor, self._device)

    def _rates(self, rates: Rates | None) -> dict[str, tuple[float, ...]]:
        if rates is None:
            return {}
        segments = len(self._spec.segments)
        if isinstance(rates, (int, float)):
            return {self._spec.name: (float(rates),) * segments}
        if len(rates) != segments:
            raise ShapeError(
                f"learning_rates of table {self._spec.name!r}",
                got=f"{len(rates)} rates",
                allowed=f"one, or one for each of {segments} segments",
                remedy="Pass a float to use one rate for all.",
            )
        return {self._spec.name: tuple(float(rate) for rate in rates)}


def _checked_ids(ids: Ids) -> Tensor:
    ids_N = ids if isinstance(ids, Tensor) else _as_tensor("ids", ids, torch.int64)
    check_dense("ids", ids_N)
    if ids_N.dtype is not torch.int64:
        raise _dtype("ids", ids_N, torch.int64)
    if ids_N.dim() != 1:
        raise _shape("ids", ids_N, "[N]")
    return ids_N.resolve_neg().contiguous()


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from the CPU through pinned memory, without waiting."""
    if tensor.is_cpu and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _as_tensor(name: str, values: Sequence[object], dtype: torch.dtype) -> Tensor:
    if dtype is torch.int64:
        _check_whole(name, values)
    try:
        tensor = torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        allowed = f"numbers in lists of equal length ({dtype})"
        remedy = "Pass a tensor or plain lists."
        raise ShapeError(name, got=str(error), allowed=allowed, remedy=remedy) from error
    if dtype is torch.int64 and tensor.numel() and tensor.dtype is not torch.int64:
        raise _dtype(name, tensor, dtype)
    return tensor.to(dtype)


def _check_whole(name: str, values: Sequence[object]) -> None:
    """Name the first null and the first integer that int64 cannot hold, with its position."""
    if not isinstance(values, (list, tuple)):
        return
    for position, value in enumerate(values):
        if value is None:
            remedy = "Drop nulls, or map them to an id of their own."
        elif isinstance(value, int) and not scalars.MIN_ID <= value <= scalars.MAX_ID:
            remedy = "Numbers here are int64: map unsigned ids with id - 2**64."
        else:
            continue
        got = f"{'null' if value is None else value} at position {position}"
        allowed = f"int64, {scalars.MIN_ID}..{scalars.MAX_ID}"
        raise InputError(name, got=got, allowed=allowed, remedy=remedy)


def _dtype(name: str, tensor: Tensor, want: torch.dtype) -> DTypeError:
    remedy = f"Call .to({want})."
    return DTypeError(f"dtype of {name}", got=tensor.dtype, allowed=want, remedy=remedy)


def _shape(name: str, tensor: Tensor, want: str) -> ShapeError:
    got = list(tensor.shape)
    return ShapeError(f"shape of {name}", got=got, allowed=want, remedy="Give one row per id.")
