"""Small shards of device rows, built from table specs: ids inserted, initial values written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal.ids import salt
from shoal.kernels.index import probe
from shoal.kernels.initial_values import initialise, settle
from shoal.kernels.tables import CallGroups, RowForm, SegmentForm
from shoal.table.spec import Segment, TableSpec

from .device_tables import DeviceTables, TableSize, make_tables

__all__ = ["DEVICES", "DTYPES", "DeviceRows", "draw_ids", "form_of", "plain_table"]

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu)
    if torch.cuda.is_available()
    else pytest.param("cpu", id="interpreted")
]
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def form_of(spec: TableSpec) -> RowForm:
    """The arguments of kernels for a table's rows."""
    segments, column, state_column = list[SegmentForm](), 0, 0
    for place, s in enumerate(spec.segments):
        segments.append(
            SegmentForm(
                column, s.dim, state_column, s.state_width, place,
                s.initializer, s.optimizer, s.compressor,
            )
        )  # fmt: skip
        column, state_column = column + s.dim, state_column + s.state_width
    shift = spec.first_column % 4
    return RowForm(column, state_column, DTYPES[spec.dtype], tuple(segments), shift)


def draw_ids(number: int, seed: int = 0) -> list[int]:
    """Distinct ids of all 64 bits, those first whose values mark slots of an index."""
    generator = torch.Generator().manual_seed(seed)
    ids = [-(1 << 63), -(1 << 63) + 1, 0, -1]
    more = torch.randint(-(1 << 62), 1 << 62, (number,), generator=generator)
    return list(dict.fromkeys([*ids, *more.tolist()]))[:number]


@dataclass(frozen=True)
class DeviceRows:
    """Tables of some specs; equal forms are one object."""

    specs: tuple[TableSpec, ...]
    forms: tuple[RowForm, ...]
    tables: DeviceTables

    @classmethod
    def make(
        cls, specs: Sequence[TableSpec], device: str, seed: int = 0, rows: int = 256
    ) -> DeviceRows:
        forms: dict[RowForm, RowForm] = {}
        own = tuple(forms.setdefault(form, form) for form in map(form_of, specs))
        numbers = {id(form): number for number, form in enumerate(forms.values())}
        sizes = [
            TableSize(
                rows=rows,
                slots=2 * rows,
                dim=spec.dim,
                state_width=spec.state_width,
                dtype=form.dtype,
                form=numbers[id(form)],
                salt=salt(spec.name),
                seed=seed,
            )
            for spec, form in zip(specs, own, strict=True)
        ]
        return cls(tuple(specs), own, make_tables(sizes, device))

    @property
    def device(self) -> str:
        return self.tables.device

    def number(self, form: RowForm) -> int:
        return next(s.form for s, f in zip(self.tables.sizes, self.forms, strict=True) if f is form)

    def insert(
        self, *groups: tuple[int, Sequence[int]], version: int = 1, time_s: int = 0
    ) -> Tensor:
        """Give all ids rows, write the new ones, settle; handles [N]."""
        handles_N = self.look_up(self.tables.groups(*groups), insert=True)
        for form in {id(form): form for form in self.forms}.values():
            initialise(
                self.tables.layout, form, self.number(form), handles_N.numel(),
                version=version, event_time_s=time_s,
            )  # fmt: skip
        self.settle()
        return handles_N

    def look_up(self, call: CallGroups, *, insert: bool = False) -> Tensor:
        handles_N = torch.full(call.ids_N.shape, -9, dtype=torch.int32, device=self.device)
        probe(self.tables.layout, call, handles_N, None, None, insert=insert)
        return handles_N

    def settle(self) -> Tensor:
        """Counters as they reach the host."""
        counters_KC = self.tables.layout.counters_KC
        host = torch.full(counters_KC.shape, -9, dtype=torch.int64)
        host = host.pin_memory() if self.device == "cuda" else host
        settle(self.tables.layout, host)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return host

    def weights(self, handles_N: Tensor) -> Tensor:
        """The stored values, [N, D]."""
        return torch.stack([self.tables.weights_of(h).cpu() for h in handles_N.tolist()])

    def state(self, handles_N: Tensor) -> Tensor:
        return torch.stack([self.tables.state_of(h).cpu() for h in handles_N.tolist()])


def plain_table(name: str, dim: int, dtype: str = "float32") -> TableSpec:
    """A table of one uniform segment."""
    return TableSpec(name=name, segments=(Segment(dim=dim),), dtype=dtype)  # type: ignore[arg-type]
