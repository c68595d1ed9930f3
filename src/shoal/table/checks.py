"""Checks of what crosses into a shard: each raises before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address, group_addresses
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, all_of_kind, known_name
from shoal.ids import salt
from shoal.lookup import POOLINGS, PoolPlan, check_sums
from shoal.table import shard
from shoal.table.shard import IdGroups, RowsById, StepContext, SummedGrads
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk

_CPU = torch.device("cpu")
_MAX_COUNT = (1 << 31) - 1
_MAX_UINT32 = (1 << 32) - 1


def seed(value: object) -> None:
    """Check a seed of initial values.

    Raises:
        DTypeError: not an int.
        InputError: it does not fit 64 bits.
    """
    remedy = "Pass a whole number of at most 64 bits."
    shard.whole("seed", value, -(1 << 63), (1 << 64) - 1, remedy=remedy)


def distinct_names(specs: Sequence[TableSpec]) -> None:
    """Check that names of tables differ. A rank may have none: fewer tables than ranks."""
    names = [spec.name for spec in all_of_kind("tables of a shard", specs, TableSpec)]
    if len(set(names)) != len(names):
        remedy = "Merge equal tables or rename one."
        raise ConfigError("tables of a shard", names, "distinct names", remedy)


def hosted_tables(given: RowsById, specs: Iterable[TableSpec]) -> dict[str, TableSpec]:
    """The tables of a shard by name, after a check that these are among them.

    Raises:
        DTypeError: no shard.
        UnknownName: the shard has none of this name.
        ConfigError: it has another spec.
    """
    if not hasattr(given, "specs"):
        got, remedy = f"{given!r:.100} ({type(given).__name__})", "Pass one, or leave it out."
        raise DTypeError("shard", got, "a shard, as make_shard returns", remedy)
    hosted = {one.name: one for one in given.specs}
    for spec in specs:
        known_name("table of the given shard", spec.name, hosted)
        if hosted[spec.name] != spec:
            got, remedy = "another spec than the given shard's", "Take the specs from shard.specs."
            raise ConfigError(f"spec of table {spec.name!r}", got, "the same spec", remedy)
    return hosted


def expected_rows(rows: object) -> int:
    """Check a number of rows that a table will have.

    Raises:
        DTypeError: not an int.
        InputError: negative.
    """
    shard.whole("rows to expect", rows, 0, shard.MAX_ID, remedy="Pass how many will come.")
    assert isinstance(rows, int)
    return min(rows, _MAX_COUNT - 1)


def flat(
    what: str, value: Tensor, device: torch.device = _CPU, dtype: torch.dtype = torch.int64
) -> None:
    """Check a vector of numbers that a shard on a device reads.

    Raises:
        DTypeError: another dtype, or on another device.
        ShapeError: not one contiguous dimension.
    """
    there = value.is_cpu if device is _CPU else value.device == device
    if value.dtype is dtype and there and value.dim() == 1 and value.is_contiguous():
        return
    if value.dtype is not dtype or not there:
        remedy = f"Convert with .to({str(device)!r}, {dtype})."
        raise DTypeError(what, f"{value.dtype} on {value.device}", f"{dtype} on {device}", remedy)
    raise ShapeError(
        what,
        got=f"shape {tuple(value.shape)}, contiguous={value.is_contiguous()}",
        allowed="one contiguous dimension",
        remedy="Flatten with .reshape(-1).contiguous().",
    )


def unfit_groups(splits: Sequence[int], tables: Sequence[int], known: int, ids: int) -> ShapeError:
    """The error for splits or tables that do not fit each other or the ids."""
    return ShapeError(
        "groups",
        got=f"splits {list(splits)[:8]}, tables {list(tables)[:8]}, {ids} ids",
        allowed=f"G + 1 splits rising from 0 to the number of ids, tables 0..{known - 1}",
        remedy="Build the splits as a running sum of group sizes, one table index a group.",
    )


def groups(value: IdGroups, tables: int) -> Any:
    """Check ids, splits and table indices of a call; returns them as the core takes them."""
    ids_N, splits_G1, tables_G = value
    places = group_addresses(ids_N, splits_G1, tables_G)
    if places is None:
        flat("ids", ids_N)
        flat("splits of ids", splits_G1)
        flat("tables of ids", tables_G, dtype=torch.int32)
        places = address(ids_N), address(splits_G1), address(tables_G)
    n, count = ids_N.numel(), tables_G.numel()
    if splits_G1.numel() == count + 1:
        try:
            return _core.Groups(n, count, *places, tables)
        except ValueError:
            pass
    raise unfit_groups(splits_G1.tolist(), tables_G.tolist(), tables, n)


def counts(value: IdGroups, counts_N: Tensor | None) -> int:
    """Check occurrence counts against ids, and what they hold; their address, 0 for None."""
    if counts_N is None:
        return 0
    one_per_id(counts_N, value.ids_N.numel())
    _within("counts", counts_N, _MAX_COUNT)
    return address(counts_N)


def one_per_id(counts_N: Tensor | None, n: int, device: torch.device = _CPU) -> None:
    """Check the shape of occurrence counts of n ids, but not what they hold."""
    if counts_N is None:
        return
    flat("counts", counts_N, device)
    if counts_N.numel() != n:
        remedy = "Leave counts out when each position stands for one occurrence."
        raise ShapeError("counts", counts_N.numel(), f"one per id, {n}", remedy)


def table_index(index: int, tables: int) -> None:
    """Check the index of a table of a shard.

    Raises:
        DTypeError: not an int.
        InputError: no such table.
    """
    remedy = "Count the tables as in Shard.specs."
    shard.whole("table index", index, 0, tables - 1, remedy=remedy)


def sketch(table: str, cells: bytes, expected: int) -> None:
    """Check the size of a sketch that admission counters are restored from."""
    if len(cells) != expected:
        raise ShapeError(
            f"admission counters of table {table!r}",
            got=f"a sketch of {len(cells)} bytes",
            allowed=f"{expected} bytes",
            remedy="Keep counter, sketch_width and sketch_depth as they were saved.",
        )


def _within(what: str, values_N: Tensor, high: int) -> None:
    if values_N.numel() == 0:
        return
    least, most = (int(edge) for edge in values_N.aminmax())
    if least < 0 or most > high:
        remedy = "Check where the numbers come from."
        raise InputError(what, least if least < 0 else most, f"0..{high}", remedy)


def bags(
    value: IdGroups, core: Any, offsets_GB1: Tensor, weights_N: Tensor | None
) -> tuple[int, int, int]:
    """Check bag offsets and weights of a pooled call against its groups.

    Returns:
        address of the offsets, bags B, address of the weights or 0.
    """
    size = bag_count(value.tables_G.numel(), value.ids_N.numel(), offsets_GB1, weights_N)
    place = address(offsets_GB1)
    # Group edges must agree with the splits, or a row of one table would be read as another's.
    if not core.bags_fit(place, size):
        raise ShapeError(
            "offsets",
            got=f"edges {offsets_GB1[:: max(size, 1)].tolist()[:8]}",
            allowed=f"rising, with group edges {value.splits_G1.tolist()[:8]}",
            remedy="Offsets are absolute positions in the ids, group-major.",
        )
    if weights_N is None:
        return place, size, 0
    if not weights_N.isfinite().all():
        raise InputError(
            "weights of ids",
            got=f"NaN or infinity at position {int((~weights_N.isfinite()).nonzero()[0])}",
            allowed="finite numbers",
            remedy="Use weight 0 for ids that should not count.",
        )
    return place, size, address(weights_N)


def bag_count(
    count: int, n: int, offsets_GB1: Tensor, weights_N: Tensor | None, device: torch.device = _CPU
) -> int:
    """Check bag offsets and weights of a pooled call of G groups of n ids, but not what they
    hold; returns B.
    """
    flat("offsets", offsets_GB1, device)
    cells = offsets_GB1.numel() - 1
    if cells < 0 or (cells % count if count else cells):
        raise ShapeError(
            "offsets",
            got=f"{offsets_GB1.numel()} values for {count} groups",
            allowed="G * B + 1",
            remedy="Concatenate one row of B lengths per group, then take the running sum.",
        )
    if weights_N is not None and (
        weights_N.dtype != torch.float32
        or weights_N.shape != (n,)
        or not weights_N.is_contiguous()
        or weights_N.device != device
    ):
        raise ShapeError(
            "weights of ids",
            got=f"{weights_N.dtype} {tuple(weights_N.shape)} on {weights_N.device}",
            allowed=f"contiguous torch.float32 ({n},) on {device}",
            remedy="Give one float32 weight per id.",
        )
    return cells // count if count else 0


def plan(
    value: PoolPlan, tables: Sequence[int], dims: Sequence[int], reals: Sequence[torch.dtype]
) -> tuple[torch.dtype, ...]:
    """Check a pool plan against the tables of its groups; returns each output's dtype."""
    if len(value.pools) != len(tables):
        got, remedy = f"{len(value.pools)} pools", "Build the plan for the groups it is used with."
        raise ShapeError("pool plan", got, f"one per group, {len(tables)}", remedy)
    dtypes: dict[int, torch.dtype] = {}
    for pool, table in zip(value.pools, tables, strict=True):
        known_name("pooling of a pool plan", pool.pooling, POOLINGS)
        for piece in pool.slices:
            width = (pool.length - 1) * piece.stride + piece.width
            if not 0 <= piece.output < len(value.outputs):
                raise ShapeError(
                    "output of a slice of a pool plan",
                    got=piece.output,
                    allowed=f"0..{len(value.outputs) - 1}",
                    remedy="Declare an Output for each that slices name.",
                )
            inside = 0 <= piece.start < piece.stop <= dims[table] and piece.column >= 0
            if not inside or piece.column + width > value.outputs[piece.output].width:
                raise ShapeError(
                    "slice of a pool plan",
                    got=piece,
                    allowed=f"columns within 0..{dims[table]} and within its output",
                    remedy="Derive slices from TableSpec.columns().",
                )
            if dtypes.setdefault(piece.output, reals[table]) != reals[table]:
                raise DTypeError(
                    f"output {piece.output} of a pool plan",
                    got="float32 and float64 tables",
                    allowed="tables of one precision",
                    remedy="Put float64 tables into outputs of their own.",
                )
    check_sums(value.pools)
    return tuple(dtypes.get(i, torch.float32) for i in range(len(value.outputs)))


