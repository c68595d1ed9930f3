"""Monolith's micro-benchmarks of communication, over this job's collectives.

Goodput is float32 payload per rank over time, in Gbit/s: length x 32 / latency in ms / 1e6. It is
taken every 20 iterations, logged by rank 0, and the first (which warms up) is left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shoal.comm.collectives import Collectives, Part
from shoal.comm.launch import init
from shoal.comm.launch_environment import whole
from shoal.comm.mesh import Mesh, Path
from shoal.errors import ConfigError, DeviceUnavailable

_log = logging.getLogger("shoal.comm")

Clock = Callable[[], float]
Summary = dict[str, list[tuple[int, float]]]

BENCHMARKS = ("c2g", "g2g", "c2c", "g2c", "ar")
INTERVAL = 20
_CPU_SHARE = 8  # ids and rows on the CPU are that much shorter in real use
_LENGTHS = 3  # of an all-to-all: whole, half, a quarter


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """What `bps_comm_benchmark` runs.

    Args:
        which: one of `BENCHMARKS`, or "all": from c(pu) or g(pu) to either, or the all-reduce.
        iterations: of each; 40 or more, as the first 20 are not counted.
        all_reduce_length, all_to_all_length: float32 values of a rank.
        path: what carries them, see `Mesh.collectives`.
    """

    which: str
    iterations: int = 200
    all_reduce_length: int = 65_536_000
    all_to_all_length: int = 65_536_000
    path: Path = "auto"

    def __post_init__(self) -> None:
        if self.which not in (*BENCHMARKS, "all"):
            raise _refused("MONOLITH_BENCHMARK_BPS", self.which, ", ".join((*BENCHMARKS, "all")))
        if self.iterations < 2 * INTERVAL:
            raise _refused("MONOLITH_BENCHMARK_ITERS", self.iterations, f"{2 * INTERVAL} or more")
        for name, length in (("AR", self.all_reduce_length), ("A2A", self.all_to_all_length)):
            if length < 1:
                raise _refused(f"MONOLITH_BENCHMARK_BPS_{name}_LEN", length, "1 or more")


def benchmark_settings(
    environ: Mapping[str, str] | None = None,
    *,
    which: str | None = None,
    iterations: int | None = None,
    all_reduce_length: int | None = None,
    all_to_all_length: int | None = None,
    path: Path = "auto",
) -> BenchmarkSettings:
    """Settings from what is given, then from the MONOLITH_BENCHMARK_* variables.

    MONOLITH_BENCHMARK_BPS (default "none", which must be changed), _ITERS (200), _BPS_AR_LEN and
    _BPS_A2A_LEN (65,536,000).

    Raises:
        ConfigError: a value that cannot be.
    """
    environ = os.environ if environ is None else environ

    def number(name: str, given: int | None, default: int) -> int:
        return whole(environ, f"MONOLITH_BENCHMARK_{name}", default) if given is None else given

    return BenchmarkSettings(
        which=which or environ.get("MONOLITH_BENCHMARK_BPS") or "none",
        iterations=number("ITERS", iterations, 200),
        all_reduce_length=number("BPS_AR_LEN", all_reduce_length, 65_536_000),
        all_to_all_length=number("BPS_A2A_LEN", all_to_all_length, 65_536_000),
        path=path,
    )


def byteps_benchmark_ar(
    total_len: int,
    total_niter: int = 10_000,
    use_cpu: bool = False,
    op: str = "pushpull",
    *,
    collectives: Collectives | None = None,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Goodputs in Gbit/s of averaging `total_len` float32 values over the ranks.

    Args:
        total_len: values of a rank, [total_len, 1].
        total_niter: iterations; a goodput for every 20.
        use_cpu: values on the CPU instead of the GPU.
        op: part of the name in logs.
        collectives: on that device; those of `shoal.comm.init` when left out.
        clock: seconds.

    Returns:
        The goodputs without the first.

    Raises:
        DeviceUnavailable: the GPU is asked for and this rank has none.
    """
    made = collectives or _collectives(init(), use_cpu, "all-reduce benchmark", "auto")
    values = torch.full((total_len, 1), float(made.rank + 1), device=made.device)
    name = f"data_len_{total_len}_{op}_{'cpu' if use_cpu else 'gpu'}"

    def once() -> None:
        (total,) = made.all_reduce(values, "sum", what=name).wait()
        total.div_(made.world_size)

    suffix = f", is_cpu={use_cpu}"
    return _goodputs(once, op, total_len, total_niter, made, clock, suffix, collectives is None)


