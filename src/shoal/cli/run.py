"""`shoal train`, `shoal eval`, `shoal predict`; `shoal data` makes something to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.shell import Commands, Overrides, argument, console, one_job, option

data = Commands(name="data", help="Make data to train on.", no_args_is_help=True)
Run = Annotated[str, argument("CONFIG|RUN", "Run folder, or a config file: then its latest run.")]


def train(
    config: Annotated[str, argument("CONFIG", "YAML file of the run.")],
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        option(
            "RUN|latest", "Resume an interrupted run: its folder, or the newest one of this name."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as YAML, and train nothing.")
    ] = False,
) -> None:
    """Train a model, evaluate it against its baselines, and write a run folder.

    The folder runs/<name>-<time>/ gets the resolved config, metrics.json, report.html, logs and
    checkpoints, the last of which is the trained model. Settings come from the YAML file, then
    from SHOAL_DEVICE, SHOAL_SEED, SHOAL_THREADS and SHOAL_OUTPUT_DIR, then from the command line.

    Examples:

      shoal train examples/flights.yaml

      shoal train examples/flights.yaml model.kind=dcn tables.default.dim=8

      shoal train examples/flights.yaml 'tables.default.optimizer={kind: adam, lr: 0.01}'

      shoal train examples/flights.yaml '~features.history' data.max_examples=20000

    With a checkpoint every 1,000 steps, and continuing from the last one of an interrupted run:

      shoal train examples/flights.yaml checkpoint.every_steps=1000

      shoal train examples/flights.yaml checkpoint.every_steps=1000 --resume latest

    On several ranks (also under mpirun and srun), with the same result:

      torchrun --nproc-per-node 2 -m shoal.cli train examples/flights.yaml
    """
    with one_job():
        from shoal import config as settings
        from shoal import train as training
        from shoal.comm.launch import early_control

        if print_config:
            typer.echo(settings.to_yaml(settings.load(config, overrides or ())), nl=False)
            return
        synced = settings.load_synced_config(
            early_control(), lambda: settings.load(config, overrides or ())
        )
        training.run(synced, console=console(), resume=resume)


def evaluate(run: Run, overrides: Overrides = None) -> None:
    """Evaluate a trained model on its evaluation examples again.

    Prints the same table as training did; with overrides, the model is evaluated on other data.

    Examples:

      shoal eval runs/flights-20131101-120000

      shoal eval examples/flights.yaml eval.max_examples=10000
    """
    with one_job():
        from shoal import train as training

        training.evaluate(run, overrides or (), console=console())


def predict(
    run: Run,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        option("FILE", "Parquet file to write; predictions.parquet in the run folder if left out."),
    ] = None,
    key: Annotated[
        list[str] | None,
        option("COLUMN", "Column of the data that the file has as it is; may be repeated."),
    ] = None,
) -> None:
    """Write a trained model's predictions for its evaluation examples as Parquet.

    One row an example, in order: keys, prediction (a probability), label, event_time_s. The data
    needs no labels: what is missing is null.

    Examples:

      shoal predict runs/flights-20131101-120000 --out predictions.parquet

      shoal predict examples/flights.yaml eval.max_examples=10000 --key carrier --key number
    """
    with one_job():
        from shoal import train as training

        training.predict(run, overrides or (), out=out, keys=key or (), console=console())


@data.callback()
def _data() -> None:
    """Make data to train on."""


@data.command(no_args_is_help=True)
def synth(
    folder: Annotated[str, argument("DIR", "Folder of train.parquet and eval.parquet.")],
    like: Annotated[str, option("NAME", "criteo, taobao or movielens.", "--like")],
    rows: Annotated[int, option("N", "Examples; 100000 if left out.")] = 100_000,
    seed: Annotated[int, option("N", "Of everything; 0 if left out.")] = 0,
) -> None:
    """Write made-up examples with the columns of a public data set, as two Parquet files.

    Ids follow a Zipf law, and labels hidden weights of them, so that models can be compared.

    Examples:

      shoal data synth --like criteo --rows 100000 data/criteo

      shoal train examples/deepfm_criteo.yaml
    """
    from shoal.data.synthetic import write_like

    for file in write_like(like, rows, folder, seed=seed):  # type: ignore[arg-type]
        console().out(str(file), highlight=False)
