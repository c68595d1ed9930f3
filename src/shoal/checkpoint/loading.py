"""Fill a job from a checkpoint: on any number of ranks, wholly or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint import job_state
from shoal.checkpoint.chain import Chain
from shoal.checkpoint.dense import DenseLoad
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading_rows import RowLoader, Target, targets_of
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.store import CheckpointStore, locate
from shoal.checkpoint.table_match import (
    LoadOptions,
    TableMatch,
    check_capacity,
    match_tables,
    saved_table,
)
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError
from shoal.table.hosting import HostedTables
from shoal.table.shard import Shard
from shoal.table.values import Cursor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What was loaded.

    Args:
        manifest: of the checkpoint.
        state: what `Contents.state` was.
        rank_state: what `Contents.rank_state` was on this rank; None where the job had another
            number of ranks.
        rank_states: the same of every rank that saved, by rank.
        rows: rows loaded, by table ("collection/table" of the model), over all ranks.
        expired: rows left out since they are expired, likewise.
        cursors: of this rank's tables by collection, from which a delta of this checkpoint may be
            saved. None where tables are not as it has them (renamed, cast, some rows, tables or
            state left out), or were at later versions than it: the next save is a full one.
    """

    manifest: Manifest
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any] | None
    rank_states: tuple[Mapping[str, Any], ...]
    rows: Mapping[str, int]
    expired: Mapping[str, int]
    cursors: Mapping[str, Cursor] | None


def load(
    url: str | Path,
    contents: Contents,
    *,
    options: LoadOptions | None = None,
    collectives: Collectives | None = None,
) -> Loaded:
    """Fill freshly built tables, modules and optimizers from a checkpoint.

    Everything is compared first, and every file is checked before it is parsed. Where anything
    fails on any rank, it is raised on every rank, tables are empty again and the rest is as it
    was. Tables are at the checkpoint's version then: the next delta may be relative to it.

    Args:
        url: a checkpoint's folder, that of a store, or a run's folder: the newest in it.
        contents: what to fill; its tables are empty. `state` and `rank_state` are not read.
        options: subset, renames and waivers.
        collectives: all ranks of the job, which all call this; None: this one alone.

    Raises:
        InputError: tables are placed on other ranks than these.
        CheckpointError: there is none, a file of it is missing or damaged, or it is of another
            model; or another rank raised something.
        TableFull: rows do not fit a table.
    """
    ranks = LocalCollectives() if collectives is None else collectives
    contents.check_placed(ranks.world_size)
    wanted = LoadOptions() if options is None else options
    # What is newest may change under the ranks: the first one's word counts.
    root, name = together(ranks, "finding a checkpoint", lambda: _found(url))[0]
    one = _Load(contents, wanted, ranks)
    check = partial(one.check, CheckpointStore(root), name)
    versions = together(ranks, f"checking checkpoint {name}", check)
    try:
        tallies = together(ranks, f"loading the tables of checkpoint {name}", one.rows.load)
        together(ranks, f"reading the dense part of checkpoint {name}", one.dense.read)
        applied = together(ranks, f"applying checkpoint {name}", lambda: one.apply(max(versions)))
    except BaseException:
        one.rows.clear()
        raise
    if ranks.rank == 0:
        one.warn_of_seeds()
    rows = _summed(one.matches, [tally.rows for tally in tallies])
    expired = _summed(one.matches, [tally.expired for tally in tallies])
    whole = (
        one.is_whole
        and wanted.state
        and not any(expired.values())
        and not any(t.trimmed for t in tallies)
        and max(versions) <= one.manifest.version  # of which cursors are
    )
    alike = len(one.rank_states) == ranks.world_size
    return Loaded(
        manifest=one.manifest,
        state=one.state,
        rank_state=one.rank_states[ranks.rank] if alike else None,
        rank_states=one.rank_states,
        rows=rows,
        expired=expired,
        cursors=applied[ranks.rank] if whole else None,
    )


def load_share(
    urls: Sequence[str | Path],
    tables: HostedTables,
    rank: int,
    *,
    collection: str,
    state: bool = True,
) -> int:
    """Fill one rank's empty tables with its rows of several checkpoints that have none in common.

    So a server takes its share of what any number of servers, or a job of ranks, have saved. No
    other rank has to call it. Where it fails, tables are empty again.

    Args:
        urls: as `load` takes them.
        tables: of this rank.
        rank: this one, of the placement of `tables`.
        collection: that the tables were saved as.
        state: load optimizer state and admission counters, too; without it, these may differ.

    Returns:
        rows that were loaded.

    Raises:
        CheckpointError: one is missing, damaged, or lacks one of the tables; or tables have rows.
        TableFull: rows do not fit a table.
    """
    chains = [Chain(*locate(url), check=False) for url in urls]
    found: list[tuple[TableMatch, ...]] = []
    for chain in chains:
        keys = {f"{collection}/{spec.name}" for spec in tables.specs}
        others = frozenset(table.key for table in chain.tables) - keys
        waived = frozenset() if state else frozenset(f"{key}.admission" for key in keys)
        options = LoadOptions(allow_unknown=others, allow_missing=waived, state=state)
        found.append(match_tables(chain.tables, {collection: tables.specs}, options))
        chain.check_forms(keys)
    targets = targets_of(found[0], {collection: tables}, rank)
    _check_empty(targets)
    rows = RowLoader(chains, targets, rank=rank, alone=False, now_s=None)
    try:
        tally = rows.load()
        tables.shard.resume(max(chain.last.manifest.version for chain in chains))
    except BaseException:
        rows.clear()
        raise
    steps = [chain.last.manifest.last_steps.get(collection, 0) for chain in chains]
    tables.shard.last_step = max(tables.shard.last_step, *steps)
    return sum(tally.rows.values())


