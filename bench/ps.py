"""Rows of parameter servers over loopback: `python bench/ps.py --json out.json`.

Prints our value, the baseline (peer), the ratio and the target (bar) of every case, and marks rows
that miss their target red. It exits 0 even then. bench/README.md explains the cases.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import (
    Case,
    Job,
    Measured,
    Runner,
    add_options,
    interleave,
    measured_json,
    median,
    percentile,
    run_jobs,
)

__all__ = ["main"]

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "numpy", "pyzmq", "grpcio", "protobuf", "shoal")
SERVERS = 2
DIMS = (16, 64)
IDS = 65_536
FEW_IDS = 4_096
BATCHES = 8
KINDS = ("find", "lookup", "update")
SOCKETS, GRPC = "plain sockets", "gRPC with repeated float"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Rows of a call use memory that is touched already, as those of the baselines do.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "ps")
    options = parser.parse_args()
    if options.worker:
        source, target = options.worker
        asked = json.loads(source.read_text())
        found = {"rates": _rates, "latency": _latency}[asked["task"]](**asked["params"])
        target.write_text(measured_json(found))
        return
    run_jobs(parser, options, [*_jobs(options.quick, options.case)], SCRIPT, PACKAGES)


def _name(kind: str, dim: int, peer: str) -> str:
    return f"{kind} of {IDS} ids, D={dim}, vs {peer}"


def _latency_name(dim: int) -> str:
    return f"p99 of a lookup of {FEW_IDS} ids under updates, D={dim}"


def _jobs(quick: bool, substring: str) -> Iterator[Job]:
    bars = {SOCKETS: (0.5, 0.8), GRPC: (5.0, None)}
    for dim in DIMS:
        cases = tuple(
            Case(name=name, unit="GB/s", peer=peer, bar=bar, stretch=stretch)
            for kind in KINDS
            for peer, (bar, stretch) in bars.items()
            if substring in (name := _name(kind, dim, peer))
        )
        params = {"dim": dim, "passes": 2 if quick else 12}
        yield Job(task="rates", params=params, cases=cases, need_bytes=2 << 30, env=ENVIRONMENT)
    for dim in DIMS:
        named = (_latency_name(dim),) if substring in _latency_name(dim) else ()
        cases = tuple(
            Case(name=n, unit="ms", peer="the idle p50", better="lower", bar=0.2) for n in named
        )
        params = {"dim": dim, "calls": 50 if quick else 1000}
        yield Job(task="latency", params=params, cases=cases, need_bytes=2 << 30, env=ENVIRONMENT)


def _tables(dim: int) -> tuple[Any, ...]:
    from shoal import Segment, TableSpec
    from shoal.rules.optimizers import Adagrad

    return (TableSpec(name="t", segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.1)),)),)


def _ids(count: int) -> list[Any]:
    """Distinct random ids of each batch, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1 << 62, (count,), generator=generator) for _ in range(BATCHES)]


