"""`shoal ckpt inspect`, and finding tables of checkpoints for the others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shoal.checkpoint.chain import Chain, Link
from shoal.checkpoint.dense import DenseReader, check_files
from shoal.checkpoint.manifest import FileKind, Manifest, SavedTable
from shoal.checkpoint.row_files import Columns, RowLayout, read_rows, tallied
from shoal.checkpoint.store import locate
from shoal.cli.shell import print_line
from shoal.errors import unknown_name
from shoal.telemetry import human_bytes


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


_DISTINCT = 1 << 20


def figures_of(chunks: Iterable[Columns]) -> dict[str, Any]:
    """Figures of rows that come in chunks, as JSON has them; no more than one chunk is kept.

    Ages are seconds before `newest_s`, the latest time that a row was seen. Norms are Euclidean, of
    rows without NaN or infinity. None where there is nothing to measure.
    """
    seen, counts, weights, state = Spread(), Spread(), _NormSums(), _NormSums()
    rows = 0
    for columns in chunks:
        rows += len(columns[0])
        for spread, column in zip((seen, counts), columns[2:4], strict=True):
            spread.add(column)
        for sums, column in zip((weights, state), columns[4:], strict=True):
            sums.add(column)
    figures: dict[str, Any] = {"rows": rows, "newest_s": None, "ages_s": None, "counts": None}
    if rows:
        newest = seen.largest
        ages = (newest - one for one in (newest, seen.median(upper=True), seen.least))
        times = (counts.least, counts.median(), counts.largest)
        names = ("min", "median", "max")
        figures["newest_s"] = newest
        figures["ages_s"] = dict(zip(names, ages, strict=True))
        figures["counts"] = dict(zip(names, times, strict=True))
    return {**figures, "weight_norms": weights.plain(), "state_norms": state.plain()}


@dataclass(slots=True)
class Spread:
    """Least, median and largest of many whole numbers >= 0 in bounded memory.

    Least and largest are exact. So is the median while there are up to a million distinct numbers;
    beyond that, numbers are rounded down to a power of two that keeps them within it.
    """

    distinct: int = _DISTINCT
    least: int = -1
    largest: int = -1
    _shift: int = 0
    _values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    _counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))

    def add(self, values: Tensor) -> None:
        """Take int64 [N]."""
        if not len(values):
            return
        low, high = map(int, values.aminmax())
        self.least = low if self.least < 0 else min(self.least, low)
        self.largest = max(self.largest, high)
        every = torch.cat([self._values, values >> self._shift])
        self._values, self._counts = tallied(
            every, torch.cat([self._counts, torch.ones_like(values)])
        )
        while len(self._values) > self.distinct:
            self._shift += 1
            self._values, self._counts = tallied(self._values >> 1, self._counts)

    def median(self, *, upper: bool = False) -> int:
        """The lower (or upper) of the middle ones."""
        totals = self._counts.cumsum(0)
        middle = (int(totals[-1]) - (0 if upper else 1)) // 2
        at = int(torch.searchsorted(totals, middle, right=True))
        value = int(self._values[min(at, len(self._values) - 1)]) << self._shift
        return min(max(value, self.least), self.largest)


@dataclass(slots=True)
class _NormSums:
    rows: int = 0
    total: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0
    wide: bool = False

    def add(self, matrix: Tensor) -> None:
        if not matrix.shape[1]:
            return
        self.wide = True
        norms = torch.linalg.vector_norm(matrix.double(), dim=1)
        finite = norms[norms.isfinite()]
        self.nonfinite += len(norms) - len(finite)
        self.rows += len(finite)
        self.total += float(finite.sum())
        self.largest = max(self.largest, float(finite.max()) if len(finite) else 0.0)

    def plain(self) -> dict[str, float] | None:
        """As JSON has them."""
        if not self.wide:
            return None
        mean = self.total / max(1, self.rows)
        return {"mean": mean, "max": self.largest, "nonfinite_rows": self.nonfinite}


_KINDS: tuple[tuple[FileKind, str], ...] = (
    ("rows", "rows"),
    ("deleted", "deletions"),
    ("admission", "admission counters"),
    ("sketch", "admission sketches"),
    ("dense", "dense modules and optimizers"),
    ("state", "state of the job"),
)


def show(path: str, tables: Sequence[str], *, as_json: bool, out: Console) -> None:
    """Print what a checkpoint holds.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UnknownName: it has no such table.
    """
    found = gather(Chain(*locate(path)), tables)
    if as_json:
        print_line(out, json.dumps(found, indent=2, allow_nan=False))
        return
    for name, value in _head(found):
        print_line(out, f"{name:<12}{value}")
    if found["tables"]:
        _print_tables(found["tables"], out)
    if found["modules"]:
        out.print(_modules(found["modules"]))
    out.print(_files(found["files"]))


_SHOWN = ("version", "seed", "world_size", "created_s", "packages", "last_steps")


def gather(chain: Chain, names: Sequence[str]) -> dict[str, Any]:
    """All of it as plain values; reads the rows of the tables of these names, or of all."""
    manifest = chain.last.manifest
    return {
        "checkpoint": chain.last.storage.url,
        **{name: getattr(manifest, name) for name in ("kind", "id", "step")},
        "samples": manifest.position,
        **{name: getattr(manifest, name) for name in _SHOWN},
        "chain": [
            {"kind": one.kind, "step": one.step, "id": one.id, "bytes": _bytes(one)}
            for one in (link.manifest for link in chain.links)
        ],
        "tables": [_table(chain, index) for index in chosen(manifest.tables, names)],
        "modules": _dense(chain.last),
        "files": [_files_of(manifest, kind) for kind, _ in _KINDS],
    }


def _table(chain: Chain, index: int) -> dict[str, Any]:
    saved, figures = chain.tables[index], figures_of(chain.chunks(index))
    delta = chain.last.manifest.kind == "delta"
    return {
        "table": saved.key,
        **figures,
        "dim": saved.dim,
        "dtype": saved.dtype,
        "state_width": saved.state_width,
        "segments": [asdict(segment) for segment in saved.segments],
        "bytes": figures["rows"] * saved.row_bytes,
        "row_bytes": saved.row_bytes,
        "rows_in_delta": saved.rows if delta else None,
        "deleted_in_delta": saved.deleted if delta else None,
        "admission": saved.admission,
        "pending_ids": _pending(chain.last, saved.key) if saved.admission == "exact" else None,
    }


def _pending(link: Link, key: str) -> int:
    """Ids without a row that are counted."""
    layout = RowLayout.ids(counted=True)
    return sum(
        len(columns[0])
        for file in link.manifest.files
        if file.kind == "admission" and key in file.tables
        for table, columns in read_rows(link.storage, file, layout)
        if file.tables[table] == key
    )


def _dense(link: Link) -> list[dict[str, Any]]:
    shapes: dict[str, tuple[int, ...] | None] = {}
    manifest = link.manifest
    if any(file.kind == "dense" for file in manifest.files):
        check_files(link.storage, manifest, shares=None)
        reader = DenseReader(link.storage)
        shapes.update((key, reader.shape(key)) for key in tuple(reader.names()))

    def numbers(part: str, name: str) -> int:
        prefix = f"{part}/{name}/"
        own = (shape for key, shape in shapes.items() if key.startswith(prefix))
        return sum(math.prod(shape) for shape in own if shape is not None)

    return [
        {
            "module": name,
            "numbers": numbers("module", name),
            "optimizer_numbers": numbers("optimizer", name)
            if name in manifest.optimizers
            else None,
        }
        for name in manifest.modules
    ]


def _files_of(manifest: Manifest, kind: FileKind) -> dict[str, Any]:
    files = [file for file in manifest.files if file.kind == kind]
    return {"kind": kind, "files": len(files), "bytes": sum(file.bytes for file in files)}


def _bytes(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files)


def _head(found: dict[str, Any]) -> list[tuple[str, str]]:
    created = datetime.fromtimestamp(found["created_s"], tz=timezone.utc)
    chain = [f"{link['kind']} of step {link['step']:,}" for link in found["chain"]]
    return [
        ("checkpoint", found["checkpoint"]),
        ("kind", found["kind"]),
        ("chain", " <- ".join(chain)),
        ("step", f"{found['step']:,}"),
        ("samples", f"{found['samples']:,}"),
        ("version", f"{found['version']:,}"),
        ("ranks", f"{found['world_size']} wrote it"),
        ("created", f"{created:%Y-%m-%d %H:%M:%S} UTC"),
        ("id", found["id"]),
    ]


def _print_tables(tables: Sequence[dict[str, Any]], out: Console) -> None:
    layout = plain_table("table", "rows", "dim", "dtype", "optimizers", "bytes")
    seen = plain_table("table", "age: newest", "median", "oldest", "count: least", "median", "most")
    norms = plain_table("table", "weights: mean", "max", "state: mean", "max", "not finite")
    for one in tables:
        kinds = ", ".join(f"{part['name']} {part['optimizer']}" for part in one["segments"])
        dim, size = str(one["dim"]), human_bytes(one["bytes"])
        layout.add_row(one["table"], f"{one['rows']:,}", dim, one["dtype"], kinds, size)
        ages, counts = one["ages_s"] or {}, one["counts"] or {}
        seen.add_row(
            one["table"],
            *(describe_age(ages[part]) if ages else "" for part in ("min", "median", "max")),
            *(f"{counts[part]:,}" if counts else "" for part in ("min", "median", "max")),
        )
        both = [one[part] or {} for part in ("weight_norms", "state_norms")]
        norms.add_row(
            one["table"],
            *(f"{of[part]:.4g}" if of else "" for of in both for part in ("mean", "max")),
            f"{sum(of.get('nonfinite_rows', 0) for of in both):,}",
        )
    for table in (layout, seen, norms):
        out.print(table)
    for one in tables:
        if one["admission"]:
            pending = one["pending_ids"]
            counted = "" if pending is None else f", {pending:,} ids without a row"
            print_line(out, f"admission of {one['table']}: {one['admission']}{counted}")
        if one["rows_in_delta"] is not None:
            rows, deleted = one["rows_in_delta"], one["deleted_in_delta"]
            print_line(
                out, f"{one['table']} in the delta alone: {rows:,} rows, {deleted:,} deletions"
            )


def _modules(modules: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("module", "numbers", "of its optimizer")
    for one in modules:
        held = one["optimizer_numbers"]
        table.add_row(one["module"], f"{one['numbers']:,}", "" if held is None else f"{held:,}")
    return table


def _files(files: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("files", "number", "bytes")
    for (_, name), one in zip(_KINDS, files, strict=True):
        if one["files"]:
            table.add_row(name, f"{one['files']:,}", human_bytes(one["bytes"]))
    return table


def plain_table(first: str, *rest: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in rest:
        table.add_column(name, justify="right", overflow="fold")
    return table


def describe_age(seconds: int) -> str:
    """90061 -> "1.0 d"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds} s"
