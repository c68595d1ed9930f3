"""Pages of what changed, out of the compiled core."""

from __future__ import annotations

from typing import Any

import torch

from shoal.table import rows
from shoal.table.changes import Changes, Cursor, DeletedIds, checked_limit, not_closed
from shoal.table.spec import TableSpec

__all__ = ["changes_of"]


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
            ids_U = torch.empty(count, dtype=torch.int64)
            page.copy_deleted(table, ids_U.data_ptr())
            deleted.append(DeletedIds(spec.name, ids_U))
    return Changes(tuple(chunks), tuple(deleted), Cursor(*page.cursor), page.done, page.restarted)
