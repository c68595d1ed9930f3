"""Saving and loading 10 M rows: `python bench/checkpoint.py --json out-checkpoint.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the
cases.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import Case, Job, add_json, measured_json, run_jobs

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "pyarrow", "shoal")
ROWS, QUICK_ROWS = 10_000_000, 1_000_000
EXTRA_MIB = 256.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "checkpoint")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, once")
    parser.add_argument("--case", default="", metavar="SUBSTR", help="only cases with this in it")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write; the disk measured")
    parser.add_argument("--threads", type=int, default=2, help="of the shard")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    params = {
        "rows": QUICK_ROWS if options.quick else ROWS,
        "passes": 1 if options.quick else 3,
        "threads": options.threads,
        "folder": str(options.dir) if options.dir else None,
    }
    jobs = [job for job in _jobs(params) if any(options.case in case.name for case in job.cases)]
    run_jobs(parser, options, jobs, SCRIPT, PACKAGES)


def _jobs(params: dict[str, object]) -> list[Job]:
    need = int(str(params["rows"])) * 1000

    def job(task: str, *cases: Case) -> Job:
        return Job(task=task, params=params, cases=cases, need_bytes=need, timeout_s=900)

    plain = "plain sequential file"
    return [
        job(
            "write_and_read",
            Case(name="full, write", unit="GB/s", peer=f"{plain}, fsync", bar=0.7),
            Case(name="full, read", unit="GB/s", peer=plain, bar=0.7),
            _extra("full, memory while writing"),
            _extra("full, memory while reading"),
            _share("delta of 1 %, time", "s", "3 % of the full's"),
            _share("delta of 1 %, size", "MB", "3 % of the full's"),
        ),
        job(
            "during_training",
            _share("saving during training, mean step", "ms", "1.1x the step without"),
            _share("saving during training, worst step", "ms", "4x the worst without"),
            _extra("saving during training, memory"),
            Case(name="saving during training, write", unit="GB/s", peer=f"{plain}, fsync"),
            Case(name="saving during training, touched", unit="GB/s", peer="half the disk's rate"),
        ),
        job(
            "finding_changes",
            Case(name="finding changed rows", unit="GB/s", peer="reading as much", bar=0.6),
            Case(
                name="finding changed rows, 0.1 % of blocks touched",
                unit="GB/s",
                peer="every block touched",
                bar=5.0,
            ),
        ),
    ]


def _extra(name: str) -> Case:
    return Case(name=name, unit="MiB", peer="limit", better="lower", bar=1.0, peer_value=EXTRA_MIB)


def _share(name: str, unit: str, limit: str) -> Case:
    """A case whose baseline is a multiple of a figure of the same run."""
    return Case(name=name, unit=unit, peer=limit, better="lower", bar=1.0)


def _work(source: Path, target: Path) -> None:
    import work_checkpoint

    job = json.loads(source.read_text())
    target.write_text(measured_json(work_checkpoint.TASKS[job["task"]](**job["params"])))


if __name__ == "__main__":
    main()
