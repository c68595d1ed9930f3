"""Monolith's values of serving: server types, replicas, paths, models and containers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from shoal.serve.registration import NAME, ContainerServiceInfo, ReplicaMeta
from shoal.serve.registration import ServerState as ModelState

__all__ = [
    "AgentConfig",
    "Container",
    "ContainerServiceInfo",
    "ModelState",
    "ReplicaMeta",
    "SavedModel",
    "SavedModelDeployConfig",
    "ServerType",
    "ZKPath",
]

_TASK = r"(?P<server_type>ps|entry|dense):(?P<index>\d+)"
_PATH = re.compile(
    rf"/(?P<bzid>{NAME})/service/(?P<base_name>{NAME})(?:/(?P<idc>{NAME}):(?P<cluster>{NAME}))??"
    rf"/{_TASK}(?:/(?P<replica_id>\d+))?"
)


class ServerType(IntEnum):
    """Parts of a model."""

    PS = 0
    ENTRY = 1
    DENSE = 2


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What of Monolith's agent config its watcher reads."""

    bzid: str
    base_name: str
    deploy_type: str = "mixed"
    num_ps: int = 1
    dc_aware: bool = False


class ZKPath:
    """A replica's path in parts; all None of another path.

    Attributes:
        bzid, base_name, idc, cluster, server_type, index, replica_id: texts; location and replica
            are None where the path has none.
    """

    def __init__(self, path: str) -> None:
        found = _PATH.fullmatch(path)
        parts = {} if found is None else found.groupdict()
        self.bzid: str | None = parts.get("bzid")
        self.base_name: str | None = parts.get("base_name")
        self.idc: str | None = parts.get("idc")
        self.cluster: str | None = parts.get("cluster")
        self.server_type: str | None = parts.get("server_type")
        self.index: str | None = parts.get("index")
        self.replica_id: str | None = parts.get("replica_id")

    @property
    def task(self) -> str | None:
        """ "ps:1"."""
        return None if self.index is None else f"{self.server_type}:{self.index}"

    @property
    def location(self) -> str | None:
        """ "idc:cluster"."""
        return None if self.idc is None else f"{self.idc}:{self.cluster}"

    def ship_in(self, idc: str | None, cluster: str | None) -> bool:
        """Whether it is there; anywhere for None and None."""
        return idc in (None, self.idc) and cluster in (None, self.cluster)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A part of a model; as text "model:sub_graph"."""

    model_name: str
    sub_graph: str

    def __str__(self) -> str:
        return f"{self.model_name}:{self.sub_graph}"


@dataclass(frozen=True, slots=True)
class SavedModelDeployConfig:
    """Where its versions are, and which of them are served: "latest" or "latest_once"."""

    model_base_path: str
    version_policy: str = "latest"


@dataclass(frozen=True, slots=True)
class Container:
    """A process that serves; as text "cluster:id"."""

    ctx_cluster: str
    ctx_id: str

    def __str__(self) -> str:
        return f"{self.ctx_cluster}:{self.ctx_id}"
