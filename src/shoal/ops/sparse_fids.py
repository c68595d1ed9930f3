"""Ids of a batch split per table and shard, with what the layout needs to put their rows back.

Runs in the thread that prepares batches: the compiled core does the work on its own threads and
holds no Python lock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import DTypeError, InputError, known_name
from shoal.ops.checks import read_offsets
from shoal.ops.ids_by_shard import RULES
from shoal.ops.layout_plan import FeatureConfigs, LayoutIndex, cells_of, check_shared
from shoal.ops.monolith_layout import MonolithOffsets, Version
from shoal.ragged import KeyedRagged

ShardRule = Literal["unsigned_mod", "floormod"]

_OP = "sharding_sparse_fids"
_SHARED = 1 << 31
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ShardedFids:
    """What `sharding_sparse_fids` found. T tables, P shards, F features; CPU tensors.

    Buffers are numbered table-major, table*P + shard, tables in sorted order. Rows that come back
    for a buffer's list lie one after the other, as wide as their feature: a flat buffer.

    Args:
        fid_list: int64 [n], the lists of all buffers one after the other.
        row_splits_FP: int64 [F, P], where the ids of each feature begin in its buffer's list.
        index: for `fused_embedding_to_layout` with the flat buffers.
        fid_sizes_TP, emb_sizes_TP: int64 [T, P], ids and floats of each buffer.
        configs, batch: what it was made of; `batch` has all configured features, sorted.
    """

    fid_list: Tensor
    row_splits_FP: Tensor
    index: LayoutIndex
    fid_sizes_TP: Tensor
    emb_sizes_TP: Tensor
    configs: FeatureConfigs
    batch: KeyedRagged

    @property
    def ps_num(self) -> int:
        """Shards P."""
        return self.fid_sizes_TP.shape[1]

    @property
    def fids(self) -> dict[str, Tensor]:
        """The list of each buffer, a view, by "table:shard"."""
        parts = torch.split(self.fid_list, self.fid_sizes_TP.reshape(-1).tolist())
        names = [f"{table}:{p}" for table in self.configs.tables for p in range(self.ps_num)]
        return dict(zip(names, parts, strict=True))

    @property
    def row_splits(self) -> dict[str, Tensor]:
        """int64 [features of the table + 1] by "table:shard": each feature's part of the list."""
        found: dict[str, Tensor] = {}
        for t, table in enumerate(self.configs.tables):
            ends = self.fid_sizes_TP[t : t + 1]
            splits = torch.cat([self.row_splits_FP[self._places(table)], ends])
            found |= {f"{table}:{p}": splits[:, p].contiguous() for p in range(self.ps_num)}
        return found

    @property
    def fid_list_by_shard(self) -> Tensor:
        """int64 [n]: the lists in shard-major order (Monolith's version 4)."""
        parts = torch.split(self.fid_list, self.fid_sizes_TP.reshape(-1).tolist())
        tables = len(self.configs.tables)
        order = [t * self.ps_num + p for p in range(self.ps_num) for t in range(tables)]
        return torch.cat([parts[m] for m in order])

    @property
    def fid_list_table_row_length(self) -> Tensor:
        """int32 [P*T]: ids of each list, shard-major (Monolith's version 4)."""
        return _int32("number of ids of a list", self.fid_sizes_TP.t().reshape(-1))

    @property
    def fid_list_shard_row_lenth(self) -> Tensor:
        """int32 [P]: ids of each shard (Monolith's version 4, its spelling)."""
        return _int32("number of ids of a shard", self.fid_sizes_TP.sum(0))

    @property
    def fid_list_emb_row_lenth(self) -> Tensor:
        """int32 [P*T]: floats of each buffer, shard-major (Monolith's version 4, its spelling).

        Raises:
            InputError: more than int32 holds.
        """
        return _int32("number of floats of a buffer", self.emb_sizes_TP.t().reshape(-1))

    def monolith(self, version: Version = 5) -> MonolithOffsets:
        """The offsets as Monolith packs them; 5 is its default, 4 its choice with GPU tables.

        A feature the batch lacks becomes SHARED with no ids.

        Raises:
            InputError: an offset or a size needs more bits than Monolith has, or a table of
                version 1 has features of different widths.
        """
        feature_offset, nfl_offset = self._cells()
        sizes: dict[str, Tensor] = {}
        if version == 5:
            vectors = {"nfl": nfl_offset, "feature": feature_offset, "fid": self.index.rows_N}
            sizes = {
                f"{name}_size": _int32(
                    f"{name}_size", torch.tensor([vector.shape[0]], device="cpu")
                )
                for name, vector in vectors.items()
            }
            sizes["emb_size"] = _int32("emb_size", self.emb_sizes_TP.reshape(-1))
        return MonolithOffsets(
            self._packed(version).view(torch.uint64),
            _int32("feature_offset", feature_offset),
            nfl_offset.to(torch.int32).view(torch.uint32),
            self.index.batch_size,
            self.ps_num,
            version,
            list(self.row_splits.values()) if version == 2 else None,
            self.fid_list_emb_row_lenth if version == 4 else None,
            **sizes,
        )

    def _cells(self) -> tuple[Tensor, Tensor]:
        """feature_offset and nfl_offset: one cell of shared and missing features."""
        cells_F3, size = self.index.cells_RF[0], self.index.batch_size
        one_F = (cells_F3[:, 1] == 0) | (cells_F3[:, 2] == 1)
        kept_FB = (torch.arange(size, device="cpu") == 0) | ~one_F.unsqueeze(1)
        starts_FB = self.index.cell_splits_C1[:-1].view(kept_FB.shape)
        counts_F = kept_FB.sum(1)
        return starts_FB[kept_FB], counts_F.cumsum(0) - counts_F + one_F * _SHARED

    def _packed(self, version: Version) -> Tensor:
        """fid_offset, int64 [N]."""
        rows_N, buffer_N = self.index.rows_N, self.index.buffer_N.to(torch.int64)
        if version in (1, 2):
            counts_F = self.batch.key_splits.diff()
            feature_N = torch.arange(counts_F.shape[0], device="cpu").repeat_interleave(counts_F)
            at_N = (feature_N, buffer_N % self.ps_num)
            width_F, floats_FP, segment_FP = self._parts(version)
            rows_N = (rows_N - floats_FP[at_N]) // width_F[feature_N]
            if version == 1:
                rows_N = rows_N + self.row_splits_FP[at_N]
            else:
                buffer_N = segment_FP[at_N]
        if rows_N.numel() and int(rows_N.max()) >> 32:
            remedy = "Use the LayoutIndex: its offsets are 64-bit."
            raise InputError(f"{_OP}: largest offset", int(rows_N.max()), "below 2**32", remedy)
        return buffer_N << 32 | rows_N

    def _parts(self, version: Version) -> tuple[Tensor, Tensor, Tensor]:
        """Row width of each feature; its first float in its buffer and its segment, per shard."""
        configs, shards = self.configs, self.ps_num
        width_F = torch.tensor(
            [configs.feature_configs[name].width for name in configs.features], device="cpu"
        )
        floats_FP, segment_FP = torch.zeros(
            2, width_F.shape[0], shards, dtype=torch.int64, device="cpu"
        )
        segments = 0
        for t, table in enumerate(configs.tables):
            own = self._places(table)
            if version == 1 and len(set(width_F[own].tolist())) > 1:
                what = f"widths of the features of table {table!r}"
                got = width_F[own].tolist()
                raise InputError(f"{_OP}: {what}", got, "one width", "Use version 3.")
            ends = torch.cat([self.row_splits_FP[own], self.fid_sizes_TP[t : t + 1]])
            floats = ends.diff(dim=0) * width_F[own].unsqueeze(1)
            floats_FP[own] = floats.cumsum(0) - floats
            rank = torch.arange(len(own), device="cpu").unsqueeze(1)
            segment_FP[own] = segments + torch.arange(shards, device="cpu") * len(own) + rank
            segments += len(own) * shards
        return width_F, floats_FP, segment_FP

    def _places(self, table: str) -> list[int]:
        """A table's features among all."""
        own = self.configs.feature_configs
        return [f for f, name in enumerate(self.configs.features) if own[name].table == table]