class _Load:
    """One rank's part of a load, stage by stage; no stage talks to other ranks."""

    def __init__(self, contents: Contents, options: LoadOptions, ranks: Collectives) -> None:
        self._contents, self._options, self._ranks = contents, options, ranks

    def check(self, store: CheckpointStore, name: str) -> int:
        """Compare all that is there; the version that this rank's tables are at."""
        contents, options, ranks = self._contents, self._options, self._ranks
        specs = {key: hosting.specs for key, hosting in contents.tables.items()}
        chain = Chain(store, name, check=False)
        self.matches = match_tables(chain.tables, specs, options)
        chain.check_forms({match.saved.key for match in self.matches})
        self._storage, self.manifest = chain.last.storage, chain.last.manifest
        for match in self.matches:
            check_capacity(match, chain.fewest_rows(match.saved.key), options.now_s)
        targets = targets_of(self.matches, contents.tables, ranks.rank)
        _check_empty(targets)
        self.rows = RowLoader(
            (chain,), targets, rank=ranks.rank, alone=ranks.world_size == 1, now_s=options.now_s
        )
        self.dense = DenseLoad(
            self._storage, self.manifest, contents.modules, contents.optimizers, options
        )
        self.state, self.rank_states = job_state.read(self._storage, self.manifest)
        self.dense.check(ranks.rank, ranks.world_size)
        return max((shard.close_version() for shard in self._shards()), default=0)

    def warn_of_seeds(self) -> None:
        """Say where ids to come will begin otherwise than in the job that was saved.

        No error: nothing that was saved is lost by it, as with other initializers or capacities.
        """
        seeds = {shard.seed for shard in self._shards()} - {self.manifest.seed}
        if seeds and self.matches:
            _log.warning(
                "checkpoint %s was saved with seed %d, these tables have %s: rows of ids that it "
                "lacks will begin with other values than in the job that saved it",
                self._storage.url,
                self.manifest.seed,
                ", ".join(map(str, sorted(seeds))),
            )

    @property
    def is_whole(self) -> bool:
        """Whether the tables of the job are those of the checkpoint, in the same form."""
        keys = [
            f"{k}/{spec.name}" for k, one in self._contents.tables.items() for spec in one.specs
        ]
        forms = {
            match.key: saved_table(match.collection, match.spec, rows=0, deleted=0)
            for match in self.matches
        }
        there = {table.key: replace(table, rows=0, deleted=0) for table in self.manifest.tables}
        return set(keys) == set(forms) and forms == there

    def apply(self, version: int) -> dict[str, Cursor]:
        """Put in place what was read: it is whole and fits. Returns cursors by collection.

        version: of the tables of any rank before the load.
        """
        version = max(version, self.manifest.version)
        cursors = {id(shard): shard.resume(version) for shard in self._shards()}
        for collection, hosting in self._contents.tables.items():
            steps = [
                self.manifest.last_steps.get(match.saved.collection, 0)
                for match in self.matches
                if match.collection == collection
            ]
            if steps:
                # Collections that share a shard count its steps together.
                hosting.shard.last_step = max(hosting.shard.last_step, *steps)
        if self._options.state:
            self._resume()
        self.dense.apply()
        return {key: cursors[id(one.shard)] for key, one in self._contents.tables.items()}

    def _resume(self) -> None:
        """Pass the number of finished steps to the tables' optimizers."""
        loaded = {match.collection: match.saved.collection for match in self.matches}
        last = max((self.manifest.last_steps.get(one, 0) for one in loaded.values()), default=0)
        # The first step's number is that of no step, too.
        step = last + 1 if last else min(1, self.manifest.step)
        for collection, hosting in self._contents.tables.items():
            if hosting.resume is not None and collection in loaded:
                hosting.resume(step)

    def _shards(self) -> Iterable[Shard]:
        return {id(one.shard): one.shard for one in self._contents.tables.values()}.values()


def _found(url: str | Path) -> tuple[str, str]:
    store, name = locate(url)
    return store.url, name


def _check_empty(targets: Iterable[Target]) -> None:
    full = [t.match.key for t in targets if t.shard.size(t.table)]
    if full:
        got = f"rows in {', '.join(map(repr, dict.fromkeys(full)))}"
        remedy = "Load into a freshly built job, or clear them first."
        raise CheckpointError("tables to load", got, "empty tables", remedy)


def _summed(matches: Iterable[TableMatch], parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {one.key: sum(part.get(one.key, 0) for part in parts) for one in matches}
