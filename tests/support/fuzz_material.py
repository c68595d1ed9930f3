"""Random tables, batches, plans and gradients for tests that compare two shards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from shoal import Expiry, Segment, TableSpec, initializers, optimizers
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.admission import Admission
from shoal.rules.compressors import FixedR8, Float32
from shoal.table.shard import IdGroups

__all__ = ["NARROW", "PLAIN", "RICH", "Bags", "Material", "Menu"]

NON_FINITE = (float("nan"), float("inf"), float("-inf"))
SLOT_1 = 1 << 48
IDS = (
    *range(9),
    *(-1, 2**63 - 1, -(2**63), 1 - 2**63),
    *(SLOT_1 + i for i in range(5)),
    2 * SLOT_1 + 77,
)
INITIALIZERS = (initializers.Uniform(-0.5, 0.5), initializers.Normal(0.0, 0.3))
EXPIRIES = (None, Expiry(ttl_s=5), Expiry(per_slot=((1, 0), (0, 7))))
ADMISSIONS = (
    None,
    Admission(threshold=3, per_slot=((1, 0),)),
    Admission(threshold=2, on="after", per_slot=((0, 0), (1, 4))),
    Admission(threshold=0, per_slot=((1, 5),)),
    Admission(threshold=0, per_slot=((1, 5),), counter="sketch", sketch_width=1 << 12),
    Admission(threshold=3, on="after", per_slot=((1, 0),), counter="sketch", sketch_width=1 << 12),
)


@dataclass(frozen=True)
class Menu:
    """What tables may be made of, and whether they are cleared at times.

    layouts: a number for each kind of rows there is, the same kinds in all runs; none: every table
        has its own.
    """

    rules: tuple[optimizers.Optimizer, ...]
    compressors: tuple[object, ...]
    on_full: tuple[str, ...]
    capacities: tuple[int | None, ...]
    clears: bool
    dims: tuple[int, ...] = (1, 2, 3, 5, 8, 17)
    segments: tuple[int, ...] = (1, 2, 3)
    layouts: tuple[int, ...] = ()


_COMMON = (optimizers.SGD(lr=0.1), optimizers.Adagrad(lr=0.1), optimizers.Adam(lr=0.01))
PLAIN = Menu(_COMMON, (Float32(),), ("raise",), (None, None, 12), False)
# Rules without jumps: two shards may differ in the last bit of a sum.
RICH = Menu(
    (
        *_COMMON,
        optimizers.Momentum(lr=0.1),
        optimizers.RowWiseAdagrad(lr=0.1),
        optimizers.AdamW(lr=0.01),
        optimizers.Amsgrad(lr=0.01),
        optimizers.LAMB(lr=0.01),
        optimizers.RMSprop(lr=0.01),
    ),
    (Float32(), Float32(), FixedR8(r=1.0)),
    ("raise", "lru", "lfu"),
    (None, 12, 14),
    True,
)
# Few kinds of rows: a GPU compiles ten kernels and more for each kind, of each dtype.
NARROW = Menu(
    (optimizers.SGD(lr=0.1), optimizers.Adam(lr=0.01), optimizers.LAMB(lr=0.01)),
    (Float32(), FixedR8(r=1.0)),
    ("raise", "lru", "lfu"),
    (None, 12, 14),
    True,
    dims=(2, 5),
    segments=(1, 2),
    layouts=(4, 5),  # LAMB, 5 wide; Adam, 5 wide, with SGD, 2 wide
)


@dataclass
class Bags:
    """Ids of some groups, each split into the same number of bags."""

    groups: IdGroups
    offsets_GB1: Tensor
    weights_N: Tensor | None
    counts_N: Tensor | None
    tables: list[int]
    sizes: list[int]


class Material:
    """A source of random input, the same for a seed."""

    def __init__(self, seed: int, dtype: str, menu: Menu = PLAIN) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.menu = menu
        names = ["float32", "float64"] if dtype == "mixed" else [dtype]
        number = self.random.randint(2, 3)
        self.specs = [self.spec(k, names[k % len(names)]) for k in range(number)]

    def spec(self, k: int, dtype: str) -> TableSpec:
        choose, layouts = self.random.choice, self.menu.layouts
        draw = random.Random(choose(layouts)).choice if layouts else choose
        segments = tuple(
            Segment(
                name=f"s{j}",
                dim=draw(self.menu.dims),
                initializer=draw(INITIALIZERS),
                optimizer=draw(self.menu.rules),
                compressor=draw(self.menu.compressors),  # type: ignore[arg-type]
            )
            for j in range(draw(self.menu.segments))
        )
        return TableSpec(
            name=f"t{k}",
            segments=segments,
            dtype=dtype,  # type: ignore[arg-type]
            capacity_rows=choose(self.menu.capacities),
            on_full=choose(self.menu.on_full),  # type: ignore[arg-type]
            admission=choose(ADMISSIONS),
            expiry=choose(EXPIRIES),
        )

    def bags(self) -> Bags:
        choose = self.random.choice
        tables = [self.random.randrange(len(self.specs)) for _ in range(self.random.randint(0, 4))]
        batch = choose((0, 1, 2, 4))
        lengths = [[choose((0, 0, 1, 1, 2, 3, 5)) for _ in range(batch)] for _ in tables]
        sizes = [sum(row) for row in lengths]
        number = sum(sizes)
        groups = IdGroups(
            torch.tensor([choose(IDS) for _ in range(number)], dtype=torch.int64),
            torch.tensor(list(accumulate(sizes, initial=0))),
            torch.tensor(tables, dtype=torch.int32),
        )
        offsets = torch.tensor(list(accumulate(chain(*lengths), initial=0)))
        weights = self.values(number).float() if self.random.random() < 0.4 else None
        counts = torch.tensor([choose((1, 2, 5)) for _ in range(number)], dtype=torch.int64)
        with_counts = self.random.random() < 0.3
        return Bags(groups, offsets, weights, counts if with_counts else None, tables, sizes)

    def plan(self, tables: Sequence[int]) -> PoolPlan:
        """Each group with its own outputs, or added to an earlier one of the same shape."""
        pools, outputs = [], list[tuple[int, str]]()
        for k in tables:
            dim = self.specs[k].dim
            pooling = self.random.choice(("sum", "mean", "first_n"))
            length = self.random.choice((1, 2, 4)) if pooling == "first_n" else 1
            cut = self.random.randrange(dim)
            slices = []
            for start, stop in [(0, cut), (cut, dim)] if cut else [(0, dim)]:
                shape = length * (stop - start), self.specs[k].dtype
                add = shape in outputs and self.random.random() < 0.5
                if not add:
                    outputs.append(shape)
                output = outputs.index(shape) if add else len(outputs) - 1
                slices.append(Slice(start, stop, output, 0, add))
            pools.append(Pool(pooling, tuple(slices), length))  # type: ignore[arg-type]
        return PoolPlan(tuple(pools), tuple(Output(width) for width, _ in outputs))

    def values(self, *shape: int) -> Tensor:
        """Away from zero, where sums that cancel would make rounding matter."""
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.sign() * (drawn.abs() + 0.2)

    def rows(self, bags: Bags) -> list[Tensor]:
        """One [n_g, D_g] per group."""
        return [
            self.values(size, self.specs[k].dim).to(getattr(torch, self.specs[k].dtype))
            for k, size in zip(bags.tables, bags.sizes, strict=True)
        ]

    def poisoned(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sometimes with a NaN or an infinity in some of them."""
        if self.random.random() < 0.2:
            for grad in grads:
                if grad.numel() and self.random.random() < 0.7:
                    at = self.random.randrange(grad.numel())
                    grad.view(-1)[at] = self.random.choice(NON_FINITE)
        return tuple(grads)
