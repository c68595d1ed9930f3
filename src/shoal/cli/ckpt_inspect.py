"""`shoal ckpt inspect`: what a checkpoint holds, as tables or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.checkpoint.dense_files import DenseReader, check_files
from shoal.checkpoint.manifest import FileKind, Manifest
from shoal.checkpoint.row_files import read_ids
from shoal.checkpoint.row_layout import RowLayout
from shoal.cli.ckpt_figures import RowFigures, figures_of
from shoal.cli.ckpt_places import Place, chosen, find

__all__ = ["describe_age", "describe_bytes", "gather", "plain_table", "show"]

_KINDS: tuple[tuple[FileKind, str], ...] = (
    ("rows", "rows"),
    ("deleted", "deletions"),
    ("sights", "sights"),
    ("sketch", "sketches of sights"),
    ("dense", "dense modules and optimizers"),
    ("state", "state of the job"),
)


def show(path: str, tables: Sequence[str], *, as_json: bool, out: Console) -> None:
    """Print what a checkpoint holds.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UnknownName: it has no such table.
    """
    found = gather(find(path), tables)
    if as_json:
        text = json.dumps(found, indent=2, allow_nan=False)
        out.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    for name, value in _head(found):
        out.print(f"{name:<12}{value}", markup=False, highlight=False, soft_wrap=True)
    if found["tables"]:
        _print_tables(found["tables"], out)
    if found["modules"]:
        out.print(_modules(found["modules"]))
    out.print(_files(found["files"]))


def gather(place: Place, names: Sequence[str]) -> dict[str, Any]:
    """All of it as plain values; reads the rows of the tables of these names, or of all."""
    chain = place.chain()
    manifest = chain[-1]
    rows = place.rows(chain)
    return {
        "checkpoint": place.url,
        "kind": manifest.kind,
        "id": manifest.id,
        "step": manifest.step,
        "samples": manifest.position,
        "epoch": manifest.epoch,
        "seed": manifest.seed,
        "world_size": manifest.world_size,
        "created_s": manifest.created_s,
        "versions": manifest.versions,
        "last_steps": manifest.last_steps,
        "chain": [
            {"kind": link.kind, "step": link.step, "id": link.id, "bytes": _bytes(link)}
            for link in chain
        ],
        "tables": [
            _table(place, chain, index, figures_of(rows.chunks(index)))
            for index in chosen(manifest.tables, names)
        ],
        "modules": _dense(place, manifest),
        "files": [_files_of(manifest, kind) for kind, _ in _KINDS],
    }


def _table(
    place: Place, chain: Sequence[Manifest], index: int, figures: RowFigures
) -> dict[str, Any]:
    saved = chain[-1].tables[index]
    layout = RowLayout.of(saved)
    return {
        "table": saved.key,
        "rows": figures.rows,
        "dim": saved.dim,
        "dtype": saved.dtype,
        "state_width": saved.state_width,
        "segments": [asdict(segment) for segment in saved.segments],
        "bytes": figures.rows * layout.row_bytes,
        "row_bytes": layout.row_bytes,
        "rows_in_delta": saved.rows if chain[-1].kind == "delta" else None,
        "deleted_in_delta": saved.deleted if chain[-1].kind == "delta" else None,
        "admission": saved.admission,
        "sights": _sights(place, chain[-1], saved.key) if saved.admission == "exact" else None,
        **figures.plain(),
    }


def _sights(place: Place, manifest: Manifest, key: str) -> int:
    """Ids without a row that are counted."""
    total = 0
    for file in manifest.files:
        if file.kind == "sights" and key in file.tables:
            wanted = file.tables.index(key)
            total += sum(
                len(ids) for table, ids, _ in read_ids(place.folder, file) if table == wanted
            )
    return total


def _dense(place: Place, manifest: Manifest) -> list[dict[str, Any]]:
    shapes: dict[str, tuple[int, ...] | None] = {}
    if any(file.kind == "dense" for file in manifest.files):
        check_files(place.folder, manifest, shares=None)
        reader = DenseReader(place.folder)
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
        ("epoch", f"{found['epoch']:,}"),
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
        layout.add_row(
            one["table"],
            f"{one['rows']:,}",
            str(one["dim"]),
            one["dtype"],
            kinds,
            describe_bytes(one["bytes"]),
        )
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
            counted = "" if one["sights"] is None else f", {one['sights']:,} ids without a row"
            line = f"admission of {one['table']}: {one['admission']}{counted}"
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        if one["rows_in_delta"] is not None:
            line = (
                f"{one['table']} in the delta alone: {one['rows_in_delta']:,} rows, "
                f"{one['deleted_in_delta']:,} deletions"
            )
            out.print(line, markup=False, highlight=False, soft_wrap=True)


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
            table.add_row(name, f"{one['files']:,}", describe_bytes(one["bytes"]))
    return table


def plain_table(first: str, *rest: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in rest:
        table.add_column(name, justify="right", overflow="fold")
    return table


def describe_bytes(count: int) -> str:
    """1234567 -> "1.2 MB"."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def describe_age(seconds: int) -> str:
    """90061 -> "1.0 d"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds} s"
