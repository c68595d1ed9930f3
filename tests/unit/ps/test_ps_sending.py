"""When a worker sends: stale updates and what they leave behind, reads that are sent twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import (
    Admission,
    EmbeddingCollection,
    Feature,
    KeyedRagged,
    Segment,
    SparseOptimizer,
    TableSpec,
)
from shoal.comm.frames import memory
from shoal.comm.transport import Frames, Server
from shoal.errors import ConfigError, InputError, NonFiniteGradient, ServerLost, TableFull
from shoal.ps.client import ServerExchange, connect
from shoal.ps.connections import Patience
from shoal.ps.messages import Head
from shoal.ps.sending import HedgeDelay, UpdateSender, first_reply
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.shard import IdGroups, StepContext

SPECS = (
    TableSpec(name="t", segments=(Segment(dim=2, initializer=Zeros(), optimizer=SGD(lr=1.0)),)),
)


class Gate:
    """A server whose updates wait until they are let through."""

    def __init__(
        self, specs: tuple[TableSpec, ...] = SPECS, *, index: int = 0, of: int = 1
    ) -> None:
        self.rows = TableServer(specs, index=index, of=of)
        self.open = threading.Event()
        self.open.set()
        self.methods: list[str] = []
        self.drop: Callable[[Head], bool] = lambda head: False
        self.server = Server("tcp://127.0.0.1:0", self._handle)

    def _handle(self, head: bytes, frames: Frames) -> tuple[bytes, Sequence[memoryview]]:
        parsed = Head.of(head)
        self.methods.append(parsed.method)
        if parsed.method == "apply":
            assert self.open.wait(60)
        reply = self.rows(head, frames)
        if self.drop(parsed):
            assert self.open.wait(60)
        return reply

    def stop(self) -> None:
        self.open.set()
        self.server.stop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.stop()


Connected = Callable[..., ServerExchange]


@pytest.fixture
def connected() -> Iterator[Connected]:
    with ExitStack() as stack:

        def exchange(gate: Gate, stale: int = 0, **options: object) -> ServerExchange:
            specs = gate.rows.specs
            made = connect([gate.server.address], specs, stale_updates=stale, **options)
            stack.callback(made.shard.servers._client.close)
            stack.callback(gate.open.set)
            return made

        yield exchange


def collection(exchange: ServerExchange) -> tuple[EmbeddingCollection, SparseOptimizer]:
    made = EmbeddingCollection(exchange.specs, [Feature("t", "t")])
    made.distribute(exchange)
    return made, SparseOptimizer(made)


def step(made: EmbeddingCollection, optimizer: SparseOptimizer) -> Tensor:
    return updated(looked_up(made), optimizer)


def looked_up(made: EmbeddingCollection) -> Tensor:
    (output,) = made(KeyedRagged.from_lists({"t": [[1], [2]]})).values()
    return output


def updated(output: Tensor, optimizer: SparseOptimizer) -> Tensor:
    output.backward(torch.ones_like(output))
    optimizer.step()
    return output.detach()


@contextmanager
def hasty(exchange: ServerExchange, patience: Patience) -> Iterator[None]:
    """For requests that are to fail soon; others wait for a machine that is busy."""
    servers = exchange.shard.servers
    before, servers._patience = servers._patience, patience
    yield
    servers._patience = before


def test_a_step_returns_while_its_update_is_on_its_way(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate, stale=2)
    made, optimizer = collection(exchange)
    gate.open.clear()
    read = [step(made, optimizer), step(made, optimizer)]
    assert [rows.unique().tolist() for rows in read] == [[0], [0]]
    staleness = exchange.shard.servers.staleness
    assert (staleness.lookups, staleness.on_their_way, staleness.most_on_their_way) == (2, 1, 1)
    third = threading.Thread(target=step, args=(made, optimizer))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.open.set()
    third.join(60)
    assert not third.is_alive()
    exchange.shard.check()
    assert gate.rows.shard.entry(0, 1).weights.tolist() == [-3, -3]  # type: ignore[union-attr]
    # The third was looked up before any was applied, or after up to two.
    assert staleness.updates == 3
    assert 1 <= staleness.most_behind <= 2


def test_tensors_may_change_while_their_update_is_on_its_way(
    gate: Gate, connected: Connected
) -> None:
    rows = connected(gate, 3).shard
    gate.open.clear()
    ids_N, grads = torch.tensor([5]), torch.zeros(1, gate.rows.specs[0].dim)
    groups = IdGroups(ids_N, torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32))
    for grad in (1, 2, 3):
        grads.fill_(grad)
        rows.apply_ids(groups, (grads,), ctx=StepContext())
    grads.fill_(100)
    gate.open.set()
    assert (rows.find(groups).weights[0] == -6).all()


def test_without_stale_updates_a_lookup_sees_all(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate)
    made, optimizer = collection(exchange)
    assert [step(made, optimizer).unique().tolist() for _ in range(3)] == [[0], [-1], [-2]]
    staleness = exchange.shard.servers.staleness
    assert (staleness.on_their_way, staleness.updates, staleness.behind) == (0, 3, 0)


def test_updates_of_other_workers_are_counted(gate: Gate, connected: Connected) -> None:
    exchange, other = connected(gate), connected(gate)
    made, optimizer = collection(exchange)
    output = looked_up(made)
    for _ in range(4):
        step(*collection(other))
    updated(output, optimizer)
    assert exchange.shard.servers.staleness.behind == 4
    assert other.shard.servers.staleness.behind == 0


def test_all_but_lookups_wait_for_updates(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate, stale=3)
    made, optimizer = collection(exchange)
    for _ in range(10):
        step(made, optimizer)
    assert exchange.shard.find(one_group([1])).weights[0].tolist() == [[-10, -10]]
    step(made, optimizer)
    assert exchange.shard.export(0).weights.tolist() == [[-11, -11]] * 2


def one_group(ids: list[int]) -> IdGroups:
    return IdGroups(
        torch.tensor(ids), torch.tensor([0, len(ids)]), torch.tensor([0], dtype=torch.int32)
    )


@pytest.mark.parametrize("where", ["step", "check", "close"])
def test_an_update_that_fails_is_reported_later(
    gate: Gate, connected: Connected, where: str
) -> None:
    exchange = connected(gate, stale=1)
    made, optimizer = collection(exchange)
    step(made, optimizer)
    exchange.shard.apply_ids(one_group([1]), [torch.full((1, 2), float("nan"))], ctx=StepContext())
    with pytest.raises(NonFiniteGradient, match="update of an earlier step"):
        {
            "step": lambda: step(made, optimizer),
            "check": exchange.shard.check,
            "close": exchange.shard.servers.close,
        }[where]()
    if where != "close":
        optimizer.step()
        exchange.shard.check()
    assert gate.rows.shard.entry(0, 1).weights[0] in (-1, -2)  # type: ignore[union-attr]
    exchange.shard.servers.close()


def test_a_lookup_that_comes_again_counts_its_ids_once() -> None:
    spec = TableSpec(name="t", segments=(Segment(dim=2),), admission=Admission(threshold=3))
    server = TableServer((spec,), index=0, of=1)

    def lookup(number: int) -> list[bool]:
        head = Head(
            method="lookup", worker="w", number=number, tables=(0,), sizes=(1,), counted=True
        )
        frames = [memory(torch.tensor([7])), memory(torch.ones(1, dtype=torch.int32))]
        return list(map(bool, server(head.to_bytes(), frames)[1][2]))

    assert [lookup(number) for number in (1, 1, 1, 2, 2)] == [[False]] * 5
    assert lookup(3) == [True]


def test_workers_whose_requests_can_come_no_more_are_forgotten() -> None:
    server = TableServer(SPECS, index=0, of=1, most_workers=3)

    def update(worker: str, number: int, patience_s: int) -> None:
        head = Head(
            method="apply",
            worker=worker,
            number=number,
            argument=patience_s,
            tables=(0,),
            sizes=(1,),
            sets=1,
        )
        rows = memory(torch.ones(2)), memory(torch.empty(0, dtype=torch.float64))
        server(head.to_bytes(), [memory(torch.tensor([5])), *rows])

    update("patient", 1, 600)
    for worker in range(5):
        update(f"hasty {worker}", 1, 0)
    assert server.forgotten >= 3
    update("patient", 1, 600)
    assert server.shard.entry(0, 5).weights.tolist() == [-6, -6]  # type: ignore[union-attr]
    for worker in ("second", "third"):
        update(worker, 1, 600)
    with pytest.raises(InputError, match="workers of a parameter server"):
        update("fourth", 1, 600)
    assert server.shard.entry(0, 5).weights.tolist() == [-8, -8]  # type: ignore[union-attr]


def test_a_read_whose_reply_is_lost_is_asked_again(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate)
    rows = exchange.shard
    exchange.shard.assign(one_group([1]), [torch.ones(1, 2)], ctx=StepContext())
    for _ in range(100):
        rows.find(one_group([1]))
    before = rows.servers.staleness.hedged  # others may have been late on a busy machine
    rows.servers._hedge._late = 0  # and may not take this one's turn
    lost = iter([True])
    # Not of one id: those may be late ones of before.
    gate.drop = lambda head: head.sizes == (2,) and next(lost, False)
    gate.open.clear()
    assert rows.find(one_group([1, 2])).weights[0].tolist() == [[1, 1], [0, 0]]
    assert rows.servers.staleness.hedged == before + 1
    assert rows.servers.staleness.repeated == 0


def replied(value: object) -> Future[object]:
    future: Future[object] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_the_first_reply_without_an_error_counts() -> None:
    lost, late = replied(ServerLost("gone")), Future[object]()
    threading.Timer(0.05, late.set_result, ["late"]).start()
    found = first_reply(lost, late)
    assert found is not None
    assert found.result() == "late"
    assert first_reply(lost, replied("here")).result() == "here"  # type: ignore[union-attr]
    both = first_reply(lost, replied(ServerLost("gone")))
    assert isinstance(both.exception(), ServerLost)  # type: ignore[union-attr]


def test_few_reads_are_sent_twice() -> None:
    hedge = HedgeDelay()
    for _ in range(100):
        assert hedge.late([replied(1), None]) == []
        hedge.took(0.001)
    never: list[Future[object] | None] = [replied(1), Future(), None, Future()]
    asked = [hedge.late(never) for _ in range(20)]
    assert asked[:5] == [[1, 3]] * 5
    assert asked.count([1, 3]) <= 6


def test_updates_are_sent_in_order_and_errors_are_counted() -> None:
    sender, sent = UpdateSender(4), []
    for number in range(20):
        sender.send(lambda number=number: sent.append(number))  # type: ignore[misc]
    sender.settle()
    assert sent == list(range(20))
    release = threading.Event()

    def fail() -> None:
        assert release.wait(60)
        raise TableFull("no room")

    sender.send(fail)
    sender.send(fail)
    release.set()
    with pytest.raises(TableFull, match=r"earlier step \(and 1 more\): no room"):
        sender.close()
    sender.close()


def test_a_server_that_is_lost_is_reported_at_the_next_step(
    gate: Gate, connected: Connected
) -> None:
    exchange = connected(gate, stale=1)
    made, optimizer = collection(exchange)
    gate.open.clear()
    output = looked_up(made)
    with hasty(exchange, Patience(reply_s=0.3, repeats=0)):
        updated(output, optimizer)
        with pytest.raises(ServerLost, match="update of an earlier step"):
            exchange.shard.check()
    gate.open.set()
    step(made, optimizer)
    exchange.shard.check()


def test_close_waits_for_updates(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate, stale=4)
    made, optimizer = collection(exchange)
    for _ in range(4):
        step(made, optimizer)
    exchange.shard.servers.close()
    assert gate.rows.shard.entry(0, 1).weights.tolist() == [-4, -4]  # type: ignore[union-attr]


def test_a_worker_says_how_long_it_may_repeat() -> None:
    assert Patience(reply_s=10, repeats=2, pause_s=0.5).longest_s == 10 * 3 + 0.5 + 1.0


def test_updates_behind_one_that_found_no_server_are_not_sent() -> None:
    sender, sent, release = UpdateSender(3), [], threading.Event()

    def lose() -> None:
        assert release.wait(60)
        raise ServerLost("gone")

    sender.send(lose)
    for number in range(2):
        sender.send(lambda number=number: sent.append(number))  # type: ignore[misc]
    release.set()
    with pytest.raises(ServerLost, match=r"\(and 2 more\): gone"):
        sender.settle()
    sender.send(lambda: sent.append(9))
    sender.close()
    assert sent == [9]


def test_nothing_hangs_after_an_update_that_came_after_the_end() -> None:
    sender = UpdateSender(2)
    sender.close()
    with pytest.raises(ConfigError, match="a connection that was closed"):
        sender.send(lambda: None)
    sender.settle()


def test_a_worker_that_comes_back_by_its_name_is_counted(gate: Gate, connected: Connected) -> None:
    numbers: list[int] = []
    gate.drop = lambda head: head.method == "lookup" and bool(numbers.append(head.number))
    for _ in range(2):
        made, _ = collection(connected(gate, worker="w"))
        for _ in range(3):
            made(KeyedRagged.from_lists({"t": [[1]]}))
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 6


def test_a_worker_that_reaches_another_server_is_refused(gate: Gate, connected: Connected) -> None:
    rows = connected(gate).shard
    for other in (
        TableServer(SPECS, index=0, of=2),
        TableServer(SPECS, index=0, of=1, seed=3),
    ):
        server = other.serve("tcp://127.0.0.1:0")
        rows.servers.follow({0: server.address})
        with pytest.raises(ConfigError, match="one for another server"):
            rows.apply_ids(one_group([1]), [torch.ones(1, 2)], ctx=StepContext())
        with pytest.raises(ConfigError, match="one for another server"):
            rows.find(one_group([1]))
        assert other.shard.size(0) == 0
        server.stop()


def test_a_worker_follows_before_it_greets(gate: Gate) -> None:
    from support.ranks import free_port

    def watch(follow: Callable[[dict[int, str]], None]) -> None:
        follow({0: gate.server.address})

    gone = f"tcp://127.0.0.1:{free_port()}"
    exchange = connect([gone], SPECS, patience=Patience(reply_s=60), watch=watch)
    exchange.shard.servers.close()


def test_a_lookup_without_ids_waits_for_nothing(gate: Gate, connected: Connected) -> None:
    exchange = connected(gate, stale=1)
    made, optimizer = collection(exchange)
    gate.open.clear()
    step(made, optimizer)
    made(KeyedRagged.from_lists({"t": [[], []]}))
    assert exchange.shard.servers._sender.on_their_way == 1
    assert exchange.shard.servers.staleness.scalars()["servers/repeated"] == 0
    gate.open.set()


def test_many_calls_at_once_are_all_answered(gate: Gate, connected: Connected) -> None:
    client = connected(gate).shard.servers._client
    gate.open.clear()
    head = Head(method="apply", tables=(0,), sizes=(0,), sets=1).to_bytes()
    frames = [memory(torch.empty(0, dtype=torch.int64))] * 3
    calls = [client.call(0, head, frames, timeout_s=60) for _ in range(64)]
    gate.open.set()
    assert [call.result(60)[0] for call in calls] == [b""] * 64
    gate.open.clear()
    late = [client.call(0, head, frames, timeout_s=0.5) for _ in range(20)]
    for call in late:
        assert isinstance(call.exception(60), ServerLost)


@pytest.mark.slow
def test_servers_that_are_down_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats of one server do not wait for those of another."""
    gates = [Gate(index=index, of=3) for index in range(3)]
    exchange = connect([gate.server.address for gate in gates], SPECS)
    servers = exchange.shard.servers
    rounds: list[int] = []
    call = servers._client.call

    def counted(server: int, *arguments: Any, **options: Any) -> Any:
        rounds.append(server)
        return call(server, *arguments, **options)

    monkeypatch.setattr(servers._client, "call", counted)
    for gate in gates:
        gate.open.clear()
    ids = list(range(50))
    impatient = Patience(reply_s=0.4, repeats=2, pause_s=0.01)
    with hasty(exchange, impatient), pytest.raises(ServerLost):
        exchange.shard.apply_ids(one_group(ids), [torch.ones(50, 2)], ctx=StepContext())
    assert rounds == [0, 1, 2] * 3
    assert servers.staleness.repeated == 6
    for gate in gates:
        gate.open.set()
    exchange.shard.apply_ids(one_group(ids), [torch.ones(50, 2)], ctx=StepContext())
    servers.close()
    for gate in gates:
        gate.stop()
