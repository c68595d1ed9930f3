"""Tables on parameter servers: Monolith's numbers, and those of a shard of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from shoal import (
    Admission,
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    ReduceMean,
    Segment,
    SparseOptimizer,
    StepContext,
    Table,
    TableSpec,
)
from shoal.comm.transport import Client
from shoal.errors import ConfigError, NonFiniteGradient, ServerLost
from shoal.exchange.wire import Wire
from shoal.ps.client import RowsOverServers, connect
from shoal.ps.connections import Servers
from shoal.ps.messages import Head
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD, Adagrad
from shoal.rules.schedules import Polynomial
from shoal.table.factory import make_shard
from shoal.table.shard import IdGroups

STEP_0, STEP_1 = StepContext(), StepContext(global_step=1)


def spec(name: str, dim: int, lr: object = 1.0) -> TableSpec:
    return TableSpec(
        name=name,
        segments=(Segment(dim=dim, initializer=Zeros(), optimizer=SGD(lr=lr)),),  # type: ignore[arg-type]
    )


Start = Callable[..., list[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Servers on loopback; their addresses."""
    with ExitStack() as stack:

        def started(specs: tuple[TableSpec, ...], count: int) -> list[str]:
            addresses = []
            for index in range(count):
                server = TableServer(specs, index=index, of=count).serve("tcp://127.0.0.1:0")
                stack.callback(server.stop)
                addresses.append(server.address)
            return addresses

        yield started


@pytest.fixture(params=[1, 2, 3])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def opened(start: Start, count: int) -> Iterator[Callable[..., RowsOverServers]]:
    with ExitStack() as stack:

        def rows(*specs: TableSpec, wire: Wire | None = None) -> RowsOverServers:
            servers = Servers(start(specs, count), specs)
            stack.callback(servers.close)
            return RowsOverServers(servers, wire=wire)

        yield rows


Opened = Callable[..., RowsOverServers]


def rows_of(*values: float, dim: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, dim).contiguous()


def test_assign_add_and_lookup(opened: Opened) -> None:
    table = Table(one := spec("t", 2), shard=opened(one))
    table.assign_add([1, 2, 3], rows_of(1, 2, 3, dim=2))
    assert table.lookup([1, 2, 3]).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert table.lookup([1, 1, 3]).tolist() == [[1, 1], [1, 1], [3, 3]]


def test_assign(opened: Opened) -> None:
    table = Table(one := spec("t", 2), shard=opened(one))
    table.assign([1, 2, 3], rows_of(1, 2, 3, dim=2))
    assert table.lookup([1, 2, 3]).tolist() == [[1, 1], [2, 2], [3, 3]]
    table.assign([2, 3, 4], rows_of(1, 2, 3, dim=2))
    assert table.lookup([1, 2, 3, 4]).tolist() == [[1, 1], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    ("ids", "read", "want"),
    [
        ([0, 1], [0, 1], [[-2], [-2]]),
        ([0, 3, 0, 1], [0, 3, 0, 1], [[-4], [-2], [-4], [-2]]),
    ],
)
def test_apply_gradients(
    opened: Opened, ids: list[int], read: list[int], want: list[list[float]]
) -> None:
    table = Table(one := spec("t", 1), shard=opened(one))
    table.apply(ids, rows_of(*[2.0] * len(ids), dim=1))
    assert table.lookup(read).tolist() == want


def test_gradients_of_other_ids_than_were_read(opened: Opened) -> None:
    table = Table(one := spec("t", 1), shard=opened(one))
    assert table.lookup([1, 0]).tolist() == [[0], [0]]
    table.apply([1, 1], rows_of(-2, -2, dim=1))
    assert table.lookup([1, 0]).tolist() == [[4], [0]]


def test_a_rate_that_decays(opened: Opened) -> None:
    decay = Polynomial(initial=1.0, end=2.0, decay_steps=10)
    rows = opened(one := spec("t", 1, decay))
    table = Table(one, shard=rows)
    table.apply([0, 1], rows_of(2, 2, dim=1), global_step=0)
    assert table.lookup([0, 1]).tolist() == [[-2], [-2]]
    table.apply([0, 1], rows_of(2, 2, dim=1), global_step=1)
    torch.testing.assert_close(table.lookup([0, 1]), rows_of(-4.2, -4.2, dim=1))


def test_two_tables(opened: Opened) -> None:
    specs = spec("1", 1), spec("2", 2)
    rows = opened(*specs)
    one, two = (Table(each, shard=rows) for each in specs)
    one.assign_add([1, 2], [[-1.0], [-2.0]])
    two.assign_add([3], [[-3.0, -3.0]])
    assert one.lookup([1, 2]).tolist() == [[-1], [-2]]
    one.apply([1, 2], [[-0.5], [-1.0]])
    two.apply([3], [[-1.5, -1.5]])
    assert one.lookup([1, 2]).tolist() == [[-0.5], [-1.0]]
    assert two.lookup([3]).tolist() == [[-1.5, -1.5]]
    assert one.reinitialize([1, 2, 3]).tolist() == [1, 1, 0]
    assert one.lookup([1, 2, 3]).tolist() == [[0], [0], [0]]
    assert two.lookup([3]).tolist() == [[-1.5, -1.5]]


