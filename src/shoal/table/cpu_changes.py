"""Pages of what changed, out of the compiled core."""

from __future__ import annotations

from typing import Any

import torch

from shoal.address import address
from shoal.errors import InputError, describe
from shoal.table import rows, scalars
from shoal.table.changes import Changes, Cursor, DeletedIds, checked_limit, not_closed
from shoal.table.spec import TableSpec

__all__ = ["changes_of", "resumed"]


def changes_of(specs: tuple[TableSpec, ...], core: Any, cursor: Cursor, limit: int) -> Changes:
    """A page of a compiled shard.

    Raises:
        InputError: limit is below 1, or `to_epoch` is not closed yet.
    """
    at = (cursor.incarnation, cursor.from_epoch, cursor.to_epoch, cursor.position)
    checked_limit(limit)
    try:
        page = core.changes(*at, limit)
    except ValueError as error:
        raise not_closed(cursor) from error
    chunks = []
    deleted = []
    for table, spec in enumerate(specs):
        if page.rows(table).n > 0:
            chunks.append(rows.chunk_of(spec, page.rows(table)))
        count = page.deleted_count(table)
        if count > 0:
            ids_U = torch.empty(count, dtype=torch.int64, device="cpu")
            page.copy_deleted(table, address(ids_U))
            deleted.append(DeletedIds(spec.name, ids_U))
    return Changes(tuple(chunks), tuple(deleted), Cursor(*page.cursor), page.done, page.restarted)


def resumed(core: Any, epoch: int) -> Cursor:
    """The cursor of a compiled shard's consumer that has everything up to `epoch`.

    Raises:
        DTypeError: not an int.
        InputError: an epoch below one that a row is stamped with, or outside [0, 2^32 - 2].
    """
    remedy = "Pass the epoch that the loaded rows were saved at."
    scalars.whole("epoch to resume at", epoch, 0, scalars.LAST_VERSION, remedy=remedy)
    try:
        return Cursor(*core.resume(epoch))
    except ValueError as error:
        raise InputError(
            describe(
                "epoch to resume at",
                got=epoch,
                allowed="at least the version of every row",
                remedy=remedy,
            )
        ) from error