def byteps_benchmark_a2a(
    total_len: int,
    total_niter: int = 10_000,
    dst_gpu: bool = True,
    src_gpu: bool = True,
    *,
    collectives: Collectives | None = None,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Goodputs in Gbit/s of an even all-to-all of `total_len` float32 values of each rank.

    From the CPU to the CPU the length is divided by 8. Where one end is a GPU, the exchange is
    between GPUs, and the copy from or to the host is part of the time.

    Args:
        total_len: values of a rank, a multiple of the number of ranks (after the division).
        total_niter: iterations; a goodput for every 20.
        dst_gpu, src_gpu: whether what is received, and what is sent, is on a GPU.
        collectives: on the GPU if there is one among the ends, else on the CPU; those of
            `shoal.comm.init` when left out.
        clock: seconds.

    Returns:
        The goodputs without the first.

    Raises:
        DeviceUnavailable: a GPU is asked for and this rank has none.
        ConfigError: the ranks cannot share the values evenly.
    """
    on_cpu = not (dst_gpu or src_gpu)
    if on_cpu:
        total_len //= _CPU_SHARE
    made = collectives or _collectives(init(), on_cpu, "all-to-all benchmark", "auto")
    size = made.world_size
    if total_len % size or not total_len:
        raise _refused("values of the all-to-all", total_len, f"a multiple of {size} ranks")
    splits = (total_len // size,) * size
    device = made.device if src_gpu else torch.device("cpu")
    source = torch.full((total_len, 1), float(made.rank + 1), device=device)
    name = f"data_len_{total_len}_{'cg'[src_gpu]}2{'cg'[dst_gpu]}"

    def once() -> None:
        part = Part(source.to(made.device), splits, splits)
        (received,) = made.all_to_all([part], what=name).wait()
        if not dst_gpu:
            received.cpu()

    return _goodputs(once, "all2all", total_len, total_niter, made, clock, "", collectives is None)


def _goodputs(
    once: Callable[[], None],
    kind: str,
    total_len: int,
    total_niter: int,
    collectives: Collectives,
    clock: Clock,
    suffix: str,
    own: bool,
) -> list[float]:
    """Goodputs without the first; collectives of this call's own are closed."""
    place = kind, collectives.rank, collectives.world_size, total_len
    _log.info("start %s benchmark %d/%d total_len=%d", *place)
    goodputs: list[float] = []
    began_s = clock()
    for done in range(1, total_niter + 1):
        once()
        if done % INTERVAL:
            continue
        if collectives.device.type == "cuda":
            torch.cuda.synchronize(collectives.device)
        latency_ms = max(clock() - began_s, 1e-9) / INTERVAL * 1000
        goodputs.append(total_len * 32 / latency_ms / 1e6)
        if collectives.rank == 0:
            text = "DONE iter=%d, latency=%.3g ms, Goodput=%.5g Gb/s%s"
            _log.info(text, done, latency_ms, goodputs[-1], suffix)
        began_s = clock()
    _log.info("end %s benchmark %d/%d total_len=%d", *place)
    if own:
        collectives.close()
    return goodputs[1:]


def bps_comm_benchmark(
    settings: BenchmarkSettings | None = None,
    *,
    mesh: Mesh | None = None,
    write_line: Callable[[str], None] = print,
) -> Summary:
    """Run the benchmarks asked for; rank 0 prints each one's list of (length, mean goodput).

    The all-reduce runs on the CPU and on the GPU; each all-to-all with the whole length, a half
    and a quarter. On a machine without GPUs "all" and "ar" leave out what needs one, and say so.

    Args:
        settings: what to run; from MONOLITH_BENCHMARK_* when left out.
        mesh: the job's; that of `shoal.comm.init` when left out.
        write_line: called with each line of text.

    Returns:
        The printed results, by benchmark.

    Raises:
        ConfigError: MONOLITH_BENCHMARK_BPS is not one of c2g, g2g, c2c, g2c, ar, all.
        DeviceUnavailable: one benchmark is asked for, and it needs a GPU.
    """
    settings = settings or benchmark_settings()
    mesh = mesh or init()
    has_gpu, everything = mesh.device.type == "cuda", settings.which == "all"
    made: dict[bool, Collectives] = {}

    def on(cpu: bool) -> Collectives:
        if cpu not in made:
            name = f"benchmark on {'cpu' if cpu else 'cuda'}"
            made[cpu] = _collectives(mesh, cpu, name, settings.path)
        return made[cpu]

    summaries: Summary = {}
    for name in BENCHMARKS if everything else (settings.which,):
        results: list[tuple[int, float]] = []
        if name == "ar":
            length = settings.all_reduce_length
            for cpu in (True, False) if has_gpu else (True,):
                found = byteps_benchmark_ar(length, settings.iterations, cpu, collectives=on(cpu))
                results.append((length, sum(found) / len(found)))
        elif "g" not in name or has_gpu or not everything:
            gpus = name.endswith("g"), name.startswith("g")  # destination, source
            for part in range(_LENGTHS):
                length = settings.all_to_all_length >> part
                found = byteps_benchmark_a2a(
                    length, settings.iterations, *gpus, collectives=on(not any(gpus))
                )
                results.append((length, sum(found) / len(found)))
        if mesh.rank == 0 and not has_gpu and ("g" in name or name == "ar"):
            write_line(f"{name}: no GPU on this machine; its part on GPUs is left out")
        if results:
            summaries[name] = results
            if mesh.rank == 0:
                write_line(f"{name}_summary: {results}")
    for collectives in made.values():
        collectives.close()
    return summaries


def _collectives(mesh: Mesh, cpu: bool, name: str, path: Path) -> Collectives:
    if not cpu and mesh.device.type != "cuda":
        raise DeviceUnavailable(
            name,
            got=f"rank {mesh.rank} on {mesh.device}",
            allowed="a rank with a CUDA GPU",
            remedy="Ask for c2c, or for the all-reduce on the CPU.",
        )
    return mesh.collectives(name, path=path, device=torch.device("cpu") if cpu else mesh.device)


def _refused(name: str, got: object, allowed: str) -> ConfigError:
    return ConfigError(name, got=got, allowed=allowed, remedy="Correct it, then run again.")
