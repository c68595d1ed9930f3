"""Which replica is asked, what happens when one fails or is slow, and Monolith's remote_predict."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from shoal.discovery import Memory, Space
from shoal.errors import ConfigError, InputError, ServerLost, ShapeError, UnknownName
from shoal.serve.client import ReplicaSet, remote_predict
from support.ranks import free_port
from support.served_models import EchoModel, OneSource, serving_sources

X = {"x": np.array([1.5, 2.0], np.float32)}


class Gated(EchoModel):
    """Replies only while its gate is open."""

    def __init__(self, name: str = "echo") -> None:
        super().__init__(name)
        self.gate = threading.Event()
        self.gate.set()

    def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
        assert self.gate.wait(60)
        return super().run(requests)


@contextmanager
def replicas(count: int, name: str = "echo") -> Iterator[tuple[list[Gated], list[str]]]:
    """Servers of a model each, and their addresses."""
    with ExitStack() as held:
        models = [Gated(name) for _ in range(count)]
        addresses = []
        for model in models:
            source = serving_sources([OneSource(model, name)], http_address=None)
            server, _ = held.enter_context(source)
            addresses.append(server.grpc_address)
        try:
            yield models, addresses
        finally:
            for model in models:
                model.gate.set()


def test_replies_have_the_outputs() -> None:
    with replicas(1) as (_, addresses), ReplicaSet(addresses) as clients:
        found = clients.predict("echo", X, timeout_s=60)
        assert found["y"].tolist() == [3, 4]
        assert clients.predict("echo", X, version=1, outputs=["y"], timeout_s=60).keys() == {"y"}
        with pytest.raises(UnknownName, match="allowed: echo"):
            clients.predict("other", X, timeout_s=60)
        with pytest.raises(UnknownName, match="version"):
            clients.predict("echo", X, version=7, timeout_s=60)
        with pytest.raises(InputError, match="signature"):
            clients.predict("echo", X, signature="other", timeout_s=60)


def test_the_deadline_is_applied() -> None:
    with replicas(1) as (models, addresses), ReplicaSet(addresses) as clients:
        clients.predict("echo", X, timeout_s=60)
        models[0].gate.clear()
        with pytest.raises(ServerLost, match="30 ms"):
            clients.predict("echo", X, timeout_s=0.03)


def test_a_replica_that_is_gone_is_left_out() -> None:
    gone = f"127.0.0.1:{free_port()}"
    with replicas(1) as (models, addresses), ReplicaSet([gone, *addresses]) as clients:
        for _ in range(30):
            assert clients.predict("echo", X, timeout_s=60)["y"].tolist() == [3, 4]
        assert sum(models[0].batches) == 30
        endpoint = clients._endpoints[gone]
        assert endpoint.failures >= 3
        assert endpoint.out_until_s > 0
    with ReplicaSet([gone]) as clients, pytest.raises(ServerLost):
        clients.predict("echo", X, timeout_s=1)


def test_a_slow_replica_is_hedged() -> None:
    with replicas(2) as (models, addresses), ReplicaSet(addresses) as clients:
        for _ in range(128):
            clients.predict("echo", X, timeout_s=60)
        assert clients._delay_s is not None
        # Others were hedged on a busy machine, too: their calls end, and take no turn of this one.
        until_s = time.monotonic() + 60
        while any(one.in_flight for one in clients._endpoints.values()):
            assert time.monotonic() < until_s
            time.sleep(0.001)
        clients._hedged = 0
        models[0].gate.clear()
        clients._endpoints[addresses[1]].mean_s = 1e6  # the first is drawn
        assert clients.predict("echo", X, timeout_s=60)["y"].tolist() == [3, 4]
        assert clients.hedged == 1


def test_the_less_loaded_of_two_is_asked() -> None:
    with replicas(2) as (models, addresses), ReplicaSet(addresses) as clients:
        models[0].gate.clear()
        clients._endpoints[addresses[1]].mean_s = 1e6  # the first is drawn
        thread = threading.Thread(target=lambda: clients.predict("echo", X, timeout_s=60))
        thread.start()
        until_s = time.monotonic() + 60
        while not clients._endpoints[addresses[0]].in_flight and time.monotonic() < until_s:
            time.sleep(0.001)
        for _ in range(10):
            clients.predict("echo", X, timeout_s=60)
        assert sum(models[1].batches) == 10
        models[0].gate.set()
        thread.join()


def test_near_replicas_are_preferred() -> None:
    with replicas(3) as (models, addresses):
        near = addresses[2]
        with ReplicaSet(addresses, is_near=lambda address: address == near) as clients:
            for _ in range(10):
                clients.predict("echo", X, timeout_s=60)
    assert [sum(model.batches) for model in models] == [0, 0, 10]


def test_replicas_come_and_go_with_the_discovery() -> None:
    space = Space()
    with replicas(2) as (models, addresses):
        registry = Memory(space)
        registry.register("serve", 0, addresses[0])
        with ReplicaSet(discovery=Memory(space)) as clients:
            wait_for(clients, {addresses[0]})
            clients.predict("echo", X, timeout_s=60)
            kept = clients._endpoints[addresses[0]]
            registry.register("serve", 1, addresses[1])
            wait_for(clients, set(addresses))
            assert clients._endpoints[addresses[0]] is kept
    assert sum(models[0].batches) == 1


def wait_for(clients: ReplicaSet, addresses: set[str]) -> None:
    until_s = time.monotonic() + 60
    while set(clients.addresses) != addresses:
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_remote_predict_returns_outputs() -> None:
    with replicas(1, "model:ps_1") as (_, addresses):
        arguments = (["x"], [X["x"]], ["y"])
        more = {"max_rpc_deadline_millis": 60_000, "output_types": [np.float64]}
        for servers in (addresses, {"model:ps_1": addresses}):
            (found,) = remote_predict(*arguments, "model:ps_1", 1, "ps_1", servers=servers, **more)
            assert (found.dtype, found.tolist()) == (np.float64, [3, 4])
        with pytest.raises(UnknownName):
            remote_predict(*arguments, "model:ps_2", servers=addresses, **more)
    with replicas(1, "ps_1") as (_, addresses):  # the old names
        servers = {"ps:1": addresses}
        (found,) = remote_predict(*arguments, "model:ps_1", 1, "ps_1", servers=servers, **more)
        assert found.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_name": None}, ValueError),
        ({"model_name": None}, ConfigError),
        ({"input_tensors": []}, ShapeError),
        ({"output_types": []}, ShapeError),
        ({}, ServerLost),
    ],
)
def test_remote_predict_refuses(changes: dict[str, Any], error: type) -> None:
    arguments: dict[str, Any] = {
        "input_tensor_alias": ["x"],
        "input_tensors": [X["x"]],
        "output_tensor_alias": ["y"],
        "model_name": "model:ps_1",
        "task": 1,
        "old_model_name": "ps_1",
    }
    with pytest.raises(error):
        remote_predict(**{**arguments, **changes})


def test_remote_predict_may_go_without_an_answer() -> None:
    found = remote_predict(
        ["x"], [X["x"]], ["y", "z"], "m", 0, "ps_0",
        fail_op_on_rpc_error=False, output_types=[np.float32, np.int64],
    )  # fmt: skip
    assert [(one.shape, one.dtype) for one in found] == [((), np.float32), ((), np.int64)]


def endpoint(clients: ReplicaSet) -> Any:
    return next(iter(clients._endpoints.values()))


def test_failures_together_leave_a_replica_out_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.serve.client.time", SimpleNamespace(monotonic=lambda: 100.0))
    with ReplicaSet(["127.0.0.1:1"]) as clients:
        one = endpoint(clients)
        one.in_flight = 16
        for _ in range(16):
            one.done(0.001, grpc.StatusCode.UNAVAILABLE)
        assert (one.failures, one.in_flight) == (3, 0)
        assert one.out_until_s == 101
        assert one.mean_s == 0


@pytest.mark.parametrize(
    ("code", "failures"),
    [("OK", 0), ("INVALID_ARGUMENT", 0), ("INTERNAL", 2), ("UNAUTHENTICATED", 2), ("CANCELLED", 1)],
)
def test_what_counts_as_a_failure(code: str, failures: int) -> None:
    with ReplicaSet(["127.0.0.1:1"]) as clients:
        one = endpoint(clients)
        one.in_flight, one.failures = 1, 1
        one.done(1.0, grpc.StatusCode[code])
        assert one.failures == failures
        assert (one.mean_s > 0) == (failures == 0)


def test_what_a_replica_cannot_answer_another_may() -> None:
    class Broken(Gated):
        def run(self, requests: Sequence[np.ndarray]) -> list[Any]:
            raise RuntimeError("a bug")

    with ExitStack() as held:
        addresses = []
        for model in (Broken(), Gated()):
            source = serving_sources([OneSource(model)], http_address=None)
            addresses.append(held.enter_context(source)[0].grpc_address)
        clients = held.enter_context(ReplicaSet(addresses))
        clients._endpoints[addresses[1]].mean_s = 1e6  # the first is drawn
        assert clients.predict("echo", X, timeout_s=60)["y"].tolist() == [3, 4]
        assert clients._endpoints[addresses[0]].failures == 1


def test_a_closed_channel_is_a_replica_that_is_gone() -> None:
    with replicas(2) as (_, addresses), ReplicaSet(addresses) as clients:
        first = clients._endpoints[addresses[0]]
        clients._endpoints[addresses[1]].mean_s = 1e6  # the first is drawn
        first.channel.close()
        assert clients.predict("echo", X, timeout_s=60)["y"].tolist() == [3, 4]
        assert first.in_flight == 0


def test_a_replica_that_leaves_answers_what_is_under_way() -> None:
    with replicas(1) as (models, addresses), ReplicaSet(addresses) as clients:
        models[0].gate.clear()
        found: list[Any] = []
        ask = threading.Thread(
            target=lambda: found.append(clients.predict("echo", X, timeout_s=60))
        )
        ask.start()
        until_s = time.monotonic() + 60
        while not endpoint(clients).in_flight and time.monotonic() < until_s:
            time.sleep(0.001)
        clients._set(())
        models[0].gate.set()
        ask.join()
        assert found[0]["y"].tolist() == [3, 4]
        clients.close()
        clients._set(addresses)  # of a discovery that is late
        assert clients.addresses == ()
