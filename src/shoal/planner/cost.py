"""Seconds and bytes of an option, for a rank that holds a part of the table.

A step of a rank is: ids to their owners, probe or insert, rows read, rows sent back, pooled; then
gradients the same way, and one update of each row. Ranks send each distinct id of their batch once,
so an owner gets as many copies of a hot id as there are ranks. The pipeline lets ids travel, and
owners probe, during the dense part of the batch before (`hidden`); the rest follows one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.planner.options import DTYPE_BYTES, Option, TableInput
from shoal.planner.topology import Topology, row_seconds

PHASES = ("ids", "probe", "read", "rows", "gradients", "update", "cache misses", "slices")
HIDDEN = 2  # the first phases, which run during the dense part of the batch before

_ID_BYTES = 12  # an id and its count, on the wire
_ROW_BYTES = 40  # id, version, last-seen, count; the index at its usual load
_IN_FLIGHT = 2  # batches whose buffers are alive

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a rank does besides tables, and how.

    Args:
        batch_size: examples of a rank.
        dense_s: seconds of the dense part, forward and backward.
        dense_bytes: of dense weights, their gradients and their optimizer's state.
        row_bytes, grad_bytes: of a value on the wire; None: as rows are, float32 for gradients.
        pipelined: whether ids of a batch travel during the batch before.
        replicas: groups that hold all tables each (2D); the ranks of the topology are one of them.

    Raises:
        ConfigError: a batch size below 1.
    """

    batch_size: int
    dense_s: float = 0.0
    dense_bytes: float = 0.0
    row_bytes: int | None = None
    grad_bytes: int | None = None
    pipelined: bool = True
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(
                "batch size of a plan",
                got=self.batch_size,
                allowed="1 or more examples of a rank",
                remedy="Count the examples of one rank.",
            )


def dense_work(topology: Topology, batch_size: int, weights: int, **settings: Any) -> Workload:
    """The workload of a rank with this number of dense weights: 6 operations of each an example, 16
    bytes of each with gradient and optimizer state."""
    seconds = 6.0 * weights * batch_size / topology.rates.flops
    return Workload(batch_size=batch_size, dense_s=seconds, dense_bytes=16.0 * weights, **settings)


@dataclass(frozen=True, slots=True)
class Price:
    """Of each rank that holds a part of a table.

    Args:
        phases: seconds of each of `PHASES`.
        every_s: seconds of every rank, whether it holds a part or not.
        device_bytes, host_bytes: at the horizon.
        device_bytes_now: at the beginning.
    """

    phases: tuple[float, ...]
    every_s: float
    device_bytes: float
    host_bytes: float
    device_bytes_now: float

    @property
    def seconds(self) -> float:
        """Of all phases, on a rank that holds a part."""
        return sum(self.phases)


