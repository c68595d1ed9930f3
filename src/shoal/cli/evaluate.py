"""`shoal eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.shell import Debug, Overrides, console, one_job

__all__ = ["evaluate"]


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="Run folder, or a config file: then its latest run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Judge a trained model on its evaluation examples again.

    Prints the same table as training did; with overrides, the model is judged on other data.

    Examples:

      shoal eval runs/flights-20131101-120000

      shoal eval examples/flights.yaml eval.max_examples=10000
    """
    with one_job(debug):
        from shoal import train as training

        training.evaluate(run, overrides or (), console=console())
