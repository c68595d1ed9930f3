"""Where a checkpoint is that a user named, and which of its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.checkpoint.manifest import Manifest, SavedTable
from shoal.checkpoint.row_sources import ChainRows
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, locate
from shoal.errors import unknown_name

__all__ = ["Place", "chosen", "find"]

_RUN_FOLDERS = ("checkpoints", "model")  # of a run folder, which has a config.yaml


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint: `name` in its store."""

    store: CheckpointStore
    name: str

    @property
    def url(self) -> str:
        """Of its folder."""
        return self.folder.url

    @property
    def folder(self) -> Storage:
        """Its own."""
        return self.store.folder(self.name)

    def chain(self) -> tuple[Manifest, ...]:
        """What it is made of, the full one first, itself last."""
        return self.store.chain(self.name)

    def rows(self, chain: Sequence[Manifest]) -> ChainRows:
        """The rows of its chain."""
        return ChainRows(self.store.storage, chain, self.name)


def find(path: str) -> Place:
    """The checkpoint of that folder or URL, or the newest of a store or of a run.

    Raises:
        CheckpointError: there is none.
    """
    here = Storage(path)
    if here.exists("config.yaml"):
        places = list(_of_run(here))
        if places:
            return places[-1][1]
    return Place(*locate(path))


def chosen(tables: Sequence[SavedTable], names: Sequence[str]) -> list[int]:
    """Indices of the tables of these names, "collection/table" or "table"; of all without names.

    Raises:
        UnknownName: no such table.
    """
    if not names:
        return list(range(len(tables)))
    found = set()
    for name in names:
        those = {k for k, one in enumerate(tables) if name in (one.key, one.name)}
        if not those:
            known = [one.key for one in tables]
            # What was left out of a key must not hide the nearest name.
            near = [one.name for one in tables] if "/" not in name else known
            raise unknown_name("table of the checkpoint", name, near)
        found |= those
    return sorted(found)


def _of_run(folder: Storage) -> Iterator[tuple[int, Place]]:
    """The newest checkpoint of each folder of a run, by step."""
    found = []
    for name in _RUN_FOLDERS:
        store = CheckpointStore(folder.child(name))
        newest = store.latest()
        if newest is not None:
            found.append((newest.step, Place(store, newest.name)))
    yield from sorted(found, key=lambda one: one[0])