def grads(
    values: Sequence[Tensor],
    shapes: Sequence[tuple[tuple[int, int], torch.dtype]],
    device: torch.device = _CPU,
) -> list[Tensor]:
    """Check rows handed to a shard on a device; returns them contiguous."""
    if len(values) != len(shapes):
        remedy = "Give one tensor per group (or per output of the plan)."
        raise ShapeError("tensors of rows", len(values), len(shapes), remedy)
    ready = []
    for value, (shape, dtype) in zip(values, shapes, strict=True):
        if value.shape != shape:
            remedy = "One row per id, as wide as its table (or output)."
            raise ShapeError("rows", tuple(value.shape), shape, remedy)
        if value.dtype is not dtype or value.device != device:
            allowed, remedy = f"{dtype} on {device}", f"Convert with .to({str(device)!r}, {dtype})."
            raise DTypeError("rows", f"{value.dtype} on {value.device}", allowed, remedy)
        value = value.detach() if value.requires_grad else value
        if value.is_neg() or not value.is_contiguous():
            value = value.resolve_neg().contiguous()
        ready.append(value)
    return ready


def single_output(
    out: Tensor, value: IdGroups, dims: Sequence[int], reals: Sequence[torch.dtype]
) -> None:
    """Check a preallocated output of a single-group find."""
    table = int(value.tables_G[0]) if value.tables_G.numel() == 1 else -1
    shape = (value.ids_N.numel(), dims[table])
    good = table >= 0 and tuple(out.shape) == shape and out.dtype == reals[table]
    if not good or not out.is_contiguous() or out.device.type != "cpu":
        raise ShapeError(
            "out",
            got=f"{out.dtype} {tuple(out.shape)} on {out.device}",
            allowed=f"contiguous {reals[table]} {shape} on cpu, one group",
            remedy="Allocate it with torch.empty(N, D).",
        )


