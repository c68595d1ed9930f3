"""Where servers of models register, and in which state: both of Monolith's ZooKeeper layouts.

| path | data |
|---|---|
| /BZID/service/MODEL[/IDC:CLUSTER]/TYPE:TASK/REPLICA | `ReplicaMeta`, with the state |
| /BZID/container_service/CLUSTER:ID | `ContainerServiceInfo` |
| /BZID/binding/MODEL/SUB_GRAPH:CLUSTER:ID | empty; there while it is AVAILABLE |
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from types import TracebackType
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from shoal.discovery.nodes import Nodes
from shoal.errors import ConfigError, ServerLost

_log = logging.getLogger(__name__)

Layout = Literal["service", "binding"]
NAME = r"[-_0-9A-Za-z]+"
_NAME = re.compile(NAME)
_SUB_GRAPH = re.compile(r"(ps|entry|dense)(?:_([0-9]{1,7}))?")
_ABSENT = re.compile(r"0\.0\.0\.0|\[::\]|$")
_LOOK_S = 0.2
_AGAIN_S = 1.0  # until a ZooKeeper that did not answer is asked again
_Value = TypeVar("_Value")


class ServerState(IntEnum):
    """TensorFlow Serving's states of a model version."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


def to_json(value: Any) -> bytes:
    """The bytes of a dataclass's node."""
    return json.dumps(asdict(value)).encode()


def from_json(kind: type[_Value], data: bytes | None) -> _Value | None:
    """A dataclass of a node's bytes; unknown keys are passed over. None of bytes that are no such,
    or have a value of another type.

    data: None of a missing node.
    """
    try:
        return TypeAdapter(kind).validate_json(data or b"", strict=True)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class ReplicaMeta:
    """A replica of one part of a model, with Monolith's keys; stat is a `ServerState`."""

    address: str | None = None
    address_ipv6: str | None = None
    stat: int = ServerState.UNKNOWN
    model_name: str | None = None
    server_type: str | None = None
    task: int = -1
    replica: int = -1
    archon_address: str | None = None
    archon_address_ipv6: str | None = None

    def get_address(self, use_archon: bool = False, address_family: str = "ipv4") -> str | None:
        """Of a family ("ipv4" or "ipv6"), else of the other; 0.0.0.0 and [::] are none."""
        pair = (self.address, self.address_ipv6)
        if use_archon:
            pair = (self.archon_address, self.archon_address_ipv6)
        ordered = pair if address_family == "ipv4" else pair[::-1]
        return next((one for one in ordered if one and not _ABSENT.match(one)), None)


@dataclass(frozen=True, slots=True)
class ContainerServiceInfo:
    """Addresses of a container's services."""

    grpc: str | None = None
    http: str | None = None
    archon: str | None = None
    agent: str | None = None
    idc: str | None = None
    debug_info: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPart:
    """Which part of which model a server has, and where it is.

    Args:
        bzid: Monolith's name of a business: the first folder.
        model: its base name.
        sub_graph: "entry", "ps_0", "ps_1", ... or "dense".
        replica: number among equal servers.
        idc, cluster: location; both or none.
    """

    bzid: str
    model: str
    sub_graph: str = "entry"
    replica: int = 0
    idc: str | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        names = (self.bzid, self.model, self.idc or "a", self.cluster or "a")
        wrong = [one for one in names if not _NAME.fullmatch(one)]
        located = (self.idc is None) == (self.cluster is None)
        if wrong or not located or not _SUB_GRAPH.fullmatch(self.sub_graph) or self.replica < 0:
            raise ConfigError(
                "served part in ZooKeeper",
                got=repr(self)[:300],
                allowed="names of letters, digits, - and _; entry, dense or ps_I; idc with cluster",
                remedy="Choose other names.",
            )

    @property
    def server_type(self) -> str:
        """ "ps", "entry" or "dense"."""
        return self.sub_graph.partition("_")[0]

    @property
    def task(self) -> int:
        """I of ps_I; 0 of others."""
        return int(self.sub_graph.partition("_")[2] or 0)

    @property
    def service(self) -> str:
        """Its node in the layout "service"; Monolith names replicas of an entry by 11 digits."""
        located = f"/{self.idc}:{self.cluster}" if self.idc else ""
        name = f"{self.replica:011d}" if self.server_type == "entry" else str(self.replica)
        kind = f"{self.server_type}:{self.task}"
        return f"/{self.bzid}/service/{self.model}{located}/{kind}/{name}"

    @property
    def container(self) -> str:
        """CLUSTER:ID of the layout "binding"."""
        return f"{self.cluster or 'default'}:{self.sub_graph}-{self.replica}"