@contextmanager
def _processes(target: Callable[..., None], *arguments: Any, count: int) -> Iterator[list[Any]]:
    """So many processes, and the address that each puts into its queue."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    running = [
        context.Process(target=target, args=(queue, index, *arguments), daemon=True)
        for index in range(count)
    ]
    for process in running:
        process.start()
    try:
        yield [address for _, address in sorted(_said(queue, running) for _ in running)]
    finally:
        for process in running:
            process.kill()
            process.join()


def _said(queue: Any, running: list[Any]) -> Any:
    while queue.empty():
        if any(process.exitcode for process in running):
            raise SystemExit("a process of the bench failed")
        time.sleep(0.05)
    return queue.get()


def _rates(dim: int, passes: int) -> dict[str, Measured]:
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    notes: dict[tuple[str, str], str] = {}
    with (
        _processes(_serve_rows, dim, count=SERVERS) as rows,
        _processes(_serve_socket, dim, count=SERVERS) as sockets,
        _processes(_serve_grpc, dim, count=SERVERS) as grpcs,
    ):
        ours = _ours(rows, dim)
        plain = _plain(sockets, dim)
        proto = _grpc(grpcs, dim) if importlib.util.find_spec("grpc") else {}
        for kind in KINDS:
            runners = [Runner(name="ours", run=ours[kind]), Runner(name=SOCKETS, run=plain[kind])]
            seconds = interleave(runners, batches=BATCHES, passes=passes)
            if proto:
                slow = [Runner(name="ours", run=ours[kind]), Runner(name=GRPC, run=proto[kind])]
                seconds[GRPC] = interleave(slow, batches=BATCHES, passes=1)[GRPC]
            payload = IDS * (8 + 4 * dim) / 1e9
            found[kind] = {name: payload / median(some) for name, some in seconds.items()}
            best = {name: payload / min(some) for name, some in seconds.items()}
            for peer in seconds:
                notes[kind, peer] = f"best of each {best['ours']:.2f} and {best[peer]:.2f}"
    return {
        _name(kind, dim, peer): Measured(
            ours=rate["ours"],
            peer_value=rate.get(peer),
            note=notes.get((kind, peer), "not installed: grpcio"),
        )
        for kind, rate in found.items()
        for peer in (SOCKETS, GRPC)
    }


def _latency(dim: int, calls: int) -> dict[str, Measured]:
    """Of training lookups by one worker, first alone and then while another one updates."""
    import torch

    torch.set_num_threads(1)
    with _processes(_serve_rows, dim, count=SERVERS) as rows:
        exchange, requests = _worker(rows, dim, FEW_IDS)

        def seconds() -> list[float]:
            took = []
            for turn in range(calls):
                began = time.perf_counter()
                exchange.probe(exchange.send(requests[turn % BATCHES], insert=True, ctx=_context()))
                took.append(time.perf_counter() - began)
            return took

        seconds()
        idle = percentile(seconds(), 50)
        with _processes(_write, rows, dim, count=1):
            busy = percentile(seconds(), 99)
    note = f"{os.cpu_count()} cores for {SERVERS} servers and 2 workers"
    return {_latency_name(dim): Measured(ours=1e3 * busy, peer_value=1e3 * idle, note=note)}


def _context() -> Any:
    from shoal import StepContext

    return StepContext()


def _serve_rows(queue: Any, index: int, dim: int) -> None:
    import torch

    from shoal.ps.server import TableServer

    torch.set_num_threads(1)
    served = TableServer(_tables(dim), index=index, of=SERVERS)
    queue.put((index, served.serve("tcp://127.0.0.1:0").address))
    threading.Event().wait()


def _worker(addresses: list[str], dim: int, count: int) -> tuple[Any, list[Any]]:
    """An exchange with the servers, which have the ids, and a request of each batch."""
    import torch

    from shoal import EmbeddingCollection, Feature, KeyedRagged, SparseOptimizer
    from shoal.ps.client import connect

    tables = _tables(dim)
    exchange = connect(addresses, tables)
    collection = EmbeddingCollection(tables, [Feature("t", "t")])
    collection.distribute(exchange)
    SparseOptimizer(collection)
    once = torch.ones(count, dtype=torch.int64)
    batches = [KeyedRagged.from_lengths(("t",), ids, once) for ids in _ids(count)]
    requests = [collection._requests.of(batch) for batch in batches]
    for request in requests:
        exchange.probe(exchange.send(request, insert=True, ctx=_context()))
    return exchange, requests


def _ours(addresses: list[str], dim: int) -> dict[str, Callable[[int], object]]:
    import torch

    from shoal.table.shard import IdGroups

    exchange, requests = _worker(addresses, dim, IDS)
    rows, ctx = exchange.shard, _context()
    splits, tables = torch.tensor([0, IDS]), torch.tensor([0], dtype=torch.int32)
    groups = [IdGroups(ids, splits, tables) for ids in _ids(IDS)]
    grads = (torch.ones(IDS, dim),)
    routes = [exchange.probe(exchange.send(request, insert=True, ctx=ctx)) for request in requests]
    records = [exchange.back(route, grads).wait() for route in routes]
    return {
        "find": lambda index: rows.find(groups[index]),
        "lookup": lambda index: exchange.probe(
            exchange.send(requests[index], insert=True, ctx=ctx)
        ),
        "update": lambda index: rows.apply(records[index], ctx=ctx),
    }


def _write(queue: Any, index: int, addresses: list[str], dim: int) -> None:
    """Updates without end."""
    import torch

    torch.set_num_threads(1)
    update = _ours(addresses, dim)["update"]
    update(0)
    queue.put((index, ""))
    while True:
        for batch in range(BATCHES):
            update(batch)


def _serve_socket(queue: Any, index: int, dim: int) -> None:
    """Replies to so many bytes with so many, whatever they are."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        queue.put((index, door.getsockname()[1]))
        connection, _ = door.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, reply = bytearray(IDS * (8 + 4 * dim)), bytearray(IDS * 4 * dim)
    head = bytearray(16)
    while True:
        _receive(connection, head)
        asked, wanted = (int.from_bytes(head[k : k + 8], "little") for k in (0, 8))
        _receive(connection, memoryview(request)[:asked])
        connection.sendall(memoryview(reply)[:wanted])