def sharding_sparse_fids(
    batch: KeyedRagged,
    ps_num: int,
    feature_cfgs: FeatureConfigs,
    *,
    unique: bool = True,
    shared: Collection[str] = (),
    rule: ShardRule = "unsigned_mod",
) -> ShardedFids:
    """Split a batch's ids by their feature's table and their shard.

    A buffer's list holds its features' ids in sorted feature order, each feature's in order of
    first appearance. Ids of two features are not merged, also where the features share a table.
    Keys the configs do not name are left out. Safe to call from any thread.

    Args:
        batch: ids by feature, on the CPU. Configured features it lacks read as zeros.
        ps_num: shards P, at least 1.
        feature_cfgs: features, their tables and row widths.
        unique: list equal ids of one feature once. False: once per occurrence.
        shared: features whose first example holds the ids of the whole batch (the others must be
            empty).
        rule: shard of an id: its 64 bits modulo P, unsigned, or floored.

    Raises:
        DTypeError: a batch in device memory.
        ShapeError: offsets that are out of order or do not end at the number of ids.
        InputError: ps_num below 1, or ids of a shared feature beyond the first example.
        UnknownName: a shared feature that is not configured, or another rule.

    Gradient: none, ids only. Output sizes depend on data.
    Monolith: `sharding_sparse_fids`; all its versions are `ShardedFids.monolith(version)`.
    """
    batch, cells = completed(batch, ps_num, feature_cfgs, shared, rule)
    tables, features = feature_cfgs.tables, len(batch.keys)
    facts = [
        (tables.index(config.table), config.width)
        for config in (feature_cfgs.feature_configs[key] for key in batch.keys)
    ]
    facts_2F = torch.tensor(facts, dtype=torch.int64, device="cpu").t().contiguous()
    found_FP = torch.empty(3, features, ps_num, dtype=torch.int64, device="cpu")
    sizes_TP = torch.empty(2, len(tables), ps_num, dtype=torch.int64, device="cpu")
    ids_N, splits_F1 = batch.values_N.contiguous(), batch.key_splits.contiguous()
    rows_N, buffer_N = torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.int32)
    split = core.FidSplit(
        *(address(ids_N), address(splits_F1), features, ps_num),
        RULES[rule],
        [address(part) for part in (*facts_2F, *found_FP, *sizes_TP)],
        len(tables),
    )
    addresses, threads = (address(rows_N), address(buffer_N)), torch.get_num_threads()
    split.count(unique, *addresses, threads)
    fid_list = torch.empty(int(sizes_TP[0].sum()), dtype=torch.int64, device="cpu")
    split.fill(*addresses, address(fid_list), threads)
    index = LayoutIndex(rows_N, buffer_N, batch.offsets_FB1, cells, (batch.batch_size,))
    fid_sizes_TP, emb_sizes_TP = sizes_TP
    return ShardedFids(
        fid_list, found_FP[1], index, fid_sizes_TP, emb_sizes_TP, feature_cfgs, batch
    )


