"""A sampler in a process of its own on each node, which ranks and their workers share.

A draw is a function of seed, key and batch alone, so servers keep nothing: one that died is started
again at its address, and who waits for it asks again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shoal.comm.collectives import Collectives
from shoal.comm.consensus import together
from shoal.comm.launch_environment import detect
from shoal.comm.transport import Client, Frames, Secret, Server
from shoal.data.samplers import (
    ItemPart,
    Key,
    Sampled,
    Sampler,
    SamplerSettings,
    joined,
    split_counts,
)
from shoal.errors import ConfigError, DataError, ServerLost, ShoalError
from shoal.models.tasks import Negatives
from shoal.ragged import KeyedRagged

_Ints = np.ndarray[Any, np.dtype[np.int64]]
Opener = Callable[..., Sampler]
"""Makes a sampler; picklable, `partial(Sampler.open, settings, recipe)` for one."""

_log = logging.getLogger(__name__)

_CALL_S = 10.0  # for an answer, before the server is asked again
_LEAST_CALL_S = 0.01
_AGAIN_S = 1.0  # before a server that did not start is started again
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The servers of a job.

    Args:
        servers: "HOST:PORT" by node, IPv6 in brackets.
        own: which of them is this node's.
        client_count: who may ask, over all ranks.
        token: that all of them share.
        spread: each server has a part of the items.
    """

    servers: tuple[str, ...]
    own: int
    client_count: int
    token: str
    spread: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """As other systems write it: servers joined by commas, and the count."""
        return {"server": ",".join(self.servers), "client_count": self.client_count}


class SamplerClient:
    """Samples of servers; may be pickled, for the workers of a DataLoader.

    It asks the server of its node, and the others when that does not answer; of items that are
    spread, all of them: first what is left to draw, then for each one's share of the draw.

    Args:
        cluster: the servers.
        id, user: the features that identify items and users; user may be None.
        patience_s: how long servers may be away; each of them is asked in that time.

    Attributes:
        server: that ends with the client, if one is given; a copy has none.
    """

    def __init__(
        self, cluster: Cluster, id: str, user: str | None, *, patience_s: float = 120.0
    ) -> None:
        self.cluster, self.id, self.user, self.patience_s = cluster, id, user, patience_s
        self.server: SamplerServer | None = None
        self._client: Client | None = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "server": None}

    def sample(self, items_B: _Ints, users_B: _Ints | None, key: Key) -> Sampled:
        """As `Sampler.sample`.

        Raises:
            InputError: all items are in the batch.
            ServerLost: no server answered in time.
        """
        frames = [np.ascontiguousarray(one) for one in (items_B, users_B) if one is not None]
        count = len(self.cluster.servers)
        if self.cluster.spread:
            heads: list[Any] = [{"key": key, "asks": "part"}] * count
            parts = [ItemPart(*json.loads(head)) for head, _ in self._every(heads, frames)]
            draws = split_counts(parts, key, items_B.size)
            heads = [{"key": key, "count": draw} for draw in draws]
            found = [_sampled(head, more) for head, more in self._every(heads, frames)]
            return joined(found, parts, items_B.size)
        head = json.dumps({"key": key}).encode()
        until = time.monotonic() + self.patience_s
        for number in itertools.count():
            server = (self.cluster.own + number) % count
            left_s = until - time.monotonic()
            timeout_s = max(min(_CALL_S, self.patience_s / count, left_s), _LEAST_CALL_S)
            try:
                reply = self._connected().call(server, head, frames, timeout_s=timeout_s)
                return _sampled(*reply.result())
            except ServerLost:
                if time.monotonic() >= until:
                    raise
        raise AssertionError("it counts without end")

    def _every(self, heads: Sequence[Any], frames: Sequence[Any]) -> list[tuple[bytes, Frames]]:
        """What all servers answer to one request each; one that is away is asked again."""
        until = time.monotonic() + self.patience_s
        found: dict[int, tuple[bytes, Frames]] = {}
        while True:
            timeout_s = max(min(_CALL_S, until - time.monotonic()), _LEAST_CALL_S)
            calls = {
                server: self._connected().call(
                    server, json.dumps(head).encode(), frames, timeout_s=timeout_s
                )
                for server, head in enumerate(heads)
                if server not in found
            }
            for server, call in calls.items():
                with contextlib.suppress(ServerLost):
                    found[server] = call.result()
            if len(found) == len(heads):
                return [found[server] for server in range(len(heads))]
            if time.monotonic() >= until:
                away = [self.cluster.servers[one] for one in calls if one not in found]
                got, allowed = f"no answer of {', '.join(away)}", f"one in {self.patience_s:g} s"
                raise ServerLost("servers of samplers", got, allowed, "Start them again.")

    def close(self) -> None:
        """Disconnect, and end the server, if it is this client's."""
        if self._client is not None and self._process == os.getpid():
            self._client.close()
        self._client = None
        if self.server is not None:
            self.server.close()

    def _connected(self) -> Client:
        # A forked worker has a copy of its parent's connections, which it may not use.
        if self._client is None or self._process != os.getpid():
            addresses = [f"tcp://{address}" for address in self.cluster.servers]
            secret = Secret(self.cluster.token)
            self._client = Client(addresses, secret=secret, most_bytes=_MOST_BYTES)
            self._process = os.getpid()
        return self._client


