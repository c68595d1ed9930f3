"""A full checkpoint of rows from elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shoal.checkpoint.interchange.collecting import CollectedRows
from shoal.checkpoint.interchange.entries import Source, TableForm
from shoal.checkpoint.manifest import SCHEMA, Manifest, SavedFile, SavedTable, commit
from shoal.checkpoint.row_files import RowFileWriter, sketch_path, write_whole
from shoal.checkpoint.row_layout import RowLayout
from shoal.checkpoint.splitting import TableRows, bits_for, pieces, split
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError, describe

__all__ = ["receive"]

_PIECE_BYTES = 8 << 20


def receive(
    url: str,
    source: Source,
    forms: Mapping[str, TableForm],
    *,
    created_s: int,
    seed: int = 0,
    last_seen_s: int = 0,
    weights_only: bool = False,
) -> tuple[Manifest, str]:
    """Write tables of a source as the first checkpoint of a new store: a full one, of step 0.

    All rows are read and checked before the first is written. On their way they lie in files of
    the folder of temporary files.

    Args:
        url: the store's folder, new or empty.
        forms: name of a table in the source -> what its rows become.
        created_s: Unix time in seconds.
        seed: of initial values of rows to come.
        last_seen_s: of rows that do not say when they were seen.
        weights_only: leave out state that the source has.

    Returns:
        the manifest, and the checkpoint's URL.

    Raises:
        DataError: the source is damaged, has an id twice, or rows of another form.
        CheckpointError: the folder is not empty or cannot be written.
    """
    store = CheckpointStore(url)
    if store.storage.files() or store.storage.folders():
        raise CheckpointError(
            describe(
                "folder of a new checkpoint",
                got=f"{store.url}, which is not empty",
                allowed="a new or empty folder",
                remedy="Choose another one.",
            )
        )
    store.storage.make()
    order = {name: index for index, name in enumerate(forms)}
    folder = store.folder(store.name(0, "full"))
    with CollectedRows(tuple(forms.values()), last_seen_s=last_seen_s) as rows:
        for name, entries in source.entries(frozenset(forms)):
            taken = replace(entries, state=None) if weights_only else entries
            rows.add(order[name], taken)
        rows.finish()
        try:
            manifest = _write(
                folder, rows, [form.table for form in forms.values()], seed, created_s
            )
        except BaseException:
            folder.remove_tree()
            raise
    return manifest, folder.url


def _write(
    folder: Storage, rows: CollectedRows, tables: Sequence[SavedTable], seed: int, created_s: int
) -> Manifest:
    tables = [replace(table, rows=rows.rows(k), deleted=0) for k, table in enumerate(tables)]
    bits = bits_for(sum(table.rows for table in tables))
    counted = {
        table.key: TableRows(table.key, RowLayout.of(table), rows.histogram(k, bits))
        for k, table in enumerate(tables)
    }
    places = {table.key: k for k, table in enumerate(tables)}
    files = [*_row_files(folder, rows, counted, places), *_sketches(folder, tables)]
    manifest = Manifest(
        schema=SCHEMA,
        id=secrets.token_hex(16),
        kind="full",
        step=0,
        position=0,
        epoch=max((rows.latest(k) for k in range(len(tables))), default=1),
        parent=None,
        seed=seed,
        last_steps=dict.fromkeys((table.collection for table in tables), 0),
        world_size=1,
        created_s=created_s,
        versions={"torch": str(torch.__version__)},
        tables=tuple(tables),
        modules=(),
        optimizers=(),
        files=tuple(files),
    )
    commit(folder, manifest)
    return manifest


def _row_files(
    folder: Storage,
    rows: CollectedRows,
    counted: Mapping[str, TableRows],
    places: Mapping[str, int],
) -> Iterator[SavedFile]:
    for plan in split(tuple(counted.values())):
        assert isinstance(plan.layout, RowLayout)
        ranges = (plan.start, plan.stop)
        writer = RowFileWriter(folder, plan.path, plan.layout, plan.tables, ranges)
        try:
            for index, key in enumerate(plan.tables):
                table = counted[key]
                cuts = pieces(table, plan.start, plan.stop, piece_bytes=_PIECE_BYTES)
                for start, stop, _ in cuts:
                    writer.add(index, rows.read(places[key], start, stop))
            yield writer.close()
        except BaseException:
            writer.abort()
            raise


def _sketches(folder: Storage, tables: Sequence[SavedTable]) -> Iterator[SavedFile]:
    """Empty counters, which sketches need; exact ones need no file."""
    for table in tables:
        if table.admission and table.admission.startswith("sketch"):
            width, depth = table.admission.split()[1].split("x")
            path = sketch_path(table.collection, table.name)
            yield write_whole(
                folder, path, "sketch", bytes(4 * int(width) * int(depth)), [table.key]
            )
