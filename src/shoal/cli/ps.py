"""`shoal ps`."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from shoal.cli.shell import Debug, Overrides, argument, clean_errors, console, option, print_line


def ps(
    config: Annotated[str, argument("CONFIG", "YAML file of the run.")],
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(metavar="I", help="Which server this is, from 0.")] = 0,
    of: Annotated[int, typer.Option(metavar="N", help="How many servers there are.")] = 1,
    address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where it listens: tcp://HOST:PORT; port 0 takes a free one."
        ),
    ] = "tcp://127.0.0.1:0",
    store: Annotated[
        str | None,
        option("FOLDER", "Where it saves its rows, and looks for them when it starts."),
    ] = None,
    save_every_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time from one save to the next.")
    ] = 60.0,
    threads: Annotated[
        int, typer.Option(metavar="N", help="Requests that are worked on at once.")
    ] = 4,
    token_file: Annotated[
        str | None,
        option("FILE", "A secret of servers and workers; it encrypts what they send."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a share of the rows of a run's model to workers, until SIGTERM or Ctrl-C.

    Workers train with distributed.path=ps and the addresses of all servers. At the end requests
    that were read are answered, and the rows are saved.

    Examples:

      shoal ps examples/flights.yaml --index 0 --of 2 --address tcp://127.0.0.1:7000 --store runs/ps

      shoal ps examples/flights.yaml --index 1 --of 2 --address tcp://127.0.0.1:7001 --store runs/ps

      shoal train examples/flights.yaml distributed.path=ps \\
        'distributed.servers.addresses=[tcp://127.0.0.1:7000,tcp://127.0.0.1:7001]'
    """
    with clean_errors(debug):
        from contextlib import nullcontext

        from shoal import config as settings
        from shoal.comm.transport import Secret
        from shoal.config.build import build_parts, open_data
        from shoal.ps.saving import ServerSaver
        from shoal.ps.server import TableServer

        run = settings.load(config, overrides or ())
        data = open_data(run)
        parts = build_parts(run, run.model, offered=data.features, num_dense=data.num_dense)
        rows = TableServer(parts.tables, index=index, of=of, seed=run.seed)
        secret = Secret.of_file(token_file)
        done = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: done.set())
        saves = nullcontext() if store is None else ServerSaver(rows, store, every_s=save_every_s)
        with saves:
            server = rows.serve(address, threads=threads, secret=secret)
            out = console()
            print_line(out, f"server {index} of {of} at {server.address}")
            done.wait()
            server.stop()
