"""Optimizer steps of more rows, or of longer calls, than one launch or one int32 takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from shoal.kernels import step_sums
from shoal.kernels.gradients import run_columns
from shoal.kernels.step_tiles import Stamp
from shoal.rules.optimizers import SGD, Adam, DelayCompensated, Optimizer
from support.device_rows import DEVICES
from support.stepped_rows import StepWorld, drawn, eighths, form_of, step

pytestmark = pytest.mark.parametrize("device", DEVICES)


@triton.jit
def _columns(runs_ptr, out_ptr, room):  # type: ignore[no-untyped-def]
    run = tl.arange(0, 4)
    handles, firsts, numbers, lengths = run_columns(runs_ptr, room, run)
    tl.store(out_ptr + run, handles.to(tl.int64))
    tl.store(out_ptr + 4 + run, firsts.to(tl.int64))
    tl.store(out_ptr + 8 + run, numbers.to(tl.int64))
    tl.store(out_ptr + 12 + run, lengths.to(tl.int64))


def test_words_of_runs_lie_further_apart_than_an_int32_reaches(device: str) -> None:
    words, room = torch.empty(1, dtype=torch.int32, device=device), (1 << 31) - 1
    out = torch.empty(4, 4, dtype=torch.int64, device=device)
    _columns[(1,)](words, out, room)
    expected = torch.arange(4)[:, None] * room + torch.arange(4)
    assert torch.equal((out.cpu() - words.data_ptr()) // 4, expected)


@pytest.mark.parametrize(
    "rules",
    [(SGD(), Adam()), (DelayCompensated(inner=SGD()), SGD())],
    ids=["kernels", "torch"],
)
def test_sums_that_do_not_fit_are_taken_in_slabs(
    rules: tuple[Optimizer, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = StepWorld([form_of((3, rules[0]), (2, rules[1]))], [0], 20, device)
    monkeypatch.setattr(step_sums, "_SLAB_BYTES", 8 * 32)  # of eight rows
    slabs: list[int] = []

    def sized(*arguments: Any) -> Any:
        slabs.append(arguments[3])
        return inner(*arguments)

    inner = step_sums._sum
    monkeypatch.setattr(step_sums, "_sum", sized)
    lengths = [1, 2, 30, 9, 0, 1, 1, 1, 12, 3, 1, 1, 1]
    for number in range(2):
        handles = drawn(world.handles[0], lengths, seed=number)
        grads = eighths(len(handles), 5, number)
        grads[handles.index(world.handles[0][8]), 4] = torch.nan
        step(world, handles, grads, Stamp(number + 2, 9, number, nan_policy="skip"))
    assert slabs == list(range(0, sum(lengths) + 5, 8)) * 2
    world.check()
