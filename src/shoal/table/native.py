"""Specs and plans in the form that the compiled core takes, and its refusals in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from shoal import _core
from shoal.errors import (
    CheckpointError,
    InputError,
    NonFiniteGradient,
    OutOfDeviceMemory,
    ShapeError,
    ShoalError,
    TableFull,
    TicketError,
    out_of_device_memory,
)
from shoal.ids import salt
from shoal.rules.admission import Admission
from shoal.rules.expiry import BySlot
from shoal.rules.optimizers import DelayCompensated, Optimizer
from shoal.rules.schedules import Schedule
from shoal.table.spec import TableSpec


def table_dict(spec: TableSpec, seed: int) -> dict[str, Any]:
    """A table spec as the core reads it; initial values are keyed by (seed, hash name)."""
    return {
        "name": spec.name,
        "dim": spec.dim,
        "state": [
            number
            for segment in spec.segments
            for number in segment.optimizer.init_state(segment.dim, torch.float64).tolist()
        ],
        "dtype": spec.dtype,
        "segments": _segment_dicts(spec),
        "salt": salt(spec.hash_name),
        "first_column": spec.first_column,
        "seed": seed & ((1 << 64) - 1),
        "capacity_rows": spec.capacity_rows or 0,
        "on_full": spec.on_full,
        "expected_rows": spec.expected_rows,
        "admission": None if spec.admission is None else _admission_dict(spec.admission),
        "ttl_s": None if spec.expiry is None else _by_slot_dict(spec.expiry.ttls),
    }


def _segment_dicts(spec: TableSpec) -> list[dict[str, Any]]:
    segments = []
    state_column = 0
    for column, _, segment in spec.spans:
        rule: Optimizer = segment.optimizer
        strength = None
        if isinstance(rule, DelayCompensated):
            strength, rule = float(rule.strength), rule.inner
        segments.append(
            {
                "column": column,
                "dim": segment.dim,
                "state_column": state_column,
                "rule": rule.kind,
                "rule_params": rule.param_values(),
                "strength": strength,
                "law": segment.initializer.law,
                "law_params": segment.initializer.param_values(),
                "retriever": segment.compressor.kind,
                "retriever_params": segment.compressor.param_values(),
            }
        )
        state_column += segment.state_width
    return segments


def _admission_dict(admission: Admission) -> dict[str, Any]:
    return {
        "sketch": admission.counter == "sketch",
        "width": admission.sketch_width,
        "depth": admission.sketch_depth,
        "required": _by_slot_dict(admission.needed),
    }


def _by_slot_dict(setting: BySlot) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in ("otherwise", "shift", "mask", "values")}


class RateList:
    """Learning rates of all segments of all tables of a shard, in order, at any step."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._fixed: list[float] = []
        self._scheduled: list[tuple[int, Optimizer]] = []
        self._slices: dict[str, slice] = {}
        for spec in specs:
            start = len(self._fixed)
            for segment in spec.segments:
                if isinstance(getattr(segment.optimizer, "lr", None), Schedule):
                    self._scheduled.append((len(self._fixed), segment.optimizer))
                self._fixed.append(segment.optimizer.rate(0))
            self._slices[spec.name] = slice(start, len(self._fixed))

    def at(self, step: int, given: Mapping[str, tuple[float, ...]]) -> list[float]:
        """The given rates of the tables named, the rules' own for the others."""
        rates = self._fixed.copy()
        for place, optimizer in self._scheduled:
            rates[place] = optimizer.rate(step)
        for name, row in given.items():
            rates[self._slices[name]] = row
        return rates


KEPT_VERSION = "a closed version from which on deletions are kept"

T = TypeVar("T")


CORE_ERRORS = (_core.TableFullError, _core.TicketStateError, _core.NonFiniteError)


def worded(call: Callable[[], T]) -> T:
    """Run a call into the core.

    Raises:
        TableFull: no room for new ids; nothing was inserted.
        NonFiniteGradient: a gradient, or a row's sum of them, is NaN or infinite under
            nan_policy="raise"; nothing was changed.
        TicketError: a ticket ended meanwhile.
    """
    try:
        return call()
    except CORE_ERRORS as error:
        raise reworded(error) from None


def reworded(error: Exception) -> ShoalError:
    """The error for one of `CORE_ERRORS`."""
    if isinstance(error, _core.TableFullError):
        kept, capacity, wanted, on_full, name = str(error).split(" ", 4)
        return table_full(name, on_full, int(capacity), kept=int(kept), wanted=int(wanted))
    if isinstance(error, _core.TicketStateError):
        return foreign_ticket()
    return NonFiniteGradient(
        "gradient of a row, summed over all that has its id",
        got="NaN or infinity",
        allowed="finite values under nan_policy='raise'",
        remedy="Find the overflow (loss scale, learning rate), or choose "
        "nan_policy='skip' or 'clip'. No table was changed.",
    )


