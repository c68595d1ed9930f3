"""Ranks that make different calls: all end soon, and are told which rank is in which call."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from shoal import (
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    Segment,
    SparseOptimizer,
    TableSpec,
    comm,
    optimizers,
)
from shoal.comm import mismatched_calls
from shoal.distributed import DistributedModelParallel
from shoal.errors import ShoalError
from support.ranks import start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

ODD_STEP = 2
TIMEOUT_S = 500.0  # nothing here ends by it


class Two(nn.Module):
    """Two collections of which a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.clicks, self.views = collection("clicks"), collection("views")
        self.head = nn.Linear(4, 1)

    def forward(self, batch: KeyedRagged, how: str) -> torch.Tensor:
        if how == "other order":
            views = self.views(batch)["f"]
            clicks = self.clicks(batch)["f"]
        else:
            clicks = self.clicks(batch)["f"]
            views = clicks if how == "not called" else self.views(batch)["f"]
        if how == "called twice":
            views = views + self.views(batch_of(7, 8, 9))["f"]
        together = clicks if how == "not in the loss" else clicks + views
        return self.head(together).sum()


def collection(table: str) -> EmbeddingCollection:
    segment = Segment(dim=4, optimizer=optimizers.SGD(lr=0.5))
    return EmbeddingCollection([TableSpec(name=table, segments=(segment,))], [Feature("f", table)])


def batch_of(*ids: int) -> KeyedRagged:
    return KeyedRagged.from_lists({"f": [list(ids)]})


def linger_for_all(ranks: int) -> None:
    """A rank that has found what is wrong waits until all have, however slow they are."""
    store = _get_default_store().clone()  # type: ignore[attr-defined]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if seconds == mismatched_calls._LINGER_S:
            ends = time.monotonic() + 60
            with suppress(RuntimeError):  # its keeper has seen that all have
                found = store.add("found", 1)
                while found < ranks and time.monotonic() < ends:
                    time.sleep(0.05)
                    found = store.add("found", 0)

    mismatched_calls.time = SimpleNamespace(  # type: ignore[attr-defined]
        sleep=sleep, monotonic=time.monotonic
    )


def trained_to_the_end(how: str, *options: Any) -> str:
    linger_for_all(comm.init(timeout_s=TIMEOUT_S).world_size)
    return trained(how, *options)


def trained(how: str, path: Any, nan_policy: Any, odd_step: int) -> str:
    """Some steps; in one of them the last rank does it `how`. What it was told."""
    mesh = comm.init(timeout_s=TIMEOUT_S)
    model = DistributedModelParallel(Two(), mesh=mesh, exchange_path=path)
    sparse = SparseOptimizer(model, nan_policy=nan_policy)
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
    try:
        for step in range(ODD_STEP + 2):
            odd = how if mesh.rank == mesh.world_size - 1 and step == odd_step else ""
            one_step(model, batch_of(step, 5 + mesh.rank), odd, sparse, dense)
    except ShoalError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # torch passes on the text of what backward meets at its end
        return str(error)
    return "nothing"


def one_step(
    model: DistributedModelParallel,
    batch: KeyedRagged,
    how: str,
    sparse: SparseOptimizer,
    dense: torch.optim.Optimizer,
) -> None:
    views = model.module.views
    if how == "evaluates":
        model.eval()
        model(batch, "")
        model.train()
    elif how == "reads a table":
        views.table("views").lookup([1, 2])
    elif how == "votes":
        model.mesh.control.barrier(what="a vote of its own")
    loss = model(batch, how)
    if how != "no backward":
        loss.backward()
    if how != "no step":
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()


# What one rank does -> what tells of the call and whose it is.
CASES = {
    "not called": r"'exchange of id counts' of tables views, which ranks \[1\] have not called",
    "not in the loss": r"'exchange of gradients' of tables views, which ranks \[1\] have not",
    "called twice": r"not in the same call of tables views|"
    r"call 12 of tables views is 'exchange of gradients' on ranks \[0\], 'exchange of id counts'",
    "other order": r"of tables clicks, which ranks \[1\] have not called",
    "no backward": r"'gradients of the dense part' of dense part, which ranks \[1\] have not",
    "no step": r"'vote on finite gradients' of steps, which ranks \[1\] have not called",
    "evaluates": r"tables clicks over ranks: got the call by rank: training, evaluation",
    "reads a table": r"'find' of tables views, which ranks \[0\] have not called",
    "votes": r"'a vote of its own' of control, which ranks \[0\] have not called",
}


