"""`shoal serve`."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.shell import argument, console, option, print_line, wait_until
from shoal.cli.usage import Exit

if TYPE_CHECKING:
    from shoal.config import RunConfig
    from shoal.serve.loading import VersionSource


def serve(
    run: Annotated[
        str, argument("RUN|EXPORT|CONFIG", "Run folder, config of one, or folder of exports.")
    ],
    grpc: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where gRPC listens.")] = (
        "127.0.0.1:8500"
    ),
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where HTTP listens.")] = (
        "127.0.0.1:8501"
    ),
    name: Annotated[str | None, option("NAME", "Of the model; by default the run's.")] = None,
    version: Annotated[
        int | None,
        option("N", "Serve this version; without it the newest, also when a newer one comes."),
    ] = None,
    follow: Annotated[
        list[str] | None,
        option("ADDRESS", "Publisher of a run that trains, tcp://HOST:PORT; one a rank, in order."),
    ] = None,
    follow_token_file: Annotated[
        str | None, option("FILE", "The secret of the publishers (publish.token_file).")
    ] = None,
    role: Annotated[
        Literal["all", "entry", "ps", "dense"],
        typer.Option(
            help="All; all but the rows, which others have; the rows of one share; or the dense "
            "module alone."
        ),
    ] = "all",
    index: Annotated[int, typer.Option(metavar="I", help="Which share of rows, for ps.")] = 0,
    of: Annotated[int, typer.Option(metavar="N", help="How many shares of rows there are.")] = 1,
    ps: Annotated[
        list[str] | None,
        option(
            "HOST:PORT[,HOST:PORT]",
            "Replicas of a share of rows, for entry; one a share, in order.",
        ),
    ] = None,
    ps_timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long an entry waits for rows.")
    ] = 1.0,
    ps_token_file: Annotated[
        str | None, option("FILE", "The secret of the servers of rows (their --token-file).")
    ] = None,
    ps_root_certificate: Annotated[
        str | None, option("FILE", "Root of the TLS of the servers of rows, PEM.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "int8"] | None,
        typer.Option(help="Of rows; by default as trained.", show_default=False),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the dense module, a minute the first time; results may differ in the "
            "last digits.",
        ),
    ] = False,
    token_file: Annotated[
        str | None, option("FILE", "A secret that callers must send: authorization: Bearer TOKEN.")
    ] = None,
    tls_certificate: Annotated[str | None, option("FILE", "Chain of TLS, PEM.")] = None,
    tls_key: Annotated[str | None, option("FILE", "Key of TLS, PEM.")] = None,
    workers: Annotated[
        int | None, option("N", "Threads that compute; by default one a core.")
    ] = None,
    requests_per_s: Annotated[float | None, option("N", "Refuse more than so many.")] = None,
    poll_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often to look for a newer version.")
    ] = 1.0,
    discovery: Annotated[
        str | None,
        option("ZOOKEEPER", "Register the server and its state there: zookeeper://HOST:PORT/BZID."),
    ] = None,
    layout: Annotated[
        Literal["service", "binding"],
        typer.Option(help="Of Monolith's two, which it registers in."),
    ] = "service",
    replica: Annotated[
        int, typer.Option(metavar="N", help="Number among equal servers, for --discovery.")
    ] = 0,
    announce: Annotated[
        str | None, option("HOST:PORT", "Where clients reach gRPC, if not where it listens.")
    ] = None,
) -> None:
    """Serve predictions of a model over gRPC and HTTP, until SIGTERM or Ctrl-C.

    Speaks TF-Serving's and the Open Inference protocol. HTTP also has /metrics, /healthz and a page
    of what is served. Rows can be spread over processes: each of them serves a share as
    MODEL:ps_I, and an entry asks them.

    Examples:

      shoal serve runs/flights-20131101-120000

      shoal serve examples/flights.yaml --follow tcp://127.0.0.1:7100 --dtype int8

      shoal serve exported --role ps --index 0 --of 2 --grpc 127.0.0.1:8600

      shoal serve exported --role entry --ps 127.0.0.1:8600 --ps 127.0.0.1:8601

      shoal serve exported --discovery zookeeper://127.0.0.1:2181/demo
    """
    from importlib.metadata import version as version_of

    from shoal.comm.transport import Secret
    from shoal.errors import ConfigError
    from shoal.serve.loading import FolderSource, FollowedSource, ServedShare
    from shoal.serve.registration import BackgroundRegistration, ServedPart, register_server
    from shoal.serve.repository import Repository
    from shoal.serve.server import ModelServer, Tls
    from shoal.serve.service import Limits, Service

    shares = [one.split(",") for one in ps or ()]
    wrong = {
        "tls_key": (tls_key is None) != (tls_certificate is None),
        "ps": (role == "entry") != bool(shares),
        "index": not 0 <= index < of,
        "of": of != 1 and role != "ps",
        "follow": bool(follow) and version is not None,
        "compile": compile and role == "ps",
    }
    for option_name, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"option --{option_name.replace('_', '-')} of shoal serve",
                got="options that do not go together",
                allowed="--tls-key with --tls-certificate, --ps with --role entry, "
                "--index below --of, --of with --role ps, --follow without --version, "
                "--compile with a dense module",
                remedy="See shoal serve --help.",
            )
    ps_token = Secret.of_file(ps_token_file)
    share = ServedShare(
        role=role,
        index=index,
        of=len(shares) or of,
        dtype=dtype,
        compile=compile,
        addresses=tuple(map(tuple, shares)),
        timeout_s=ps_timeout_s,
        token=None if ps_token is None else ps_token.token,
        root_certificate=ps_root_certificate,
    )
    token = Secret.of_file(token_file)
    source: VersionSource
    if follow:
        secret = Secret.of_file(follow_token_file)
        followed = _config(run)
        by_servers = followed.distributed.path == "ps"
        if by_servers and role != "ps":
            raise ConfigError(
                "option --follow of shoal serve",
                got="a run on parameter servers",
                allowed="a run whose own ranks publish, or --role ps",
                remedy="Its servers publish rows only: follow them with --role ps, and serve "
                "its run folder with --role entry.",
            )
        source = FollowedSource(
            followed,
            follow,
            share,
            name=name,
            secret=secret,
            checkpoint=None if by_servers else _checkpoint(run),
        )
    else:
        source = FolderSource(_folder(run), share, name=name, version=version)
    done, loading, out = threading.Event(), False, console()

    def stop(number: int, _: object) -> None:
        nonlocal loading
        done.set()
        if loading:  # its rows may take minutes
            loading = False
            raise SystemExit(Exit.INTERRUPTED if number == signal.SIGINT else Exit.DONE)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    tls = Tls(tls_certificate, tls_key) if tls_certificate and tls_key else None
    service_limits = Limits(workers=workers, requests_per_s=requests_per_s)
    with ExitStack() as stack:
        models = Repository([source], every_s=poll_s)
        stack.push(models)  # closed last; entered once the server shows that it loads
        service = Service(
            models, limits=service_limits, token=None if token is None else token.token
        )
        server = stack.enter_context(
            ModelServer(
                service,
                grpc_address=grpc,
                http_address=http,
                tls=tls,
                version=version_of("shoal"),
            )
        )
        if discovery is not None:
            where, _, bzid = discovery.rpartition("/")
            part = ServedPart(
                bzid=bzid,
                model=source.name.partition(":")[0],
                sub_graph={"ps": f"ps_{index}", "dense": "dense"}.get(role, "entry"),
                replica=replica,
            )
            register = partial(
                register_server,
                where,
                part,
                announce or server.grpc_address,
                http=server.http_address,
                layout=layout,
            )
            registered = BackgroundRegistration(register, lambda: models.ready, done)
            stack.enter_context(registered)
        loading = True
        models.__enter__()
        loading = False
        what = ", ".join(models.names)
        print_line(out, f"{what}: gRPC {server.grpc_address}, HTTP {server.http_address}")
        wait_until(done)


def _folder(run: str) -> Path:
    """A run's folder, or a folder of exports; of a config file the latest run's."""
    from shoal.train import folder as folders

    path = Path(run)
    return path if path.is_dir() else folders.find(run, ())[0].path


def _checkpoint(run: str) -> str | None:
    """The folder of a run's checkpoints, if it has one."""
    from shoal.train import folder as folders

    found = folders.RunFolder(Path(run))
    return None if folders.checkpoint_of(found) is None else folders.checkpoints_of(found)


def _config(run: str) -> RunConfig:
    from shoal import config as settings

    path = Path(run)
    return settings.load(path / "config.yaml" if path.is_dir() else path)
