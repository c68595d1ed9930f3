"""A chain of deltas as one new full checkpoint, equal to a full save at that cut."""

from __future__ import annotations

import dataclasses
import secrets
import time

from shoal import _core
from shoal.checkpoint.manifest import Manifest, SavedFile, SavedTable, commit
from shoal.checkpoint.row_files import RowFileWriter, damaged
from shoal.checkpoint.row_layout import RowLayout
from shoal.checkpoint.row_sources import ChainRows
from shoal.checkpoint.splitting import FilePlan, TableRows, bits_for, pieces, split
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, folder_name
from shoal.errors import CheckpointError, describe

__all__ = ["compact"]

_PIECE_BYTES = 16 << 20


def compact(store: CheckpointStore, name: str) -> Manifest:
    """Write what a delta and its chain stand for as a full checkpoint of the same step.

    Row files have the bytes that a full save at that cut would have given them; dense weights,
    state and admission counters are the delta's. The manifest is written last: until then
    nothing but leftovers for `CheckpointStore.clean` are there. The chain stays.

    Args:
        name: folder of the delta.

    Raises:
        CheckpointError: a full checkpoint, one of that step exists already, a link of the chain
            is missing or damaged, or no space; nothing is left behind then.
    """
    chain = store.chain(name)
    last = chain[-1]
    target = folder_name(last.step, "full")
    taken = any(entry.name == target for entry in store.list())
    if last.kind == "full" or taken:
        raise CheckpointError(
            describe(
                f"checkpoint {name} to compact in {store.url}",
                got="a full one" if last.kind == "full" else f"a delta, with {target} beside it",
                allowed="a delta without a full checkpoint of its step",
                remedy="Nothing is left to do: load the full one.",
            )
        )
    folder, held = store.folder(target), store.claim(target)
    try:
        manifest = _written(folder, store.folder(name), ChainRows(store.storage, chain, name), last)
        commit(folder, manifest)
    except BaseException:
        folder.remove_tree()
        held.release()
        raise
    held.release(keep=False)
    return manifest


def _written(folder: Storage, newest: Storage, rows: ChainRows, last: Manifest) -> Manifest:
    """All files of the full checkpoint, and its manifest yet to be committed."""
    folder.make()
    counted = []
    for k, table in enumerate(rows.tables):
        bits = bits_for(rows.most_rows(k))
        counted.append(TableRows(table.key, RowLayout.of(table), rows.histogram(k, bits)))
    files = [_write_rows(folder, plan, rows, counted) for plan in split(counted)]
    copied = ("sights", "sketch", "dense", "state")
    files += [_copied(newest, folder, file) for file in last.files if file.kind in copied]
    return dataclasses.replace(
        last,
        id=secrets.token_hex(16),
        kind="full",
        parent=None,
        created_s=int(time.time()),
        tables=tuple(
            _whole(table, one.rows) for table, one in zip(rows.tables, counted, strict=True)
        ),
        files=tuple(files),
    )


def _whole(table: SavedTable, rows: int) -> SavedTable:
    return dataclasses.replace(table, rows=rows, deleted=0)


def _write_rows(
    folder: Storage, plan: FilePlan, rows: ChainRows, counted: list[TableRows]
) -> SavedFile:
    assert isinstance(plan.layout, RowLayout)
    writer = RowFileWriter(folder, plan.path, plan.layout, plan.tables, (plan.start, plan.stop))
    try:
        for k, key in enumerate(plan.tables):
            index = rows.index(key)
            parts = pieces(counted[index], plan.start, plan.stop, piece_bytes=_PIECE_BYTES)
            for start, stop, _ in parts:
                writer.add(k, rows.read(index, start, stop))
        return writer.close()
    except BaseException:
        writer.abort()
        raise


def _copied(source: Storage, folder: Storage, saved: SavedFile) -> SavedFile:
    """The same bytes in another folder, compared with the manifest on their way."""
    crc32 = 0
    with folder.create(saved.path) as new:
        for piece in source.pieces(saved.path):
            crc32 = _core.crc32(piece, crc32)
            new.write(piece)
        if (new.bytes, crc32) != (saved.bytes, saved.crc32):
            got = f"{new.bytes} bytes, checksum {crc32:08x}"
            raise damaged(
                source, saved.path, got, f"{saved.bytes} bytes, checksum {saved.crc32:08x}"
            )
    return saved