class SamplerServer:
    """A process that answers `SamplerClient`; it is started again if it dies, and ends with ours.

    Args:
        opener: makes the sampler, in that process.
        host: where to listen: an address of this machine; IPv6 without brackets.
        token: that clients know.
        restarts: how often it is started again.

    Attributes:
        address: "HOST:PORT".

    Raises:
        DataError: the sampler cannot be opened, or the address not be used.
    """

    def __init__(
        self, opener: Opener, token: str, *, host: str = "127.0.0.1", restarts: int = 10
    ) -> None:
        self._material = [opener, token]
        self._restarts = restarts
        self._ending = threading.Event()
        host = f"[{host}]" if ":" in host else host
        self.address = self._start(f"{host}:0")
        self._keeper = threading.Thread(target=self._keep, name="shoal-sampler", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the process that answers now."""
        return int(self._process.pid)

    def close(self) -> None:
        """End the process. May be called twice."""
        self._ending.set()
        _end(self._process)
        self._keeper.join()

    def _start(self, address: str) -> str:
        """Start a process there; where it listens."""
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "shoal.data.sampler_service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self._process = process  # which close() ends while it starts
        if self._ending.is_set():
            _end(process)
        try:
            with process.stdout:
                material = pickle.dumps([*self._material, address])
                with contextlib.suppress(BrokenPipeError, ValueError):  # closed by close()
                    process.stdin.write(material)
                    process.stdin.flush()
                line = process.stdout.readline()
            found = json.loads(line) if line else {"error": "it ended at once"}
            if "error" in found:
                remedy = "Correct what is named."
                raise DataError("server of a sampler", found["error"], "one that starts", remedy)
        except BaseException:
            _end(process)
            process.wait()
            raise
        return str(found["address"])

    def _keep(self) -> None:
        for _ in range(self._restarts):
            self._process.wait()
            if self._ending.is_set():
                return
            _end(self._process)
            _log.warning("the sampler's server ended (%s); again", self._process.returncode)
            try:
                self._start(self.address)
            except (ShoalError, OSError) as error:
                _log.warning("%s", error)
                self._ending.wait(_AGAIN_S)
        self._process.wait()
        if not self._ending.is_set():
            _log.error("the sampler's server ended, and is not started again")


def _end(process: Any) -> None:
    """End a server, also when a forked child of ours has its standard input open."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.terminate()


def start_service(
    opener: Opener,
    collectives: Collectives,
    *,
    id: str,
    user: str | None = None,
    local_rank: int,
    clients: int = 1,
    host: str | None = "127.0.0.1",
    patience_s: float = 120.0,
    spread: bool = False,
) -> tuple[SamplerClient, SamplerServer | None]:
    """A server on each node, at its local rank 0, and this rank's client; a collective call.

    Args:
        opener: makes the sampler, at the server.
        collectives: of all ranks.
        id, user, patience_s: of the client.
        local_rank: number of this rank on its node.
        clients: of this rank, its workers among them.
        host: this node's address; with one that other nodes reach, their ranks ask this node's
            server when their own is away; None: the address that the node's name stands for.
        spread: each server has a part of the items: openers are called with `share`, and ranks
            ask all servers, so that `host` is one that they reach.

    Raises:
        DataError: a server cannot start, or a node's name has no address that others reach; on
            every rank.
        ConfigError: rank 0 is not local rank 0, or `spread` over nodes with a host that is this
            machine alone; on every rank.
    """
    lone = host is not None and _local_only(host)
    mine = secrets.token_hex(32), local_rank == 0, lone
    told = collectives.gather_objects(mine, what="token of samplers")
    token, first = told[0][0], [leads for _, leads, _ in told]
    if spread and sum(first) > 1 and any(leads and alone for _, leads, alone in told):
        allowed = "an address that other nodes reach"
        raise ConfigError("host of spread samplers", host, allowed, "Give one, or None.")
    # Ranks are numbered node by node; names of hosts need not differ.
    own = sum(first[: collectives.rank + 1]) - 1
    if spread:
        opener = partial(opener, share=(own, sum(first)))
    server: SamplerServer | None = None

    def start() -> tuple[str | None, int]:
        nonlocal server
        if local_rank == 0:
            server = SamplerServer(opener, token, host=_own_address() if host is None else host)
        return server.address if server else None, clients

    try:
        found = together(collectives, "servers of samplers", start, failed=DataError)
        if found[0][0] is None:
            remedy = "Number the ranks node by node, each from local rank 0 on."
            raise ConfigError("servers of samplers", "none of rank 0", "one on each node", remedy)
    except BaseException:
        if server is not None:
            server.close()
        raise
    servers = [address for address, _ in found if address is not None]
    if lone and not spread:
        servers, own = [servers[own]], 0
    cluster = Cluster(
        servers=tuple(servers),
        own=own,
        client_count=sum(count for _, count in found),
        token=token,
        spread=spread,
    )
    return SamplerClient(cluster, id, user, patience_s=patience_s), server


def shared_sampler(
    opener: Opener, settings: SamplerSettings, collectives: Collectives
) -> SamplerClient:
    """A client of this node's server, which local rank 0 starts and ends; a collective call.

    Raises:
        DataError: as of `start_service`.
    """
    launch = detect()
    several = launch.local_world_size < collectives.world_size
    client, server = start_service(
        opener,
        collectives,
        id=settings.id,
        user=settings.user,
        local_rank=launch.local_rank,
        host=None if settings.spread and several else "127.0.0.1",
        spread=settings.spread,
    )
    client.server = server
    return client


def _own_address() -> str:
    """The address that this machine's name stands for.

    Raises:
        DataError: none that other machines reach.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            if not _local_only(str(address[0])):
                return str(address[0])
    allowed, remedy = "one that other nodes reach", "Name this machine in its hosts file or DNS."
    raise DataError(f"address of {name!r}", "none", allowed, remedy)


def _local_only(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _packed(sampled: Sampled) -> tuple[bytes, Sequence[Any]]:
    ids, negatives, order_H = sampled
    tensors = {
        "values_N": ids.values_N,
        "offsets_FB1": ids.offsets_FB1,
        "log_counts_N": negatives.log_counts_N,
        "hard_H": negatives.hard_H,
        "known": negatives.known,
        "order_H": order_H,
    }
    if ids.weights_N is not None:
        tensors["weights_N"] = ids.weights_N
    head = {"keys": ids.keys, "most_hard": negatives.most_hard, "names": list(tensors)}
    return json.dumps(head).encode(), [one.contiguous().numpy() for one in tensors.values()]


def _sampled(head: bytes, frames: Frames) -> Sampled:
    told = json.loads(head)
    made = {}
    kinds = {"log_counts_N": np.float32, "weights_N": np.float32, "order_H": np.float64}
    for name, frame in zip(told["names"], frames, strict=True):
        kind = kinds.get(name, np.int64)
        made[name] = torch.from_numpy(np.frombuffer(bytearray(frame), kind))
    ids = KeyedRagged(
        tuple(told["keys"]), made["values_N"], made["offsets_FB1"], made.get("weights_N")
    )
    hard = {"hard_H": made["hard_H"], "known": made["known"].view(-1, 2)}
    negatives = Negatives(made["log_counts_N"], **hard, most_hard=told["most_hard"])
    return Sampled(ids, negatives, made["order_H"])


def _serve() -> None:
    """Answer until standard input ends, which it does when who started this ends."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an opener prints is no answer
    try:
        opener, token, address = pickle.load(sys.stdin.buffer)
        sampler = opener()

        def handler(head: bytes, frames: Frames) -> tuple[bytes, Sequence[Any]]:
            items_B, users_B = (
                np.frombuffer(frames[k], np.int64) if k < len(frames) else None for k in (0, 1)
            )
            request = json.loads(head)
            if request.get("asks") == "part":
                return json.dumps(sampler.part(items_B)).encode(), ()
            key, count = tuple(request["key"]), request.get("count")
            return _packed(sampler.sample(items_B, users_B, key, count))

        server = Server(f"tcp://{address}", handler, secret=Secret(token), most_bytes=_MOST_BYTES)
    except Exception as error:  # noqa: BLE001 - who started this reports it, whatever it is
        name = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
        print(json.dumps({"error": f"{name}{error}"}), file=told, flush=True)
        return
    print(json.dumps({"address": server.address.removeprefix("tcp://")}), file=told, flush=True)
    told.close()
    sys.stdin.buffer.read()
    server.stop()


if __name__ == "__main__":
    _serve()
