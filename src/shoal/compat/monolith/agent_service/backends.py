"""Monolith's backends: what is to be served, who serves it, and whom a trainer pushes to."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from shoal.compat.monolith.agent_service.data_def import (
    Container,
    ContainerServiceInfo,
    SavedModel,
    SavedModelDeployConfig,
)
from shoal.compat.monolith.native_training.protos.parameter_sync_pb2 import ClientConfig
from shoal.discovery.nodes import Nodes
from shoal.errors import ConfigError
from shoal.serve.registration import from_json, to_json

_log = logging.getLogger(__name__)

TargetExtraInfo = ClientConfig.TargetExtraInfo
Targets = list[str] | dict[str, TargetExtraInfo]
Layout = list[tuple[SavedModel, SavedModelDeployConfig]]
ServiceMap = Mapping[str, Mapping[str, list[ContainerServiceInfo]]]


class SyncBackend(ABC):
    """Whom a trainer pushes rows to."""

    @abstractmethod
    def subscribe_model(self, model_name: str) -> None:
        """Follow a model; once."""

    @abstractmethod
    def get_sync_targets(self, sub_graph: str) -> tuple[str, Targets]:
        """The served name of a part, and who serves it now: addresses, maybe with their places."""

    @abstractmethod
    def start(self) -> None:
        """Begin to follow."""

    @abstractmethod
    def stop(self) -> None:
        """Follow no longer. May be called twice."""


class ZKBackend(SyncBackend):
    """Models, layouts, containers and bindings in ZooKeeper (Monolith's agent v3).

    Nodes of this process come back after a lost session; meanwhile what was last read is kept.

    Args:
        bzid: the first folder.
        zk_servers: HOST:PORT, with commas between them.
        zk_client: the session, which stays open; None: `start` opens one.
    """

    def __init__(self, bzid: str, zk_servers: str = "", zk_client: Nodes | None = None) -> None:
        self._bzid, self._hosts = bzid, zk_servers
        self._nodes = zk_client
        self._held = ExitStack()
        self._lock = threading.RLock()
        self._available: dict[Container, set[SavedModel]] = {}
        self._layouts: dict[str, tuple[Callable[[Layout], None], Layout | None]] = {}
        self._services: dict[str, dict[str, list[ContainerServiceInfo]]] = {}
        self._subscribed: str | None = None

    def start(self) -> None:
        """Connect, and follow.

        Raises:
            ServerLost: ZooKeeper does not answer.
        """
        if self._nodes is None:
            self._nodes = Nodes(self._hosts)
            self._held.callback(self._end)
        self._held.callback(self._nodes.follow(self._look))

    def stop(self) -> None:
        """Follow no longer, and end the session that `start` opened. May be called twice."""
        self._held.close()

    def decl_saved_model(self, saved_model: SavedModel, config: SavedModelDeployConfig) -> None:
        """Declare a part of a model."""
        self.nodes.put(self._declared(saved_model), to_json(config))

    def list_saved_models(self, model_name: str) -> list[SavedModel]:
        """Declared parts of a model."""
        parts = self.nodes.children(f"/{self._bzid}/saved_models/{model_name}")
        return [SavedModel(model_name, one) for one in parts]

    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Have those of a layout serve a part."""
        self.nodes.put(f"{self._layout(layout)}/{saved_model}")

    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None:
        """Have them serve it no longer."""
        self.nodes.delete(f"{self._layout(layout)}/{saved_model}")

    def bzid_info(self) -> dict[str, dict[str, list[str]]]:
        """Parts by model, bindings by container, and parts by layout."""
        root, nodes = f"/{self._bzid}", self.nodes
        containers: dict[str, list[str]] = {
            one: [] for one in nodes.children(f"{root}/container_service")
        }
        for model in nodes.children(f"{root}/binding"):
            for one in nodes.children(f"{root}/binding/{model}"):
                sub_graph, _, container = one.partition(":")
                containers.setdefault(container, []).append(f"{model}:{sub_graph}")

        def below(folder: str) -> dict[str, list[str]]:
            return {one: nodes.children(f"{folder}/{one}") for one in nodes.children(folder)}

        return {
            "model_info": below(f"{root}/saved_models"),
            "container_info": containers,
            "layout_info": below(f"{root}/layouts"),
        }

    def register_layout_callback(self, layout: str, callback: Callable[[Layout], None]) -> None:
        """Call with the parts of a layout and their configs, in order of their names, and again
        whenever they change. The models of these are in the service map."""
        with self._lock:
            self._layouts[self._layout(layout)] = callback, None
        self.nodes.wake()

    def report_service_info(self, container: Container, info: ContainerServiceInfo) -> None:
        """Let others find a container's services, as long as this process lives."""
        self.nodes.hold(f"/{self._bzid}/container_service/{container}", to_json(info))

    def sync_available_saved_models(
        self, container: Container, saved_models: Collection[SavedModel]
    ) -> None:
        """Let others see just these as available in a container."""
        with self._lock:
            before = self._available.get(container, set())
            for gone in before - set(saved_models):
                self.nodes.release(self._binding(gone, container))
            for new in set(saved_models) - before:
                self.nodes.hold(self._binding(new, container), b"")
            self._available[container] = set(saved_models)

    def get_service_map(self) -> ServiceMap:
        """Who serves which part of the models of layouts."""
        with self._lock:
            layouts = [found for _, found in self._layouts.values()]
            models = {str(model.model_name) for found in layouts for model, _ in found or ()}
        return {model: self._services_of(model) for model in sorted(models)}

    def subscribe_model(self, model_name: str) -> None:
        """Follow a model.

        Raises:
            ConfigError: another one was subscribed before.
        """
        if self._subscribed not in (None, model_name):
            raise ConfigError(
                "model of a sync backend",
                got=model_name,
                allowed=self._subscribed,
                remedy="Use a backend for each model.",
            )
        self._subscribed = model_name

    def get_sync_targets(self, sub_graph: str) -> tuple[str, Targets]:
        """`model:sub_graph`, and gRPC addresses of the containers where it is available."""
        if self._subscribed is None:
            raise ConfigError(
                "model of a sync backend", got=None, allowed="a name", remedy="Subscribe one first."
            )
        found = self._services_of(self._subscribed).get(sub_graph, [])
        return f"{self._subscribed}:{sub_graph}", [one.grpc for one in found if one.grpc]

    @property
    def nodes(self) -> Nodes:
        """The session.

        Raises:
            ConfigError: it was not started, or was stopped.
        """
        if self._nodes is None:
            raise ConfigError(
                "backend in ZooKeeper", got="none", allowed="a session", remedy="Call start first."
            )
        return self._nodes

    def _end(self) -> None:
        nodes, self._nodes = self.nodes, None
        nodes.close()

    def _declared(self, saved_model: SavedModel) -> str:
        return f"/{self._bzid}/saved_models/{saved_model.model_name}/{saved_model.sub_graph}"

    def _layout(self, layout: str) -> str:
        return layout if layout.startswith("/") else f"/{self._bzid}/layouts/{layout}"

    def _binding(self, saved_model: SavedModel, container: Container) -> str:
        bound = f"{saved_model.sub_graph}:{container}"
        return f"/{self._bzid}/binding/{saved_model.model_name}/{bound}"

    def _services_of(self, model: str) -> dict[str, list[ContainerServiceInfo]]:
        """By part; what was last read while ZooKeeper does not answer."""
        nodes = self.nodes
        try:
            found: dict[str, list[ContainerServiceInfo]] = {}
            for bound in nodes.children(f"/{self._bzid}/binding/{model}"):
                sub_graph, _, container = bound.partition(":")
                data = nodes.read(f"/{self._bzid}/container_service/{container}")
                info = from_json(ContainerServiceInfo, data)
                if info is not None:
                    found.setdefault(sub_graph, []).append(info)
            self._services[model] = found
        except nodes.errors as error:
            if model not in self._services:
                raise nodes.lost(error) from error
        return self._services[model]

    def _look(self) -> None:
        with self._lock:
            layouts = dict(self._layouts)
        for path, (callback, before) in layouts.items():
            now: Layout = []
            for child in self.nodes.children(path):
                model = SavedModel(*child.rsplit(":", 1)) if ":" in child else None
                data = None if model is None else self.nodes.read(self._declared(model))
                config = from_json(SavedModelDeployConfig, data)
                if model is None or config is None:
                    _log.warning("%s/%s is not declared", path, child)
                else:
                    now.append((model, config))
            if now != before:
                with self._lock:
                    self._layouts[path] = callback, now  # the callback may ask for the service map
                try:
                    callback(now)
                except BaseException:
                    with self._lock:
                        if self._layouts[path] == (callback, now):
                            self._layouts[path] = callback, before  # it is called again
                    raise
