"""Inputs and contenders of `fused_embedding_to_layout`: Monolith's own mix of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ops_work import Work
from shoal import ops
from shoal.ops.layout_plan import OutType
from shoal.ragged import KeyedRagged

__all__ = ["backward", "forward"]

FLOAT = 4
FIRST = 3  # rows that a firstn feature keeps
WIDTH = 21  # of both tables' rows
KINDS: dict[str, OutType] = {
    "bias": "addn",
    "vec": "concat",
    "ffm1": "stack",
    "ffm2": "none",
    "firstn": "none",
}


def forward(*, device: str, batch: int, groups: list[int]) -> Work:
    """1 to 6 ids a cell, every other feature shared by the batch."""
    x = _Batch.of(device, batch, groups)
    return Work(
        ours=lambda: ops.fused_embedding_to_layout(x.buffers, x.index, x.configs),
        peers={"embedding_bag": lambda: x.composed(x.weights)},
        moved=x.moved(back=False),
    )


def backward(*, device: str, batch: int, groups: list[int]) -> Work:
    """The gradient alone; torch's is that of a forward pass done before."""
    x = _Batch.of(device, batch, groups)
    weights = {name: rows.requires_grad_() for name, rows in x.weights.items()}
    outputs = x.composed(weights)
    grads = [torch.rand_like(output) for output in outputs]

    def by_autograd() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, list(weights.values()), grads, retain_graph=True)

    def ours() -> list[Tensor]:
        return ops.fused_embedding_to_layout_grad(grads, x.buffers, x.index, x.configs)

    def check() -> None:
        found = dict(zip(x.configs.tables, ours(), strict=True))
        for name, theirs in zip(weights, by_autograd(), strict=True):
            first, width = x.starts[name], theirs.shape[1]
            table = x.configs.feature_configs[name].table
            mine = found[table][first : first + theirs.shape[0], :width]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

    return Work(
        ours=ours,
        peers={"embedding_bag": by_autograd},
        moved=x.moved(back=True),
        check=check,
    )


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch both ways: tables and an index for ours, rows per feature for torch.

    Args:
        starts: a feature's first row in its table; each id has its own row.
        weights: a feature's rows, contiguous.
        offsets: of a feature's cells, one of them where it is shared.
        ids, kept: rows of the cells, in the order of the batch; of a firstn feature its first
            ones, and which of them there are.
    """

    size: int
    configs: ops.FeatureConfigs
    buffers: list[Tensor]
    index: ops.LayoutIndex
    starts: dict[str, int]
    weights: dict[str, Tensor]
    offsets: dict[str, Tensor]
    ids: dict[str, Tensor]
    kept: dict[str, Tensor]

    @classmethod
    def of(cls, device: str, size: int, groups: list[int]) -> _Batch:
        configs = _configs(groups)
        names = configs.features
        shared = [name for place, name in enumerate(names) if place % 2]
        lengths_FB = torch.randint(1, 7, (len(names), size))
        for place in range(1, len(names), 2):
            lengths_FB[place, 1:] = 0
        counts = dict(zip(names, lengths_FB.sum(1).tolist(), strict=True))
        ids = {name: torch.randperm(count) for name, count in counts.items()}
        starts, rows = {}, dict.fromkeys(configs.tables, 0)
        for name in names:
            table = configs.feature_configs[name].table
            starts[name] = rows[table]
            rows[table] += counts[name]
        inverse_N = torch.cat([ids[name] + starts[name] for name in names])
        keyed = KeyedRagged.from_lengths(names, inverse_N, lengths_FB)
        widths = dict.fromkeys(configs.tables, WIDTH)
        index = ops.LayoutIndex.from_keyed(keyed, inverse_N, widths, configs, shared=shared)
        tables = {table: torch.rand(count, WIDTH) for table, count in rows.items()}
        weights, offsets, kept = {}, {}, {}
        for place, name in enumerate(names):
            config, first = configs.feature_configs[name], starts[name]
            own = tables[config.table][first : first + counts[name], : config.width]
            weights[name] = own.clone().to(device)
            cells = lengths_FB[place, : 1 if place % 2 else size]
            offsets[name] = functional.pad(cells.cumsum(0), (1, 0)).to(device)
            ids[name] = ids[name].to(device)
            if config.pooling_type == "firstn":
                ids[name], kept[name] = _first(ids[name], offsets[name])
        return cls(
            size=size,
            configs=configs,
            buffers=[tables[table].to(device) for table in configs.tables],
            index=index.to(device),
            starts=starts,
            weights=weights,
            offsets=offsets,
            ids=ids,
            kept=kept,
        )

    def composed(self, weights: dict[str, Tensor]) -> list[Tensor]:
        """The outputs by torch alone."""
        pooled = {name: self._pooled(name, rows) for name, rows in weights.items()}
        outputs: list[Tensor] = []
        for layout in sorted(self.configs.out_configs):
            out = self.configs.out_configs[layout]
            parts = [pooled[s.feature_name][..., s.start : s.end] for s in out.slice_configs]
            if out.out_type == "none":
                outputs += [part.contiguous() for part in parts]
            elif out.out_type == "concat":
                outputs.append(torch.cat(parts, dim=-1))
            elif out.out_type == "stack":
                outputs.append(torch.stack(parts, dim=1))
            else:
                outputs.append(torch.stack(parts).sum(0))
        return outputs

    def moved(self, *, back: bool) -> int:
        """Bytes of outputs or their gradients, of rows, and of the index."""
        with torch.no_grad():
            floats = sum(output.numel() for output in self.composed(self.weights))
        floats += sum(table.numel() for table in self.buffers) if back else self._read()
        index = (self.index.rows_N, self.index.buffer_N, self.index.cell_splits_C1)
        return FLOAT * floats + sum(part.numel() * part.element_size() for part in index)

    def _read(self) -> int:
        """Floats of rows that the forward pass reads."""
        slices = [s for out in self.configs.out_configs.values() for s in out.slice_configs]
        total = 0
        for piece in slices:  # no column is in two
            name = piece.feature_name
            lengths = self.offsets[name].diff()
            if self.configs.feature_configs[name].pooling_type == "firstn":
                lengths = lengths.clamp(max=FIRST)
            total += int(lengths.sum()) * piece.width
        return total

    def _pooled(self, name: str, rows_UD: Tensor) -> Tensor:
        config = self.configs.feature_configs[name]
        if config.pooling_type == "firstn":
            found = functional.embedding(self.ids[name], rows_UD) * self.kept[name]
        else:
            found = functional.embedding_bag(
                self.ids[name],
                rows_UD,
                self.offsets[name],
                mode=config.pooling_type,
                include_last_offset=True,
            )
        if found.shape[0] == 1:
            found = found.expand(self.size, *found.shape[1:])
        return found


def _first(ids_N: Tensor, offsets_C1: Tensor) -> tuple[Tensor, Tensor]:
    """The first ids of each cell [C, L], and which of them there are [C, L, 1]."""
    place_CL = offsets_C1[:-1, None] + torch.arange(FIRST, device=offsets_C1.device)
    kept_CL = place_CL < offsets_C1[1:, None]
    return ids_N[place_CL.where(kept_CL, 0)], kept_CL.unsqueeze(2).float()


def _configs(groups: list[int]) -> ops.FeatureConfigs:
    """Three groups of features: sums of one table, means of another, first rows of the first."""
    sums, means, firsts = groups
    features: dict[str, ops.FeatureConfig] = {}
    slices: dict[str, list[ops.SliceConfig]] = {name: [] for name in KINDS}
    for slot in range(sums + means + firsts):
        name = f"slot_{slot:03}"
        if slot >= sums + means:
            features[name] = ops.FeatureConfig("table_one", (1, 4, 16), "firstn", FIRST)
            slices["firstn"].append(ops.SliceConfig(name, 1, 21))
            continue
        if slot < sums:
            features[name] = ops.FeatureConfig("table_one", (1, 4, 8))
        else:
            features[name] = ops.FeatureConfig("table_two", (1, 4, 16), "mean")
        slices["bias"].append(ops.SliceConfig(name, 0, 1))
        slices["vec"].append(ops.SliceConfig(name, 1, 5))
        part = "ffm1" if slot < sums else "ffm2"
        slices[part].append(ops.SliceConfig(name, 5, features[name].width))
    outs = {name: ops.OutConfig(tuple(parts), KINDS[name]) for name, parts in slices.items()}
    return ops.FeatureConfigs(features, outs)
