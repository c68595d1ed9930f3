"""Servers and workers whose rows count the updates that were applied, so that none can hide.

Rows start at 0 and each update adds 1 to each of its rows (SGD at rate 1, gradients of -1). Ids are
in groups of `SIZE`, all of one server, that are updated together: an update that was applied in
part leaves a group uneven. Every update goes to all servers, `GROUPS_OF_UPDATE` groups to each, so
the sum of a server's rows says how many updates it applied.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from shoal.checkpoint import CheckpointStore
from shoal.comm import transport
from shoal.placement import hash_ids, owners
from shoal.ps.client import RowsOverServers
from shoal.ps.connections import Patience, Servers
from shoal.ps.messages import Head
from shoal.ps.saving import ServerSaver, store_of
from shoal.ps.server import TableServer, spread_over
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.ranks import free_port

__all__ = ["Job", "Lost"]

DIM, SIZE, GROUPS, GROUPS_OF_UPDATE = 3, 8, 200, 20
WAIT_S = 200
CONFIG = {
    "name": "counted",
    "seed": 1,
    "data": {
        "source": {
            "kind": "synthetic",
            "examples": 64,
            "eval_examples": 64,
            "num_features": 1,
            "vocabulary": 10,
        },
        "batch_size": 32,
    },
    "tables": {
        "default": {
            "dim": DIM,
            "initializer": "zeros",
            "optimizer": {"kind": "sgd", "lr": 1.0},
        }
    },
    "model": {"kind": "dlrm", "bottom": [DIM], "hidden": [2]},
    "baselines": [],
}
SPECS = (
    TableSpec(
        name="f0",
        segments=(Segment(dim=DIM, name="vec", initializer=Zeros(), optimizer=SGD(lr=1.0)),),
    ),
)
SENT, DONE, STOP, TORN = range(4)


def id_groups(servers: int) -> Tensor:
    """Ids [servers, GROUPS, SIZE]; those of a server fall to it."""
    ids = torch.arange(servers * GROUPS * SIZE * 2)
    owner = owners(spread_over(SPECS, servers).of("f0")[0], hash_ids("f0", ids))
    return torch.stack(
        [ids[owner == s][: GROUPS * SIZE].view(GROUPS, SIZE) for s in range(servers)]
    )


def one_group(ids_N: Tensor) -> IdGroups:
    """All of the one table."""
    return IdGroups(ids_N, torch.tensor([0, ids_N.numel()]), torch.zeros(1, dtype=torch.int32))


@dataclass(frozen=True)
class Lost:
    """What one worker's updates came to on one server.

    Args:
        sent, done: updates that the worker made, and that it knows to be applied.
        lost: as the server counts.
    """

    sent: int
    done: int
    lost: int


class Job:
    """Servers and workers in processes of their own; whatever is left at the end is killed.

    Args:
        folder: of config, stores and logs.
        seed: of what the workers do.
        stale_updates: of each worker, that may be on their way.

    Attributes:
        reply_s: how long a worker waits before it sends a request again.
    """

    def __init__(self, folder: Path, seed: int, *, stale_updates: int = 0) -> None:
        self.folder, self.seed, self.stale_updates = folder, seed, stale_updates
        self.count, self.reply_s = 2, 0.5
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG))
        self.listens = [f"tcp://127.0.0.1:{free_port()}" for _ in range(self.count)]
        self.addresses = list(self.listens)  # where workers find them
        self.namespaces: dict[int, str] = {}  # of networks, in which a server is
        self.servers: dict[int, Any] = {}
        self.workers: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "shoal.cli.app", "shoal.config.build", "shoal.ps.client", "shoal.ps.saving"]
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.servers.values(), *self.workers.values()):
            process.kill()
            process.join()

    def start_server(self, index: int) -> None:
        """Start it, or start it again; it saves every 0.2 s."""
        arguments = ["ps", str(self.config), "--index", str(index), "--of", str(self.count)]
        arguments += ["--address", self.listens[index], "--store", str(self.folder / "store")]
        arguments += ["--save-every-s", "0.2"]
        log = self.folder / f"server-{index}.log"
        self.servers[index] = self._start(_serve, arguments, str(log), self.namespaces.get(index))

    def start_worker(self, name: str) -> None:
        """Start to send updates."""
        counters = self._context.RawArray("q", 4)
        self.counters[name] = counters
        seed = f"{self.seed} {name}"
        self.workers[name] = self._start(
            _work,
            self.addresses,
            name,
            seed,
            counters,
            self.reply_s,
            self.stale_updates,
            str(self.folder),
        )

    def start(self, workers: int = 2) -> None:
        """All servers and some workers; returns when each has done some updates."""
        for index in range(self.count):
            self.start_server(index)
        for worker in range(workers):
            self.start_worker(f"w{worker}")
        self.advance(3)

    def _start(self, function: Callable[..., None], *args: Any) -> Any:
        process = self._context.Process(target=function, args=(sys.path[:], *args), daemon=True)
        process.start()
        return process

    def done(self) -> dict[str, int]:
        """Updates of each worker that it knows to be applied, so many at least."""
        return {name: counters[DONE] for name, counters in self.counters.items()}

    def advance(self, updates: int) -> None:
        """Wait until each worker that runs has done so many more."""
        goal = {name: done + updates for name, done in self.done().items()}

        def there() -> bool:
            for process in self.workers.values():
                assert process.is_alive() or process.exitcode == -signal.SIGKILL, self.logs()
            return all(
                self.done()[name] >= goal[name]
                for name, process in self.workers.items()
                if process.is_alive()
            )

        self.wait(there)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait, not forever."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, f"nothing happens: {self.logs()}"
            time.sleep(0.005)

    def logs(self) -> str:
        """What servers and workers have printed."""
        found = {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.log")}
        return f"{self.done()} {json.dumps(found, indent=1)}"

    def saves(self, index: int) -> int:
        """How often a server has saved by now, in all its lives; old checkpoints go."""
        newest = CheckpointStore(store_of(self.folder / "store", index, self.count)).latest()
        return 0 if newest is None else newest.step

    def saved(self, index: int) -> dict[str, int]:
        """Of each worker, the last update in the newest checkpoint of a server."""
        server = TableServer(SPECS, index=index, of=self.count, seed=1)
        ServerSaver(server, self.folder / "store")._restore()
        return {name: one.applied for name, one in server._workers.items()}

    def finish(self) -> dict[str, list[Lost]]:
        """Let the workers end, and compare the rows with what they sent: by worker and server."""
        for name, process in self.workers.items():
            self.counters[name][STOP] = 1
            process.join(WAIT_S)
            assert process.exitcode in (0, -signal.SIGKILL), self.logs()
        with _checker(self.addresses) as rows:
            ids_SGk = id_groups(self.count)
            weights = rows.find(one_group(ids_SGk.flatten())).weights[0]
            values_SGkD = weights.view(*ids_SGk.shape, DIM)
        assert (values_SGkD == values_SGkD[:, :, :1, :1]).all(), "an update was applied in part"
        applied = values_SGkD[:, :, 0, 0].double().sum(1) / GROUPS_OF_UPDATE
        found = {name: self._lost(name) for name in self.workers}
        for server in range(self.count):
            said = [one[server].counted for one in found.values()]
            assert applied[server] == sum(said), f"server {server}: {applied} {found}"
        assert not any(counters[TORN] for counters in self.counters.values())
        return {
            name: [Lost(self.counters[name][SENT], self.counters[name][DONE], s.lost) for s in said]
            for name, said in found.items()
        }

    def _lost(self, name: str) -> list[_Said]:
        """What each server knows of a worker; it must know of all that was acknowledged."""
        client = transport.Client(self.addresses)
        try:
            head = Head(method="hello", worker=name).to_bytes()
            replies = [client.call(s, head, timeout_s=WAIT_S) for s in range(self.count)]
            said = [json.loads(reply.result()[0]) for reply in replies]
        finally:
            client.close()
        sent, done = self.counters[name][SENT], self.counters[name][DONE]
        for one in said:
            assert done <= one["applied"] <= sent, (name, done, sent, said)
        return [_Said(one["applied"], one["lost"]) for one in said]


@dataclass(frozen=True)
class _Said:
    applied: int
    lost: int

    @property
    def counted(self) -> int:
        return self.applied - self.lost


@contextmanager
def _checker(addresses: Sequence[str]) -> Iterator[RowsOverServers]:
    servers = Servers(addresses, SPECS, patience=Patience(reply_s=5))
    try:
        yield RowsOverServers(servers)
    finally:
        servers.close()


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however it did."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _prepare(path: Sequence[str], log: str, namespace: str | None = None) -> None:
    sys.path[:] = path
    end_with_parent()
    torch.set_num_threads(1)
    transport._BEAT_MS, transport._DEAD_MS = 300, 1500  # the tests' cuts are short
    if namespace is not None:
        enter(namespace)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)


def enter(namespace: str) -> None:
    """Move this process, before it has threads, into a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


