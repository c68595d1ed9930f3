"""Workers of the throughput cases: find, step, insert, threads, and probes of settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness import Measured, Runner, interleave, median
from ids import index_batches, to_ids
from limits_cpu import copy_bytes_per_s, find_bytes, insert_bytes, step_bytes
from peers_cpu import IndexSelect, check_peer, step_peer
from plan_cpu import BATCH_IDS, DIMS, DISTRIBUTIONS, STEP_PEERS, THREADS, Scale, case_name

__all__ = ["find", "insert", "probe", "scaling", "step"]


def find(*, scale: Scale, dim: int, peers_only: bool = False) -> dict[str, Measured]:
    """Rows of known ids into a preallocated output, against index_select on a static table."""
    check_peer("index_select", dim)
    indices = _indices(scale)
    peer = IndexSelect(scale.rows, dim, indices["uniform"])
    runners = [Runner(name="peer", run=peer.run)]
    if not peers_only:
        from ours_cpu import FindRun, loaded_shard

        ours = FindRun(loaded_shard(scale.rows, dim))
        runners.append(Runner(name="ours", run=ours.run))
    found = {}
    for threads in THREADS:
        limit = copy_bytes_per_s(threads) / find_bytes(dim)
        for distribution in DISTRIBUTIONS:
            peer.batches = indices[distribution]
            if not peers_only:
                ours.use([to_ids(index_N) for index_N in indices[distribution]])
            seconds = interleave(runners, batches=scale.batches, passes=2 * scale.passes)
            found[case_name("find", dim, distribution, threads)] = _measured(seconds, limit)
    return found


def step(*, scale: Scale, dim: int, peer: str, peers_only: bool = False) -> dict[str, Measured]:
    """Forward, backward and optimizer of one id a bag, through each side's public modules."""
    check_peer(peer, dim)
    indices = _indices(scale)
    contender = step_peer(peer, scale.rows, dim, indices["uniform"])
    contender.touch()
    runners = [Runner(name="peer", run=contender.run)]
    optimizer = "adam" if peer == "torch_adam" else "adagrad"
    state_width = (2 if optimizer == "adam" else 1) * dim
    if not peers_only:
        from ours_cpu import StepRun, check_step, loaded_shard

        check_step(dim, optimizer)
        ours = StepRun(loaded_shard(scale.rows, dim, optimizer))
        runners.append(Runner(name="ours", run=ours.run))
    found = {}
    for threads in THREADS:
        bandwidth = copy_bytes_per_s(threads)
        for distribution in DISTRIBUTIONS:
            contender.batches = indices[distribution]
            if not peers_only:
                ours.use([to_ids(index_N) for index_N in indices[distribution]])
            seconds = interleave(runners, batches=scale.batches, passes=scale.passes)
            moved = step_bytes(dim, state_width, _unique_fraction(indices[distribution]))
            name = case_name(f"{STEP_PEERS[peer][0]} vs {peer}", dim, distribution, threads)
            found[name] = _measured(seconds, bandwidth / moved)
    return found


def insert(*, scale: Scale, dim: int) -> dict[str, Measured]:
    """New ids, all distinct, in batches until the table is full; then cleared and again.

    The first round touches the memory, the later ones find it touched.
    """
    from ours_cpu import InsertRun

    count = max(scale.rows // BATCH_IDS, scale.batches)
    found = {}
    for threads in THREADS:
        limit = copy_bytes_per_s(threads) / insert_bytes(dim, dim)
        run = InsertRun(dim)
        rounds = []
        for turn in range(2 + scale.passes):
            parts = torch.arange(count * BATCH_IDS).split(BATCH_IDS)
            run.use([to_ids(index_N, salt=turn) for index_N in parts])
            runner = Runner(name="ours", run=run.run)
            seconds = interleave([runner], batches=count, passes=1, warmup=0)["ours"]
            run.check(count * BATCH_IDS)
            run.clear()
            # All of the round, not its median batch: growing the index is part of inserting.
            rounds.append(count * BATCH_IDS / sum(seconds))
        for when, rate in (("memory touched", median(rounds[1:])), ("first touch", rounds[0])):
            name = case_name(f"insert new ids, {when}", dim, None, threads)
            found[name] = Measured(ours=rate / 1e6 / threads, limit_fraction=rate / limit)
    return found


def scaling(*, scale: Scale, dim: int) -> dict[str, Measured]:
    """The same loaded shard on two threads and on one, taking turns."""
    from ours_cpu import FindRun, StepRun, loaded_shard

    limit = copy_bytes_per_s(2)
    shard = loaded_shard(scale.rows, dim)
    indices = _indices(scale)
    found = {}
    for what, run in (("find", FindRun(shard)), ("Adagrad step", StepRun(shard))):
        runners = [
            Runner(name="ours", run=run.run, before=_thread_setter(2)),
            Runner(name="peer", run=run.run, before=_thread_setter(1)),
        ]
        for distribution in DISTRIBUTIONS:
            run.use([to_ids(index_N) for index_N in indices[distribution]])
            seconds = interleave(runners, batches=scale.batches, passes=2 * scale.passes)
            moved = find_bytes(dim)
            if what != "find":
                moved = step_bytes(dim, dim, _unique_fraction(indices[distribution]))
            name = case_name(f"2 threads over 1, {what}", dim, distribution)
            found[name] = _measured(seconds, limit / moved)
    return found


def probe(*, scale: Scale) -> dict[str, Measured]:
    """Only baselines, on one thread, under this process's memory settings, to pick the best.

    Named `peer D`; the rate is in `peer_value`.
    """
    torch.set_num_threads(1)
    found = {}
    for dim in DIMS:
        indices = index_batches(scale.rows, scale.batches, BATCH_IDS, "uniform")
        for peer in ("index_select", *STEP_PEERS):
            if peer == "index_select":
                runner = Runner(name="peer", run=IndexSelect(scale.rows, dim, indices).run)
            else:
                contender = step_peer(peer, scale.rows, dim, indices)
                contender.touch()
                runner = Runner(name="peer", run=contender.run)
            seconds = interleave([runner], batches=scale.batches, passes=scale.passes, warmup=1)
            found[f"{peer} {dim}"] = Measured(peer_value=BATCH_IDS / median(seconds["peer"]) / 1e6)
    return found


def _indices(scale: Scale) -> dict[str, list[Tensor]]:
    return {d: index_batches(scale.rows, scale.batches, BATCH_IDS, d) for d in DISTRIBUTIONS}


def _measured(seconds: dict[str, list[float]], limit_ids_per_s: float) -> Measured:
    rates = {name: BATCH_IDS / median(values) for name, values in seconds.items()}
    ours = rates.get("ours")
    return Measured(
        ours=None if ours is None else ours / 1e6,
        peer_value=rates["peer"] / 1e6,
        limit_fraction=None if ours is None else ours / limit_ids_per_s,
        note="peers only" if ours is None else "",
    )


def _unique_fraction(indices: Sequence[Tensor]) -> float:
    return statistics.mean(x.unique().numel() / x.numel() for x in indices[:5])


def _thread_setter(threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(threads)
