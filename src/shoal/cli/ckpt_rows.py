"""`shoal ckpt import` and `export`: rows from other systems, and to them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from rich.console import Console

from shoal import config as settings
from shoal.checkpoint.chain import Chain
from shoal.checkpoint.formats.dumps import open_embeddings, open_npz, open_text
from shoal.checkpoint.formats.foreign import ForeignSource, Offered, TableForm, form_of, receive
from shoal.checkpoint.formats.monolith import open_monolith
from shoal.checkpoint.formats.parquet import open_parquet, write_parquet
from shoal.checkpoint.store import locate
from shoal.cli.ckpt_inspect import chosen
from shoal.cli.shell import print_line
from shoal.config import RunConfig
from shoal.config.build import table_spec
from shoal.config.tree import OPTIMIZERS, build
from shoal.errors import CheckpointError, ConfigError, known_name, unknown_name
from shoal.table.spec import RowDType, Segment, TableSpec

_COLLECTION = "embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What `shoal ckpt import` was given."""

    source: Path
    out: str
    form: str
    collection: str | None
    tables: list[str]
    config: str | None
    optimizer: str | None
    dtype: str | None
    key: list[str]
    id_column: str | None
    vector_column: str | None
    weights_only: bool
    seed: int | None
    last_seen_s: int | None


def import_rows(request: ImportRequest, *, out: Console) -> None:
    """Write the checkpoint and say what is in it.

    Raises:
        UnknownName: a format, table, column or rule that does not exist.
        ConfigError: options that contradict each other.
        DataError: the source is missing, damaged or of another form.
        CheckpointError: the new checkpoint cannot be written where it should.
    """
    _check(request)
    source = _IMPORTS[request.form](request)
    offered = {table.name: table for table in source.tables}
    config = None if request.config is None else settings.load(request.config)
    names = _chosen(request, offered)
    forms = {name: _form(request, config, offered[name]) for name in names}
    _check_apart(forms)
    seed = _seed(request, config, [offered[name] for name in names])
    now_s = int(time.time())
    manifest, where = receive(
        request.out,
        source,
        forms,
        seed=seed,
        created_s=now_s,
        last_seen_s=now_s if request.last_seen_s is None else request.last_seen_s,
        weights_only=request.weights_only,
    )
    for table in manifest.tables:
        print_line(
            out, f"table {table.key}: {table.rows:,} rows of {table.dim} columns, {table.dtype}"
        )
    print_line(out, f"checkpoint: {where}")


def _chosen(request: ImportRequest, offered: Mapping[str, Offered]) -> tuple[str, ...]:
    """Names of the tables to import; "collection/table" is good for any that says its own."""
    keys = {one.saved.key: name for name, one in offered.items() if one.saved is not None}
    names = {**keys, **{name: name for name in offered}}
    for name in request.tables:
        known_name(f"table in {request.source}", name, names)
    return tuple(dict.fromkeys(names[name] for name in request.tables)) or tuple(offered)


def _check_apart(forms: Mapping[str, TableForm]) -> None:
    """Refuse two tables that would become one."""
    there: dict[str, str] = {}
    for name, form in forms.items():
        if (other := there.setdefault(form.table.key, name)) != name:
            what, got = "tables that come in", f"{other} and {name} as {form.table.key}"
            remedy = "Leave --collection out, or pick one with --table."
            raise ConfigError(what, got, "a name for each", remedy)


def _check(request: ImportRequest) -> None:
    known_name("format to import", request.form, _IMPORTS)
    if request.config is not None and (request.optimizer or request.dtype):
        what, got = "what the rows become", "--config with --optimizer or --dtype"
        raise ConfigError(what, got, "one of the two", "The config says optimizers and dtype.")
    if request.dtype is not None and request.dtype not in get_args(RowDType):
        raise unknown_name("dtype", request.dtype, get_args(RowDType))
    if request.key and request.form != "embedding":
        raise ConfigError("--key", f"--format {request.form}", "embedding", "Leave --key out.")
    for name in ("seed", "last_seen_s"):
        value = getattr(request, name)
        if value is not None and not 0 <= value < 1 << 32:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, value, "0..2^32 - 1", "Give a whole number.")


def _open_parquet(request: ImportRequest) -> ForeignSource:
    named = _one_named(request)
    return open_parquet(request.source, named, ids=request.id_column, vectors=request.vector_column)


def _one_named(request: ImportRequest) -> str | None:
    return request.tables[0] if len(request.tables) == 1 else None


def _open_embeddings(request: ImportRequest) -> ForeignSource:
    if not request.tables or (request.key and len(request.key) != len(request.tables)):
        raise ConfigError(
            "--table and --key",
            f"{len(request.tables)} and {len(request.key)} of them",
            "a --table or more, and a --key for each or none",
            "Name the tables that the embeddings become.",
        )
    keys: Sequence[str | None] = request.key or [None] * len(request.tables)
    return open_embeddings(request.source, dict(zip(request.tables, keys, strict=True)))