def _serve(path: list[str], arguments: list[str], log: str, namespace: str | None) -> None:
    from shoal.cli.app import app

    _prepare(path, log, namespace)
    app(arguments)


def _work(
    path: list[str],
    addresses: Sequence[str],
    name: str,
    seed: str,
    counters: Any,
    reply_s: float,
    stale_updates: int,
    folder: str,
) -> None:
    _prepare(path, f"{folder}/{name}.log")
    chance = random.Random(seed)
    patience = Patience(reply_s=reply_s, repeats=500, pause_s=0.05)
    servers = Servers(addresses, SPECS, worker=name, patience=patience, stale_updates=stale_updates)
    rows = RowsOverServers(servers)
    ids_SGk = id_groups(len(addresses))
    while not counters[STOP]:
        picked = [own[chance.sample(range(GROUPS), GROUPS_OF_UPDATE)] for own in ids_SGk]
        groups = one_group(torch.cat(picked).flatten())
        counters[SENT] += 1
        grads = torch.full((groups.ids_N.numel(), DIM), -1.0)
        rows.apply_ids(groups, (grads,), ctx=StepContext())
        counters[DONE] = max(0, counters[SENT] - stale_updates)
        time.sleep(chance.uniform(0, 0.01))
        if chance.random() < 0.3:
            weights = rows.find(groups).weights[0]
            counters[TORN] += int((weights != weights[:, :1]).any())
    servers.close()
    counters[DONE] = counters[SENT]
