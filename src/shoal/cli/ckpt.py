"""`shoal ckpt`: look at checkpoints, check and compare them, move rows in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.shell import Commands, argument, console, option
from shoal.cli.usage import Exit

ckpt = Commands(
    name="ckpt",
    help="Look into checkpoints, check and compare them, move rows in and out.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Checkpoint = Annotated[
    str,
    argument(
        "CKPT", "Folder or URL of a checkpoint, of a store of them, or of a run: then its newest."
    ),
]


Tables = Annotated[
    list[str] | None,
    option("NAME", "This table only, as collection/table or table; may be repeated.", "--table"),
]


@ckpt.command(name="inspect", no_args_is_help=True)
def inspect(
    path: Checkpoint,
    tables: Tables = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds: step, chain, tables with ages and norms, dense modules, files.

    Reads all rows, a few MiB at a time. Ages are seconds of event time before the newest row of
    the table. Of a delta, the rows are those of its whole chain.

    Examples:

      shoal ckpt inspect runs/flights-20131101-120000

      shoal ckpt inspect checkpoints/step-000000002000-delta --table deepfm/carrier --json
    """
    from shoal.cli.ckpt_inspect import show

    show(path, tables or (), as_json=as_json, out=console())


@ckpt.command(name="verify", no_args_is_help=True)
def verify(
    path: Checkpoint,
    chain: Annotated[
        bool, typer.Option("--chain/--alone", help="With the checkpoints that it builds on.")
    ] = True,
) -> None:
    """Check every file: size and checksum, order and ranges of rows, counts.

    Exits with 0 when all is well, with 1 when files are wrong, which it names.

    Examples:

      shoal ckpt verify checkpoints

      shoal ckpt verify s3://bucket/checkpoints/step-000000002000-delta --alone
    """
    from shoal.cli import ckpt_compare

    if not ckpt_compare.verify(path, chain=chain, out=console()):
        raise typer.Exit(Exit.DIFFERENT)


@ckpt.command(name="diff", no_args_is_help=True)
def diff(
    left: Annotated[str, argument("A", "Folder or URL, as of inspect.")],
    right: Annotated[str, argument("B", "Folder or URL, as of inspect.")],
    tables: Tables = None,
) -> None:
    """Compare two checkpoints: rows that only one has, rows and dense parameters that differ.

    Exits with 0 when they are equal, with 1 when not. Neither world size nor files matter.

    Examples:

      shoal ckpt diff runs/a/checkpoints runs/b/checkpoints

      shoal ckpt diff checkpoints/step-000000001000-full checkpoints/step-000000002000-delta
    """
    from shoal.cli import ckpt_compare

    if not ckpt_compare.diff(left, right, tables or (), out=console()):
        raise typer.Exit(Exit.DIFFERENT)


@ckpt.command(name="compact", no_args_is_help=True)
def compact(path: Checkpoint) -> None:
    """Write the chain that ends in a delta as one full checkpoint next to it.

    The chain stays; the new one loads by itself and can be a parent. Its row files have the bytes
    that a full save at that step would have written.

    Example:

      shoal ckpt compact checkpoints/step-000000002000-delta
    """
    from shoal.cli import ckpt_compare

    ckpt_compare.compact(path, out=console())


@ckpt.command(name="export", no_args_is_help=True)
def export(
    path: Checkpoint,
    out: Annotated[Path, option("DIR", "New or empty folder.", "--out")],
    form: Annotated[str, typer.Option("--format", metavar="NAME", help="parquet.")] = "parquet",
    tables: Tables = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Leave out optimizer state, version, time and count."),
    ] = False,
) -> None:
    """Write the rows as Parquet: a folder for each table, which pandas, polars and DuckDB read.

    Columns: id, weights (list of floats), state (list of floats), version, last_seen_s, count.

    Examples:

      shoal ckpt export runs/flights-20131101-120000 --out rows

      shoal ckpt export checkpoints --out vectors --table deepfm/carrier --weights-only
    """
    from shoal.cli import ckpt_rows

    ckpt_rows.export(
        path, out, form=form, tables=tables or (), weights_only=weights_only, log=console()
    )


@ckpt.command(name="import", no_args_is_help=True)
def import_(
    source: Annotated[Path, argument("SRC", "File or folder to read.")],
    out: Annotated[str, option("DIR", "New or empty folder, or URL.", "--out")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="parquet, monolith (EntryDump records), embedding (a torch state dict), npz, text "
            "(lines: id, then its vector).",
        ),
    ] = "parquet",
    tables: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Table to make; may be repeated. All that the source names if left out.",
            "--table",
        ),
    ] = None,
    collection: Annotated[
        str | None,
        option(
            "NAME",
            "Collection of the tables; if left out what the source says, the model's kind "
            "with --config, or embeddings.",
        ),
    ] = None,
    config: Annotated[
        str | None, option("FILE", "Config of a run: segments, optimizers and dtype of its tables.")
    ] = None,
    optimizer: Annotated[
        str | None,
        option(
            "RULE",
            "In place of a config: rule whose initial state rows get, adagrad or "
            "'{kind: adagrad, initial_accumulator: 0.1}'.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        option(
            "NAME", "With --optimizer: float32, float16, bfloat16 or float64; float32 if left out."
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        option("KEY", "embedding: key of the weights in the state dict, one for each --table."),
    ] = None,
    id_column: Annotated[str | None, option("NAME", "parquet: column of ids.")] = None,
    vector_column: Annotated[str | None, option("NAME", "parquet: column of vectors.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out state that the source has.")
    ] = False,
    seed: Annotated[
        int | None,
        option("N", "Of initial values of rows to come; the config's, or 0, if left out."),
    ] = None,
    last_seen_s: Annotated[
        int | None,
        option("S", "Unix time at which rows count as seen that do not say it; now if left out."),
    ] = None,
) -> None:
    """Make a full checkpoint of rows from elsewhere.

    Rows whose source has no optimizer state get their rule's initial one: name the rule by
    --config or --optimizer. What `shoal ckpt export` wrote needs neither.

    Examples:

      shoal ckpt import rows --out checkpoints

      shoal ckpt import model.pt --format embedding --table user --key user_emb.weight
      --optimizer adagrad --out checkpoints

      shoal ckpt import dump/MonolithMultiHashTable_0 --format monolith --config run.yaml
      --out checkpoints
    """
    given = {**locals(), "tables": tables or [], "key": key or []}
    from shoal.cli import ckpt_rows

    ckpt_rows.import_rows(ckpt_rows.ImportRequest(**given), out=console())
