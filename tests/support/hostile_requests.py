"""Random and hostile input for a parameter server in a process of its own.

    PYTHONPATH=tests python -m support.hostile_requests --seconds 600 --seed 1

Valid requests of every method are spoiled and sent through ZeroMQ; raw bytes go to its port, below
ZeroMQ's framing. The server must answer what is a request, leave rows as they are where it refuses,
and stay alive, with as many threads and no more memory than its rows take.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import torch
import zmq
from torch import Tensor

from shoal.comm.frames import memory
from shoal.exchange.wire import WireKind
from shoal.ps.messages import REALS, Head, Method, rows_to_frames
from shoal.ps.server import TableServer
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import FTRL, Adagrad, Adam
from shoal.table.rows import real_dtype
from shoal.table.spec import Segment, TableSpec
from support.counted_updates import end_with_parent

__all__ = [
    *("CORPUS", "GREETING", "READY"),
    *("Fuzzer", "ServerProcess", "corpus", "frame", "send_bytes"),
]

Parts = list[bytes]
"""Of a message: the request's number, head, frames."""

CORPUS = Path(__file__).parents[1] / "golden" / "hostile_requests.json"
SPECS = (
    TableSpec(name="plain", segments=(Segment(dim=3, optimizer=Adagrad()),)),
    TableSpec(name="double", segments=(Segment(dim=2, optimizer=Adam()),), dtype="float64"),
    TableSpec(
        name="half",
        segments=(Segment(name="bias", dim=1, optimizer=FTRL()), Segment(name="vec", dim=4)),
        dtype="bfloat16",
        admission=Admission(threshold=3),
    ),
    TableSpec(name="small", segments=(Segment(dim=2),), capacity_rows=64),
    TableSpec(name="brief", segments=(Segment(dim=1),), expiry=Expiry(ttl_s=10)),
)
REPLY_S = 60
ROW_BYTES = 400  # what a row takes at most, with its index
SPARE_BYTES = 96 << 20
_WIRES = (None, *get_args(WireKind))
_NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 7, 255, (1 << 31) - 1, 1 << 31, (1 << 40) - 1, 1 << 40, (1 << 62) + 1),
    *((1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 1e308, -0.5, float("nan"), float("inf")),
)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    *(None, True, "", "x", "x" * 300, "\0", "int8", [], [0], [[]], [-1], {}, {"plain": [1.0]}),
    *({"vec": [float("nan")]}, {"": []}, [0] * 5000, ["0"]),
)


class ServerProcess:
    """A server of `SPECS` in a child; its rows, memory and threads."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(sys.path[:], theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.address = str(self._pipe.recv())

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self._pipe.send("stop")
            self.process.join(REPLY_S)
        self.process.kill()
        self.process.join()

    def rows(self) -> str:
        """A digest of all rows."""
        self._pipe.send("rows")
        return str(self._pipe.recv())

    def count(self) -> int:
        """Rows of all tables."""
        self._pipe.send("count")
        return int(self._pipe.recv())

    def memory_and_threads(self) -> tuple[int, int]:
        """Resident bytes, and threads."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        return int(found["VmRSS"].split()[0]) << 10, int(found["Threads"])


def _serve(path: list[str], pipe: Connection) -> None:
    sys.path[:] = path
    end_with_parent()
    torch.set_num_threads(1)
    rows = TableServer(SPECS, index=0, of=1)
    server = rows.serve("tcp://127.0.0.1:0")
    pipe.send(server.address)
    while (asked := pipe.recv()) != "stop":
        if asked == "count":
            pipe.send(sum(rows.shard.size(table) for table in range(len(SPECS))))
            continue
        digest = hashlib.sha256()
        for table in range(len(SPECS)):
            chunk = rows.shard.export(table)
            for column in (chunk.ids, chunk.weights, chunk.state, chunk.counts, chunk.last_seen_s):
                digest.update(memory(column))
        pipe.send(digest.hexdigest())
    server.stop()


