"""Many Python threads on one table: nothing is lost, no row is ever seen half updated."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shoal import Expiry, Segment, Table, TableSpec, initializers, optimizers

DIM = 24
IDS = 4000
BATCH = 1500
STEPS = 25


def make_table(expiry: Expiry | None = None) -> Table:
    segment = Segment(dim=DIM, initializer=initializers.Zeros(), optimizer=optimizers.SGD(lr=1.0))
    return Table(TableSpec(name="shared", segments=(segment,), expiry=expiry))


def run_all(bodies: list[Callable[[], None]]) -> None:
    """Run each body in a thread of its own; the first failure is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def assert_whole(weights_ND: torch.Tensor) -> None:
    assert torch.equal(weights_ND, weights_ND[:, :1].expand_as(weights_ND))


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, IDS, (BATCH,), generator=generator) for _ in range(STEPS)]


def test_every_update_of_eight_threads_arrives_once() -> None:
    table = make_table()
    ones = torch.ones(BATCH, DIM)
    stop = threading.Event()

    def train(seed: int) -> None:
        for ids in batches(seed):
            table.apply(ids, ones)

    def read(seed: int) -> None:
        while not stop.is_set():
            weights, found = table.find(batches(seed)[0])
            assert_whole(weights)
            assert (weights[:, 0] <= 0).all()
            assert (weights[~found] == 0).all()

    readers = [threading.Thread(target=read, args=(50 + k,)) for k in range(4)]
    for reader in readers:
        reader.start()
    run_all([lambda k=k: train(k) for k in range(4)])  # type: ignore[misc]
    stop.set()
    for reader in readers:
        reader.join()
    occurrences = torch.bincount(
        torch.cat([b for k in range(4) for b in batches(k)]), minlength=IDS
    )
    weights, found = table.find(torch.arange(IDS))
    assert torch.equal(found, occurrences > 0)
    assert torch.equal(weights[:, 0], -occurrences.float())


def test_eviction_beside_training_and_reading_leaves_a_possible_table() -> None:
    table = make_table(Expiry(ttl_s=3))
    ones = torch.ones(BATCH, DIM)

    def train(seed: int) -> None:
        for step, ids in enumerate(batches(seed)):
            ticket = table.find_or_init(ids, event_time_s=step)
            assert_whole(table.gather(ticket))
            assert ticket.admitted_N.all()
            ticket.end()
            table.apply(ids, ones, event_time_s=step)

    def evict() -> None:
        for now_s in range(STEPS * 2):
            table.evict(now_s)

    def read() -> None:
        for ids in batches(99):
            weights, found = table.find(ids)
            assert_whole(weights)
            assert (weights[~found] == 0).all()

    run_all([lambda k=k: train(k) for k in range(4)] + [evict, evict, read, read])  # type: ignore[misc]
    chunk = table.export()
    assert len(set(chunk.ids.tolist())) == len(table) == chunk.ids.numel()
    assert_whole(chunk.weights)
    # No row can have lost more than every occurrence of its id.
    occurrences = torch.bincount(
        torch.cat([b for k in range(4) for b in batches(k)]), minlength=IDS
    )
    assert (chunk.weights[:, 0] <= 0).all()
    assert (-chunk.weights[:, 0] <= occurrences[chunk.ids]).all()
    table.evict(10_000)
    assert len(table) == 0
