"""Changes of the reference shard, and its rows at a snapshot point: a dictionary and a list."""

from __future__ import annotations

import secrets
import weakref

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import HASHES
from shoal.table.spec import TableSpec
from shoal.table.values import Cursor, RowChunk, released

from .reference_row import Key, Row

__all__ = ["ChangeVerbs", "ReferenceSnapshot", "by_hash"]

LAST_VERSION = (1 << 32) - 2


class ChangeVerbs:
    """A list of deletions, and the version in each row."""

    specs: tuple[TableSpec, ...]
    _rows: list[dict[int, Row]]
    _version: int

    def _start(self) -> None:
        self._incarnation = drawn()
        self._deleted: list[tuple[Key, int]] | None = None  # with the version of each; None: unkept
        self._floor = 0
        self._snapshots: weakref.WeakSet[ReferenceSnapshot] = weakref.WeakSet()
        self._passed: dict[str, int] = {}  # by consumer

    def _stack(self, rows: list[Tensor], width: int) -> Tensor:
        raise NotImplementedError

    def export(self, table: int) -> RowChunk:
        return self._chunk(table, by_hash(self.specs[table], sorted(self._rows[table]))[0])

    def _chunk(self, table: int, ids: Tensor) -> RowChunk:
        spec, rows = self.specs[table], self._rows[table]
        kept = [rows[id_] for id_ in ids.tolist()]
        meta = torch.tensor([(r.version, r.last_seen_s, r.count) for r in kept], dtype=torch.int64)
        meta = meta.reshape(-1, 3)
        return RowChunk(
            table=spec.name,
            ids=ids,
            weights=self._stack([row.weights for row in kept], spec.dim),
            state=self._stack([row.state for row in kept], spec.state_width),
            versions=meta[:, 0],
            last_seen_s=meta[:, 1],
            counts=meta[:, 2],
        )

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def close_version(self) -> int:
        self._version += 1
        return self._version - 1

    def release(self, version: int | None, consumer: str = "") -> None:
        if version is None:
            self._passed.pop(consumer, None)
        else:
            version = min(released(version), self._version - 1)
            self._passed[consumer] = max(version, self._passed.get(consumer, self._floor))
        if not self._passed:
            self._deleted = None
        elif self._deleted is not None:
            self._floor = max(self._floor, min(self._passed.values()))
            self._deleted = [(key, at) for key, at in self._deleted if at > self._floor]

    def snapshot(self, since: Cursor | None = None) -> ReferenceSnapshot:
        if len(self._snapshots) == 8:
            raise refused("snapshot", "8 open ones")
        from_version = 0 if since is None else since.version
        if since is not None:
            known = self._deleted is not None and since.incarnation == self._incarnation
            if not known or not self._floor <= from_version < self._version:
                raise refused("snapshot", since)
        gone = self._gone_in(from_version, self._version)
        version = self.close_version()
        if self._deleted is None:
            self._keep(version)
        made = ReferenceSnapshot(self, from_version, version, [] if since is None else gone)
        self._snapshots.add(made)
        return made

    def resume(self, version: int) -> Cursor:
        self._check_still()
        stamps = [row.version for rows in self._rows for row in rows.values()]
        if type(version) is not int or not max(stamps, default=0) <= version <= LAST_VERSION:
            raise refused("version to resume at", version)
        self._version = max(self._version, version + 1)
        self._keep(version)
        return Cursor(self._incarnation, version)

    def _check_still(self) -> None:
        """Before a method that changes rows."""
        if self._snapshots:
            raise refused("verb that changes rows", "an open snapshot")

    def _keep(self, floor: int) -> None:
        self._incarnation = drawn()
        self._deleted, self._floor = [], floor
        self._passed = dict.fromkeys(self._passed, floor)

    def _renew(self) -> None:
        """Rows were loaded whose versions no earlier cursor covers."""
        if self._deleted is not None:
            self._keep(self._version - 1)
        else:
            self._incarnation = drawn()

    def _remove(self, table: int, id_: int) -> None:
        del self._rows[table][id_]
        if self._deleted is not None:
            self._deleted.append(((table, id_), self._version))

    def _gone_in(self, from_version: int, to_version: int) -> list[Key]:
        """Keys deleted in a span of versions that have no row."""
        span = [key for key, at in self._deleted or () if from_version < at <= to_version]
        return [key for key in dict.fromkeys(span) if key[1] not in self._rows[key[0]]]

    def _stamped(self, key: Key, from_version: int, to_version: int) -> bool:
        row = self._rows[key[0]].get(key[1])
        return row is not None and from_version < row.version <= to_version


class ReferenceSnapshot:
    """Not concurrent: rows must not change until it is closed."""

    concurrent = False

    def __init__(self, shard: ChangeVerbs, since: int, version: int, gone: list[Key]) -> None:
        self.shard: ChangeVerbs | None = shard
        self.since = since
        self.version = version
        self.gone = gone

    def _open(self) -> ChangeVerbs:
        if self.shard is None:
            raise refused("snapshot", "a closed one")
        return self.shard

    def _sorted(self, table: int) -> tuple[Tensor, Tensor]:
        """Ids by hash, and their keys."""
        shard = self._open()
        span = (self.since, self.version)
        ids = [id_ for id_ in shard._rows[table] if shard._stamped((table, id_), *span)]
        return by_hash(shard.specs[table], ids)

    def histogram(self, table: int, bits: int) -> Tensor:
        if not 0 <= bits <= 20:
            raise refused("bits of a histogram", bits)
        keys = self._sorted(table)[1].tolist()
        counts = torch.zeros(1 << bits, dtype=torch.int64)
        for key in keys:
            counts[(key + (1 << 63)) >> (64 - bits)] += 1
        return counts

    def read(self, table: int, start: int, stop: int, *, state: bool = True) -> RowChunk:
        if not 0 <= start <= stop <= HASHES:
            raise refused("range of hashes", (start, stop))
        ids, keys = self._sorted(table)
        kept = [start <= key + (1 << 63) < stop for key in keys.tolist()]
        return self._open()._chunk(table, ids[torch.tensor(kept, dtype=torch.bool)])

    def deleted(self, table: int) -> Tensor:
        shard = self._open()
        return by_hash(shard.specs[table], [id_ for k, id_ in self.gone if k == table])[0]

    def give_way(self) -> None:
        """Nothing to leave: a read has one thread."""

    def close(self) -> None:
        if self.shard is not None:
            self.shard._snapshots.discard(self)
            self.shard = None

    def __enter__(self) -> ReferenceSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drawn() -> int:
    return secrets.randbelow((1 << 63) - 1) + 1


def by_hash(spec: TableSpec, ids: list[int]) -> tuple[Tensor, Tensor]:
    ids_R = torch.tensor(ids, dtype=torch.int64)
    keys_R, order_R = sort_key(hash_ids(spec.hash_name, ids_R)).sort()
    return ids_R[order_R], keys_R


def refused(what: str, got: object) -> InputError:
    remedy = "Close the snapshot first, or take a full snapshot."
    return InputError(what, got=got, allowed="see shoal.table.shard.Shard", remedy=remedy)
