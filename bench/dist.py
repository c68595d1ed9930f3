"""Training on several ranks against one, and exchanges of rows against raw transports:
`python bench/dist.py --json out.json`.

With GPUs: NCCL on all of them. Without: processes of this host, one thread each. Prints our value,
the baseline (peer), the ratio and the target (bar) of every case, and marks rows that miss their
target red. It exits 0 even then. bench/README.md explains the cases.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Case, Measured, add_json, as_row, conclude, median
from rank_main import on_ranks

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "shoal")
HUGECTR_4_GPUS = 7.32e6  # samples a second of 4 x H100 SXM, MLPerf v4.1
LOOKUPS = 214
DENSE_WEIGHTS = 16.0e6
DIM = 128

Found = dict[str, Measured]
Job = tuple[tuple[Case, ...], Callable[[], Found]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("`")[0].strip())
    add_json(parser, "dist")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all runs")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--profile", default="", metavar="PREFIX", help="write kernels of a step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    gpus = _gpus() if options.device != "cpu" else 0
    jobs = _gpu_jobs(gpus, options.quick, options.profile) if gpus else _cpu_jobs(options.quick)
    wanted = [
        (cases, run) for cases, run in jobs if any(options.case in case.name for case in cases)
    ]
    if not wanted:
        parser.error(f"no case has {options.case!r} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for cases, _ in wanted for case in cases))
        return
    rows: list[dict[str, Any]] = []
    for cases, run in wanted:
        print(f"{cases[0].name} ...", file=sys.stderr, flush=True)
        try:
            found = run()
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            note = f"{type(error).__name__}: {error}"[:200]
            found = {case.name: Measured(note=note) for case in cases}
        rows += [as_row(case, found.get(case.name)) for case in cases]
    conclude(rows, options.json, PACKAGES)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _gpu_jobs(gpus: int, quick: bool, profile: str) -> list[Job]:
    exchanges = [_exchange_job(gpus, mib, quick) for mib in (16, 64, 256)] if gpus > 1 else []
    return [
        *exchanges,
        _scaling_job(gpus, quick, profile),
        *_mode_jobs(quick, profile),
        _device_job(quick),
    ]


def _exchange_job(gpus: int, mib: int, quick: bool) -> Job:
    packed = f"row exchange of {mib} MiB on {gpus} GPUs, packing included, over raw NCCL"
    reading = f"the same with reading the rows from the table, {mib} MiB"
    cases = (
        Case(name=packed, unit="GB/s", peer="all_to_all_single", bar=0.9, stretch=1.0),
        Case(name=reading, unit="GB/s", peer="all_to_all_single"),
    )

    def run() -> Found:
        repeats = 5 if quick else 40
        params = {"mib": mib, "dim": DIM, "repeats": repeats, "device": "cuda"}
        ranks = on_ranks(gpus, "exchange_rows", params, timeout_s=120)
        worst = {key: max(one[key] for one in ranks) for key in ranks[0]}
        size = worst["bytes"] / 1e6
        alone = worst["exchange"] - worst["gather"]
        note = (
            f"raw {worst['raw']:.3f} ms, rows read into the send buffer and exchanged "
            f"{worst['exchange']:.3f}, reading alone {worst['gather']:.3f}, exchange alone "
            f"{worst['sent']:.3f}"
        )
        raw = size / worst["raw"]
        return {
            packed: Measured(ours=size / alone, peer_value=raw, note=note),
            reading: Measured(ours=size / worst["exchange"], peer_value=raw),
        }

    return cases, run


def _dlrm(quick: bool, profile: str) -> Callable[..., list[dict[str, Any]]]:
    """A run of DLRM-DCNv2: (ranks, compile, pipelined) -> what each rank found."""
    shape = {"batch_size": _samples(quick), "dim": DIM, "most_ids": 1_000_000, "device": "cuda"}
    length = {"steps": 6 if quick else 30, "warmup": 8 if quick else 20}

    def run(
        ranks: int, compile: bool | str = True, pipelined: bool | None = None
    ) -> list[dict[str, Any]]:
        kind = {"pipelined": pipelined, "compile": compile}
        file = f"{profile}-{ranks}-{compile}.txt" if profile else ""
        params = {**shape, **length, **kind, "profile": file}
        return on_ranks(ranks, "train_dlrm", params, timeout_s=240)

    return run


def _samples(quick: bool) -> int:
    return 512 if quick else 16_384


def _shown(found: Sequence[Mapping[str, Any]]) -> str:
    """Times of the slowest rank: of a step; of its kernels without launches; of its launches."""
    step = max(one["step_s"] for one in found)
    device, host = (
        max(one.get(key, math.inf) for one in found) for key in ("device_ms", "host_ms")
    )
    shown = [f"{one:.2f}" if one < math.inf else "not known" for one in (device, host)]
    return f"{1e3 * step:.2f} ms a step, device {shown[0]}, host {shown[1]}"


MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def _mode_jobs(quick: bool, profile: str) -> list[Job]:
    dlrm = _dlrm(quick, profile)
    eager = functools.cache(lambda: dlrm(1, False, pipelined=False))

    def job(mode: str) -> Job:
        name = f"DLRM-DCNv2 on one GPU, compiled ({mode}) over eager"

        def run() -> Found:
            peer, ours = eager(), dlrm(1, mode, pipelined=False)
            return {
                name: Measured(
                    ours=1e3 * _slowest_s(ours),
                    peer_value=1e3 * _slowest_s(peer),
                    note=f"{_shown(ours)}; eager {_shown(peer)}",
                )
            }

        return (Case(name=name, unit="ms", peer="eager", better="lower"),), run

    return [job(mode) for mode in MODES]


def _scaling_job(gpus: int, quick: bool, profile: str) -> Job:
    alone = "DLRM-DCNv2 on one GPU, bf16, compiled, dynamic ids"
    weak = f"weak scaling of DLRM-DCNv2, 1 to {gpus} GPUs"
    speed = f"DLRM-DCNv2 on {gpus} GPUs"
    memory = f"memory of rank 0 over the others', {gpus} GPUs"
    peer, published = "HugeCTR on 4 x H100, MLPerf, scaled to", HUGECTR_4_GPUS / 1e6 / 4
    cases = (
        Case(name=alone, unit="M samples/s", peer=f"{peer} one", peer_value=published, bar=1.0,
             stretch=2.5 / published),
    )  # fmt: skip
    if gpus > 1:
        cases += (
            Case(name=weak, unit="k samples/s a GPU", peer="one GPU, no exchange", bar=0.85),
            Case(name=speed, unit="M samples/s", peer=f"{peer} {gpus} GPUs",
                 peer_value=published * gpus, stretch=1.0),
            Case(name=memory, unit="x", peer="the requested ceiling", better="lower", bar=1.0,
                 peer_value=1.05),
        )  # fmt: skip

    def run() -> Found:
        size, dlrm = _samples(quick), _dlrm(quick, profile)
        # Batches have one size: a step's launches of the dense part are replayed.
        best = {ranks: dlrm(ranks, "reduce-overhead") for ranks in {1, gpus}}
        notes = {
            ranks: f"{size} samples a GPU and step, {LOOKUPS} lookups each, D={DIM}, Adagrad; "
            f"{_shown(found)}; without the pipeline {1e3 * _slowest_s(found, 'plain_s'):.2f} ms, "
            f"with it {1e3 * _slowest_s(found, 'piped_s'):.2f}"
            for ranks, found in best.items()
        }
        one_s, all_s = _slowest_s(best[1]), _slowest_s(best[gpus])
        others = [one["memory"] for one in best[gpus] if one["rank"]]
        return {
            alone: Measured(
                ours=size / one_s / 1e6,
                limit_fraction=_floor_s(size, best[1][0]["distinct"]) / one_s,
                note=f"{notes[1]}; {_LIMIT}",
            ),
            weak: Measured(ours=size / all_s / 1e3, peer_value=size / one_s / 1e3),
            speed: Measured(
                ours=size * gpus / all_s / 1e6,
                limit_fraction=_floor_s(size, best[gpus][0]["distinct"]) / all_s,
                note=f"{notes[gpus]}; {_LIMIT}",
            ),
            memory: Measured(
                ours=best[gpus][0]["memory"] / (sum(others) / len(others)) if others else None
            ),
        }

    return cases, run


_LIMIT = "of limit: the bytes of rows, gradients and state at 3.0 TB/s, then dense products"


def _slowest_s(found: Sequence[Mapping[str, Any]], key: str = "step_s") -> float:
    return float(max(one[key] for one in found))


def _floor_s(size: int, distinct: float) -> float:
    """Seconds of what a step must do: lookups are read, distinct rows and state go both ways; of
    dense weights each sample has six operations."""
    row_bytes = 4 * DIM
    moved = (size * LOOKUPS * row_bytes + 5 * distinct * row_bytes) / 3.0e12
    return moved + 6 * size * DENSE_WEIGHTS / 7.0e14


def _device_job(quick: bool) -> Job:
    name = f"flights, device=cuda compile=true, over the CPU, batches of {_BATCH}"
    cases = (Case(name=name, unit="k examples/s", peer="device=cpu", bar=8.0, stretch=20.0),)

    def run() -> Found:
        epochs = "data.epochs=2" if quick else "data.epochs=30"
        gpu = {
            how: _flights(1, epochs, "device=cuda", how)
            for how in ("compile=true", "compile=reduce-overhead", "compile=false")
        }
        some = f"data.epochs={1 if quick else 2}"
        threads = sorted({1, min(8, os.cpu_count() or 1)})
        cpu = {count: _flights(1, some, f"threads={count}") for count in threads}
        shown = {**gpu, **{f"cpu, {count} threads": speed for count, speed in cpu.items()}}
        return {
            name: Measured(
                ours=gpu["compile=true"] / 1e3,
                peer_value=max(cpu.values()) / 1e3,
                note=", ".join(f"{how} {speed / 1e3:.0f} k/s" for how, speed in shown.items())
                + "; after the first quarter of the points, which has the compilation",
            )
        }

    return cases, run


def _cpu_jobs(quick: bool) -> list[Job]:
    return [_flights_job(quick), *(_gloo_job(size, quick) for size in ("1 MiB", "16 MiB"))]


def _flights_job(quick: bool) -> Job:
    name = "flights on 2 processes over one, one thread each"
    cases = (Case(name=name, unit="k examples/s", peer="one process", bar=1.6),)

    def run() -> Found:
        speeds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(1 if quick else 3):
            for ranks, values in speeds.items():
                values.append(_flights(ranks, f"data.epochs={1 if quick else 3}"))
        ours, peer = median(speeds[2]), median(speeds[1])
        note = f"batches of {_BATCH} examples over all ranks; {len(speeds[1])} runs each"
        return {name: Measured(ours=ours / 1e3, peer_value=peer / 1e3, note=note)}

    return cases, run


_BATCH = 8192


def _flights(ranks: int, *settings: str) -> float:
    """Examples a second of a run of the flights example, from a quarter of its points on."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            "threads=1",
            f"data.batch_size={_BATCH}",
            "baselines=[]",
            "logging.points=40",
            "output.save_model=false",
            f"output.dir={folder}",
            *settings,
        )
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        command = [
            sys.executable, *(launcher if ranks > 1 else []),
            *(["-m", "shoal.cli"]), "train", str(ROOT / "examples/flights.yaml"), *settings,
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-160:])
        (file,) = Path(folder).glob("*/*/log.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        points = [line for line in lines if "examples" in line]  # others are of evaluations
        first, last = points[len(points) // 4], points[-1]
        return float(
            (last["examples"] - first["examples"]) / (last["time_s"] - first["time_s"])
        )  # fmt: skip


def _gloo_job(size: str, quick: bool) -> Job:
    """A case of `comm_cpu.py`, which has more sizes and baselines."""
    name = f"all-to-all of {size}, shared memory vs Gloo"
    cases = (Case(name=name, unit="GB/s", peer="Gloo", bar=3.0),)

    def run() -> Found:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "out.json"
            command = [sys.executable, str(ROOT / "bench/comm_cpu.py"), "--json", str(file)]
            command += ["--case", f"of {size}", *(["--quick"] if quick else [])]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            (row,) = [r for r in json.loads(file.read_text())["rows"] if r["case"] == name]
        return {name: Measured(ours=row["ours"], peer_value=row["peer_value"], note=row["note"])}

    return cases, run


if __name__ == "__main__":
    main()
