"""Monolith's watch of replicas (agent v1): who serves which part of a model, and where."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from shoal.compat.monolith.agent_service.backends import SyncBackend, TargetExtraInfo, Targets
from shoal.compat.monolith.agent_service.data_def import (
    AgentConfig,
    ModelState,
    ReplicaMeta,
    ServerType,
    ZKPath,
)
from shoal.discovery.nodes import Nodes
from shoal.serve.registration import from_json


class ReplicaWatcher:
    """Replicas below /BZID/service/MODEL, at locations or not. Only AVAILABLE ones are given.

    Args:
        zk_client: the session.
        config: whose replicas; with `dc_aware` keys begin with the location.
        use_archon: give archon addresses.
        address_family: "ipv4" or "ipv6", preferred.
    """

    def __init__(
        self,
        zk_client: Nodes,
        config: AgentConfig,
        use_archon: bool = False,
        address_family: str = "ipv4",
    ) -> None:
        self._nodes, self._config = zk_client, config
        self._archon, self._family = use_archon, address_family
        self._root = f"/{config.bzid}/service/{config.base_name}"
        self._lock = threading.Lock()
        self._replicas: dict[str, ReplicaMeta] = {}

    def watch_data(self) -> None:
        """Read who is there, and follow changes."""
        self._nodes.tried(self._look)
        self._nodes.follow(self._look)

    def get_all_replicas(
        self, server_type: ServerType, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, list[str]]:
        """Addresses by task: {"ps:1": [...]}, or {"idc:cluster/ps:1": [...]}."""
        found: dict[str, list[str]] = {}
        for path, address in self._available(server_type, idc, cluster):
            located = f"{path.location}/" if self._config.dc_aware and path.location else ""
            found.setdefault(f"{located}{path.task}", []).append(address)
        return found

    def get_replicas(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> list[str]:
        """Addresses of a task."""
        every = self._available(server_type, idc, cluster, task)
        return [address for _, address in every]

    def get_replica(
        self,
        server_type: ServerType,
        task: int,
        replica: int,
        idc: str | None = None,
        cluster: str | None = None,
    ) -> str | list[str] | None:
        """Addresses of one replica: None, one, or one of each location."""
        every = self._available(server_type, idc, cluster, task)
        found = [address for path, address in every if int(path.replica_id or -1) == replica]
        return found[0] if len(found) == 1 else found or None

    def get_replicas_with_extra_info(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, TargetExtraInfo]:
        """Addresses of a task with their places."""
        return {
            address: TargetExtraInfo(
                idc=path.idc, cluster=path.cluster, replica_id=int(path.replica_id or -1)
            )
            for path, address in self._available(server_type, idc, cluster, task)
        }

    def to_sync_wrapper(self) -> SyncBackend:
        """Targets of a trainer's pushes, at all locations."""
        return _WatchedReplicas(self)

    def _available(
        self,
        server_type: ServerType,
        idc: str | None,
        cluster: str | None,
        task: int | None = None,
    ) -> Iterator[tuple[ZKPath, str]]:
        with self._lock:
            every = sorted(self._replicas.items())
        wanted = server_type.name.lower()
        for name, meta in every:
            path, address = ZKPath(name), meta.get_address(self._archon, self._family)
            alike = path.server_type == wanted and path.ship_in(idc, cluster)
            ready = meta.stat == ModelState.AVAILABLE and task in (None, int(path.index or 0))
            if alike and ready and address is not None:
                yield path, address

    def _look(self) -> None:
        found = {}
        for folder in self._tasks():
            for replica in self._nodes.children(folder):
                path = f"{folder}/{replica}"
                meta = from_json(ReplicaMeta, self._nodes.read(path))
                if meta is not None and ZKPath(path).replica_id is not None:
                    found[path] = meta
        with self._lock:
            self._replicas = found

    def _tasks(self) -> Iterator[str]:
        for child in self._nodes.children(self._root):
            path = f"{self._root}/{child}"
            if ZKPath(path).task is not None:
                yield path
            else:
                yield from (f"{path}/{task}" for task in self._nodes.children(path))


class _WatchedReplicas(SyncBackend):
    def __init__(self, watcher: ReplicaWatcher) -> None:
        self._watcher = watcher

    def subscribe_model(self, model_name: str) -> None:
        """Does nothing: a watcher has one model."""

    def start(self) -> None:
        """Does nothing: the watcher follows."""

    def stop(self) -> None:
        """Does nothing: the watcher's session ends it."""

    def get_sync_targets(self, sub_graph: str) -> tuple[str, Targets]:
        """The part's own name, and its replicas with their places."""
        task = int(sub_graph.partition("_")[2] or 0)
        found = self._watcher.get_replicas_with_extra_info(ServerType.PS, task)
        return sub_graph, found
