"""The command line: one typer application, one function per command."""

from __future__ import annotations

import typer

from shoal.cli.bench import bench
from shoal.cli.ckpt import ckpt
from shoal.cli.export import export
from shoal.cli.plan import plan
from shoal.cli.ps import ps
from shoal.cli.run import data, evaluate, predict, train
from shoal.cli.serve import serve

app = typer.Typer(
    name="shoal",
    help="Train models whose embedding tables keep growing.",
    epilog="Start here: shoal train examples/flights.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(name="train", no_args_is_help=True)(train)
app.command(name="eval", no_args_is_help=True)(evaluate)
app.command(name="predict", no_args_is_help=True)(predict)
app.command(name="export", no_args_is_help=True)(export)
app.command(name="ps", no_args_is_help=True)(ps)
app.command(name="serve", no_args_is_help=True)(serve)
app.add_typer(ckpt)
app.add_typer(plan)
app.add_typer(bench)
app.add_typer(data)


@app.callback()
def _root() -> None:
    """Train models whose embedding tables keep growing."""


def main() -> None:
    """Entry point of the `shoal` command."""
    app(prog_name="shoal")
