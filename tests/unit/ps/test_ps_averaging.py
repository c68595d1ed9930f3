"""Dense weights over server 0: who leads brings them, others join, nobody waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from shoal import Segment, TableSpec
from shoal.comm.frames import memory
from shoal.errors import ConfigError, InputError, ServerLost, ShapeError
from shoal.ps.averaging import DenseAverage, average_of
from shoal.ps.connections import Servers
from shoal.ps.messages import Head
from shoal.ps.server import TableServer

SPECS = (TableSpec(name="t", segments=(Segment(dim=2),)),)
Worker = Callable[..., DenseAverage]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Connects further workers to two servers."""
    with ExitStack() as stack:
        addresses = []
        for index in range(2):
            server = TableServer(SPECS, index=index, of=2).serve("tcp://127.0.0.1:0")
            stack.callback(server.stop)
            addresses.append(server.address)

        def connected(*weights: Tensor, every: int = 1, workers: int = 2) -> DenseAverage:
            servers = Servers(addresses, SPECS)
            stack.callback(servers.close)
            return DenseAverage(servers, weights, every=every, workers=workers)

        yield connected


def test_who_joins_begins_with_the_weights_of_who_leads(worker: Worker) -> None:
    lead, other = [torch.tensor([[1.0, 2]]), torch.tensor(3.0)], torch.zeros(1, 2)
    bias = torch.zeros((), dtype=torch.float64)
    waits = threading.Thread(target=lambda: worker(other, bias).join(leads=False, timeout_s=60))
    waits.start()
    worker(*lead).join(leads=True, timeout_s=1)
    waits.join(60)
    assert (other.tolist(), bias.item()) == ([[1, 2]], 3)
    late = [torch.zeros(1, 2), torch.zeros(())]
    worker(*late).join(leads=True, timeout_s=1)  # one that leads and comes back
    assert late[0].tolist() == [[1, 2]]


def test_weights_and_their_average_move_towards_each_other(worker: Worker) -> None:
    one, other = torch.tensor([0.0]), torch.tensor([0.0])
    first, second = worker(one, workers=1), worker(other, workers=3)
    first.join(leads=True, timeout_s=1)
    second.join(leads=False, timeout_s=1)
    one += 8
    first.stepped(1)  # by half the difference
    assert one.item() == 4
    second.stepped(1)  # by 0.9 / 3 of it
    assert other.item() == pytest.approx(1.2)
    first.stepped(2)
    assert one.item() == pytest.approx(4 - 0.5 * (4 - 2.8))


def test_exchanges_are_every_so_many_steps(worker: Worker) -> None:
    one = torch.tensor([0.0])
    average = worker(one, every=3, workers=1)
    average.join(leads=True, timeout_s=1)
    seen = []
    for step in range(1, 7):
        one += 1
        average.stepped(step)
        seen.append(one.item())
    assert seen == [1, 2, 1.5, 2.5, 3.5, 3]


def test_a_process_group_averages_by_itself(worker: Worker) -> None:
    servers = worker(torch.zeros(1))._servers
    module = torch.nn.BatchNorm1d(2)
    with pytest.raises(ConfigError, match="in a process group"):
        average_of(servers, module, every=1, workers=1, grouped=True)
    average = average_of(servers, module, every=1, workers=1, grouped=False)
    assert [one.numel() for one in average._weights] == [2, 2, 2, 2]  # statistics, too; no counts


def test_nobody_leads(worker: Worker) -> None:
    with pytest.raises(ServerLost, match=r"dense weights on server 0: got none in 0\.1 s"):
        worker(torch.zeros(1)).join(leads=False, timeout_s=0.1)


def test_weights_of_another_model_or_that_diverged_change_nothing(worker: Worker) -> None:
    one = torch.tensor([1.0, 2.0])
    average = worker(one)
    average.join(leads=True, timeout_s=1)
    with pytest.raises(ShapeError):
        worker(torch.zeros(3)).join(leads=False, timeout_s=1)
    with pytest.raises(ShapeError):
        worker(torch.zeros(3)).stepped(1)
    one[0] = float("nan")
    with pytest.raises(InputError, match="dense weights of a worker"):
        average.stepped(1)
    fresh = torch.zeros(2)
    worker(fresh).join(leads=False, timeout_s=1)
    assert fresh.tolist() == [1, 2]


def test_weights_that_come_again_move_the_average_once() -> None:
    server = TableServer(SPECS, index=0, of=1)

    def exchange(value: float, number: int) -> float:
        head = Head(method="average", worker="w", number=number, share=0.5)
        return float(server(head.to_bytes(), [memory(torch.tensor([value]))])[1][0].cast("f")[0])

    def average() -> float:
        return float(server(Head(method="average").to_bytes(), [])[1][0].cast("f")[0])

    exchange(0.0, 5)
    assert exchange(8.0, 6) == 4
    exchange(8.0, 6)
    assert average() == 4
    exchange(8.0, 7)
    assert average() == 6
