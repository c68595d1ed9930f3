"""Inputs and contenders of the row operations: by id, by index, and out of a flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ids import to_ids
from ops_work import Work, equal
from shoal import ops

__all__ = [
    "fused_gather",
    "fused_gather_gradient",
    "gather",
    "gather_by_input",
    "map_id",
    "scatter",
]

WORD = 8  # bytes of an id or an index
FLOAT = 4


def map_id(*, device: str, ids: int, shards: int, dim: int) -> Work:
    """Every id of the shards once, in any order; mapped rows must be the original ones."""
    ids_N = to_ids(torch.arange(ids)).to(device)
    rows_ND = torch.rand(ids, dim, device=device)
    parts = [ids_N[shard::shards].contiguous() for shard in range(shards)]
    rows = [rows_ND[shard::shards].contiguous() for shard in range(shards)]
    pick_N = torch.randperm(ids, device=device)
    input_N, original_ND = ids_N[pick_N].contiguous(), rows_ND[pick_N]
    search = _Search(ids, input_N, dim)

    def ours() -> Tensor:
        return ops.map_id_to_embedding(parts, rows, input_N, _several())

    def by_search() -> Tensor:
        return search(torch.cat(parts), torch.cat(rows))

    def check() -> None:
        equal(ours(), original_ND, "rows: mapped != original")
        equal(by_search(), original_ND, "rows of the baseline")

    return Work(
        ours=ours,
        peers={"sort and search": by_search},
        moved=ids * (2 * WORD + 2 * FLOAT * dim),
        check=check,
    )


def gather_by_input(*, device: str, ids: int, columns: int, dim: int) -> Work:
    """An input [ids, columns] drawn from the ids; gathered rows must be the original ones."""
    ids_M = to_ids(torch.arange(ids)).to(device)
    rows_MD = torch.rand(ids, dim, device=device)
    pick = torch.randint(ids, (ids, columns), device=device)
    input_, original = ids_M[pick], rows_MD[pick]
    search = _Search(ids, input_, dim)

    def check() -> None:
        found = ops.gather_embeddings_by_input(ids_M, rows_MD, input_, _several())
        equal(found.embeddings, original, "rows: gathered != original")
        equal(found.index_mapping, pick, "index mapping")
        equal(search(ids_M, rows_MD), original, "rows of the baseline")

    total = ids * columns
    return Work(
        ours=lambda: ops.gather_embeddings_by_input(ids_M, rows_MD, input_, _several()),
        peers={"sort and search": lambda: search(ids_M, rows_MD)},
        moved=WORD * (ids + 2 * total) + 2 * FLOAT * dim * total,
        check=check,
    )


def gather(*, device: str, dim: int, value_bytes: int) -> Work:
    """As many random indices as rows."""
    count = value_bytes // (FLOAT * dim)
    rows_MD = torch.rand(count, dim, device=device)
    index_N = torch.randint(count, (count,), device=device)
    out_ND = torch.empty_like(rows_MD)
    return Work(
        ours=lambda: ops.gather_rows(rows_MD, index_N),
        peers={
            "index_select": lambda: torch.index_select(rows_MD, 0, index_N, out=out_ND),
            "embedding": lambda: functional.embedding(index_N, rows_MD),
        },
        moved=count * (WORD + 2 * FLOAT * dim),
    )


def scatter(*, device: str, dim: int, value_bytes: int) -> Work:
    """The gradient of `gather`."""
    count = value_bytes // (FLOAT * dim)
    grad_ND = torch.rand(count, dim, device=device)
    index_N = torch.randint(count, (count,), device=device)
    sums_MD = torch.empty_like(grad_ND)

    def by_dense_backward() -> Tensor:
        sums: Tensor = torch.ops.aten.embedding_dense_backward(grad_ND, index_N, count, -1, False)
        return sums

    return Work(
        ours=lambda: ops.scatter_rows(grad_ND, index_N, count),
        peers={
            "index_add_": lambda: sums_MD.zero_().index_add_(0, index_N, grad_ND),
            "embedding_dense_backward": by_dense_backward,
        },
        moved=count * (WORD + 2 * FLOAT * dim),
    )


def fused_gather(*, device: str, tables: int, ids: int, dim: int) -> Work:
    """Random rows of each table; the baseline has row numbers ready."""
    flat = _Flat(device, tables, ids, dim)
    outs = [torch.empty(ids, dim, device=device) for _ in range(tables)]
    out_ND = torch.empty(tables * ids, dim, device=device)

    def per_table() -> list[Tensor]:
        for index_N, out in zip(flat.index, outs, strict=True):
            torch.index_select(flat.rows_MD, 0, index_N, out=out)
        return outs

    def at_once() -> tuple[Tensor, ...]:
        torch.index_select(flat.rows_MD, 0, flat.index_N, out=out_ND)
        return torch.split(out_ND, ids)

    buffer_E = flat.rows_MD.view(-1)
    return Work(
        ours=lambda: ops.fused_gather_embeddings_by_input(buffer_E, flat.offsets, flat.dims),
        peers={"index_select per table": per_table, "one index_select": at_once},
        moved=tables * ids * (WORD + 2 * FLOAT * dim),
    )


def fused_gather_gradient(*, device: str, tables: int, ids: int, dim: int) -> Work:
    """The gradient of `fused_gather`."""
    flat = _Flat(device, tables, ids, dim)
    grads = [torch.rand(ids, dim, device=device) for _ in range(tables)]
    joined_ND = torch.empty(tables * ids, dim, device=device)
    sums_MD = torch.empty_like(flat.rows_MD)
    size = sums_MD.numel()

    def per_table() -> Tensor:
        sums_MD.zero_()
        for index_N, grad_ND in zip(flat.index, grads, strict=True):
            sums_MD.index_add_(0, index_N, grad_ND)
        return sums_MD.view(-1)

    def at_once() -> Tensor:
        torch.cat(grads, out=joined_ND)
        return sums_MD.zero_().index_add_(0, flat.index_N, joined_ND).view(-1)

    return Work(
        ours=lambda: ops.fused_gather_embeddings_by_input_gradient(
            size, grads, flat.offsets, flat.dims
        ),
        peers={"index_add_ per table": per_table, "one index_add_": at_once},
        moved=tables * ids * (WORD + 2 * FLOAT * dim),
    )


def _several() -> bool:
    """Monolith's switch for many threads."""
    return torch.get_num_threads() > 1