def _one_table(request: ImportRequest) -> str:
    if (named := _one_named(request)) is not None:
        return named
    what = f"--table with --format {request.form}"
    raise ConfigError(what, len(request.tables), "one", "Name the table that the rows become.")


_EXPORTS = {"parquet": write_parquet}
_IMPORTS: Mapping[str, Callable[[ImportRequest], ForeignSource]] = {
    "parquet": _open_parquet,
    "monolith": lambda request: open_monolith(request.source, _one_named(request)),
    "embedding": _open_embeddings,
    "npz": lambda request: open_npz(request.source, _one_table(request)),
    "text": lambda request: open_text(request.source, _one_table(request)),
}


def _form(request: ImportRequest, config: RunConfig | None, offered: Offered) -> TableForm:
    saved = offered.saved
    table_name = saved.name if saved else offered.name
    collection = request.collection or (saved.collection if saved else None)
    if config is not None:
        spec = table_spec(config, table_name)
        form = form_of(collection or config.model.kind, spec)
    elif request.optimizer is not None:
        form = form_of(collection or _COLLECTION, _spec(request, offered, table_name))
    elif saved is None:
        raise ConfigError(
            f"optimizer of table {offered.name!r}",
            "none",
            "--optimizer RULE, or --config FILE",
            "Rows need its initial state; say --optimizer sgd for tables without state.",
        )
    else:
        table = replace(saved, collection=collection or _COLLECTION, admission=None)
        form = TableForm(table=table, initial_state=None)
    _check_fits(request, offered, form)
    return form


def _seed(request: ImportRequest, config: RunConfig | None, tables: Sequence[Offered]) -> int:
    if request.seed is not None:
        return request.seed
    if config is not None:
        return config.seed
    seeds = {table.seed for table in tables if table.seed is not None}
    if len(seeds) > 1:
        got = ", ".join(map(str, sorted(seeds)))
        raise ConfigError("seeds of the tables", got, "one", "Name one with --seed.")
    return seeds.pop() if seeds else 0


def _spec(request: ImportRequest, offered: Offered, name: str) -> TableSpec:
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    text = request.optimizer or ""
    try:
        rule = build(safe_load(text), OPTIMIZERS)
    except YAMLError as error:
        allowed = "a rule's name, or {kind: name, ...}"
        raise ConfigError("--optimizer", repr(text), allowed, "Correct it.") from error
    dtype = request.dtype or (offered.saved.dtype if offered.saved else "float32")
    segment = Segment(dim=offered.dim, optimizer=rule)
    return TableSpec(name=name, segments=(segment,), dtype=dtype)  # type: ignore[arg-type]


def _check_fits(request: ImportRequest, offered: Offered, form: TableForm) -> None:
    """State that comes along must be that of the rules named."""
    if form.table.dim != offered.dim:
        raise ConfigError(
            f"columns of table {offered.name!r}",
            f"{offered.dim} in {request.source}",
            f"{form.table.dim}, as the config has it",
            "Correct dim in the config, or pick the tables that are in it with --table.",
        )
    if request.weights_only or not offered.has_state or offered.saved is None:
        return
    ours = [(one.dim, one.optimizer, one.state_width) for one in form.table.segments]
    theirs = [(one.dim, one.optimizer, one.state_width) for one in offered.saved.segments]
    if ours != theirs:
        raise ConfigError(
            f"optimizers of table {offered.name!r}",
            ", ".join(f"{dim} columns with {rule}" for dim, rule, _ in theirs),
            ", ".join(f"{dim} columns with {rule}" for dim, rule, _ in ours),
            "Leave the state behind with --weights-only, or keep the optimizers.",
        )


def export(
    path: str, out: Path, *, form: str, tables: Sequence[str], weights_only: bool, log: Console
) -> None:
    """Write a folder for each table into `out`, which appears whole or not at all.

    Raises:
        UnknownName: no such format or table.
        CheckpointError: no checkpoint, it is damaged, or `out` is not empty or not writable.
    """
    known_name("format to export", form, _EXPORTS)
    chain, what = Chain(*locate(path)), "folder to export to"
    indices = chosen(chain.tables, tables)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = f"{out}, which is {'not empty' if out.is_dir() else 'a file'}"
        raise CheckpointError(what, got, "a new or empty folder", "Choose another one.")
    seed = chain.last.manifest.seed
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
            partial = Path(folder, "tables")
            partial.mkdir()
            for index in indices:
                # Of a delta the chain's rows are written, so its own counts do not hold.
                whole = replace(chain.tables[index], rows=0, deleted=0)
                name = f"{quote(whole.collection, safe='')}.{quote(whole.name, safe='')}"
                rows = chain.chunks(index)
                count = _EXPORTS[form](
                    partial / name, whole, rows, seed=seed, place=index, weights_only=weights_only
                )
                print_line(log, f"table {whole.key}: {count:,} rows in {out / name}")
            os.replace(partial, out)
    except OSError as error:
        got, remedy = f"{out}: {error.strerror or error}", "Choose another one, or make room."
        raise CheckpointError(what, got, "a folder that can be written", remedy) from error