def rates(ctx: StepContext, specs: Sequence[TableSpec]) -> None:
    """Check that learning rates name tables of the shard, one finite rate per segment."""
    if not ctx.learning_rates:
        return
    known = {spec.name: len(spec.segments) for spec in specs}
    for name, row in ctx.learning_rates.items():
        known_name("table in learning_rates", name, known)
        if len(row) != known[name]:
            what, remedy = f"learning rates of table {name!r}", "Order them as the spec's segments."
            raise ShapeError(what, len(row), f"one per segment, {known[name]}", remedy)
    shard.finite_rates(ctx.learning_rates)


def summed_groups(summed: SummedGrads) -> IdGroups:
    """The ids of summed gradients, one group per table."""
    sizes = torch.tensor([0, *(ids.numel() for ids in summed.ids)], dtype=torch.int64, device="cpu")
    return IdGroups(
        torch.cat(summed.ids),
        sizes.cumsum(0),
        torch.tensor(summed.tables, dtype=torch.int32, device="cpu"),
    )


def chunk(
    value: RowChunk, spec: TableSpec, weights: torch.dtype, real: torch.dtype
) -> tuple[Tensor, ...]:
    """Check rows to load; returns (ids, versions, seen, counts, weights, state), contiguous."""
    if value.table != spec.name:
        remedy = "Load rows into their own table, or name the chunk after this one."
        raise InputError("table of rows to load", repr(value.table), repr(spec.name), remedy)
    rows = value.ids.numel()
    expected = {
        "ids": (value.ids, (rows,), torch.int64),
        "versions": (value.versions, (rows,), torch.int64),
        "last_seen_s": (value.last_seen_s, (rows,), torch.int64),
        "counts": (value.counts, (rows,), torch.int64),
        "weights": (value.weights, (rows, spec.stored_width), weights),
        "state": (value.state, (rows, spec.state_width), real),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ShapeError(
                f"{name} of rows for table {spec.name!r}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                allowed=f"{dtype} {shape}",
                remedy="Load rows of a table with the same segments, rules and dtype.",
            )
    _within(f"versions of rows for table {spec.name!r}", value.versions, shard.LAST_VERSION)
    for name in ("last_seen_s", "counts"):
        _within(f"{name} of rows for table {spec.name!r}", expected[name][0], _MAX_UINT32)
    ready = tuple(tensor.contiguous() for tensor, _, _ in expected.values())
    # Rows that were saved come in order of hash, which is quick to see; others are sorted.
    on_host = ready[0].device == _CPU
    if on_host and _core.ordered_by_hash(address(ready[0]), rows, salt(spec.hash_name)):
        return ready
    sorted_R = value.ids.sort().values
    twice_R = sorted_R[1:][sorted_R[1:] == sorted_R[:-1]]
    if twice_R.numel():
        got, remedy = f"id {int(twice_R[0])} twice", "Keep one row per id."
        raise InputError(f"ids of rows for table {spec.name!r}", got, "distinct ids", remedy)
    return ready
