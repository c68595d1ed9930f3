"""Latency and throughput of a served model: `python bench/serve.py --json out-serve.json`.

One `shoal serve` process with the flights DeepFM model. Latency: single examples over gRPC, 200 a
second, sent by the clock. Rows: batches of 256. Requests: single examples by 32 callers at once,
next to a plain FastAPI + torch server of the same model, in turns. The caller has no client library
in the way: its messages are made before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Case, Measured, add_json, as_row, conclude, median, percentile

SCRIPT = Path(__file__).resolve()
PACKAGES = ("torch", "grpcio", "starlette", "uvicorn", "fastapi", "shoal")
LATENCY = "latency of 1 row, 200 requests/s, gRPC, {}"
ROWS = "rows/s in batches of 256, gRPC"
REQUESTS = "requests/s of 1 row, 32 callers, {}"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
RATE, BATCH, CALLERS = 200, 256, 32


def cases() -> tuple[Case, ...]:
    """Against what is asked for, and against FastAPI."""
    latency = [
        Case(name=LATENCY.format(name), unit="ms", better="lower", peer="asked for",
             peer_value=most, bar=1.0)
        for name, most in (("p50", 3.0), ("p99", 10.0))
    ]  # fmt: skip
    rows = Case(
        name=ROWS, unit="rows/s", better="higher", peer="asked for", peer_value=20_000.0, bar=1.0
    )
    requests = [
        Case(name=REQUESTS.format(name), unit="requests/s", better="higher",
             peer="FastAPI + torch", bar=3.0 if name == "gRPC" else None)
        for name in ("gRPC", "TF-Serving REST")
    ]  # fmt: skip
    return (*latency, rows, *requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser, "serve")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--run", metavar="RUN", type=Path, help="a run of flights, trained before")
    parser.add_argument("--plain", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain(options.plain)
        return
    seconds, turns = (2.0, 1) if options.quick else (10.0, 3)
    found = measure(seconds, turns, options.run)
    conclude([as_row(case, found.get(case.name)) for case in cases()], options.json, PACKAGES)


def measure(seconds: float, turns: int, run: Path | None) -> dict[str, Measured]:
    """By case."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        run = run or trained(folder)
        examples = asked_about(run)
        command = ["-m", "shoal.cli", "serve", str(run), "--compile", "--grpc", "127.0.0.1:0"]
        line = held.enter_context(server([*command, "--http", "127.0.0.1:0"], "gRPC"))
        grpc_address, http_address = re.findall(r"127\.0\.0\.1:\d+", line)
        line = held.enter_context(server([str(SCRIPT), "--plain", str(run)], "http"))
        (plain_address,) = re.findall(r"127\.0\.0\.1:\d+", line)
        singles = [message(examples, k, 1) for k in range(256)]
        batches = [message(examples, BATCH * k, BATCH) for k in range(8)]
        bodies = [body(examples, k) for k in range(256)]
        rest, peer = "/v1/models/flights:predict", "/predict"
        at_rate: list[float] = []
        rows: list[float] = []
        rates: dict[str, list[float]] = {"gRPC": [], "REST": [], "plain": []}
        asyncio.run(over_grpc(grpc_address, singles, 1.0, callers=4))  # warm
        asyncio.run(over_http(plain_address, peer, bodies, 1.0))
        for _ in range(turns):
            at_rate += asyncio.run(at_a_rate(grpc_address, singles, seconds))
            rows.append(BATCH * asyncio.run(over_grpc(grpc_address, batches, seconds, callers=4)))
            rates["gRPC"].append(asyncio.run(over_grpc(grpc_address, singles, seconds)))
            rates["plain"].append(asyncio.run(over_http(plain_address, peer, bodies, seconds)))
            rates["REST"].append(asyncio.run(over_http(http_address, rest, bodies, seconds)))
    peer_rate = median(rates["plain"])
    return {
        LATENCY.format("p50"): Measured(ours=1000 * percentile(at_rate, 50)),
        LATENCY.format("p99"): Measured(ours=1000 * percentile(at_rate, 99)),
        ROWS: Measured(ours=median(rows)),
        REQUESTS.format("gRPC"): Measured(ours=median(rates["gRPC"]), peer_value=peer_rate),
        REQUESTS.format("TF-Serving REST"): Measured(
            ours=median(rates["REST"]), peer_value=peer_rate
        ),
    }


def trained(folder: Path) -> Path:
    """A run of the flights model that has seen some of them."""
    from rich.console import Console

    from shoal import config as settings
    from shoal import train

    flights = SCRIPT.parents[1] / "examples" / "flights.yaml"
    changes = ("data.epochs=1", "data.max_examples=20000", "eval.max_examples=4096")
    config = settings.load(flights, (*changes, "baselines=[]", f"output.dir={folder}"))
    return train.run(config, console=Console(quiet=True)).folder


@dataclass(frozen=True)
class Asked:
    """Examples: lists of ids by feature, and dense [N, n]."""

    lists: dict[str, list[list[int]]]
    dense: Any


def asked_about(run: Path) -> Asked:
    """Examples of the run's evaluation."""
    import torch

    from shoal import config as settings
    from shoal.config.build import open_data

    source = open_data(settings.load(run / "config.yaml")).evaluation.source
    examples = source.take(torch.arange(4096))
    return Asked(examples.ids.to_lists(), examples.dense)


