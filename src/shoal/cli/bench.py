"""`shoal bench`: measurements that a user may want on their own machines."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.shell import Commands, console, option, print_line

bench = Commands(
    name="bench", help="Measure this machine.", no_args_is_help=True, rich_markup_mode="rich"
)


@bench.callback()
def _bench() -> None:
    """Measure this machine."""


@bench.command(name="comm")
def comm(
    which: Annotated[
        str | None,
        option(
            "NAME",
            "ar (all-reduce), c2c, c2g, g2c, g2g (all-to-all from CPU or GPU to either), or "
            "all; MONOLITH_BENCHMARK_BPS if left out, then all.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        option("N", "Of each, 40 or more; MONOLITH_BENCHMARK_ITERS if left out, then 200."),
    ] = None,
    ar_length: Annotated[
        int | None,
        option(
            "N",
            "float32 values of the all-reduce; MONOLITH_BENCHMARK_BPS_AR_LEN if left out, "
            "then 65536000.",
        ),
    ] = None,
    a2a_length: Annotated[
        int | None,
        option(
            "N",
            "float32 values of the all-to-all, an eighth of it from CPU to CPU; "
            "MONOLITH_BENCHMARK_BPS_A2A_LEN if left out, then 65536000.",
        ),
    ] = None,
    path: Annotated[
        str,
        typer.Option(metavar="NAME", help="What carries it: auto, torch, shared_memory or mpi."),
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or one GPU, cuda:0.")
    ] = "auto",
) -> None:
    """Measure the goodput of collectives between the ranks that this was launched on.

    Rank 0 prints (length, mean goodput in Gbit/s) of each benchmark. Goodput is what one rank
    hands in over the time it takes, means over 20 iterations, without the first 20. Settings of
    NCCL and threads, and each mean, are logged to stderr.

    Examples:

      torchrun --nproc-per-node 2 -m shoal.cli bench comm --which c2c

      MONOLITH_BENCHMARK_BPS=ar mpirun -n 4 shoal bench comm --iterations 100
    """
    import logging
    import os

    from shoal.comm import benchmarks, launch, launch_environment, mesh

    environ = {"MONOLITH_BENCHMARK_BPS": "all", **os.environ}
    settings = benchmarks.benchmark_settings(
        environ,
        which=which,
        iterations=iterations,
        all_reduce_length=ar_length,
        all_to_all_length=a2a_length,
        path=mesh.path_named(path),
    )
    logger = logging.getLogger("shoal.comm")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO if launch_environment.detect().rank == 0 else logging.WARNING)
    started = launch.init(device=device)
    out = console()
    try:
        benchmarks.bps_comm_benchmark(
            settings, mesh=started, write_line=lambda line: print_line(out, line)
        )
    finally:
        launch.shutdown()