def test_half_precision_on_the_way(opened: Opened) -> None:
    specs = spec("1", 1), spec("2", 2)
    rows = opened(*specs, wire=Wire(rows="float16", grads="float16"))
    one, two = (Table(each, shard=rows) for each in specs)
    one.apply([1, 2], rows_of(2, 2, dim=1))
    two.apply([3], [[3.0, 3.0]])
    assert one.lookup([1, 2]).tolist() == [[-2], [-2]]
    assert two.lookup([3]).tolist() == [[-3, -3]]


def batch(seed: int, keys: tuple[str, ...] = ("a", "b", "c")) -> KeyedRagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (16 * len(keys),), generator=generator)
    ids = torch.randint(-50, 50, (int(lengths.sum()),), generator=generator)
    return KeyedRagged.from_lengths(keys, ids, lengths)


def trained(collection: EmbeddingCollection, backwards: int = 1, steps: int = 6) -> list[Tensor]:
    optimizer = SparseOptimizer(collection)
    seen = []
    for step in range(steps):
        for turn in range(backwards):
            outputs = collection(batch(10 * step + turn), event_time_s=step)
            seen += [output.detach().clone() for output in outputs.values()]
            loss = sum((output.double() ** 2).sum() for output in outputs.values())
            assert isinstance(loss, Tensor)
            loss.backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize("init_on_lookup", [True, False])
@pytest.mark.parametrize("backwards", [1, 2])
def test_one_worker_trains_as_a_shard_of_its_own(
    start: Start, count: int, backwards: int, init_on_lookup: bool
) -> None:

    specs = (
        TableSpec(name="wide", segments=(Segment(dim=3, optimizer=Adagrad(lr=0.1)),)),
        TableSpec(name="double", segments=(Segment(dim=2),), dtype="float64"),
        TableSpec(name="seldom", segments=(Segment(dim=4),), admission=Admission(threshold=3)),
    )
    features = (
        Feature("a", "wide"),
        Feature("b", "double", combiner=ReduceMean()),
        Feature("c", "seldom"),
    )
    local = EmbeddingCollection(
        specs, features, shard=make_shard(specs), init_on_lookup=init_on_lookup
    )
    remote = EmbeddingCollection(specs, features, init_on_lookup=init_on_lookup)
    exchange = connect(start(specs, count), specs)
    remote.distribute(exchange)
    want, got = trained(local, backwards), trained(remote, backwards)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0 if backwards == 1 else 1e-6)
    for number, table in enumerate(specs):
        mine, theirs = local.shard.export(number), exchange.shard.export(number)
        assert torch.equal(mine.ids, theirs.ids), table.name
        for column in ("weights", "state", "last_seen_s", "counts"):
            torch.testing.assert_close(
                getattr(theirs, column),
                getattr(mine, column),
                rtol=0,
                atol=0 if backwards == 1 else 1e-5,
                msg=lambda text, name=f"{table.name}.{column}": f"{name}: {text}",
            )
    local.eval(), remote.eval()
    for one, other in zip(local(batch(3)).values(), remote(batch(3)).values(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0 if backwards == 1 else 1e-6)
    exchange.shard.servers.close()


def test_no_ids_at_all(opened: Opened) -> None:
    rows = opened(spec("t", 2))
    none = IdGroups(
        torch.empty(0, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.empty(0, dtype=torch.int32),
    )
    assert rows.find(none).weights == ()
    rows.apply([], ctx=STEP_0)
    unknown = none._replace(
        ids_N=torch.tensor([1, 2, 3]),
        splits_G1=torch.tensor([0, 3]),
        tables_G=torch.tensor([7], dtype=torch.int32),
    )
    assert rows.reinitialize(unknown, ctx=STEP_0).tolist() == [-1, -1, -1]


def test_a_step_after_one_that_a_server_refused(opened: Opened) -> None:
    table = Table(one := spec("t", 1), shard=opened(one))
    ids = list(range(40))
    grads = torch.ones(40, 1)
    for _ in range(5):
        with pytest.raises(NonFiniteGradient):
            table.apply(ids, torch.full((40, 1), float("nan")))
        table.apply(ids, grads)
    assert table.lookup(ids).flatten().tolist() == [-5.0] * 40


def test_a_server_that_is_down_hangs_nobody(start: Start) -> None:
    (address,) = start((spec("t", 1),), 1)
    client = Client([address, "tcp://127.0.0.1:9"])
    lost = [client.call(1, b"{}", timeout_s=0.2) for _ in range(1200)]
    hello = Head(method="hello").to_bytes()
    assert client.call(0, hello, timeout_s=20).result()[0]
    assert {type(one.exception()) for one in lost} == {ServerLost}
    client.close()
    with pytest.raises(ConfigError, match="closed"):
        client.call(0, hello, timeout_s=1)
