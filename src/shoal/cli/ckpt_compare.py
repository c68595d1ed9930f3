"""`shoal ckpt diff`, `verify` and `compact`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shoal.checkpoint import maintenance
from shoal.checkpoint.chain import Chain, Link
from shoal.checkpoint.dense import DenseReader, check_files
from shoal.checkpoint.store import locate
from shoal.cli.ckpt_inspect import chosen, plain_table
from shoal.cli.shell import print_line
from shoal.telemetry import human_bytes

_DENSE = 20  # parameters to print at most


def diff(left: str, right: str, tables: Sequence[str], *, out: Console) -> bool:
    """Print what differs; whether nothing does. With `tables`, only those are compared.

    Raises:
        CheckpointError: no checkpoint there, or a file of it is missing or damaged.
        UnknownName: neither has such a table.
    """
    both = [Chain(*locate(path)) for path in (left, right)]
    rows = _rows(both, tables)
    dense = [] if tables else list(_dense(both))

    for letter, chain in zip("AB", both, strict=True):
        print_line(out, f"{letter}: {chain.last.storage.url}, step {chain.last.manifest.step:,}")
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


def _rows(both: Sequence[Chain], names: Sequence[str]) -> maintenance.TableDiffs:
    wanted = None
    if names:
        every = tuple({table.key: table for chain in both for table in chain.tables}.values())
        wanted = frozenset(every[index].key for index in chosen(every, names))
    a, b = (chain.last.storage.url for chain in both)
    return maintenance.diff(a, b, tables=wanted)


def _print_rows(rows: maintenance.TableDiffs, out: Console) -> None:
    table = plain_table(
        *("table", "only A", "only B", "equal", "changed", "only seen"),
        *("weights: max diff", "state: max diff"),
    )
    for one in rows.tables:
        counts = (one.only_a, one.only_b, one.equal, one.changed, one.touched)
        largest = (one.weights_difference, one.state_difference)
        table.add_row(one.key, *(f"{n:,}" for n in counts), *(f"{n:.3g}" for n in largest))
    out.print(table)


def _dense(both: Sequence[Chain]) -> Iterator[str]:
    """A line for each value of a module or an optimizer that differs."""
    readers = [_reader(chain.last) for chain in both]
    keys = [frozenset(reader.names()) if reader else frozenset() for reader in readers]
    for key in sorted(keys[0] | keys[1]):
        pairs = zip(readers, keys, strict=True)
        values = [reader.value(key) for reader, own in pairs if reader and key in own]
        if len(values) < 2:
            yield f"dense {key}: only in {'A' if key in keys[0] else 'B'}"
        elif why := _difference(*values):
            yield f"dense {key}: {why}"


def _reader(link: Link) -> DenseReader | None:
    if not any(file.kind == "dense" for file in link.manifest.files):
        return None
    check_files(link.storage, link.manifest)
    return DenseReader(link.storage)


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r} and {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if torch.equal(one, other):
        return ""
    far = maintenance.apart(one, other)
    if not far.any():
        return ""
    count, largest = int((far != 0).sum()), float(far.max())
    return f"{count:,} of {one.numel():,} numbers, max diff {largest:.3g}"


_UNLISTED = 5  # names to print at most


def verify(path: str, *, chain: bool, out: Console) -> bool:
    """Print what was looked at and what is wrong; whether all is well.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    store, name = locate(path)
    report = maintenance.verify(store.folder(name).url, chain=chain)

    print_line(out, f"checkpoint: {report.url}")
    for name in report.checkpoints:
        print_line(out, f"looked at: {name}")
    for problem in report.problems:
        print_line(out, f"wrong: {problem.checkpoint}/{problem.file}: {problem.why}")
    for name in report.unlisted[:_UNLISTED]:
        print_line(out, f"no part of it: {name}")
    if len(report.unlisted) > _UNLISTED:
        print_line(out, f"no part of it: {len(report.unlisted) - _UNLISTED:,} more files")
    counted = f"{report.files:,} files, {human_bytes(report.bytes)}, {report.rows:,} rows"
    wrong = f"{len(report.problems):,} problem{'s' if len(report.problems) > 1 else ''}"
    print_line(out, f"{'all well' if report.ok else wrong}: {counted}")
    return report.ok


def compact(path: str, *, out: Console) -> None:
    """Write the full checkpoint and say where it is, and the bytes of both.

    Raises:
        CheckpointError: none there, a broken chain, a full one already, or no room.
    """
    store, name = locate(path)
    chain = Chain(store, name)
    written = maintenance.compact(store, name)
    new = store.folder(store.name(written.step, "full"))
    before = sum(file.bytes for link in chain.links for file in link.manifest.files)
    after = sum(file.bytes for file in written.files)
    print_line(out, f"chain: {len(chain.links)} checkpoints, {human_bytes(before)}")
    print_line(out, f"full: {new.url}, {human_bytes(after)}")
