"""What a foreign file offers, and what it becomes here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.manifest import SavedTable
from shoal.checkpoint.matching import saved_table
from shoal.errors import DataError, describe
from shoal.table.spec import TableSpec

__all__ = [
    "STATE_DTYPES",
    "WEIGHT_DTYPES",
    "Entries",
    "Offered",
    "Source",
    "TableForm",
    "form_of",
    "malformed",
    "need_file",
]

WEIGHT_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
STATE_DTYPES = {name: torch.float32 for name in WEIGHT_DTYPES} | {"float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Some rows as a foreign file has them, in any order; what it does not have is None.

    ids int64 [N]; weights floating [N, D]; state floating [N, S]; versions, last_seen_s and counts
    int64 [N].
    """

    ids: Tensor
    weights: Tensor
    state: Tensor | None = None
    versions: Tensor | None = None
    last_seen_s: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A table that a source has: D columns. `saved` and `seed` where it says what they were."""

    name: str
    dim: int
    saved: SavedTable | None = None
    seed: int | None = None
    has_state: bool = False


class Source(Protocol):
    """An opened foreign file or folder."""

    @property
    def tables(self) -> tuple[Offered, ...]: ...

    def entries(self, wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        """The rows of the tables of these names, a bounded number at a time.

        Raises:
            DataError: the file is damaged, or not what it seemed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableForm:
    """What rows become. `initial_state` [S] is of rows that come without; None: they may not."""

    table: SavedTable
    initial_state: Tensor | None


def form_of(collection: str, spec: TableSpec) -> TableForm:
    """The form of a table's rows; their state, where they have none, is the rules' initial one."""
    dtype = STATE_DTYPES[spec.dtype]
    parts = [segment.optimizer.init_state(segment.dim, dtype) for segment in spec.segments]
    return TableForm(
        table=saved_table(collection, spec, rows=0, deleted=0),
        initial_state=torch.cat([part.reshape(-1) for part in parts]),
    )


def need_file(path: Path, allowed: str) -> None:
    """Check that a path is there.

    Raises:
        DataError: it is not.
    """
    if not path.exists():
        raise malformed(path, "nothing", allowed, "Check the path.")


def malformed(where: object, got: object, allowed: object, remedy: str) -> DataError:
    """Build the error of a foreign file that cannot be read."""
    return DataError(describe(f"rows of {where}", got=got, allowed=allowed, remedy=remedy))