def _receive(connection: socket.socket, into: bytearray | memoryview) -> None:
    left = memoryview(into)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise SystemExit
        left = left[count:]


def _plain(ports: list[int], dim: int) -> dict[str, Callable[[int], object]]:
    """Each server's half of a call's bytes, at once: no ids are hashed and no rows are found."""
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    half = IDS // SERVERS
    ids, rows = bytes(8 * half), bytes(half * (8 + 4 * dim))
    replies = [bytearray(4 * dim * half) for _ in connections]

    def call(request: bytes, reply: int) -> None:
        head = len(request).to_bytes(8, "little") + reply.to_bytes(8, "little")
        for connection in connections:
            connection.sendall(head)
            connection.sendall(request)
        for connection, into in zip(connections, replies, strict=True):
            _receive(connection, memoryview(into)[:reply])

    read = functools.partial(call, ids, 4 * dim * half)
    # An update's reply is one byte.
    return {
        "find": lambda _: read(),
        "lookup": lambda _: read(),
        "update": lambda _: call(rows, 1),
    }


def _message() -> Any:
    """message Rows { repeated int64 ids = 1; repeated float values = 2; }"""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Rows")
    kinds = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate(
        (("ids", kinds.TYPE_INT64), ("values", kinds.TYPE_FLOAT)), start=1
    ):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Rows"))


_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def _serve_grpc(queue: Any, index: int, dim: int) -> None:
    """Replies to ids with rows, to rows with nothing; finds none."""
    if importlib.util.find_spec("grpc") is None:
        queue.put((index, None))
        return
    import grpc
    import numpy as np

    made = _message()
    row = np.ones(IDS * dim, dtype=np.float32).tolist()

    def handle(request: Any, _: Any) -> Any:
        return made() if request.values else made(values=row[: len(request.ids) * dim])

    methods = {
        "call": grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=made.FromString,
            response_serializer=made.SerializeToString,
        )
    }
    server = grpc.server(futures.ThreadPoolExecutor(2), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    queue.put((index, port))
    threading.Event().wait()


def _grpc(ports: list[int], dim: int) -> dict[str, Callable[[int], object]]:
    import grpc
    import numpy as np

    made = _message()
    calls = [
        grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS).unary_unary(
            "/bench/call",
            request_serializer=made.SerializeToString,
            response_deserializer=made.FromString,
        )
        for port in ports
    ]
    half = IDS // SERVERS
    ids = [some[:half].numpy() for some in _ids(IDS)]
    grads = np.ones(half * dim, dtype=np.float32)

    def read(index: int) -> None:
        pending = [call.future(made(ids=ids[index])) for call in calls]
        for one in pending:
            np.array(one.result().values, dtype=np.float32)

    def update(index: int) -> None:
        pending = [call.future(made(ids=ids[index], values=grads)) for call in calls]
        for one in pending:
            one.result()

    return {"find": read, "lookup": read, "update": update}


if __name__ == "__main__":
    main()