def message(examples: Asked, first: int, count: int) -> bytes:
    """A PredictRequest of some examples."""
    import numpy as np

    from shoal.serve.protos import tfserving_pb2 as tfs
    from shoal.serve.tensors import tensor_to_tf

    first %= 4096 - count
    request = tfs.PredictRequest(model_spec=tfs.ModelSpec(name="flights"))
    for name, rows in examples.lists.items():
        own = rows[first : first + count]
        longest = max(map(len, own))
        ids = np.array([row + [0] * (longest - len(row)) for row in own], np.int64)
        if name.endswith("history"):
            lengths = np.array([len(row) for row in own], np.int64)
            request.inputs[f"{name}_lengths"].CopyFrom(tensor_to_tf(lengths, raw=True))
            ids = ids.reshape(count, longest)
        request.inputs[name].CopyFrom(tensor_to_tf(ids, raw=True))
    dense = examples.dense[first : first + count].numpy()
    request.inputs["dense"].CopyFrom(tensor_to_tf(dense, raw=True))
    return request.SerializeToString()


def body(examples: Asked, k: int) -> bytes:
    """One example as JSON, for both HTTP servers."""
    one = {name: rows[k] for name, rows in examples.lists.items()}
    plainly = {n: ids if n.endswith("history") else ids[0] for n, ids in one.items()}
    return json.dumps({"instances": [{**plainly, "dense": examples.dense[k].tolist()}]}).encode()


async def at_a_rate(address: str, messages: list[bytes], seconds: float) -> list[float]:
    """Latencies of requests that are sent by the clock, whatever became of the last ones."""
    import grpc.aio

    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(PREDICT)
        began_s, taken, asked = time.perf_counter(), [], []

        async def ask(k: int, due_s: float) -> None:
            await call(messages[k % len(messages)])
            taken.append(time.perf_counter() - due_s)

        for k in range(int(RATE * seconds)):
            due_s = began_s + k / RATE
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            # From when it is sent: the sleep above ends late on a busy machine.
            asked.append(asyncio.ensure_future(ask(k, time.perf_counter())))
        await asyncio.gather(*asked)
    return taken


async def over_grpc(
    address: str, messages: list[bytes], seconds: float, callers: int = CALLERS
) -> float:
    """Requests a second of some callers."""
    import grpc.aio

    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(PREDICT)

        async def ask(k: int) -> None:
            await call(messages[k % len(messages)])

        return await repeated(lambda number: ask, seconds, callers)


async def over_http(address: str, path: str, bodies: list[bytes], seconds: float) -> float:
    """The same over HTTP, a connection each."""
    host, port = address.split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    requests = [f"{head}content-length: {len(one)}\r\n\r\n".encode() + one for one in bodies]
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(CALLERS)]

    def asks(number: int) -> Callable[[int], Awaitable[None]]:
        reader, writer = streams[number]

        async def ask(k: int) -> None:
            writer.write(requests[k % len(requests)])
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            size = re.search(rb"content-length: (\d+)", answer)
            assert size is not None
            await reader.readexactly(int(size[1]))

        return ask

    try:
        return await repeated(asks, seconds, CALLERS)
    finally:
        for _, writer in streams:
            writer.close()


async def repeated(
    asks: Callable[[int], Callable[[int], Awaitable[None]]], seconds: float, callers: int
) -> float:
    """Requests a second of callers, each of which asks again once it has its reply."""
    began_s, count = time.perf_counter(), 0

    async def caller(number: int) -> None:
        nonlocal count
        ask = asks(number)
        while time.perf_counter() - began_s < seconds:
            await ask(count)
            count += 1

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return count / (time.perf_counter() - began_s)


@contextmanager
def server(arguments: list[str], word: str) -> Iterator[str]:
    """A process, with the line that names its addresses."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, cwd=SCRIPT.parents[1]
    ) as process:
        assert process.stdout is not None
        try:
            line = next((one for one in process.stdout if word in one), "")
            assert line, f"{arguments} ended"
            yield line
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def plain(run: str) -> None:
    """What one writes without a library: FastAPI, pydantic, and the model of the run."""
    import socket

    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import create_model

    from shoal import config as settings
    from shoal.checkpoint import Contents, LoadOptions, load
    from shoal.config.build import build_parts, source_inputs
    from shoal.ragged import KeyedRagged
    from shoal.train.folder import RunFolder, checkpoint_of
    from shoal.train.learner import Learner

    torch.set_num_threads(1)
    config = settings.load(Path(run) / "config.yaml")
    inputs = source_inputs(config.data.source)
    parts = build_parts(config)
    learner = Learner(parts, config)
    url = checkpoint_of(RunFolder(Path(run)))
    assert url is not None
    name = learner.name
    contents = Contents(tables={name: learner.tables.hosted}, modules={name: learner.module})
    load(url, contents, options=LoadOptions(allow_unknown=frozenset([f"optimizer:{name}"])))
    model = learner.model.eval()
    fields: dict[str, Any] = {
        name: (list[int] if name in inputs.lists else int, ...) for name in inputs.features
    }
    example = create_model("Example", **fields, dense=(list[float], ...))
    wanted = create_model("Wanted", instances=(list[example], ...))
    app = FastAPI()

    async def predict(request: Any) -> dict[str, list[float]]:
        rows = request.instances
        lists = {
            name: [
                getattr(row, name) if name in inputs.lists else [getattr(row, name)] for row in rows
            ]
            for name in inputs.features
        }
        dense = torch.tensor([row.dense for row in rows])
        batch = Examples(KeyedRagged.from_lists(lists), dense)
        with torch.inference_mode():
            return {"predictions": model(batch).sigmoid().tolist()}

    # Annotations of this file are texts, which FastAPI could not look up here.
    predict.__annotations__ = {"request": wanted, "return": dict[str, list[float]]}
    app.post("/predict")(predict)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(f"http 127.0.0.1:{listening.getsockname()[1]}", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listening])


class Examples:
    """What `Scorer` reads of a batch."""

    event_time_s, negatives = 0, None

    def __init__(self, ids: Any, dense: Any) -> None:
        self.ids, self.dense = ids, dense


if __name__ == "__main__":
    main()
