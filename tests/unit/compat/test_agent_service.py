"""Monolith's discovery of servers, in a real ZooKeeper, with the numbers of its tests."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.compat.monolith.agent_service.backends import ZKBackend
from shoal.compat.monolith.agent_service.data_def import (
    AgentConfig,
    Container,
    ContainerServiceInfo,
    ModelState,
    ReplicaMeta,
    SavedModel,
    SavedModelDeployConfig,
    ServerType,
    ZKPath,
)
from shoal.compat.monolith.agent_service.replica_manager import ReplicaWatcher
from shoal.compat.monolith.native_training.distributed_serving_ops import refresh_sync_config
from shoal.compat.monolith.native_training.protos.parameter_sync_pb2 import ClientConfig
from shoal.discovery.nodes import Nodes
from shoal.errors import ConfigError
from shoal.serve.registration import (
    ServedPart,
    ServerState,
    register_server,
    to_json,
)
from support.zookeeper import ZooKeeperServer, expire, require_zookeeper

pytestmark = pytest.mark.xdist_group("zookeeper")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    one = ZooKeeperServer(Path(tmp_path_factory.mktemp("zookeeper")))
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture
def nodes(server: ZooKeeperServer) -> Iterator[Nodes]:
    one = Nodes(server.hosts, reply_s=60)
    yield one
    one.close()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_refresh_from_replicas(nodes: Nodes) -> None:
    meta = ReplicaMeta(address="localhost:8500", stat=ModelState.AVAILABLE)
    nodes.hold("/demo/service/test_ffm_model/ps:1/0", to_json(meta))
    config = AgentConfig(bzid="demo", base_name="test_ffm_model", deploy_type="ps", num_ps=10)
    watcher = ReplicaWatcher(nodes, config)
    watcher.watch_data()
    found = ClientConfig.FromString(refresh_sync_config(watcher.to_sync_wrapper(), 1))
    assert found.model_name == "ps_1"
    assert list(found.targets) == ["localhost:8500"]
    assert [one.replica_id for one in found.targets_extra_info] == [0]
    assert (found.signature_name, found.timeout_in_ms) == ("hashtable_assign", 3000)


def test_refresh_from_bindings(nodes: Nodes) -> None:
    backend = ZKBackend(bzid="demo", zk_client=nodes)
    backend.start()
    container = Container("default", "asdf")
    backend.report_service_info(container, ContainerServiceInfo(grpc="localhost:8888"))
    served = {SavedModel("test_ffm_model", f"ps_{i}") for i in range(3)}
    backend.sync_available_saved_models(container, served)
    backend.subscribe_model("test_ffm_model")
    found = ClientConfig.FromString(refresh_sync_config(backend, 1))
    assert found.model_name == "test_ffm_model:ps_1"
    assert list(found.targets) == ["localhost:8888"] and not found.targets_extra_info
    with pytest.raises(ConfigError, match="model of a sync backend"):
        backend.subscribe_model("another")


def test_layouts_and_bindings(server: ZooKeeperServer) -> None:
    backend = ZKBackend("gip", server.hosts)
    with pytest.raises(ConfigError, match="Call start first"):
        backend.list_saved_models("m")
    backend.start()
    seen: queue.Queue[list[tuple[SavedModel, SavedModelDeployConfig]]] = queue.Queue()
    try:
        models = [SavedModel("test_ffm_model", one) for one in ("entry", "ps_0", "ps_1", "ps_2")]
        for model in models:
            backend.decl_saved_model(model, SavedModelDeployConfig("base", "latest"))
            backend.add_to_layout("test_layout", model)
        backend.add_to_layout("test_layout", SavedModel("unknown", "entry"))  # is passed over
        backend.register_layout_callback("/gip/layouts/test_layout", seen.put)
        now = seen.get(timeout=60)
        assert [model for model, _ in now] == models
        assert now[0][1] == SavedModelDeployConfig("base", "latest")
        backend.remove_from_layout("test_layout", models[0])
        assert [model for model, _ in seen.get(timeout=60)] == models[1:]
        assert backend.list_saved_models("test_ffm_model") == models

        container = Container("default", "asdf")
        info = ContainerServiceInfo(grpc="localhost:8888", idc="lf")
        backend.report_service_info(container, info)
        backend.sync_available_saved_models(container, set(models[1:]))
        binding = backend.nodes.children("/gip/binding/test_ffm_model")
        assert binding == [f"ps_{i}:default:asdf" for i in range(3)]
        backend.subscribe_model("test_ffm_model")
        assert backend.get_sync_targets("ps_1") == ("test_ffm_model:ps_1", ["localhost:8888"])
        assert backend.get_sync_targets("ps_7") == ("test_ffm_model:ps_7", [])
        service_map = {"test_ffm_model": {f"ps_{i}": [info] for i in range(3)}}
        assert backend.get_service_map() == service_map
        backend.sync_available_saved_models(container, {models[3]})
        assert backend.get_service_map() == {"test_ffm_model": {"ps_2": [info]}}
        found = backend.bzid_info()
        assert found["container_info"] == {"default:asdf": ["test_ffm_model:ps_2"]}
        assert found["model_info"] == {"test_ffm_model": ["entry", "ps_0", "ps_1", "ps_2"]}
        assert len(found["layout_info"]["test_layout"]) == 4

        session = backend.nodes.client.client_id
        expire(backend.nodes)
        until(lambda: backend.nodes.client.client_id not in (None, session))
        until(
            lambda: backend.nodes.children("/gip/binding/test_ffm_model") == ["ps_2:default:asdf"]
        )
        until(lambda: backend.get_sync_targets("ps_2")[1] == ["localhost:8888"])
    finally:
        backend.stop()
        backend.stop()


def test_a_layout_callback_that_raises_is_called_again(server: ZooKeeperServer) -> None:
    backend, model = ZKBackend("raises", server.hosts), SavedModel("m", "entry")
    seen: list[list[str]] = []

    def callback(layout: list[tuple[SavedModel, SavedModelDeployConfig]]) -> None:
        seen.append(sorted(backend.get_service_map()))  # has the models of the layout
        if len(seen) < 2:
            raise ValueError("the first time")

    backend.start()
    try:
        backend.decl_saved_model(model, SavedModelDeployConfig("base", "latest"))
        backend.add_to_layout("l", model)
        backend.register_layout_callback("l", callback)
        until(lambda: len(seen) == 2)
        assert seen == [["m"], ["m"]]
    finally:
        backend.stop()


def test_a_session_that_was_given_stays_open(server: ZooKeeperServer, nodes: Nodes) -> None:
    backend = ZKBackend("given", zk_client=nodes)
    calls: list[object] = []
    backend.start()
    backend.register_layout_callback("l", calls.append)
    backend.stop()
    backend.stop()
    nodes.put("/given/layouts/l/m:entry")  # the session still writes
    assert nodes.children("/given/layouts/l") == ["m:entry"]
    assert nodes._looks == []


def test_a_node_that_another_session_has_is_not_released(
    server: ZooKeeperServer, nodes: Nodes
) -> None:
    other = Nodes(server.hosts, reply_s=60)
    try:
        nodes.hold("/owned/a", b"1")
        other.hold("/owned/a", b"2")
        nodes.release("/owned/a")
        assert other.read("/owned/a") == b"2"
        other.release("/owned/a")
        assert other.read("/owned/a") is None
    finally:
        other.close()


def test_replicas_by_location(nodes: Nodes) -> None:
    """20 servers of 2 replicas and 2 entries at lf:default."""
    for replica in range(2):
        for task in range(20):
            meta = ReplicaMeta(address=f"h:{1 + 2 * task + replica}", stat=30)
            nodes.put(f"/gip/service/m/lf:default/ps:{task}/{replica}", to_json(meta))
        meta = ReplicaMeta(address=f"e:{replica + 1}", stat=30)
        nodes.put(f"/gip/service/m/lf:default/entry:0/{replica:011d}", to_json(meta))
    watcher = ReplicaWatcher(nodes, AgentConfig("gip", "m", num_ps=20, dc_aware=True))
    watcher.watch_data()
    every = watcher.get_all_replicas(ServerType.PS)
    assert len(every) == 20 and every["lf:default/ps:1"] == ["h:3", "h:4"]
    assert watcher.get_replicas(ServerType.PS, 1) == ["h:3", "h:4"]
    assert watcher.get_replicas(ServerType.PS, 1, "hl", "default") == []
    assert watcher.get_replica(ServerType.PS, 1, 1) == "h:4"
    assert watcher.get_replica(ServerType.PS, 1, 2) is None
    assert watcher.get_replicas(ServerType.ENTRY, 0) == ["e:1", "e:2"]
    assert watcher.get_all_replicas(ServerType.DENSE) == {}
    places = watcher.get_replicas_with_extra_info(ServerType.PS, 0)
    assert (places["h:2"].idc, places["h:2"].cluster, places["h:2"].replica_id) == (
        "lf",
        "default",
        1,
    )
    # One that is loading, junk, and none at all are not given.
    nodes.put("/gip/service/m/lf:default/ps:1/0", to_json(ReplicaMeta(address="h:3", stat=20)))
    until(lambda: watcher.get_replicas(ServerType.PS, 1) == ["h:4"])
    nodes.put("/gip/service/m/lf:default/ps:1/1", b"\xff{")
    until(lambda: watcher.get_replicas(ServerType.PS, 1) == [])
    nodes.delete("/gip/service/m/lf:default/ps:2/0")
    until(lambda: watcher.get_replicas(ServerType.PS, 2) == ["h:6"])


@pytest.mark.parametrize("located", [False, True])
@pytest.mark.parametrize("layout", ["service", "binding"])
def test_a_server_registers_its_state(
    server: ZooKeeperServer, nodes: Nodes, layout: str, located: bool
) -> None:
    bzid = f"reg-{layout}-{located}"
    where = {"idc": "lf", "cluster": "default"} if located else {}
    place = ServedPart(bzid=bzid, model="m", sub_graph="ps_1", replica=2, **where)
    watcher = ReplicaWatcher(nodes, AgentConfig(bzid, "m", num_ps=2))
    watcher.watch_data()
    backend = ZKBackend(bzid, zk_client=nodes)
    backend.subscribe_model("m")

    def served() -> bool:
        if layout == "service":
            return watcher.get_replica(ServerType.PS, 1, 2) == "h:1"
        return backend.get_sync_targets("ps_1")[1] == ["h:1"]

    registration = register_server(
        f"zookeeper://{server.hosts}",
        place,
        "h:1",
        layout=layout,  # type: ignore[arg-type]
    )
    try:
        for state in (ServerState.START, ServerState.LOADING):
            registration.set(state)
            assert not served()
        if layout == "service":
            found = json.loads(nodes.read(place.service) or b"")
            assert (found["stat"], found["address"], found["task"]) == (20, "h:1", 1)
            assert place.service == f"/{bzid}/service/m{'/lf:default' * located}/ps:1/2"
        registration.set(ServerState.AVAILABLE)
        until(served)
        own = registration._nodes
        session = own.client.client_id
        expire(own)
        until(lambda: own.client.client_id not in (None, session))
        until(served)
        registration.set(ServerState.UNLOADING)
        until(lambda: not served())
        registration.set(ServerState.AVAILABLE)
        until(served)
    finally:
        registration.close()
    until(lambda: not served())
    registration.close()


@pytest.mark.parametrize(
    "wrong",
    [{"bzid": "a/b"}, {"model": ""}, {"sub_graph": "ps:1"}, {"idc": "lf"}, {"replica": -1}],
)
def test_a_place_that_is_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="served part in ZooKeeper"):
        ServedPart(**{"bzid": "b", "model": "m", **wrong})  # type: ignore[arg-type]


def test_another_discovery_is_refused() -> None:
    with pytest.raises(ConfigError, match="discovery of servers of models"):
        register_server("consul://h:1", ServedPart(bzid="b", model="m"), "h:1")


def test_an_entry_is_named_by_11_digits() -> None:
    place = ServedPart(bzid="b", model="m", replica=7)
    assert place.service == "/b/service/m/entry:0/00000000007"


@pytest.mark.parametrize(
    ("meta", "archon", "family", "expected"),
    [
        ({"address": "a:1", "address_ipv6": "[b]:1"}, False, "ipv4", "a:1"),
        ({"address": "a:1", "address_ipv6": "[b]:1"}, False, "ipv6", "[b]:1"),
        ({"address": "a:1"}, False, "ipv6", "a:1"),
        ({"address": "0.0.0.0:1", "address_ipv6": "[b]:1"}, False, "ipv4", "[b]:1"),
        ({"address": "0.0.0.0:1", "address_ipv6": "[::]:1"}, False, "ipv4", None),
        ({"address": "a:1", "archon_address": "c:1"}, True, "ipv4", "c:1"),
        ({"address": "a:1"}, True, "ipv4", None),
        ({}, False, "ipv4", None),
    ],
)
def test_which_address_a_replica_has(
    meta: dict[str, str], archon: bool, family: str, expected: str | None
) -> None:
    assert ReplicaMeta(**meta).get_address(archon, family) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/b/service/m/ps:1/0", ("b", "m", None, None, "ps", "1", "0")),
        ("/b/service/m/lf:d-1/entry:0/00000000007",
         ("b", "m", "lf", "d-1", "entry", "0", "00000000007")),
        ("/b/service/m/lf:default/dense:0", ("b", "m", "lf", "default", "dense", "0", None)),
        ("/b/service/m/ps:x/0", (None,) * 7),
        ("/b/other/m/ps:1/0", (None,) * 7),
    ],
)  # fmt: skip
def test_the_parts_of_a_path(path: str, expected: tuple[str | None, ...]) -> None:
    found = ZKPath(path)
    names = ("bzid", "base_name", "idc", "cluster", "server_type", "index", "replica_id")
    assert tuple(getattr(found, name) for name in names) == expected
    assert found.ship_in(None, None)
    assert found.ship_in("lf", None) is (found.idc == "lf")


def test_states_are_those_of_tensorflow_serving() -> None:
    expected = {
        "UNKNOWN": 0,
        "START": 10,
        "LOADING": 20,
        "AVAILABLE": 30,
        "UNLOADING": 40,
        "END": 50,
    }
    assert {one.name: one.value for one in ModelState} == expected
    assert [one.value for one in (ServerType.PS, ServerType.ENTRY, ServerType.DENSE)] == [0, 1, 2]
