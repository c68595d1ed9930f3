"""`shoal ckpt export`: rows as Parquet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from shoal.checkpoint.interchange import write_parquet
from shoal.checkpoint.manifest import SavedTable
from shoal.cli.ckpt_places import chosen, find
from shoal.errors import CheckpointError, describe, unknown_name

__all__ = ["export"]


def export(
    path: str,
    out: Path,
    *,
    form: str,
    tables: Sequence[str],
    weights_only: bool,
    tell: Console,
) -> None:
    """Write a folder for each table into `out`, which appears whole or not at all.

    Raises:
        UnknownName: no such format or table.
        CheckpointError: no checkpoint, it is damaged, or `out` is not empty or not writable.
    """
    if form != "parquet":
        raise unknown_name("format to export", form, ["parquet"])
    place = find(path)
    chain = place.chain()
    rows = place.rows(chain)
    indices = chosen(chain[-1].tables, tables)
    partial = _partial(out)
    try:
        for index in indices:
            saved = chain[-1].tables[index]
            folder = partial / _folder_of(saved)
            # Of a delta the chain's rows are written, so its own counts do not hold.
            whole = replace(saved, rows=0, deleted=0)
            count = write_parquet(
                folder,
                whole,
                rows.chunks(index),
                seed=chain[-1].seed,
                place=index,
                weights_only=weights_only,
            )
            line = f"table {saved.key}: {count:,} rows in {out / _folder_of(saved)}"
            tell.print(line, markup=False, highlight=False, soft_wrap=True)
        os.replace(partial, out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _folder_of(saved: SavedTable) -> str:
    return f"{quote(saved.collection, safe='')}.{quote(saved.name, safe='')}"


def _partial(out: Path) -> Path:
    """A folder beside the one to be, with its permissions."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            describe(
                "folder to export to",
                got=f"{out}, which is {'not empty' if out.is_dir() else 'a file'}",
                allowed="a new or empty folder",
                remedy="Choose another one.",
            )
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        partial.chmod(0o755)
    except OSError as error:
        raise _unwritable(out, error) from error
    return partial


def _unwritable(out: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        describe(
            "folder to export to",
            got=f"{out}: {error.strerror or error}",
            allowed="a folder that can be written",
            remedy="Choose another one, or make room.",
        )
    )
