"""Predicted against measured steps of six plans, on the ranks of a launcher:
`torchrun --nproc-per-node 2 bench/plan_measured.py --json`.

One rank a GPU where there are GPUs, with NCCL; CPU processes otherwise. The ranks measure their
own speeds, predict a step of each plan from them, and time steps: the fastest fifth of a turn, the
best of several turns. On cores or GPUs that others use as well, times say nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from harness import Case, Measured, add_json, as_row, conclude

__all__ = ["CASES", "ERROR", "TAU", "kendall_tau", "main", "measured_of"]

TAU = Case(name="order of measured steps as predicted, Kendall's tau", unit="x", bar=1.0,
           peer="the requested floor", peer_value=0.8)  # fmt: skip
ERROR = Case(name="predicted step over measured, or the inverse, worst plan", unit="x", bar=1.0,
             better="lower", peer="the requested ceiling", peer_value=1.25)  # fmt: skip
CASES = (TAU, ERROR)
PACKAGES = ("torch", "numpy", "shoal")


def measured_of(found: dict[str, Any]) -> dict[str, Measured]:
    """The figures of what `work_plan.five_plans` returned on rank 0."""
    names = list(found["measured"])
    pairs = [(found["predicted"][name], found["measured"][name]) for name in names]
    said = "; ".join(
        f"{name} {1e3 * b:.2f} ms, predicted {1e3 * a:.2f}"
        for name, (a, b) in zip(names, pairs, strict=True)
    )
    off = np.array([max(a / b, b / a) for a, b in pairs])
    tau = kendall_tau(pairs, noise=found["noise_s"])
    where = f"{found['ranks']} ranks of {found['device']}"
    # A tau of 0 or less is no value of a ratio; it is in the note.
    return {
        TAU.name: Measured(
            ours=tau if tau > 0 else None,
            note=f"tau {tau:.2f} on {where}; steps that differ by less than "
            f"{1e3 * found['noise_s']:.2f} ms, as turns of a plan do, are a tie: {said}",
        ),
        ERROR.name: Measured(
            ours=float(off.max()),
            note=f"median {np.median(off):.2f}; " + "; ".join(found["rates"]),
        ),
    }


def kendall_tau(pairs: list[tuple[float, float]], *, noise: float = 0.0) -> float:
    """Kendall's tau-b of (a, b): 1 the same order, -1 the opposite one.

    Values of b that differ by `noise` or less are ties.
    """
    differences = [(a - c, b - d) for k, (a, b) in enumerate(pairs) for c, d in pairs[k + 1 :]]
    signs = [np.sign(a) * np.sign(b) for a, b in differences if abs(b) > noise]
    return float(np.sum(signs) / np.sqrt(len(signs) * len(differences))) if signs else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":\n")[0])
    add_json(parser, "plan-measured")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all runs")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for name in ("tables", "rows", "dim", "ids", "batch", "turns"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the device's own")
    options = vars(parser.parse_args())
    from work_plan import five_plans  # torch, once the arguments are known to be right

    file = options.pop("json")
    found = five_plans(**options)
    if found["rank"] == 0:
        figures = measured_of(found)
        conclude([as_row(case, figures[case.name]) for case in CASES], file, PACKAGES)


if __name__ == "__main__":
    main()
