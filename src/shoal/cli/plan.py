"""`shoal plan`: where tables go, on machines that there are or are not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.cli.shell import Commands, Overrides, argument, console, option, print_line
from shoal.cli.start import write

if TYPE_CHECKING:
    from shoal.config import RunConfig
    from shoal.planner import Topology

_MAKE = "make"


class _ConfigFirst(TyperGroup):
    """`shoal plan CONFIG` is short for `shoal plan make CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [_MAKE, *args]
        return super().parse_args(ctx, args)


plan = Commands(
    name="plan",
    help="Plan which rank holds which table, for machines that there are or are not.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    cls=_ConfigFirst,
)

Config = Annotated[str, argument("CONFIG", "YAML file of the run.")]
TopologyFile = Annotated[
    Path | None,
    option(
        "FILE",
        "YAML of the machines, or JSON of shoal plan calibrate; this machine's if left out.",
        "--topology",
    ),
]
Out = Annotated[Path, option("FOLDER", "Where files are written; this one if left out.", "--out")]
Groups = Annotated[
    bool, typer.Option("--groups", help="Also try groups that hold all tables each (simulated).")
]


@plan.callback()
def _plan() -> None:
    """Plan which rank holds which table, for machines that there are or are not.

    shoal plan CONFIG is short for shoal plan make CONFIG.
    """


@plan.command(name=_MAKE)
def make(
    config: Config,
    overrides: Overrides = None,
    devices: Annotated[
        int | None, option("N", "Ranks; those of the topology, or 1, if left out.")
    ] = None,
    topology: TopologyFile = None,
    out: Out = Path(),
    groups: Groups = False,
    changes: Annotated[
        bool,
        typer.Option(
            "--changes/--no-changes", help="Plan what twice the memory or speed would change."
        ),
    ] = True,
    time_limit: Annotated[float, option("S", "Seconds of the search.")] = 60.0,
) -> None:
    """Plan the tables of a run, print the plan, and write it as JSON and HTML.

    distributed.plan=NAME-plan.json trains with it; distributed.placement=auto plans when training
    begins.

    Examples:

      shoal plan examples/dlrm_dcnv2.yaml --devices 4

      shoal plan examples/dlrm_dcnv2.yaml --devices 64 --topology cluster.yaml --no-changes
    """
    from shoal.config.build import build_parts
    from shoal.planner import report
    from shoal.train import table_placement

    settings = _loaded(config, overrides)
    machines = _machines(settings, topology, devices)
    parts = build_parts(settings)

    inputs = table_placement.inputs_of(settings, parts, machines.world_size)

    def plan_on(where: Topology) -> Any:
        return table_placement.plan_run(
            settings, parts, where, inputs=inputs, groups=groups, time_limit_s=time_limit
        )

    found = plan_on(machines)
    changed = report.changes_of(plan_on, machines) if changes else []
    _print(report.text_of(found, changed))
    name = f"{settings.name}-plan"
    write(out / f"{name}.json", found.to_json())
    write(out / f"{name}.html", report.html_of(found, f"Plan of {settings.name}", changed))


@plan.command(name="simulate")
def simulate(
    config: Annotated[str, argument("CONFIG|TABLES", "YAML of a run, or of tables.")],
    overrides: Overrides = None,
    devices: Annotated[
        str, option("N,N,...", "Numbers of ranks; 8 to 4096 by factors of 2 if left out.")
    ] = "8,16,32,64,128,256,512,1024,2048,4096",
    topology: TopologyFile = None,
    batch_size: Annotated[
        int | None,
        option("N", "Examples of a rank; if left out, those of the tables, or the run's, divided."),
    ] = None,
    groups: Groups = False,
    out: Out = Path(),
    time_limit: Annotated[float, option("S", "Seconds of the search of each size.")] = 20.0,
) -> None:
    """Plan for clusters that one does not have: step time and memory against devices.

    A YAML of tables has them under "tables": name -> rows, dim, and maybe state_width, dtype,
    copies, ids_per_sample, exponent, tiers; and maybe dense_weights and batch_size (of a rank). Of
    a run, data.batch_size is divided among the ranks.

    Examples:

      shoal plan simulate examples/dlrm_dcnv2.yaml --devices 8,64,512 --topology cluster.yaml

      shoal plan simulate tables.yaml --groups
    """
    from shoal.planner import report, simulation

    sizes = simulation.sizes_of(devices)
    described = simulation.read_tables(config)
    machines = None
    if described is None:
        from shoal.config.build import build_host_rows, build_parts
        from shoal.planner import host_tier
        from shoal.train import table_placement

        settings = _loaded(config, overrides)
        parts = build_parts(settings)
        machines = _machines(settings, topology, None)
        weights = sum(one.numel() for one in parts.module.parameters())
        described = simulation.Simulated(
            table_placement.inputs_of(settings, parts, 1),
            weights,
            divided=settings.data.batch_size,
            tier_on=partial(host_tier, build_host_rows(settings), parts.tables),
        )
    if machines is None or topology is not None:
        machines = simulation.machines_of(topology)
    points = simulation.simulate(
        described, machines, sizes, batch_size=batch_size, groups=groups,
        time_limit_s=time_limit,
    )  # fmt: skip
    _print(report.simulated_text(points))
    name = Path(config).stem
    page = report.simulated_html(points, f"Simulation of {name}", machines)
    write(out / f"{name}-simulation.html", page)


@plan.command(name="diff")
def diff(
    first: Annotated[str, argument("PLAN", "A plan's JSON file.")],
    second: Annotated[str, argument("PLAN", "Another one.")],
) -> None:
    """Print what two plans have differently, a line a table."""
    from shoal.planner import read_plan

    _print(read_plan(first).diff(read_plan(second)) or ["no difference"])


@plan.command(name="calibrate")
def calibrate(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or one GPU, cuda:0.")
    ] = "auto",
    out: Annotated[
        Path | None, option("FOLDER", "Where the file goes; ~/.cache/shoal if left out.", "--out")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few repeats: shows that it runs.")
    ] = False,
) -> None:
    """Measure this machine for plans: memory, tables, links between ranks, whole steps.

    Under a launcher all ranks measure together; rank 0 writes. Pass the file with --topology, or as
    distributed.topology.

    Examples:

      shoal plan calibrate

      torchrun --nproc-per-node 8 -m shoal.cli plan calibrate --out .
    """
    from shoal.comm import launch
    from shoal.distributed import timed_steps
    from shoal.planner import calibrate as measuring
    from shoal.planner.topology import cache_folder

    mesh = launch.init(device=device)
    try:
        found = measuring.measure(mesh, scale=measuring.QUICK if quick else None)
        found = timed_steps.fitted(mesh, found, quick=quick)
        if mesh.rank == 0:
            folder = cache_folder() if out is None else out
            _print([found.summary(), *measuring.lines_of(found.rates)])
            write(*measuring.measured_file(folder, found))
    finally:
        launch.shutdown()


@plan.command(name="profile-data")
def profile(
    config: Config,
    overrides: Overrides = None,
    batches: Annotated[int, option("N", "Batches that are read.")] = 256,
    out: Annotated[
        Path, option("FILE", "Where the statistics are written; statistics.json if left out.")
    ] = Path("statistics.json"),
) -> None:
    """Measure the ids of a run's data: how many, how often which, how many are new.

    distributed.statistics=FILE plans with them.
    """
    from shoal.config.build import build_parts
    from shoal.planner.statistics import statistics_text
    from shoal.train import table_placement

    settings = _loaded(config, overrides)
    found = table_placement.statistics_of(settings, build_parts(settings), batches)
    lines = [f"{'table':24} {'ids':>9} {'an example':>10} {'hot 1 %':>8} {'new':>8}"]
    for name, one in sorted(found.items()):
        hot = one.hot_share(one.ids / 100)
        lines.append(
            f"{name:24} {one.ids:>9,.0f} {one.ids_per_sample:>10.3g} {hot:>8.1%} "
            f"{one.new_per_sample:>8.3g}"
        )
    _print(lines)
    write(out, statistics_text(found))


def _loaded(config: str, overrides: Sequence[str] | None) -> RunConfig:
    from shoal import config as settings

    return settings.load(config, overrides or ())


def _machines(config: RunConfig, file: Path | None, devices: int | None) -> Topology:
    import os

    from shoal.planner import on_this_host, read_topology
    from shoal.planner.topology import overridden
    from shoal.table.factory import resolve_device

    named = file or config.distributed.topology
    if named is None:
        return on_this_host(1 if devices is None else devices, resolve_device(config.device))
    found = read_topology(named)
    return overridden(found if devices is None else found.with_devices(devices), os.environ)


def _print(lines: Sequence[str]) -> None:
    out = console()
    for line in lines:
        print_line(out, line)
