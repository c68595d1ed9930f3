"""`shoal ckpt diff`, `verify` and `compact`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shoal.checkpoint.dense import DenseReader, check_files
from shoal.checkpoint.maintenance import TableDiffs
from shoal.checkpoint.maintenance import compact as compact_chain
from shoal.checkpoint.maintenance import diff as compare
from shoal.checkpoint.maintenance import verify as look
from shoal.checkpoint.manifest import Manifest, SavedTable
from shoal.cli.ckpt_inspect import Place, chosen, describe_bytes, find, plain_table
from shoal.cli.shell import print_line

_DENSE = 20  # parameters to print at most


def diff(left: str, right: str, tables: Sequence[str], *, out: Console) -> bool:
    """Print what differs; whether nothing does. With `tables`, only those are compared.

    Raises:
        CheckpointError: no checkpoint there, or a file of it is missing or damaged.
        UnknownName: neither has such a table.
    """
    a, b = find(left), find(right)
    manifests = [place.store.manifest(place.name) for place in (a, b)]
    rows = _rows(a, b, manifests, tables)
    dense = [] if tables else list(_dense(a, b, manifests))

    for letter, place, manifest in zip("AB", (a, b), manifests, strict=True):
        print_line(out, f"{letter}: {place.url}, step {manifest.step:,}")
    for letter, keys in (("A", rows.only_a), ("B", rows.only_b)):
        for key in keys:
            print_line(out, f"table {key}: only in {letter}")
    for key in rows.reshaped:
        print_line(out, f"table {key}: of other columns or types in B, rows not compared")
    if rows.tables:
        _print_rows(rows, out)
    for line in dense[:_DENSE]:
        print_line(out, line)
    if len(dense) > _DENSE:
        print_line(out, f"{len(dense) - _DENSE:,} more dense parameters differ")
    same = rows.same and not dense
    print_line(out, "the same" if same else "different")
    return same


def _rows(a: Place, b: Place, manifests: Sequence[Manifest], names: Sequence[str]) -> TableDiffs:
    if not names:
        return compare(a.url, b.url)
    every = {table.key: table for manifest in manifests for table in manifest.tables}
    tables: Sequence[SavedTable] = tuple(every.values())
    wanted = frozenset(tables[index].key for index in chosen(tables, names))
    return compare(a.url, b.url, tables=wanted)


def _print_rows(rows: TableDiffs, out: Console) -> None:
    table = plain_table(
        *("table", "only A", "only B", "equal", "changed", "only seen"),
        *("weights: max diff", "state: max diff"),
    )
    for one in rows.tables:
        counts = (one.only_a, one.only_b, one.equal, one.changed, one.touched)
        largest = (one.weights_difference, one.state_difference)
        table.add_row(one.key, *(f"{n:,}" for n in counts), *(f"{n:.3g}" for n in largest))
    out.print(table)


def _dense(a: Place, b: Place, manifests: Sequence[Manifest]) -> Iterator[str]:
    """A line for each value of a module or an optimizer that differs."""
    readers = [_reader(place, one) for place, one in zip((a, b), manifests, strict=True)]
    keys = [frozenset(reader.names()) if reader else frozenset() for reader in readers]
    for key in sorted(keys[0] | keys[1]):
        for letter, own in zip("AB", keys, strict=True):
            if key not in keys[0] & keys[1] and key in own:
                yield f"dense {key}: only in {letter}"
        if key in keys[0] & keys[1]:
            one, other = (reader.value(key) for reader in readers if reader)
            if why := _difference(one, other):
                yield f"dense {key}: {why}"


def _reader(place: Place, manifest: Manifest) -> DenseReader | None:
    if not any(file.kind == "dense" for file in manifest.files):
        return None
    check_files(place.folder, manifest)
    return DenseReader(place.folder)


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r} and {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if torch.equal(one, other):
        return ""
    wide, other_wide = one.double(), other.double()
    apart = (wide - other_wide).abs()
    apart[(wide == other_wide) | (wide.isnan() & other_wide.isnan())] = 0.0
    if not apart.any():
        return ""
    count, largest = int((apart != 0).sum()), float(apart.nan_to_num(torch.inf).max())
    return f"{count:,} of {one.numel():,} numbers, max diff {largest:.3g}"


_UNLISTED = 5  # names to print at most


def verify(path: str, *, chain: bool, out: Console) -> bool:
    """Print what was looked at and what is wrong; whether all is well.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    report = look(find(path).url, chain=chain)

    print_line(out, f"checkpoint: {report.url}")
    for name in report.checkpoints:
        print_line(out, f"looked at: {name}")
    for problem in report.problems:
        print_line(out, f"wrong: {problem.checkpoint}/{problem.file}: {problem.why}")
    for name in report.unlisted[:_UNLISTED]:
        print_line(out, f"no part of it: {name}")
    if len(report.unlisted) > _UNLISTED:
        print_line(out, f"no part of it: {len(report.unlisted) - _UNLISTED:,} more files")
    counted = f"{report.files:,} files, {describe_bytes(report.bytes)}, {report.rows:,} rows"
    print_line(
        out, f"{'all well' if report.ok else f'{len(report.problems):,} problems'}: {counted}"
    )
    return report.ok


def compact(path: str, *, out: Console) -> None:
    """Write the full checkpoint and say where it is, and the bytes of both.

    Raises:
        CheckpointError: none there, a broken chain, a full one already, or no room.
    """
    place = find(path)
    chain = place.chain()
    written = compact_chain(place.store, place.name)
    new = Place(place.store, place.store.name(written.step, "full"))
    before = sum(file.bytes for link in chain.links for file in link.manifest.files)
    after = sum(file.bytes for file in written.files)
    print_line(out, f"chain: {len(chain.links)} checkpoints, {describe_bytes(before)}")
    print_line(out, f"full: {new.url}, {describe_bytes(after)}")
