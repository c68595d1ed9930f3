"""Generated inputs of `fused_embedding_to_layout`, in every form, with expected results.

The features, layouts and rows follow Monolith's own test: three groups of slots in two tables, one
table with two row widths, rows whose float j is fid + j, every even slot shared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.ops import FeatureConfig, FeatureConfigs, MonolithOffsets, OutConfig, SliceConfig
from shoal.ragged import KeyedRagged

__all__ = ["Case", "as_batch", "assert_layouts", "make_case", "make_configs", "make_grad_case"]

SHARED = 1 << 31


@dataclass
class Case:
    """Ids by feature and example, and the rows they are looked up to.

    Args:
        ids: feature -> one list of fids per example, or the one list of a shared feature.
        shared: features of which there is one list.
        ps_num: servers; a fid's is fid % ps_num.
    """

    configs: FeatureConfigs
    ids: dict[str, list[list[int]]]
    shared: set[str]
    batch_size: int
    ps_num: int
    dtype: torch.dtype = torch.float32
    # (table, ps) -> feature -> its fids in order of lookup, and their places
    lists: dict[tuple[str, int], dict[str, dict[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.lists = {
            (table, ps): {name: {} for name in self.configs.features_of(table)}
            for table in self.configs.tables
            for ps in range(self.ps_num)
        }
        for name in self.configs.features:
            for fid in (fid for cell in self.ids.get(name, []) for fid in cell):
                found = self.lists[self.configs.feature_configs[name].table, fid % self.ps_num]
                found[name].setdefault(fid, len(found[name]))

    def width(self, name: str) -> int:
        return self.configs.feature_configs[name].width

    def row(self, name: str, fid: int) -> list[float]:
        return [float(fid + j) for j in range(self.width(name))]

    def flat_buffers(self) -> list[Tensor]:
        """Rows by table and server, features one after the other; flat."""
        return [
            torch.tensor(
                [x for name, fids in found.items() for fid in fids for x in self.row(name, fid)],
                dtype=self.dtype,
            )
            for found in self.lists.values()
        ]

    def offsets(self, version: int) -> MonolithOffsets:
        """Packed as Monolith's pipeline of that version does."""
        packed = []
        for name in self.configs.features:
            tops = [self._top(version, name, ps) for ps in range(self.ps_num)]
            table, scale = self.configs.feature_configs[name].table, 1
            if version > 2:
                scale = self.width(name)
            for fid in (fid for cell in self._cells(name) for fid in cell):
                ps = fid % self.ps_num
                packed.append(tops[ps] + self.lists[table, ps][name][fid] * scale)
        feature_offset, nfl_offset, count = [], [], 0
        for name in self.configs.features:
            start = len(feature_offset)
            nfl_offset.append(start | (SHARED if self._one_cell(name) else 0))
            for cell in self._cells(name):
                feature_offset.append(count)
                count += len(cell)
        extra: dict[str, Any] = {}
        if version == 2:
            extra["fid_list_row_split"] = [
                torch.tensor([0, *torch.tensor([len(f) for f in found.values()]).cumsum(0)])
                for found in self.lists.values()
            ]
        if version == 4:
            sizes = {
                key: buffer.numel()
                for key, buffer in zip(self.lists, self.flat_buffers(), strict=True)
            }
            order = [(t, ps) for ps in range(self.ps_num) for t in self.configs.tables]
            extra["fid_list_emb_row_lenth"] = torch.tensor(
                [sizes[key] for key in order], dtype=torch.int32
            )
        return MonolithOffsets(
            torch.tensor(packed, dtype=torch.int64).view(torch.uint64),
            torch.tensor(feature_offset, dtype=torch.int32),
            torch.tensor(nfl_offset, dtype=torch.int64).to(torch.int32).view(torch.uint32),
            self.batch_size,
            self.ps_num,
            version,  # type: ignore[arg-type]
            **extra,
        )

    def buffers(self, version: int) -> list[Tensor]:
        """The rows, as that version has them."""
        flat = self.flat_buffers()
        if version == 4:
            tables = len(self.configs.tables)
            order = [t * self.ps_num + ps for ps in range(self.ps_num) for t in range(tables)]
            return [torch.cat([flat[m] for m in order])]
        if version == 1:
            width = {t: self.width(self.configs.features_of(t)[0]) for t in self.configs.tables}
            keys = list(self.lists)
            return [b.view(-1, width[t]) for b, (t, _) in zip(flat, keys, strict=True)]
        return flat

    def expected(self) -> list[Tensor]:
        """Outputs by plain Python, cell by cell."""
        made = []
        for layout in sorted(self.configs.out_configs):
            out = self.configs.out_configs[layout]
            parts = [self._slice(piece) for piece in out.slice_configs]
            if out.out_type == "none":
                made += parts
            elif out.out_type == "concat":
                made.append(torch.cat(parts, dim=-1))
            elif out.out_type == "stack":
                made.append(torch.stack(parts, dim=1))
            else:
                made.append(torch.stack(parts).sum(0))
        return made

    def _slice(self, piece: SliceConfig) -> Tensor:
        config = self.configs.feature_configs[piece.feature_name]
        cells = self.ids.get(piece.feature_name, [[]] * self.batch_size)
        if piece.feature_name in self.shared:
            cells = cells * self.batch_size
        columns = torch.arange(piece.start, piece.end, dtype=torch.float64)
        if config.pooling_type == "firstn":
            length = config.max_sequence_length
            padded = [[*cell[:length], *[None] * (length - len(cell))] for cell in cells]
            out = torch.tensor([[f or 0 for f in cell] for cell in padded]).unsqueeze(2) + columns
            real = torch.tensor([[f is not None for f in cell] for cell in padded])
            return (out * real.unsqueeze(2)).to(self.dtype)
        count = torch.tensor([len(cell) for cell in cells]).unsqueeze(1)
        total = torch.tensor([sum(cell) for cell in cells]).unsqueeze(1) + count * columns
        mean = config.pooling_type == "mean"
        return (total / count.clamp(min=1) if mean else total).to(self.dtype)

    def _one_cell(self, name: str) -> bool:
        return name in self.shared or name not in self.ids

    def _cells(self, name: str) -> list[list[int]]:
        return self.ids.get(name, [[]])

    def _top(self, version: int, name: str, ps: int) -> int:
        """A feature's first entry on a server: high half, and what comes before it in the low."""
        configs, table = self.configs, self.configs.feature_configs[name].table
        found = self.lists[table, ps]
        before = list(found)[: list(found).index(name)]
        if version == 2:
            first = sum(len(configs.features_of(t)) for t in configs.tables if t < table)
            return (first * self.ps_num + ps * len(found) + len(before)) << 32
        size = self.width if version > 2 else lambda other: 1
        low = sum(len(found[other]) * size(other) for other in before)
        return (configs.tables.index(table) * self.ps_num + ps) << 32 | low