class _Search:
    """Rows by id in plain torch; all outputs except torch's own are allocated before."""

    def __init__(self, ids: int, input_: Tensor, dim: int) -> None:
        self.input = input_
        self.sorted_M, self.order_M = (input_.new_empty(ids) for _ in range(2))
        self.place, self.index = torch.empty_like(input_), torch.empty_like(input_)
        self.out_ND = torch.empty(input_.numel(), dim, device=input_.device)

    def __call__(self, ids_M: Tensor, rows_MD: Tensor) -> Tensor:
        torch.sort(ids_M, out=(self.sorted_M, self.order_M))
        torch.searchsorted(self.sorted_M, self.input, out=self.place)
        torch.take(self.order_M, self.place, out=self.index)
        torch.index_select(rows_MD, 0, self.index.view(-1), out=self.out_ND)
        return self.out_ND.view(*self.input.shape, -1)


class _Flat:
    """A flat buffer of tables one after the other, and where each wanted row starts."""

    def __init__(self, device: str, tables: int, ids: int, dim: int) -> None:
        self.rows_MD = torch.rand(tables * ids, dim, device=device)
        self.dims = [dim] * tables
        self.index = [
            torch.randint(ids, (ids,), device=device) + table * ids for table in range(tables)
        ]
        self.index_N = torch.cat(self.index)
        self.offsets = [index_N * dim for index_N in self.index]
