"""Rows and dense weights of a checkpoint for serving: without optimizer state, maybe a share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from shoal.checkpoint import Contents, LoadOptions, Manifest, load, load_share, read_manifest
from shoal.checkpoint.dense import read_module
from shoal.checkpoint.job_state import average_in
from shoal.checkpoint.job_state import read as read_job
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import locate
from shoal.errors import CheckpointError
from shoal.placement import Placement, row_wise
from shoal.sync.pages import ALL, Share
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables, hosted_specs
from shoal.table.spec import TableSpec

Only = Literal["rows", "dense"]
"""The half of a model that is wanted; None is both."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedCheckpoint:
    """What was loaded.

    Args:
        url: its folder.
        manifest: of it; `id` and `version` are where a publisher follows on.
        shard: with the rows; empty where only dense weights were wanted.
        dense: weights of the module; empty where none was saved, or only rows were wanted.
    """

    url: str
    manifest: Manifest
    shard: CpuShard
    dense: dict[str, Tensor]


def newest_checkpoint(url: str) -> str:
    """Folder of a checkpoint, of the newest in a store, or of the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    store, name = locate(url)
    return store.folder(name).url


def load_checkpoint(
    url: str,
    specs: Sequence[TableSpec],
    share: Share = ALL,
    *,
    collection: str | None = None,
    only: Only | None = None,
) -> ServedCheckpoint:
    """Load a checkpoint for serving.

    Args:
        url: its folder.
        specs: the tables as they are served: other dtypes and no state than were saved.
        share: of the rows.
        collection: that the tables were saved as; None: the one that has them.
        only: this half of it.

    Raises:
        CheckpointError: it is missing or damaged, or has not these tables.
    """
    manifest = read_manifest(url)
    collection = collection or _collection(manifest, specs)
    placement = None
    if share.of > 1:
        placed = [one for spec in specs for one in row_wise(spec.name, spec.dim, share.of)]
        placement = Placement(share.of, tuple(placed))
    hosted = tuple(specs) if placement is None else hosted_specs(specs, placement, share.index)
    shard = CpuShard(hosted)
    if only != "dense":
        tables = HostedTables(tuple(specs), shard, placement)
        load_share([url], tables, share.index, collection=collection, state=False)
        shard.release(None)  # deletions need not be kept
    dense: dict[str, Tensor] = {}
    if only != "rows":
        state = read_job(Storage(url), manifest).state
        average = average_in(state, collection) or {}
        dense = {**read_module(Storage(url), manifest, collection), **average}
    return ServedCheckpoint(url, manifest, shard, dense)


def load_module(url: str, name: str, module: nn.Module) -> None:
    """Load a dense module's weights alone, or their moving average where a run kept one.

    Args:
        url: folder of a checkpoint.
        name: that the module was saved as.

    Raises:
        CheckpointError: it is missing or damaged, or of another module.
    """
    manifest = read_manifest(url)
    others = {f"module:{one}" for one in manifest.modules if one != name}
    others |= {f"optimizer:{one}" for one in manifest.optimizers}
    options = LoadOptions(tables=(), state=False, allow_unknown=frozenset(others))
    found = load(url, Contents(modules={name: module}), options=options)
    module.load_state_dict(average_in(found.state, name) or {}, strict=False)


def _collection(manifest: Manifest, specs: Sequence[TableSpec]) -> str:
    wanted = {(spec.name, spec.dim) for spec in specs}
    there: dict[str, set[tuple[str, int]]] = {}
    for table in manifest.tables:
        there.setdefault(table.collection, set()).add((table.name, table.dim))
    found = [name for name, tables in there.items() if wanted <= tables]
    if len(found) == 1:
        return found[0]
    raise CheckpointError(
        "tables of a checkpoint to serve",
        got=f"{len(found)} collections of {sorted(there)} that have all of {sorted(wanted)}",
        allowed="one",
        remedy="Give the config of the run that saved it, or name the collection.",
    )