class CostModel:
    """Prices of options on some machines under some work."""

    def __init__(self, topology: Topology, work: Workload) -> None:
        self.topology = topology
        self.work = work
        self._known: dict[str, tuple[TableInput, tuple[float, ...]]] = {}

    def price(self, table: TableInput, option: Option) -> Price:
        """Of one rank that holds a part of the table under that option."""
        topology, rates, work = self.topology, self.topology.rates, self.work
        ranks = topology.world_size
        distinct, shared, merged, synced = self._ids(table)
        copied = option.sharding == "data_parallel"
        shares = 1 if copied else option.row_shares(topology)
        columns = math.ceil(table.dim / option.slices)
        state = table.state_width / option.slices
        size = DTYPE_BYTES[option.dtype]
        row, whole = columns * size, columns * size + 4 * state
        # Ids that reach a rank, with one standard deviation for hashes that fall unevenly.
        received = ranks * distinct / shares
        if shares > 1:
            lumps = ranks * ranks * shared + ranks * max(distinct - shared, 0.0)
            received += math.sqrt(lumps / shares * (1 - 1 / shares))
        touched = min(merged / shares, received)
        grad = columns * (work.grad_bytes or 4)
        sent = columns * (work.row_bytes or size)
        ids_s = self._network(received * _ID_BYTES)
        probe_s = received * rates.id_s
        # Also of a replicated table: its rows are read for the ids of all ranks.
        read_s = received * row_seconds(rates.gather, row)
        rows_s = 0.0 if copied else self._network(received * sent)
        # CPUs look for NaN in what has arrived; gradients for all ranks are repeated for each.
        passes = (topology.device == "cpu") + 2 * copied
        grads_s = self._network(received * grad) + passes * received * grad / rates.copy
        grads_s += copied * received * grad * rates.replica_s
        stepped = touched + rates.repeat * (received - touched)
        update_s = stepped * 2 * row_seconds(rates.update, whole)
        if work.replicas > 1:  # rows touched in any group are brought together, then stepped alike
            grads_s += (work.replicas - 1) * touched * grad / rates.cross
            update_s *= synced / max(merged, 1e-9)
        missed_s = 0.0
        if option.tier != "device":
            cached = option.cache * table.row_count
            missed = table.statistics.missed(ranks * work.batch_size, cached) / shares
            missed_s = 2 * min(missed, received) * whole / rates.host_link
        slices_s = rates.slice_s
        phases = (ids_s, probe_s, read_s, rows_s, grads_s, update_s, missed_s, slices_s)
        fixed = self._buffers(received, columns)
        now, later = (
            self._rows(count / shares, row, 4 * state, option) for count in
            (table.rows, table.row_count)
        )  # fmt: skip
        every_s = (option.slices - 1) * self._positions_s(table)
        return Price(phases, every_s, later[0] + fixed, later[1], now[0] + fixed)

    def shared_phases(self, table: TableInput) -> float:
        """Seconds of every rank for its own batch's ids of a table, whatever the option."""
        rates = self.topology.rates
        occurrences = self.work.batch_size * table.statistics.ids_per_sample
        # Received rows to outputs, and gradients of outputs to those of rows: read and written.
        moved = 4 * 4.0 * table.dim * occurrences
        return rates.table_s + self._positions_s(table) + moved / rates.copy

    def _positions_s(self, table: TableInput) -> float:
        """Seconds of a rank for the positions of its own batch in one column slice of a table:
        each slice has ids made distinct, rows pooled and gradients summed on its own."""
        occurrences = self.work.batch_size * table.statistics.ids_per_sample
        return 2 * occurrences * self.topology.rates.occurrence_s

    def shared_bytes(self, table: TableInput) -> float:
        """Buffers of every rank for its own batch's ids and rows of a table."""
        distinct = self._ids(table)[0]
        occurrences = self.work.batch_size * table.statistics.ids_per_sample
        return _IN_FLIGHT * (16 * occurrences + 8 * table.dim * distinct)

    def fixed_s(self) -> float:
        """Seconds of a step that no plan changes: collectives of no bytes, the dense gradients."""
        topology, rates = self.topology, self.topology.rates
        if topology.world_size == 1:
            return rates.step_s
        across = topology.nodes > 1 or self.work.replicas > 1
        latency = rates.cross_latency_s if across else rates.intra_latency_s
        speed = min(rates.intra, rates.cross * topology.local_size) if across else rates.intra
        reduced = self.work.dense_bytes / 4 / (rates.reduce or speed / 2)
        return rates.step_s + 4 * latency + max(0.0, reduced - self.work.dense_s / 2)

    def _network(self, size: float) -> float:
        """Seconds for bytes that an owner sends to all ranks evenly, or gets from all."""
        topology, rates = self.topology, self.topology.rates
        ranks = topology.world_size
        near = size * (topology.local_size - 1) / ranks / rates.intra
        far = size * (ranks - topology.local_size) / ranks / rates.cross
        return max(near, far)

    def _ids(self, table: TableInput) -> tuple[float, ...]:
        """(distinct of a rank, common to two ranks, distinct of all ranks, of all groups)."""
        known = self._known.get(table.name)
        if known is None or known[0] is not table:
            one, batch = table.statistics, self.work.batch_size
            ranks = self.topology.world_size
            known = (
                table,
                (
                    one.distinct(batch),
                    one.shared(batch),
                    one.distinct(batch * ranks),
                    one.distinct(batch * ranks * self.work.replicas),
                ),
            )
            self._known[table.name] = known
        return known[1]

    def _rows(
        self, rows: float, weights: float, state: float, option: Option
    ) -> tuple[float, float]:
        """(device, host) bytes of rows; their index is on the device."""
        values = math.ceil(weights / 16) * 16 + math.ceil(state / 16) * 16
        if option.tier == "device":
            return rows * (_ROW_BYTES + values), 0.0
        return rows * (_ROW_BYTES + option.cache * values), rows * values

    def _buffers(self, received: float, columns: float) -> float:
        return _IN_FLIGHT * received * (_ID_BYTES + 8 + 8 * columns)