def closing(call: Callable[[], T]) -> T:
    """Run a call that closes a version.

    Raises:
        InputError: there is no version after the open one.
    """
    try:
        return call()
    except OverflowError as error:
        raise last_version() from error


def last_version() -> InputError:
    """The error of a snapshot if there is no version after the open one."""
    return InputError(
        "snapshot",
        got="the last version is open",
        allowed="at most 2^32 - 2 versions in the life of a table's rows",
        remedy="Set the versions of all rows to 1 and load them into new tables.",
    )


def table_full(name: str, on_full: str, capacity: int, *, kept: int, wanted: int) -> TableFull:
    """The error for `wanted` new ids that a table has no room for, as `kept` rows may not go."""
    if on_full == "raise":
        remedy = "Raise capacity_rows, set on_full to 'lru' or 'lfu', or evict; "
        remedy += "rows under live tickets cannot be evicted."
    else:
        remedy = f"on_full={on_full!r} drops no row that a step uses or a load brings: raise "
        remedy += "capacity_rows to the distinct ids of a step, or use a smaller batch."
    rows = "rows" if on_full == "raise" else "rows in use"
    return TableFull(
        f"new ids for table {name!r}",
        got=f"{wanted} on top of {kept} {rows}",
        allowed=f"capacity_rows={capacity} in all",
        remedy=remedy,
    )


def out_of_memory(what: str, wanted_bytes: int, device: torch.device) -> OutOfDeviceMemory:
    """The error for an allocation that failed, with what the device has free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return out_of_device_memory(f"{what} on {device}", wanted_bytes, free)


@contextmanager
def enough_memory(what: str, device: torch.device) -> Iterator[None]:
    """Word a failed allocation; torch says how many bytes it was asked for.

    Raises:
        OutOfDeviceMemory: an allocation failed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_memory(what, device, error) from error


def no_memory(what: str, device: torch.device, error: torch.OutOfMemoryError) -> OutOfDeviceMemory:
    """The error for an allocation that failed."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return OutOfDeviceMemory(
        f"device memory for {what} on {device}",
        got=f"{asked[1] if asked else 'more'} wanted",
        allowed=f"{free:,} bytes free",
        remedy="Look up smaller batches, keep rows in host memory (host_rows=HostRows(...)), or "
        "give the tables a row budget (capacity_rows with on_full='lru' or 'lfu').",
    )


def foreign_ticket() -> TicketError:
    """The error for a ticket that ended or belongs elsewhere."""
    return TicketError(
        "ticket",
        got="one that ended or that another shard issued",
        allowed="a live ticket of this shard",
        remedy="Look the ids up again: a ticket serves one step.",
    )


def plan_without_offsets() -> ShapeError:
    """The error for a pooled gradient that does not say how it was pooled."""
    return ShapeError(
        "gradient record",
        got="a plan without offsets",
        allowed="plan and offsets together, or neither",
        remedy="Pass the offsets that gather_pooled was given.",
    )


class TooManySnapshots(InputError):
    """All snapshots that a shard may have are open; one that is closed makes space."""


def too_many_snapshots() -> TooManySnapshots:
    """The error for one more snapshot than a shard keeps rows for."""
    return TooManySnapshots(
        "snapshot",
        got=f"{_core.MOST_SNAPSHOTS} open ones",
        allowed=f"at most {_core.MOST_SNAPSHOTS} open snapshots of a shard",
        remedy="Close one: call its close(), or read it in a with block.",
    )


def snapshot_since(got: str, allowed: str) -> InputError:
    """The error for a snapshot of what changed since a cursor that is no good."""
    remedy = "Take a full snapshot: since=None."
    return InputError("snapshot", got=got, allowed=allowed, remedy=remedy)


def closed_snapshot() -> InputError:
    """The error for reading a snapshot after its end."""
    return InputError(
        "snapshot",
        got="a closed one",
        allowed="an open one",
        remedy="Read before close(), or take another.",
    )


def kept(call: Callable[[], T]) -> T:
    """Run a call that reads copies of rows.

    Raises:
        CheckpointError: copies were lost.
    """
    try:
        return call()
    except RuntimeError as error:
        raise copies_lost(str(error)) from error


def copies_lost(why: str) -> CheckpointError:
    """The error for a snapshot whose copies of changed rows are not whole."""
    return CheckpointError(
        "snapshot",
        got=f"rows that training changed could not be kept: {why}",
        allowed="room for them in the temporary folder",
        remedy="Point TMPDIR to a folder with room for the rows that change during a "
        "save, or raise buffer_bytes. The tables are as they should be.",
    )


def rows_held(name: str) -> TicketError:
    """The error for clearing a table whose rows live tickets hold."""
    return TicketError(
        f"clear of table {name!r}",
        got="live tickets",
        allowed="no step in flight",
        remedy="Call step() or zero_grad() first.",
    )