class Valid:
    """Requests as a worker sends them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 0

    def request(self, method: str | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Head and frames of some request."""
        chance = self._chance
        method = method or chance.choice(get_args(Method))
        head: dict[str, Any] = {"method": method, "worker": chance.choice(("", "a", "b"))}
        if method not in ("find", "lookup", "apply", "assign", "assign_add", "reinitialize"):
            if method in ("clear", "size", "entry", "export"):
                head["argument"] = chance.randrange(len(SPECS))
            return head, []
        tables = [chance.randrange(len(SPECS)) for _ in range(chance.randrange(4))]
        ids = [chance.sample(range(-20, 20), chance.randrange(6)) for _ in tables]
        head |= {"tables": tables, "sizes": [len(own) for own in ids], "step": 1}
        head["event_time_s"] = chance.randrange(50)
        if chance.random() < 0.5:
            self._number += 1
            head["number"] = self._number
        every = [id for own in ids for id in own]
        frames = [memory(torch.tensor(every, dtype=torch.int64))]
        if method in ("lookup", "apply") and chance.random() < 0.8:
            head["counted"] = True
            frames.append(memory(torch.ones(len(every), dtype=torch.int32)))
        if method in ("apply", "assign", "assign_add"):
            head["sets"] = chance.choice((1, 1, 2)) if method == "apply" else 1
            head["wire"] = chance.choice(_WIRES)
            frames += self._sets(head)
        if method in ("find", "lookup"):
            head["reply"] = chance.choice(_WIRES)
        return head, [bytes(frame) for frame in frames]

    def _sets(self, head: dict[str, Any]) -> list[memoryview]:
        shown = Head(method="find", tables=tuple(head["tables"]), sizes=tuple(head["sizes"]))
        segments = [shown.segments(SPECS, real) for real in REALS]
        rows = [_rows(shown, real) for real in REALS]
        one_set = rows_to_frames(segments, rows, head["wire"])
        return one_set * head["sets"]


def _rows(head: Head, real: torch.dtype) -> Tensor:
    rows, pairs = 0, zip(head.tables, head.sizes, strict=True)
    rows = sum(n * SPECS[k].dim for k, n in pairs if real_dtype(SPECS[k]) is real)
    return torch.linspace(-1, 1, rows, dtype=real) if rows else torch.empty(0, dtype=real)


