"""Sharding types: how the rows and columns of a table are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from shoal.errors import ConfigError
from shoal.placement.ownership import Hosted

Sharding = Literal[
    "row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel"
]

_WIDE_LOAD = 4  # columns: one load of a row, and one block of random words


def sharded(
    kind: str, table: str, dim: int, nodes: Sequence[tuple[int, ...]], load_W: Sequence[int]
) -> tuple[Hosted, ...]:
    """The slices of a table by its sharding type, on the ranks or nodes that hold least so far.

    Args:
        kind: a `Sharding`.
        table, dim: name and columns.
        nodes: ranks of each node.
        load_W: what each of W ranks holds so far, in any unit.

    Raises:
        ConfigError: no such type.
    """
    ranks = sorted(range(len(load_W)), key=load_W.__getitem__)
    near = sorted(nodes, key=lambda node: sum(load_W[rank] for rank in node) / len(node))
    slices = max(1, dim // _WIDE_LOAD)
    match kind:
        case "row_wise":
            return row_wise(table, dim, len(load_W))
        case "table_wise":
            return table_wise(table, dim, ranks[0])
        case "column_wise":
            return column_wise(table, dim, ranks[:slices])
        case "table_row_wise":
            return table_row_wise(table, dim, near[0])
        case "grid":
            return grid(table, dim, near[:slices])
        case "data_parallel":
            return data_parallel(table, dim, len(load_W))
    raise ConfigError(
        f"sharding type of table {table!r}",
        got=repr(kind),
        allowed=", ".join(get_args(Sharding)),
        remedy="Name one of them.",
    )


def row_wise(table: str, dim: int, world_size: int) -> tuple[Hosted, ...]:
    """All columns, rows split over all ranks."""
    return (Hosted(table, 0, dim, tuple(range(world_size))),)


def table_wise(table: str, dim: int, rank: int) -> tuple[Hosted, ...]:
    """The whole table on one rank."""
    return (Hosted(table, 0, dim, (rank,)),)


def column_wise(table: str, dim: int, ranks: Sequence[int]) -> tuple[Hosted, ...]:
    """One column slice for each of `ranks`, as even as possible; a rank may occur several times.

    Slices start at multiples of 4 columns if dim is one and each slice gets at least 4.

    Raises:
        ConfigError: more ranks than columns.
    """
    return grid(table, dim, tuple((rank,) for rank in ranks))


def table_row_wise(table: str, dim: int, ranks: Sequence[int]) -> tuple[Hosted, ...]:
    """All columns, rows split over some ranks: those of one node."""
    return (Hosted(table, 0, dim, tuple(ranks)),)


def grid(table: str, dim: int, column_nodes: Sequence[tuple[int, ...]]) -> tuple[Hosted, ...]:
    """One column slice for each tuple of ranks, over which the slice's rows are split.

    Slices as in `column_wise`.

    Raises:
        ConfigError: more slices than columns.
    """
    count = len(column_nodes)
    if type(dim) is not int or not 0 < count <= dim:
        raise ConfigError(
            f"column slices of table {table!r}",
            got=f"{count} of {dim!r} columns",
            allowed="at least one, each with one column or more",
            remedy="Split the table into fewer slices.",
        )
    unit = _WIDE_LOAD if dim % _WIDE_LOAD == 0 and dim // _WIDE_LOAD >= count else 1
    cuts = [-(-k * (dim // unit) // count) * unit for k in range(count + 1)]
    return tuple(
        Hosted(table, start, stop, tuple(ranks))
        for (start, stop), ranks in zip(pairwise(cuts), column_nodes, strict=True)
    )


def data_parallel(table: str, dim: int, world_size: int) -> tuple[Hosted, ...]:
    """The whole table on every rank."""
    return (Hosted(table, 0, dim, tuple(range(world_size)), replicated=True),)
