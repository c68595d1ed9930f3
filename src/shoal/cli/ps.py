"""`shoal ps`."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.shell import Overrides, argument, console, option, print_line, wait_until
from shoal.cli.usage import Exit

if TYPE_CHECKING:
    from shoal.comm.transport import Secret


def ps(
    config: Annotated[str, argument("CONFIG", "YAML file of the run; an address, with --status.")],
    overrides: Overrides = None,
    index: Annotated[
        int | None,
        option("I", "Which server this is, from 0; without it, with a discovery, a free one."),
    ] = None,
    of: Annotated[
        int | None, option("N", "How many servers there are; by default those of the config, or 1.")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where it listens: tcp://HOST:PORT; port 0 takes a free one."
        ),
    ] = "tcp://127.0.0.1:0",
    announce: Annotated[
        str | None,
        option("HOST:PORT", "Where workers reach it, if not where it listens; for a discovery."),
    ] = None,
    store: Annotated[
        str | None, option("FOLDER", "Where it saves its rows, and looks for them when it starts.")
    ] = None,
    save_every_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time from one save to the next.")
    ] = 60.0,
    threads: Annotated[
        int, typer.Option(metavar="N", help="Requests that are worked on at once.")
    ] = 4,
    token_file: Annotated[
        str | None, option("FILE", "A secret of servers and workers; it encrypts what they send.")
    ] = None,
    status: Annotated[
        bool,
        typer.Option("--status", help="Serve nothing: print how the servers at ADDRESS... are."),
    ] = False,
) -> None:
    """Serve a share of the rows of a run's model to workers, until SIGTERM or Ctrl-C.

    Workers train with distributed.path=ps and the addresses of all servers, or the discovery where
    they register. Servers beyond --of stand by there, and take the index of one that is gone. At
    the end requests that were read are answered, and the rows are saved. With `publish` in the
    config, server i publishes its rows to replicas at that port + i.

    Examples:

      shoal ps examples/flights.yaml --index 0 --of 2 --address tcp://127.0.0.1:7000 --store runs/ps

      shoal ps examples/flights.yaml --index 1 --of 2 --address tcp://127.0.0.1:7001 --store runs/ps

      shoal train examples/flights.yaml distributed.path=ps \\
        'distributed.servers.addresses=[tcp://127.0.0.1:7000,tcp://127.0.0.1:7001]'

      shoal ps examples/flights.yaml distributed.servers.discovery=zookeeper://127.0.0.1:2181 \\
        --of 2 --store runs/ps

      shoal ps --status 127.0.0.1:7000 127.0.0.1:7001
    """
    from shoal import config as settings
    from shoal.comm.transport import Secret
    from shoal.config.build import build_tables
    from shoal.discovery import TfConfig, open_discovery
    from shoal.ps.membership import ROLE, IndexLease
    from shoal.ps.saving import ServerSaver
    from shoal.ps.server import TableServer, spread_over
    from shoal.sync.publisher import Publisher, address_of_rank
    from shoal.table.hosting import HostedTables

    if status:
        _print_status([config, *(overrides or ())], Secret.of_file(token_file))
        return
    run = settings.load(config, overrides or ())
    servers = run.distributed.servers
    tables = build_tables(run)
    secret = Secret.of_file(token_file)
    done, out = threading.Event(), console()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    where = servers.discovery
    registry = where and open_discovery(where, job=run.name, session_s=servers.session_s)
    listed = registry.query(ROLE) if isinstance(registry, TfConfig) else servers.addresses
    count = (servers.count or len(listed) or 1) if of is None else of
    with IndexLease(registry or None, count, done) as lease, ExitStack() as saves:
        own = lease.take(index, lambda: print_line(out, "all indices are taken: standing by"))
        if own is None:
            return
        rows = TableServer(
            tables, index=own, of=count, seed=run.seed, most_bytes=servers.most_mib << 20
        )
        if store is not None:
            saves.enter_context(
                ServerSaver(rows, store, every_s=save_every_s, is_held=lease.is_held)
            )
        server = rows.serve(address, threads=threads, secret=secret)
        lease.announce(own, announce or server.address)
        print_line(out, f"server {own} of {count} at {server.address}")
        publisher = None
        if (publish := run.publish) is not None:
            hosted = HostedTables(tables, rows.shard, spread_over(tables, count))
            publisher = saves.enter_context(
                Publisher(hosted, rank=own, every_s=publish.every_s, keep_bytes=publish.keep_bytes)
            )
            at = address_of_rank(publish.address, own)
            published = publisher.serve(at, secret=Secret.of_file(publish.token_file))
            saves.callback(published.stop)
            print_line(out, f"publishing at {published.address}")
        wait_until(done)
        server.stop()
        if publisher is not None and run.publish is not None:
            publisher.drain(run.publish.linger_s)
        lease.check()


def _print_status(addresses: list[str], secret: Secret | None) -> None:
    """One line of JSON a server; exits with 1 if one does not answer."""
    from shoal.ps.connections import health_of

    out, found = console(), health_of(addresses, secret=secret)
    for address, said in zip(addresses, found, strict=True):
        print_line(out, json.dumps({"address": address, **(said or {"state": "no answer"})}))
    if None in found:
        raise typer.Exit(Exit.DIFFERENT)