class Fuzzer:
    """Sends spoiled requests to a server, one after the other, and checks it.

    Args:
        server: its process.
        seed: of what is sent.

    Attributes:
        outcomes: how many requests were answered, refused, dropped, or raw bytes.
    """

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self._valid = Valid(self.chance)
        self._corpus = corpus()
        self._context = zmq.Context()
        self._socket = self._connected()
        self.outcomes: Counter[str] = Counter()
        self._rows = server.rows()
        self._threads = server.memory_and_threads()[1]

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)

    def run(self, requests: int) -> None:
        """Send so many.

        Raises:
            AssertionError: the server did what it must not.
        """
        for _ in range(requests):
            if self.chance.random() < 0.1:
                self.send_raw(self._raw())
            else:
                self.send(self._spoiled())
        self.check()

    def send(self, parts: Parts) -> None:
        """Send one message; if it is a request, wait for its reply."""
        self._socket.send_multipart(parts)
        if not _is_request(parts):
            self.outcomes["dropped"] += 1
            return
        assert self._socket.poll(REPLY_S * 1000), f"no reply to {_shown(parts)}"
        number, status, *_ = self._socket.recv_multipart()
        assert number == parts[0], f"another's reply to {_shown(parts)}"
        if status == b"\0":
            self.outcomes["answered"] += 1
            self._rows = ""
            return
        self.outcomes["refused"] += 1
        rows = self.server.rows()
        assert self._rows in ("", rows), f"rows changed by {_shown(parts)}"
        self._rows = rows

    def send_raw(self, data: bytes) -> None:
        """Send bytes to its port, on a connection of their own, and leave."""
        self.outcomes["raw"] += 1
        send_bytes(self.server.address, data)

    def check(self) -> None:
        """The server is alive, and takes no more than it needs."""
        self.send([bytes(8), b'{"method":"hello"}'])
        assert self.server.process.is_alive()

    def check_memory(self, before: int) -> None:
        """Of a server that took `before` bytes."""
        now, threads = self.server.memory_and_threads()
        assert now < before + SPARE_BYTES + ROW_BYTES * self.server.count(), (before, now)
        assert threads <= self._threads + 1, (self._threads, threads)

    def _connected(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.connect(self.server.address)
        return made

    def _spoiled(self) -> Parts:
        chance = self.chance
        if chance.random() < 0.1 and (known := [one for one in self._corpus if "parts" in one]):
            return _spoiled_parts([bytes.fromhex(p) for p in chance.choice(known)["parts"]], chance)
        head, frames = self._valid.request()
        for _ in range(chance.randrange(3)):
            _spoil_head(head, chance)
        for _ in range(chance.randrange(3)):
            _spoil_frames(frames, chance)
        parts = [chance.randbytes(8), json.dumps(head).encode(), *frames]
        return _spoiled_parts(parts, chance) if chance.random() < 0.2 else parts

    def _raw(self) -> bytes:
        chance = self.chance
        if chance.random() < 0.3 and (known := [one for one in self._corpus if "raw" in one]):
            data = bytes.fromhex(chance.choice(known)["raw"])
        else:
            head, frames = self._valid.request()
            sent = [chance.randbytes(8), json.dumps(head).encode(), *frames]
            data = (
                GREETING
                + READY
                + b"".join(frame(part, more=n + 1 < len(sent)) for n, part in enumerate(sent))
            )
        if chance.random() < 0.9:
            data = _spoiled_bytes(data, chance)
        return data


def send_bytes(address: str, data: bytes) -> None:
    """Send them on a connection of their own, and leave."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=REPLY_S) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(0.002)
            connection.recv(1 << 16)
        except (TimeoutError, ConnectionError):
            pass


def _is_request(parts: Parts) -> bool:
    return 2 <= len(parts) <= 18 and len(parts[0]) == 8 and len(parts[1]) <= 1 << 20


def _spoil_head(head: dict[str, Any], chance: random.Random) -> None:
    key = chance.choice([*Head.model_fields, "more"])
    way = chance.randrange(4)
    if way == 0:
        head.pop(key, None)
    elif way == 1:
        head["method"] = chance.choice(get_args(Method))
    elif way == 2 and isinstance(head.get(key), list) and head[key]:
        head[key] = list(head[key])
        head[key][chance.randrange(len(head[key]))] = chance.choice(_NUMBERS)
    else:
        head[key] = chance.choice(_VALUES)


def _spoil_frames(frames: list[bytes], chance: random.Random) -> None:
    if not frames or chance.random() < 0.1:
        frames.insert(chance.randrange(len(frames) + 1), chance.randbytes(chance.randrange(64)))
        return
    at = chance.randrange(len(frames))
    frame = frames[at]
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: frame[: chance.randrange(len(frame) + 1)],
        lambda: frame + chance.randbytes(chance.choice((1, 4, 8, 4096))),
        lambda: b"\xff" * len(frame),
        lambda: chance.randbytes(len(frame)),
        lambda: (struct.pack("<f", float("nan")) * len(frame))[: len(frame)],
        lambda: (struct.pack("<q", -(1 << 63)) * len(frame))[: len(frame)],
        lambda: (struct.pack("<f", 3e38) * len(frame))[: len(frame)],
        lambda: frame[:8] * (len(frame) // 8),
        lambda: frame * 2,
    )
    way = chance.randrange(len(ways) + 2)
    if way < len(ways):
        frames[at] = ways[way]()
    elif way == len(ways):
        del frames[at]
    else:
        chance.shuffle(frames)


def _spoiled_parts(parts: Parts, chance: random.Random) -> Parts:
    parts = list(parts)
    way = chance.randrange(5)
    if way == 0:
        at = chance.randrange(len(parts))
        parts[at] = _spoiled_bytes(parts[at], chance)
    elif way == 1:
        del parts[chance.randrange(len(parts))]
    elif way == 2:
        parts += [b""] * chance.choice((1, 20, 500))
    elif way == 3 and len(parts) > 1:
        deep = chance.choice((10, 1000, 100_000))
        parts[1] = b'{"method":"find","tables":' + b"[" * deep + b"]" * deep + b"}"
    else:
        parts[0] = chance.randbytes(chance.randrange(20))
    return parts or [b""]


def _spoiled_bytes(data: bytes, chance: random.Random) -> bytes:
    spoiled = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(spoiled) + 1)
        way = chance.randrange(4)
        if way == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            spoiled[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif way == 2:
            del spoiled[at : at + chance.randrange(1, 30)]
        elif at < len(spoiled):
            spoiled[at] = chance.choice((0, 1, 127, 128, 255))
    return bytes(
        spoiled[: chance.randrange(len(spoiled) + 1)] if chance.random() < 0.2 else spoiled
    )


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0."""


def frame(body: bytes, *, more: bool = False, flags: int = 0, size: int | None = None) -> bytes:
    """A frame as ZMTP has it; flags 4 is a command. `size` may be another than the body's."""
    size = len(body) if size is None else size
    flags |= more | (2 if size > 255 else 0)
    return bytes([flags]) + (struct.pack(">Q", size) if size > 255 else bytes([size])) + body


READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", flags=4)


def corpus() -> list[dict[str, Any]]:
    """Inputs that are kept: each has `why`, and `parts` of a message or `raw` bytes, in hex."""
    return list(json.loads(CORPUS.read_text()))


def _shown(parts: Parts) -> str:
    return json.dumps([part[:2000].hex() for part in parts[:20]])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with ServerProcess() as server:
        fuzzer = Fuzzer(server, args.seed)
        fuzzer.run(2000)
        before = server.memory_and_threads()[0]
        end_s, shown_s = time.monotonic() + args.seconds, 0.0
        while time.monotonic() < end_s:
            fuzzer.run(500)
            fuzzer.check_memory(before)
            if time.monotonic() > shown_s:
                shown_s = time.monotonic() + 30
                bytes_now, threads = server.memory_and_threads()
                print(
                    f"{sum(fuzzer.outcomes.values())} inputs, {dict(fuzzer.outcomes)}, "
                    f"{bytes_now >> 20} MiB (at first {before >> 20}), {threads} threads, "
                    f"{server.count()} rows",
                    flush=True,
                )
        fuzzer.close()
    assert server.process.exitcode in (0, -9), server.process.exitcode
    print(f"done: {dict(fuzzer.outcomes)}")


if __name__ == "__main__":
    main()
