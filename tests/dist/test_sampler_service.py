"""Servers of a sampler: draws as here, over ranks, IPv4 and IPv6, one that dies, bad material."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal import comm
from shoal.data import IdFeature, Recipe, Sampler, SamplerSettings, sampler_service
from shoal.data.sampler_service import Cluster, SamplerClient, SamplerServer, start_service
from shoal.data.samplers import Sampled, joined, split_counts
from shoal.errors import ConfigError, DataError, InputError, ServerLost
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

RECIPE = Recipe(
    ids=(IdFeature(name="user"), IdFeature(name="item"), IdFeature(name="kind", is_list=True)),
    label="label",
)
OWN, USERS = np.array([3, 4, 5]), np.array([1, 2, 3])
TOKEN = secrets.token_hex(16)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> SamplerSettings:
    folder = tmp_path_factory.mktemp("items")
    kinds = [[item] * (item % 3) for item in range(50)]
    items = {"item": list(range(50)), "kind": kinds, "n": [1.0 + item for item in range(50)]}
    pq.write_table(pa.table(items), folder / "items.parquet")
    pq.write_table(pa.table({"user": [1, 1, 2], "item": [7, 8, 9]}), folder / "hard.parquet")
    return SamplerSettings(
        items=str(folder / "items.parquet"),
        id="item",
        weight="n",
        attributes=("kind",),
        count=20,
        user="user",
        hard_edges=str(folder / "hard.parquet"),
        hard_count=1,
    )


def same(one: Sampled, other: Sampled) -> bool:
    pairs = [
        (one.ids.values_N, other.ids.values_N),
        (one.ids.offsets_FB1, other.ids.offsets_FB1),
        (one.negatives.log_counts_N, other.negatives.log_counts_N),
        (one.negatives.hard_H, other.negatives.hard_H),
        (one.negatives.known, other.negatives.known),
    ]
    alike = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    return alike and one.ids.keys == other.ids.keys


def client_of(server: SamplerServer, **more: Any) -> SamplerClient:
    cluster = Cluster(servers=(server.address,), own=0, client_count=1, token=TOKEN)
    return SamplerClient(cluster, "item", "user", **more)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_draws_as_a_sampler_here_and_again_after_it_died(
    settings: SamplerSettings, host: str
) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    here = Sampler.open(settings, RECIPE, seed=5)
    server = SamplerServer(partial(Sampler.open, settings, RECIPE, seed=5), TOKEN, host=host)
    assert server.address.startswith("[::1]:" if host == "::1" else "127.0.0.1:")
    client = client_of(server)
    try:
        for key in ((0, 0, 0), (0, 64, 1)):
            assert same(client.sample(OWN, USERS, key), here.sample(OWN, USERS, key))
        with pytest.raises(InputError, match="all 50 are in the batch"):
            client.sample(np.arange(50), np.arange(50), (0, 0, 0))
        other = pickle.loads(pickle.dumps(client))  # as a worker of a DataLoader gets it
        assert same(other.sample(OWN, USERS, (1, 0, 0)), here.sample(OWN, USERS, (1, 0, 0)))
        other.close()

        first = server.pid
        os.kill(first, signal.SIGKILL)
        assert same(client.sample(OWN, USERS, (2, 0, 0)), here.sample(OWN, USERS, (2, 0, 0)))
        until = time.monotonic() + 60
        while server.pid == first and time.monotonic() < until:  # it answers before it is noted
            time.sleep(0.05)
        assert server.pid != first
    finally:
        client.close()
        server.close()
    lost = client_of(server, patience_s=1.0)
    with pytest.raises(ServerLost):
        lost.sample(OWN, USERS, (0, 0, 0))
    lost.close()


def test_close_does_not_wait_for_a_forked_child(settings: SamplerSettings) -> None:
    server = SamplerServer(partial(Sampler.open, settings, RECIPE), TOKEN)
    child = os.fork()
    if child == 0:  # pragma: no cover - as a worker of a DataLoader that is still there
        time.sleep(600)
        os._exit(0)
    try:
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def printing(settings: SamplerSettings) -> Sampler:
    print("loading items")
    return Sampler.open(settings, RECIPE)


def raising() -> Sampler:
    raise KeyError("not there")


def test_an_opener_may_print_and_its_errors_are_reported(settings: SamplerSettings) -> None:
    SamplerServer(partial(printing, settings), TOKEN).close()
    with pytest.raises(DataError, match="server of a sampler: got KeyError: 'not there'"):
        SamplerServer(raising, TOKEN)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        SamplerServer(lambda: raising(), TOKEN)


def test_the_last_end_of_a_server_is_logged(
    settings: SamplerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    server = SamplerServer(partial(Sampler.open, settings, RECIPE), TOKEN, restarts=0)
    os.kill(server.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while "not started again" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    server.close()
    assert "not started again" in caplog.text


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("patience_s", "servers"), [(1.0, 1), (5.0, 3), (35.0, 2), (120.0, 3)])
def test_patience_is_kept(monkeypatch: pytest.MonkeyPatch, patience_s: float, servers: int) -> None:
    clock, asked = _Clock(), []
    monkeypatch.setattr(sampler_service, "time", clock)

    class Away:
        def call(self, server: int, *_: Any, timeout_s: float) -> Any:
            asked.append(server)
            clock.now += timeout_s
            raise ServerLost("server", got="away", allowed="one that answers", remedy="")

    cluster = Cluster(servers=("a:1",) * servers, own=0, client_count=1, token=TOKEN)
    client = SamplerClient(cluster, "item", None, patience_s=patience_s)
    monkeypatch.setattr(client, "_connected", Away)
    with pytest.raises(ServerLost):
        client.sample(OWN, None, (0, 0, 0))
    assert clock.now == pytest.approx(patience_s, abs=0.1)
    assert set(asked) == set(range(servers))


def nodes(settings: SamplerSettings, local_rank: int) -> tuple[list[str], str]:
    """Two nodes of one hostname, as containers may be."""
    mesh = comm.init(device="cpu", timeout_s=120)
    opener = partial(Sampler.open, settings, RECIPE, seed=5)
    try:
        client, server = start_service(
            opener, mesh.control, id="item", user="user", local_rank=local_rank
        )
    except ConfigError as error:
        return [], str(error)
    assert server is not None
    client.sample(OWN, USERS, (0, 0, 0))
    mesh.control.barrier(what="draws")
    client.close()
    server.close()
    return list(client.cluster.servers), server.address


def test_ranks_ask_their_own_node_s_server(settings: SamplerSettings) -> None:
    found = run_ranks(2, nodes, settings, 0, timeout_s=240)
    assert [servers for servers, _ in found] == [[address] for _, address in found]
    for servers, message in run_ranks(2, nodes, settings, 1, timeout_s=240):
        assert servers == []
        assert "servers of samplers" in message


def test_what_a_server_cannot_open_is_reported(settings: SamplerSettings, tmp_path: Path) -> None:
    missing = SamplerSettings(items=str(tmp_path / "none.parquet"), id="item", count=1)
    with pytest.raises(DataError, match=r"server of a sampler: .*none\.parquet"):
        SamplerServer(partial(Sampler.open, missing, RECIPE), TOKEN)


def served(settings: SamplerSettings) -> tuple[dict[str, Any], list[int], int | None, bool]:
    mesh = comm.init(device="cpu", timeout_s=120)
    opener = partial(Sampler.open, settings, RECIPE, seed=5)
    client, server = start_service(
        opener, mesh.control, id="item", user="user", local_rank=mesh.rank, clients=3
    )
    first = client.sample(OWN, USERS, (0, 0, mesh.rank))
    mesh.control.barrier(what="first draws")
    if server is not None:
        os.kill(server.pid, signal.SIGKILL)
    time.sleep(0.5)
    again = client.sample(OWN, USERS, (0, 0, mesh.rank))
    mesh.control.barrier(what="second draws")
    client.close()
    if server is not None:
        server.close()
    ids = first.ids["item"].values.tolist()
    return client.cluster.spec, ids, None if server is None else server.pid, same(first, again)


def test_ranks_of_a_node_share_a_server(settings: SamplerSettings) -> None:
    (spec, ids, pid, alike), (other_spec, other_ids, none, other_alike) = run_ranks(
        2, served, settings, timeout_s=240
    )
    assert spec == other_spec
    assert spec["client_count"] == 6
    assert len(spec["server"].split(",")) == 1
    assert alike
    assert other_alike
    assert pid is not None
    assert none is None
    here = Sampler.open(settings, RECIPE, seed=5)
    for rank, drawn in enumerate((ids, other_ids)):
        assert drawn == here.sample(OWN, USERS, (0, 0, rank)).ids["item"].values.tolist()


def spread(settings: SamplerSettings) -> tuple[dict[str, Any], list[int], list[int], bool]:
    """Two nodes with a part of the items each; one server dies between two draws."""
    sampler_service._local_only = lambda host: False  # type: ignore[assignment]  # of both nodes
    mesh = comm.init(device="cpu", timeout_s=120)
    opener = partial(Sampler.open, settings, RECIPE, seed=5)
    client, server = start_service(
        opener, mesh.control, id="item", user="user", local_rank=0, clients=3, spread=True
    )
    assert server is not None
    first = client.sample(OWN, USERS, (0, 0, 0))
    mesh.control.barrier(what="first draws")
    if mesh.rank == 1:
        os.kill(server.pid, signal.SIGKILL)
    time.sleep(0.5)
    again = client.sample(OWN, USERS, (0, 0, 0))
    mesh.control.barrier(what="second draws")
    client.close()
    server.close()
    hard = first.negatives.hard_H.tolist()
    return client.cluster.spec, first.ids["item"].values.tolist(), hard, same(first, again)


def test_items_spread_over_servers_are_drawn_as_one(settings: SamplerSettings) -> None:
    one, other = run_ranks(2, spread, settings, timeout_s=240)
    assert one == other
    spec, items, hard, alike = one
    assert spec["client_count"] == 6
    assert len(spec["server"].split(",")) == 2
    assert alike
    assert len(items) == 20 + 2
    assert hard == [0, 1]
    assert items[20] in (7, 8)
    assert items[21] == 9
    parts = [Sampler.open(settings, RECIPE, seed=5, share=(number, 2)) for number in range(2)]
    told = [part.part(OWN) for part in parts]
    counts = split_counts(told, (0, 0, 0), 3)
    pairs = zip(parts, counts, strict=True)
    found = [part.sample(OWN, USERS, (0, 0, 0), count) for part, count in pairs]
    assert items == joined(found, told, 3).ids["item"].values.tolist()


def failing(settings: SamplerSettings, **more: Any) -> str:
    mesh = comm.init(device="cpu", timeout_s=120)
    opener = partial(Sampler.open, settings, RECIPE)
    try:
        start_service(opener, mesh.control, **{"id": "item", "local_rank": mesh.rank, **more})
    except (ConfigError, DataError) as error:
        return str(error)
    return "started"


def test_a_server_that_cannot_start_is_an_error_on_every_rank(tmp_path: Path) -> None:
    missing = SamplerSettings(items=str(tmp_path / "none.parquet"), id="item", count=1)
    for found in run_ranks(2, failing, missing, timeout_s=240):
        assert "none.parquet" in found


def unreachable(settings: SamplerSettings) -> list[str]:
    """Two nodes: on loopback, then one with a name that it alone knows."""
    on_loopback = failing(settings, local_rank=0, spread=True)
    own = "127.0.1.1" if comm.init(device="cpu").rank else "0.0.0.0"
    socket.getaddrinfo = lambda *_, **__: [(0, 0, 0, "", (own, 0))]  # type: ignore[assignment]
    return [on_loopback, failing(settings, local_rank=0, host=None)]


def test_items_are_not_spread_over_nodes_that_do_not_reach_each_other(
    settings: SamplerSettings,
) -> None:
    for on_loopback, by_name in run_ranks(2, unreachable, settings, timeout_s=240):
        assert "host of spread samplers: got 127.0.0.1" in on_loopback
        assert "address of" in by_name