def assert_layouts(got: list[Tensor], case: Case) -> None:
    """The outputs are what plain Python makes of the case."""
    want = case.expected()
    assert len(got) == len(want)
    for name, one, other in zip(case.configs.outputs, got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=0, msg=lambda m, n=name: n + m)


def as_batch(case: Case) -> KeyedRagged:
    more = [[]] * (case.batch_size - 1)
    return KeyedRagged.from_lists(
        {name: cells + (more if name in case.shared else []) for name, cells in case.ids.items()}
    )


def make_configs(
    groups: tuple[int, int, int], *, one_width: bool = False, last_start: int = 1
) -> FeatureConfigs:
    """Slots 1.. in three groups: table_one sums, table_two means, table_one first 3.

    one_width: all rows of table_one equally wide, as version 1 needs it.
    """
    wide = 16 if one_width else 8
    features: dict[str, FeatureConfig] = {}
    slices: dict[str, list[SliceConfig]] = {
        n: [] for n in ("bias", "vec", "ffm1", "ffm2", "firstN")
    }
    for slot in range(1, sum(groups) + 1):
        name = f"fc_slot_{slot}"
        if slot > groups[0] + groups[1]:
            features[name] = FeatureConfig("table_one", (1, 4, 16), "firstn", 3)
            slices["firstN"].append(SliceConfig(name, last_start, 21))
            continue
        first = slot <= groups[0]
        features[name] = (
            FeatureConfig("table_one", (1, 4, wide))
            if first
            else FeatureConfig("table_two", (1, 4, 16), "mean")
        )
        slices["bias"].append(SliceConfig(name, 0, 1))
        slices["vec"].append(SliceConfig(name, 1, 5))
        part = "ffm1" if first else "ffm2"
        slices[part].append(SliceConfig(name, 5, features[name].width))
    kinds = {"bias": "addn", "vec": "concat", "ffm1": "stack", "ffm2": "none", "firstN": "none"}
    outs = {n: OutConfig(tuple(s), kinds[n]) for n, s in slices.items() if s}  # type: ignore[arg-type]
    return FeatureConfigs(features, outs)


def make_case(
    batch_size: int,
    groups: tuple[int, int, int],
    *,
    ps_num: int = 5,
    seed: int = 2,
    one_width: bool = False,
) -> Case:
    """Monolith's forward test: 1 to 6 fids a cell, even slots shared."""
    rng = random.Random(seed)
    configs = make_configs(groups, one_width=one_width)
    ids, shared = {}, set()
    for slot in range(1, sum(groups) + 1):
        name = f"fc_slot_{slot}"
        if slot % 2 == 0:
            shared.add(name)
        cells = 1 if slot % 2 == 0 else batch_size
        ids[name] = [_fids(rng, slot) for _ in range(cells)]
    return Case(configs, ids, shared, batch_size, ps_num)


def _fids(rng: random.Random, slot: int) -> list[int]:
    # Small, so that float32 holds fid + j exactly.
    return [slot * 1000 + i * 100 + rng.randint(1, 99) for i in range(rng.randint(1, 6))]


def make_grad_case(
    batch_size: int = 4, *, ps_num: int = 3, seed: int = 2, one_width: bool = False
) -> Case:
    """Monolith's gradient test: 29 slots, every column read once, few fids a slot, none shared."""
    rng = random.Random(seed)
    configs = make_configs((9, 10, 10), one_width=one_width, last_start=0)
    ids = {}
    for slot in range(1, 30):
        known = [slot * 1000 + rng.randint(1, 999) for _ in range(rng.randint(2, 10))]
        ids[f"fc_slot_{slot}"] = [
            [rng.choice(known) for _ in range(rng.randint(0, len(known)))]
            for _ in range(batch_size)
        ]
    return Case(configs, ids, set(), batch_size, ps_num)