def completed(
    batch: KeyedRagged,
    ps_num: int,
    feature_cfgs: FeatureConfigs,
    shared: Collection[str],
    rule: ShardRule,
) -> tuple[KeyedRagged, Tensor]:
    """The batch of all configured features, sorted, and `LayoutIndex.cells_RF` of it."""
    if batch.values_N.device.type != "cpu":
        got, remedy = batch.values_N.device, "Split ids before they go to the device."
        raise DTypeError(f"{_OP}: device of the batch", got, "cpu", remedy)
    if ps_num < 1:
        raise InputError(f"{_OP}: ps_num", ps_num, "1 or more", "One without shards.")
    known_name("rule", rule, get_args(ShardRule))
    for name in shared:
        known_name("shared feature", name, feature_cfgs.feature_configs)
    read_offsets(_OP, batch.offsets_FB1, batch.values_N.shape[0])
    check_shared(batch, shared)
    features, size = feature_cfgs.features, batch.batch_size
    present = [f for f, name in enumerate(features) if name in batch.keys]
    whole = batch
    if batch.keys != features:
        lengths_FB = torch.zeros(len(features), size, dtype=torch.int64, device="cpu")
        values_N = batch.values_N[:0]
        if present:
            chosen = batch.select([features[f] for f in present])
            lengths_FB[present], values_N = chosen.lengths, chosen.values_N
        whole = KeyedRagged.from_lengths(features, values_N, lengths_FB)
    cells = cells_of(whole, feature_cfgs, shared)
    missing = sorted(set(range(len(features))) - set(present))
    cells[:, missing] = 0
    return whole, cells


def _int32(what: str, values: Tensor) -> Tensor:
    """As Monolith packs them.

    Raises:
        InputError: one does not fit.
    """
    most = int(values.max()) if values.numel() else 0
    if most > _INT32_MAX:
        remedy = "Use the LayoutIndex: its offsets are 64-bit."
        raise InputError(f"{_OP}: largest {what}", most, "below 2**31", remedy)
    return values.to(torch.int32)
