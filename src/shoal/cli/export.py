"""`shoal export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.run import Run
from shoal.cli.shell import argument, console, option, print_line


def export(
    run: Run,
    folder: Annotated[Path, argument("DIR", "Folder of all versions of the model.")],
    mode: Annotated[
        Literal["standalone", "distributed", "dense"],
        typer.Option(help="One bundle, an entry and shards of rows, or the dense module only."),
    ] = "standalone",
    shards: Annotated[
        int, typer.Option(metavar="N", help="Shards of rows in a distributed export.")
    ] = 1,
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="Of rows.")] = "float32",
    version: Annotated[
        int | None, option("N", "Number of the version; by default the step of the checkpoint.")
    ] = None,
    keep: Annotated[
        int, typer.Option(metavar="N", help="Versions that stay; older ones are removed.")
    ] = 5,
) -> None:
    """Write a trained model for servers: DIR/<version>/, which appears as a whole.

    A bundle has the settings, rows without optimizer state, the dense module by torch.export
    (dense.pt2) and as a state dict (dense.pt), and signature.json. The same checkpoint exported
    again the same way leaves a version as it is.

    Examples:

      shoal export runs/flights-20131101-120000 exported

      shoal export examples/flights.yaml exported --mode distributed --shards 2 --dtype float16
    """
    from shoal.config.build import build_parts
    from shoal.serve.bundle import open_bundle
    from shoal.serve.export import export as write
    from shoal.train import folder as folders

    out = console()
    found, config = folders.find(run, ())
    checkpoint = folders.checkpoint_of(found)
    assert checkpoint is not None, "found before"
    parts = build_parts(config)
    path = write(
        config,
        parts,
        checkpoint,
        folder,
        mode=mode,
        shards=shards,
        dtype=dtype,
        version=version,
        keep=keep,
    )
    bundle = open_bundle(path / "entry" if mode == "distributed" else path)
    if bundle.signature.dense_problem is not None:
        print_line(out, f"no dense.pt2, only dense.pt: {bundle.signature.dense_problem}")
    print_line(out, f"exported: {path}")