def told(
    ranks: int,
    how: str,
    path: str,
    nan_policy: str = "raise",
    odd_step: int = ODD_STEP,
    work: Callable[..., str] = trained,
) -> list[str]:
    running = start_ranks(ranks, work, how, path, nan_policy, odd_step)
    outcomes = running.outcomes()
    assert all(value != "hung" for _, value in outcomes.values()), outcomes
    return [str(outcomes[rank][1]) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("path", "how"),
    [
        *(("shared_memory", how) for how in CASES),
        *(
            ("torch", how)
            for how in ("not in the loss", "called twice", "no step", "reads a table")
        ),
    ],
)
def test_ranks_in_different_calls_are_told_of_them(path: str, how: str) -> None:
    texts = told(2, how, path)
    # The rank that meets foreign bytes knows at once; the other may see only that it is gone.
    assert any(re.search(CASES[how], text) for text in texts), texts
    assert "nothing" not in texts


def test_all_of_four_ranks_are_told() -> None:
    for text in told(4, "not in the loss", "shared_memory", work=trained_to_the_end):
        assert re.search(
            r"wait in 'exchange of gradients' of tables views, which ranks \[3\] have not called",
            text,
        ), text


def test_a_wait_in_a_call_of_torch_is_told() -> None:
    """DDP arranges its buckets before the second forward, where it waits without a look."""
    texts = told(2, "evaluates", "shared_memory", odd_step=1)
    wanted = r"'buffers of the dense part' of dense part, which ranks \[1\] have not called"
    assert any(re.search(wanted, text) for text in texts), texts


@pytest.mark.parametrize("how", ["no step", "not in the loss"])
def test_steps_without_a_vote_differ_at_the_next_lookup(how: str) -> None:
    texts = told(2, how, "shared_memory", "skip")
    wanted = {
        "no step": r"lookup in tables clicks over ranks: got optimizer steps by rank: 3, 2",
        "not in the loss": CASES["not in the loss"],
    }[how]
    assert any(re.search(wanted, text) for text in texts), texts


def test_a_collection_that_no_rank_uses_needs_no_exchange() -> None:
    running = start_ranks(2, unused_by_all)
    assert running.finish() == [True, True]


def unused_by_all() -> bool:
    mesh = comm.init(timeout_s=TIMEOUT_S)
    model = DistributedModelParallel(Two(), mesh=mesh)
    sparse = SparseOptimizer(model)
    before = model.module.views.table("views").lookup([1])
    for _ in range(2):
        model(batch_of(1), "not in the loss").backward()
        sparse.step()
        sparse.zero_grad()
    after = model.module.views.table("views").lookup([1])
    return bool((before == 0).all() and (after != 0).all())  # a row, as it was initialised


def test_ranks_that_are_only_slow_are_waited_for() -> None:
    assert start_ranks(2, slow).finish() == [None, None]


def slow() -> None:
    """One rank waits in one call for a while, the other in no call."""
    mesh = comm.init(timeout_s=TIMEOUT_S)
    collectives = mesh.collectives("mine")
    for late in range(mesh.world_size):
        if mesh.rank == late:
            time.sleep(2.5)
        collectives.barrier(what="after some work")


def unclaimed() -> tuple[int, list[int], bool]:
    """Warnings, records that are kept, and whether rows moved, where no optimizer steps rows."""
    mesh = comm.init(timeout_s=TIMEOUT_S)
    model = DistributedModelParallel(Two(), mesh=mesh)
    tables = [model.module.clicks, model.module.views]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            model(batch_of(step, 5 + mesh.rank), "").backward()
            if not step:
                before = tables[0].table("clicks").lookup([0, 5, 6])
    warned = sum("no SparseOptimizer over them" in str(one.message) for one in said)
    same = torch.equal(before, tables[0].table("clicks").lookup([0, 5, 6]))
    return warned, [len(one.ledger) for one in tables], same


def test_ranks_without_an_optimizer_of_rows_warn_and_keep_one_batch() -> None:
    outcomes = start_ranks(2, unclaimed).outcomes()
    assert [value for _, value in outcomes.values()] == [(2, [1, 1], True)] * 2, outcomes
