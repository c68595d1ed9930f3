"""Rows by id and by index: Monolith's map and gather functions, and the operators under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import ShapeError
from shoal.ops import checks
from shoal.ops.dispatch import by_core, fresh, linear, operator, widened


class GatheredRows(NamedTuple):
    """embeddings [*input.shape, D]; index_mapping int64, shaped as the input: row of each id."""

    embeddings: Tensor
    index_mapping: Tensor


def _threads(several: bool) -> int:
    return torch.get_num_threads() if several else 1


def _core_match(
    ids: Sequence[Tensor], query_N: Tensor, missing_ok: bool, multi_threads: bool, what: str
) -> Tensor:
    if len(ids) == 1:
        ids_M = ids[0].contiguous()
    else:
        ids_M = fresh(sum(part.numel() for part in ids), dtype=torch.int64)
        torch.cat(list(ids), out=ids_M)
    query_N = query_N.contiguous()
    index_N = fresh(query_N.numel(), dtype=torch.int64)
    pairs = address(ids_M), ids_M.numel(), address(query_N), query_N.numel()
    missing = core.match_rows(*pairs, address(index_N), _threads(multi_threads))
    if missing >= 0 and not missing_ok:
        raise checks.missing_id(what, missing, int(query_N[missing]))
    return index_N


def _core_gather(
    shards: Sequence[Tensor], index_N: Tensor, multi_threads: bool, what: str
) -> Tensor:
    shards, index_N = [rows.contiguous() for rows in shards], index_N.contiguous()
    dtype, width = shards[0].dtype, shards[0].shape[1]
    out_ND = fresh(index_N.numel(), width, dtype=dtype)
    counts = [rows.shape[0] for rows in shards]
    arrays = [address(rows) for rows in shards], counts, width * dtype.itemsize
    places = address(index_N), index_N.numel(), address(out_ND)
    bad = core.gather_rows(*arrays, *places, _threads(multi_threads))
    if bad >= 0:
        raise checks.bad_row_index(what, bad, int(index_N[bad]), sum(counts))
    return out_ND


def _check_index(index_N: Tensor, rows: int, what: str) -> None:
    """By the core, as of rows without columns."""
    _core_gather([torch.empty(rows, 0, device="cpu")], index_N.cpu(), True, what)


def _core_scatter(grad_ND: Tensor, index_N: Tensor, rows: int, what: str) -> Tensor:
    index_N, wide_ND = index_N.contiguous(), widened(grad_ND)
    n, dim = index_N.numel(), grad_ND.shape[1]
    out_MD = fresh(rows, dim, dtype=wide_ND.dtype)
    run = core.scatter_rows_f64 if wide_ND.dtype is torch.float64 else core.scatter_rows_f32
    addresses, threads = (address(wide_ND), address(index_N)), torch.get_num_threads()
    bad = run(*addresses, n, rows, dim, address(out_MD), threads)
    if bad >= 0:
        raise checks.bad_row_index(what, bad, int(index_N[bad]), rows)
    return out_MD.to(grad_ND.dtype)


def _gather_transposed(
    grad_ND: Tensor, shapes: Sequence[torch.Size], index_N: Tensor, _: bool, what: str
) -> list[Tensor]:
    counts = [shape[0] for shape in shapes]
    rows = sum(counts)
    if grad_ND.is_complex():
        pairs_ND = torch.view_as_real(grad_ND).flatten(1)
        sums_MD = _scatter_rows(pairs_ND, index_N, rows, what).view(rows, -1, 2)
        sums_MD = torch.view_as_complex(sums_MD)
    else:
        sums_MD = _scatter_rows(grad_ND, index_N, rows, what)
    return list(torch.split(sums_MD, counts))


_check_match = by_core(_core_match)
_match_rows = operator(
    "match_rows(Tensor[] ids, Tensor query_N, bool missing_ok, bool multi_threads, str what)"
    " -> Tensor",
    core=_core_match,
    triton="flat_rows:match_rows",
    fake=lambda ids, query_N, *_: torch.empty_like(query_N),
    check=lambda ids, query_N, missing_ok, *rest: (
        None if missing_ok else _check_match(ids, query_N, missing_ok, *rest)
    ),
)
_gather_rows = operator(
    "gather_rows(Tensor[] shards, Tensor index_N, bool multi_threads, str what) -> Tensor",
    core=_core_gather,
    triton="flat_rows:gather_rows",
    fake=lambda shards, index_N, *_: shards[0].new_empty(index_N.shape[0], shards[0].shape[1]),
    check=lambda shards, index_N, _, what: _check_index(
        index_N, sum(rows.shape[0] for rows in shards), what
    ),
    gradient=linear(_gather_transposed),
)
_scatter_rows = operator(
    "scatter_rows(Tensor grad_ND, Tensor index_N, SymInt rows, str what) -> Tensor",
    core=_core_scatter,
    triton="flat_rows:scatter_rows",
    fake=lambda grad_ND, index_N, rows, _: grad_ND.new_empty(rows, grad_ND.shape[1]),
    check=lambda grad_ND, index_N, rows, what: _check_index(index_N, rows, what),
    gradient=linear(
        lambda grad_MD, _, index_N, rows, what: _gather_rows([grad_MD], index_N, True, what)
    ),
)


def match_rows(
    ids_M: Tensor, query: Tensor, *, missing_ok: bool = False, multi_threads: bool = True
) -> Tensor:
    """First row of each id.

    ids_M int64 [M], query int64 of any shape; gives int64 shaped as `query`: the least i with
    `ids_M[i] == query`, or -1 for a missing id if `missing_ok`. No gradient. On CUDA a missing id
    gives -1 unless bounds checks are on.

    Raises:
        DTypeError, ShapeError: ids not int64 [M], or query not int64.
        InputError: a missing id; names it and its place in the flattened query. Several devices.
    """
    checks.check_ids("match_rows", "ids_M", ids_M)
    checks.check_ids("match_rows", "query", query, dims=None)
    checks.check_devices("match_rows", ids_M=ids_M, query=query)
    return _matched([ids_M], query, "match_rows: query", missing_ok, multi_threads)


def gather_rows(rows: Tensor | Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows by index.

    rows [M, D] of any dtype, or several [M_s, D] that are numbered through; index int64 of any
    shape; gives [*index.shape, D]. Gradient: `scatter_rows`. On CUDA without bounds checks, an
    index outside reads as NaN (integers: 0), and several arrays are joined first.

    Raises:
        DTypeError, ShapeError: index not int64, rows not two-dimensional, several dtypes or widths.
        InputError: an index outside 0 to M-1; names it. No rows, or several devices.
    """
    op = "gather_rows"
    shards = [rows] if isinstance(rows, Tensor) else list(rows)
    checks.check_lists(op, least=1, rows=shards)
    _check_shards(op, "rows", shards)
    checks.check_ids(op, "index", index, dims=None)
    checks.check_devices(op, rows=shards, index=index)
    return _gathered(shards, index, "gather_rows: index", True)