class ServingRegistration:
    """A server that is registered while it runs, with its state; again after a lost session.

    Args:
        nodes: the session; `close` ends it.
        part: what it serves.
        address: HOST:PORT of gRPC that others reach.
        http: HOST:PORT of HTTP.
        layout: "service": its node has its state; "binding": it is bound while AVAILABLE.

    Raises:
        ServerLost: ZooKeeper does not answer.
    """

    def __init__(
        self,
        nodes: Nodes,
        part: ServedPart,
        address: str,
        *,
        http: str = "",
        layout: Layout = "service",
    ) -> None:
        self._nodes, self._part, self._layout = nodes, part, layout
        self._binding = f"/{part.bzid}/binding/{part.model}/{part.sub_graph}:{part.container}"
        self._meta = ReplicaMeta(
            address=address,
            model_name=part.model,
            server_type=part.server_type,
            task=part.task,
            replica=part.replica,
        )
        self._info = ContainerServiceInfo(grpc=address, http=http or None, idc=part.idc)
        self._state = ServerState.UNKNOWN
        self.set(self._state)

    def set(self, state: ServerState) -> None:
        """Let others see a state.

        Raises:
            ServerLost: ZooKeeper does not answer.
        """
        if self._layout == "service":
            data = to_json(replace(self._meta, stat=int(state)))
            self._nodes.hold(self._part.service, data)
            self._state = state
            return
        path = f"/{self._part.bzid}/container_service/{self._part.container}"
        self._nodes.hold(path, to_json(self._info))
        if state == ServerState.AVAILABLE:
            self._nodes.hold(self._binding, b"")
        else:
            self._nodes.release(self._binding)
        self._state = state

    def follow(self, is_ready: Callable[[], bool], done: threading.Event) -> None:
        """Show LOADING or AVAILABLE until a server is done, then UNLOADING; waits meanwhile.

        While ZooKeeper does not answer the server continues, and its state follows later.
        """
        state = self._state
        while state != ServerState.UNLOADING:
            ended = done.wait(_LOOK_S)
            state = ServerState.AVAILABLE if is_ready() else ServerState.LOADING
            state = ServerState.UNLOADING if ended else state
            if state != self._state:
                try:
                    self.set(state)
                except ServerLost as error:
                    _log.warning("state %s is not registered yet: %s", state.name, error)

    def close(self) -> None:
        """Register no longer. May be called twice."""
        self._nodes.close()


def register_server(
    where: str,
    part: ServedPart,
    address: str,
    *,
    http: str = "",
    layout: Layout = "service",
    session_s: float = 10.0,
) -> ServingRegistration:
    """Register a server in the ZooKeeper that a text names.

    Args:
        where: zookeeper://HOST:PORT[,HOST:PORT...].
        part, address, http, layout: as of `ServingRegistration`.
        session_s: how long ZooKeeper keeps a server that it does not hear.

    Raises:
        ConfigError: another discovery.
        ServerLost: ZooKeeper does not answer.
    """
    kind, _, hosts = where.partition("://")
    if kind != "zookeeper" or not hosts:
        raise ConfigError(
            "discovery of servers of models",
            got=repr(where)[:200],
            allowed="zookeeper://HOST:PORT[,HOST:PORT...]",
            remedy="Name it so.",
        )
    nodes = Nodes(hosts.rstrip("/"), session_s=session_s)
    try:
        return ServingRegistration(nodes, part, address, http=http, layout=layout)
    except BaseException:
        nodes.close()
        raise


class BackgroundRegistration:
    """Registers a server as soon as ZooKeeper answers, and shows its state until it is done.

    Args:
        register: registers it.
        is_ready: whether it serves.
        done: set when it ends; also set here where no ZooKeeper is possible.
    """

    def __init__(
        self,
        register: Callable[[], ServingRegistration],
        is_ready: Callable[[], bool],
        done: threading.Event,
    ) -> None:
        self._register, self._is_ready, self._done = register, is_ready, done
        self._error: ConfigError | None = None
        self._thread = threading.Thread(target=self._run, name="shoal registration", daemon=True)

    def __enter__(self) -> BackgroundRegistration:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show UNLOADING, and register no longer.

        Raises:
            ConfigError: it could not be registered, whatever ZooKeeper does.
        """
        self._done.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        while not self._done.is_set():
            self._try()

    def _try(self) -> None:
        try:
            registration = self._register()
        except ServerLost as error:
            _log.warning("not registered yet: %s", error)
            self._done.wait(_AGAIN_S)
        except ConfigError as error:
            self._error = error
            self._done.set()
        else:
            with closing(registration):
                registration.follow(self._is_ready, self._done)
