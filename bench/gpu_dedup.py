"""Where the GPU's dedup spends its time: device time of each kernel, host time of each call.

    PYTHONPATH=src python3 bench/gpu_dedup.py [--ids N] [--sweep]

Prints, for ids that are all distinct, a third of them repeated, and Zipf: microseconds of a call
back to back (what `bench/ops.py` reports), of the host alone (calls that do not wait, issued until
the device has not caught up), and of the device by kernel. `--sweep` repeats it for other block and
table sizes. Every form is checked against `torch.unique` first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness import median
from ids import index_batches, to_ids
from ops_work import equal
from shoal import ops
from shoal.kernels import ids as kernels

ROUNDS, CALLS = 9, 20
SWEEP = {"_INSERT_BLOCK": (64, 128, 256), "_SLOTS_AN_ID": (2, 4), "_RANK_BLOCK": (512, 1024)}


class Outputs:
    """Tensors that `dedup_into` fills, and what a call does to them."""

    def __init__(self, ids_N: Tensor) -> None:
        self.ids_N = ids_N
        self.outs = [torch.empty_like(ids_N) for _ in range(3)]
        self.size_1 = ids_N.new_empty(1)

    def public(self) -> None:
        ids, counts, inverse = self.outs
        ops.dedup_into(
            self.ids_N,
            ids_out_N=ids,
            counts_out_N=counts,
            inverse_out_N=inverse,
            size_out_1=self.size_1,
        )

    def operator(self) -> None:
        torch.ops.shoal.dedup_into.default(self.ids_N, *self.outs, self.size_1)

    def launcher(self) -> None:
        kernels.dedup_into(self.ids_N, *self.outs, self.size_1)

    def check(self) -> None:
        """Raise AssertionError unless a call is right, order of first appearance included."""
        self.public()
        size = int(self.size_1)
        ids_U, counts_U, inverse_N = self.outs[0][:size], self.outs[1][:size], self.outs[2]
        equal(ids_U[inverse_N], self.ids_N, "inverse")
        equal(ids_U.sort().values, torch.unique(self.ids_N), "distinct ids")
        equal(counts_U, torch.bincount(inverse_N, minlength=size), "counts")
        newest_N = torch.cummax(inverse_N, 0).values
        if bool((newest_N.diff() > 1).any()) or int(inverse_N[0]) != 0:
            raise AssertionError("wrong order")


def cases(ids: int) -> dict[str, Tensor]:
    """Ids [N] by name."""
    (uniform_N,) = index_batches(ids, 1, ids, "uniform")
    (zipf_N,) = index_batches(ids // 2, 1, ids, "zipf")
    distinct_N = to_ids(torch.arange(ids))
    return {"distinct": distinct_N, "a third repeated": to_ids(uniform_N), "Zipf": to_ids(zipf_N)}


def back_to_back_us(run: Callable[[], object]) -> float:
    """Of one call among many, by events: the larger of host and device time."""
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(found)


def host_us(run: Callable[[], object]) -> float:
    """Of one call that does not wait, by the clock."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - start) * 1e6 / CALLS)
    torch.cuda.synchronize()
    return median(found)


def device_us(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of one call by kernel, as the profiler sees them."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    return {
        row.key[:60]: row.self_device_time_total / CALLS
        for row in profiler.key_averages()
        if row.device_type == DeviceType.CUDA and row.self_device_time_total > 0
    }


@contextmanager
def sizes(**given: int) -> Iterator[None]:
    """Other block and table sizes of the launcher."""
    before = {name: getattr(kernels, name) for name in given}
    for name, value in given.items():
        setattr(kernels, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(kernels, name, value)


def print_case(name: str, ids_N: Tensor) -> None:
    """All of one case."""
    into = Outputs(ids_N)
    into.check()
    peer = back_to_back_us(lambda: torch.unique(ids_N, return_inverse=True))
    waiting = back_to_back_us(lambda: ops.dedup(ids_N))
    print(f"\n{name}: {ids_N.numel()} ids, torch.unique {peer:.0f} us, dedup {waiting:.0f} us")
    for form in ("public", "operator", "launcher"):
        run = getattr(into, form)
        print(f"  {form:9} back to back {back_to_back_us(run):6.1f}   host {host_us(run):6.1f}")
    found = device_us(into.public)
    print(f"  device {sum(found.values()):6.1f}")
    for kernel, us in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"    {us:7.1f}  {kernel}")


def print_sweep(name: str, ids_N: Tensor) -> None:
    """Device time of a case for other sizes."""
    into = Outputs(ids_N)
    print(f"\n{name}, device us by {', '.join(SWEEP)}:")
    for values in product(*SWEEP.values()):
        with sizes(**dict(zip(SWEEP, values, strict=True))):
            into.check()
            found = device_us(into.launcher)
        parts = ", ".join(f"{kernel[:24]} {us:.1f}" for kernel, us in sorted(found.items()))
        print(f"  {values!s:18} {sum(found.values()):6.1f}   {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--sweep", action="store_true", help="other block and table sizes too")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    given = {name: ids_N.to("cuda") for name, ids_N in cases(options.ids).items()}
    for name, ids_N in given.items():
        print_case(name, ids_N)
    if options.sweep:
        for name, ids_N in given.items():
            print_sweep(name, ids_N)


if __name__ == "__main__":
    main()
