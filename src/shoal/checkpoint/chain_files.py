"""The order in which files of a chain are read so that the newest of each row is met first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.checkpoint.manifest import Manifest, SavedFile

__all__ = ["ChainFile", "Newer", "windows"]


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file of rows or of deletions; `link` counts checkpoints of the chain, the full one is 0."""

    link: int
    file: SavedFile


def windows(
    chain: Sequence[Manifest], wanted: Callable[[SavedFile], bool]
) -> list[tuple[ChainFile, ...]]:
    """Files of rows and deletions in runs that share no row: each run newest first.

    What was met is remembered within a run only, so that a long chain of a large table needs
    little memory: a run is as many hashes as the widest of its files.

    Args:
        chain: the full checkpoint first.
        wanted: whether a file is read at all.
    """
    files = [
        ChainFile(link, file)
        for link, manifest in enumerate(chain)
        for file in manifest.files
        if file.kind in ("rows", "deleted") and wanted(file)
    ]
    found: list[tuple[ChainFile, ...]] = []
    for together in _by_tables(files):
        run: list[ChainFile] = []
        stop = 0
        for one in sorted(together, key=lambda each: (each.file.start, each.file.path)):
            if run and one.file.start >= stop:
                found.append(_newest_first(run))
                run = []
            stop = max(stop, one.file.stop) if run else one.file.stop
            run.append(one)
        if run:
            found.append(_newest_first(run))
    return found


class Newer:
    """Ids of one table that newer checkpoints of a run had, alive or deleted."""

    def __init__(self) -> None:
        self._known_U = torch.empty(0, dtype=torch.int64, device="cpu")  # sorted
        self._link: int | None = None
        self._parts: list[Tensor] = []

    def unseen(self, link: int, ids_R: Tensor) -> Tensor:
        """bool [R]: ids that no newer link had. Links come newest first."""
        if link != self._link:
            if self._parts:
                self._known_U = torch.cat([self._known_U, *self._parts]).sort().values
            self._link, self._parts = link, []
        if not self._known_U.numel():
            return torch.ones_like(ids_R, dtype=torch.bool)
        at_R = torch.searchsorted(self._known_U, ids_R).clamp_(max=self._known_U.numel() - 1)
        return self._known_U[at_R] != ids_R

    def add(self, ids_R: Tensor) -> None:
        """Remember ids of the link that `unseen` was last asked about; they are copied."""
        self._parts.append(ids_R.clone())


def _newest_first(run: Iterable[ChainFile]) -> tuple[ChainFile, ...]:
    return tuple(sorted(run, key=lambda one: (-one.link, one.file.start, one.file.path)))


def _by_tables(files: Iterable[ChainFile]) -> list[list[ChainFile]]:
    """Files apart by table; tables that share a file stay together."""
    groups: list[tuple[set[str], list[ChainFile]]] = []
    for one in files:
        tables, members = set(one.file.tables), [one]
        apart = []
        for names, others in groups:
            if names & tables:
                tables, members = tables | names, others + members
            else:
                apart.append((names, others))
        groups = [*apart, (tables, members)]
    return [members for _, members in groups]
