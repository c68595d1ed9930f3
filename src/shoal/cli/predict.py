"""`shoal predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.shell import Debug, Overrides, console, one_job

__all__ = ["predict"]


def predict(
    run: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="Run folder, or a config file: then its latest run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file to write; predictions.parquet in the run folder if left out.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a trained model's predictions for its evaluation examples as Parquet.

    One row an example, in order: prediction (a probability), label, event_time_s.

    Examples:

      shoal predict runs/flights-20131101-120000 --out predictions.parquet

      shoal predict examples/flights.yaml eval.max_examples=10000
    """
    with one_job(debug):
        from shoal import train as training

        training.predict(run, overrides or (), out=out, console=console())