def scatter_rows(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum of the gradients of each row: what `gather_rows` does backwards.

    grad [*index.shape, D] floating, index int64 of any shape; gives [rows, D]: row r is the sum of
    all grad[i] with index[i] == r, added in order (float16 and bfloat16 in float32), so the result
    depends neither on the number of threads nor on chance. Gradient: `gather_rows`.

    Raises:
        DTypeError, ShapeError: index not int64, grad not floating or not [*index.shape, D].
        InputError: an index outside 0 to rows-1; names it. Several devices.
    """
    op = "scatter_rows"
    checks.check_ids(op, "index", index, dims=None)
    _check_grad(op, grad, index)
    checks.check_devices(op, grad=grad, index=index)
    if rows < 0:
        raise ShapeError(f"{op}: rows", rows, "0 or more", "Give the number of rows of the result.")
    return _scattered(grad, index, rows, "scatter_rows: index")


def map_id_to_embedding(
    ids: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    input: Tensor,
    use_multi_threads: bool = True,
) -> Tensor:
    """Embedding of each id of the input, looked up in several id lists.

    ids int64 [M_s] each, embeddings [M_s, D] each, input int64 of any shape; gives
    [*input.shape, D]. An id that occurs twice is read where it occurs first. Gradient: sum per row,
    in order. On CUDA without bounds checks a missing id reads as NaN.

    Raises:
        DTypeError, ShapeError: ids or input not int64, or an entry of embeddings not [M_s, D].
        InputError: a missing id; names it. Lists of different lengths, or several devices.

    Monolith: `map_id_to_embedding`.
    """
    op = "map_id_to_embedding"
    checks.check_lists(op, least=1, ids=ids, embeddings=embeddings)
    return _looked_up(op, ids, list(embeddings), input, use_multi_threads)[0]


def map_id_to_embedding_gradient_back_prop(
    ids: Sequence[Tensor], input: Tensor, grads: Tensor
) -> list[Tensor]:
    """Gradients of the embeddings that `map_id_to_embedding` read.

    ids int64 [M_s] each, input int64 of any shape, grads [*input.shape, D]; gives one [M_s, D] per
    entry of `ids` (views of one buffer): the sum of the gradients of each row, in order. A row
    whose id occurs earlier gets zeros. Gradient: that of `scatter_rows`.

    Raises:
        DTypeError, ShapeError: ids or input not int64, grads not floating [*input.shape, D].
        InputError: a missing id; names it. No ids, or several devices.

    Monolith: `map_id_to_embedding_gradient_back_prop`.
    """
    op = "map_id_to_embedding_gradient_back_prop"
    checks.check_lists(op, least=1, ids=ids)
    _check_id_lists(op, ids, input)
    _check_grad(op, grads, input)
    checks.check_devices(op, ids=ids, input=input, grads=grads)
    index = _matched(ids, input, f"{op}: input", False, True)
    sizes = [part.shape[0] for part in ids]
    return list(torch.split(_scattered(grads, index, sum(sizes), f"{op}: input"), sizes))


def gather_embeddings_by_input(
    ids: Tensor, embeddings: Tensor, input: Tensor, use_multi_threads: bool = True
) -> GatheredRows:
    """Embedding of each id of the input, and which row it is.

    ids int64 [M], embeddings [M, D], input int64 of any shape; gives embeddings [*input.shape, D]
    and index_mapping int64 shaped as the input. First match wins. Gradient: sum per row, in order
    (none through index_mapping). On CUDA without bounds checks a missing id reads as NaN, row -1.

    Raises:
        DTypeError, ShapeError: ids or input not int64, or embeddings not [M, D].
        InputError: a missing id; names it. Several devices.

    Monolith: `gather_embeddings_by_input` (its index_mapping is int32).
    """
    op = "gather_embeddings_by_input"
    return GatheredRows(*_looked_up(op, [ids], [embeddings], input, use_multi_threads))


def gather_embeddings_by_ids_gradient_back_prop(
    ids: Tensor, grads: Tensor, index_mapping: Tensor
) -> Tensor:
    """Gradient of the embeddings that `gather_embeddings_by_input` read.

    ids int64 [M] (only M counts), grads [*index_mapping.shape, D], index_mapping int64; gives
    [M, D]: the sum of the gradients of each row, in order. Gradient: that of `scatter_rows`.

    Raises:
        DTypeError, ShapeError: ids or index_mapping not int64, grads not floating or misshapen.
        InputError: an index outside 0 to M-1; names it. Several devices.

    Monolith: `gather_embeddings_by_ids_gradient_back_prop`.
    """
    op = "gather_embeddings_by_ids_gradient_back_prop"
    checks.check_ids(op, "ids", ids)
    checks.check_ids(op, "index_mapping", index_mapping, dims=None)
    _check_grad(op, grads, index_mapping)
    checks.check_devices(op, ids=ids, grads=grads, index_mapping=index_mapping)
    return _scattered(grads, index_mapping, ids.shape[0], f"{op}: index_mapping")


def _looked_up(
    op: str, ids: Sequence[Tensor], shards: list[Tensor], input: Tensor, many: bool
) -> tuple[Tensor, Tensor]:
    """The row of each id, and which it is."""
    _check_id_lists(op, ids, input)
    _check_shards(op, "embeddings", shards)
    for s, (ids_M, rows_MD) in enumerate(zip(ids, shards, strict=True)):
        if ids_M.shape[0] != rows_MD.shape[0]:
            at = f"[{s}]" if len(ids) > 1 else ""
            got, allowed = rows_MD.shape[0], f"{ids_M.shape[0]}, as many as ids{at}"
            raise ShapeError(f"{op}: rows of embeddings{at}", got, allowed, "Give one row per id.")
    checks.check_devices(op, ids=ids, embeddings=shards, input=input)
    index = _matched(ids, input, f"{op}: input", False, many)
    return _gathered(shards, index, f"{op}: input", many), index


def _matched(
    ids: Sequence[Tensor], query: Tensor, what: str, missing_ok: bool, many: bool
) -> Tensor:
    index_N: Tensor = _match_rows(list(ids), query.flatten(), missing_ok, many, what)
    return index_N.view(query.shape)


def _gathered(shards: list[Tensor], index: Tensor, what: str, many: bool) -> Tensor:
    rows_ND: Tensor = _gather_rows(shards, index.flatten(), many, what)
    return rows_ND.view(*index.shape, shards[0].shape[1])


def _scattered(grad: Tensor, index: Tensor, rows: int, what: str) -> Tensor:
    flat_ND = grad.reshape(index.numel(), grad.shape[-1])
    sums_MD: Tensor = _scatter_rows(flat_ND, index.flatten(), rows, what)
    return sums_MD


def _check_id_lists(op: str, ids: Sequence[Tensor], input: Tensor) -> None:
    for s, ids_M in enumerate(ids):
        checks.check_ids(op, f"ids[{s}]" if len(ids) > 1 else "ids", ids_M)
    checks.check_ids(op, "input", input, dims=None)


def _check_shards(op: str, name: str, shards: Sequence[Tensor]) -> None:
    for s, rows_MD in enumerate(shards):
        checks.check_rows(op, f"{name}[{s}]" if len(shards) > 1 else name, rows_MD)
    checks.check_same_dtype(op, name, shards)
    widths = {rows_MD.shape[1] for rows_MD in shards}
    if len(widths) > 1:
        raise ShapeError(
            f"{op}: widths of {name}", sorted(widths), "one width D", "Group them by D."
        )


def _check_grad(op: str, grad: Tensor, index: Tensor) -> None:
    checks.check_floating(op, "grads", grad)
    if grad.ndim != index.ndim + 1 or grad.shape[:-1] != index.shape:
        allowed = f"[*{tuple(index.shape)}, D]"
        raise ShapeError(
            f"{op}: grads", tuple(grad.shape), allowed, "Give one gradient row per index."
        )
