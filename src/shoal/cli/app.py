"""The command line: one typer application, one function per command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shoal.cli import start
from shoal.cli.bench import bench
from shoal.cli.ckpt import ckpt
from shoal.cli.export import export
from shoal.cli.plan import plan
from shoal.cli.ps import ps
from shoal.cli.run import data, evaluate, predict, train
from shoal.cli.serve import serve
from shoal.cli.shell import Commands, GivesWay
from shoal.cli.usage import AllCommands, run_app

app = Commands(
    name="shoal",
    cls=AllCommands,
    help="Train models whose embedding tables keep growing.",
    epilog="Start here: shoal examples flights && shoal train examples/flights.yaml",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(name="init", no_args_is_help=True)(start.init)
app.command(name="examples")(start.examples)
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
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show versions.", is_eager=True, callback=start.version),
    ] = False,
) -> None:
    """Train models whose embedding tables keep growing."""


def main() -> None:
    """Entry point of the `shoal` command."""
    streams: Any = (GivesWay(sys.stdout), GivesWay(sys.stderr))
    sys.stdout, sys.stderr = streams
    run_app(app)
