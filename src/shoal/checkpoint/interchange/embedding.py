"""Weights of `nn.Embedding`s and `nn.EmbeddingBag`s in a state dict: row i is id i."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.interchange.dumps import rows_at_once
from shoal.checkpoint.interchange.entries import Entries, Offered, Source, malformed, need_file
from shoal.errors import unknown_name

__all__ = ["open_embeddings"]


def open_embeddings(path: Path, tables: Mapping[str, str | None]) -> Source:
    """Open a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: the file; dicts in it may be nested, as in `{"model": state_dict}`.
        tables: name of each table to be -> key of its weights, or the end of the key. Without a
            key it is the one that ends in "NAME.weight" (as torchrec's
            "embedding_bags.NAME.weight" does) or the only weights [rows, D] there are.

    Raises:
        DataError: no such file, or one that torch does not load.
        UnknownName: no weights of that key or table.
    """
    need_file(path, "a file of torch.save")
    every = dict(_flat(_load(path)))
    weights = {key: value for key, value in every.items() if _is_matrix(value)}
    for table, key in tables.items():
        _check_form(path, f"{table}.weight" if key is None else key, every)
    return _Embeddings(
        {table: weights[_key_of(path, table, key, weights)] for table, key in tables.items()}
    )


class _Embeddings:
    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    @property
    def tables(self) -> tuple[Offered, ...]:
        return tuple(
            Offered(name=name, dim=weights.shape[1]) for name, weights in self._weights.items()
        )

    def entries(self, wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        for name, weights in self._weights.items():
            many = rows_at_once(weights.shape[1])
            for start in range(0, len(weights) if name in wanted else 0, many):
                piece = weights[start : start + many].detach().contiguous()
                yield (
                    name,
                    Entries(
                        ids=torch.arange(start, start + len(piece), device="cpu"), weights=piece
                    ),
                )


def _load(path: Path) -> Any:
    try:
        try:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except RuntimeError:  # a file of before torch 1.6 cannot be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        got = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "Save the state dict: torch.save(model.state_dict(), path)."
        raise malformed(path, got, "tensors by name, in dicts", remedy) from error


def _flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield prefix or "weight", part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _is_matrix(value: Tensor) -> bool:
    return value.ndim == 2 and value.dtype.is_floating_point and value.layout is torch.strided


def _check_form(path: Path, ending: str, every: Mapping[str, Tensor]) -> None:
    """Refuse weights that are there, of another form than a table's."""
    for name, value in every.items():
        if (name == ending or name.endswith(f".{ending}")) and not _is_matrix(value):
            layout = "" if value.layout is torch.strided else f", {value.layout}"
            raise malformed(
                f"weights {name} in {path}",
                f"{value.dtype} of shape {list(value.shape)}{layout}",
                "floats of shape [rows, columns]",
                "Name other weights with --key, or save them in this form.",
            )


def _key_of(path: Path, table: str, key: str | None, weights: Mapping[str, Tensor]) -> str:
    ending = f"{table}.weight" if key is None else key
    if ending in weights:
        return ending
    found = [name for name in weights if name.endswith(f".{ending}")]
    if key is None and not found and len(weights) == 1:
        found = list(weights)
    if len(found) > 1:
        remedy = "Name one with --key."
        raise malformed(
            f"table {table!r} in {path}", f"weights {', '.join(found)}", "weights of one", remedy
        )
    if not found:
        remedy = "Name the key of its weights with --key."
        raise unknown_name(f"weights of table {table!r} in {path}", ending, weights, remedy=remedy)
    return found[0]
