"""The puzzle table of examples/hrm against HRM's sparse step, in one process and with a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hrm.carry import Batch, Carry
from hrm.losses import act_loss
from hrm.model import ReasoningModel
from hrm.model_config import ModelConfig
from hrm.puzzle_table import TABLE, PuzzleTable
from hrm.schedule import WarmupCosine
from shoal import SparseOptimizer
from support.hrm_oracle import sparse_step

ROWS, DIM, LR, DECAY = 12, 5, 0.125, 0.5


def whole_grads(generator: torch.Generator, count: int) -> Tensor:
    """Gradients whose sums are exact in any order."""
    return torch.randint(-3, 4, (count, DIM), generator=generator).float()


def all_rows(table: PuzzleTable) -> Tensor:
    return table.rows.table(TABLE).find(torch.arange(ROWS))[0]


def test_steps_are_hrms() -> None:
    generator = torch.Generator().manual_seed(0)
    table = PuzzleTable(DIM, lr=LR, weight_decay=DECAY)
    optimizer = SparseOptimizer(table)
    want = torch.zeros(ROWS, DIM)
    for step in range(30):
        # Ids 10 and 11 never come; most ids repeat.
        ids = torch.randint(0, 10, (16,), generator=generator)
        grads = whole_grads(generator, 16)
        if step % 3 == 0:
            ids[:2] = 4
            ids[2:][ids[2:] == 4] = 5
            grads[1] = -grads[0]  # they cancel: row 4 only decays
        (table(ids) * grads).sum().backward()
        before = want
        want = sparse_step(want, [ids], [grads], LR, DECAY)
        optimizer.step()
        assert torch.equal(all_rows(table), want)
        if step % 3 == 0:
            assert torch.equal(want[4], before[4] * (1 - LR * DECAY))
    assert bool((want[10:] == 0).all()) and bool((want[:10] != 0).any(1).all())
    assert not table.rows.table(TABLE).find(torch.tensor([10, 11]))[1].any()


def test_rows_stay_within_the_inverse_of_the_decay() -> None:
    table = PuzzleTable(DIM, lr=LR, weight_decay=DECAY)
    optimizer = SparseOptimizer(table)
    for _ in range(200):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(all_rows(table)[1], torch.full((DIM,), -1 / DECAY))


def test_unknown_ids_read_as_zeros_and_get_no_row_in_evaluation() -> None:
    table = PuzzleTable(DIM).eval()
    assert table(torch.tensor([3, 3, 0])).tolist() == [[0.0] * DIM] * 3
    assert not table.rows.table(TABLE).find(torch.tensor([3]))[1].any()


def test_a_schedule_binds_by_the_tables_name() -> None:
    table = PuzzleTable(DIM, weight_decay=0)
    rate = WarmupCosine(base=1.0, warmup_steps=4, total_steps=10)
    optimizer = SparseOptimizer(table, rates={TABLE: rate})
    for _ in range(2):
        table(torch.tensor([2])).sum().backward()
        optimizer.step()
    assert all_rows(table)[2].tolist() == [-0.75] * DIM


@pytest.mark.slow
@pytest.mark.parametrize("bootstrap", [True, False])
def test_rows_of_the_examples_at_work_learn(bootstrap: bool) -> None:
    """Not the fresh batch's: a slot that goes on keeps its puzzle, and its row the gradient."""
    config = ModelConfig(
        vocab_size=5,
        seq_len=4,
        hidden_size=8,
        num_heads=2,
        expansion=1,
        gated_multiple=8,
        H_layers=1,
        L_layers=1,
        puzzle_dim=DIM,
        bootstrap=bootstrap,
        forward_dtype="float32",
    )
    model, table = ReasoningModel(config), PuzzleTable(DIM, lr=LR, weight_decay=DECAY)
    optimizer = SparseOptimizer(table)
    cells = torch.ones(2, 4, dtype=torch.int32)
    first = Batch(cells, cells + 1, torch.tensor([3, 4]))
    second = Batch(cells, cells + 1, torch.tensor([5, 6]))
    carry = Carry.empty(config, first)
    touched = []
    for batch in (first, second):
        carry = model.admit(carry, batch)
        rows = table(carry.puzzle_ids_B)
        carry, outputs = model(carry, rows)
        loss, _ = act_loss(carry, outputs)
        loss.backward()
        optimizer.step()
        found = table.rows.table(TABLE).find(torch.arange(ROWS))[1]
        touched.append(found.nonzero().ravel().tolist())
        carry = dataclasses.replace(carry, halted_B=torch.tensor([False, True]))
    assert touched == [[3, 4], [3, 4, 6]]
    moved = all_rows(table)[[3, 4, 6]].abs()
    assert bool((moved[1:] == LR).all())
    assert bool((moved[0] <= 2 * LR).all()) and bool((moved[0] > 0).any())
