"""Damaged messages for the decoders of `sync` and `serve`.

    PYTHONPATH=tests python -m support.wire_fuzz sync --seconds 600 --seed 1
    PYTHONPATH=tests python -m support.wire_fuzz serve --seconds 600 --seed 1

Messages of a corpus (tests/golden/wire_corpus.json) are damaged and decoded. Each must be taken, or
refused with an error that says so. Messages that once led to something else stay in the corpus. Of
messages with checksums what they cover is damaged, and the checksum is that of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from shoal import _core
from shoal.errors import DataError, InputError, ShoalError
from shoal.serve.grpc_server import services
from shoal.serve.http_server import make_app
from shoal.serve.loading import FolderSource
from shoal.serve.repository import Repository
from shoal.serve.service import Code, Service, code_of
from shoal.sync.pages import sealed, unpack, unpack_dense
from shoal.sync.protocol import answer_of
from shoal.sync.publisher import Publisher
from support.published import SPECS, train, trainers
from support.served_models import trained

CORPUS = Path(__file__).parents[1] / "golden" / "wire_corpus.json"
_EDGES = (0, 1, 0x7F, 0x80, 0xFF)
_PAGE = struct.Struct("<4sI")
_FIRST_NUMBER = 7000  # of a segment of the corpus
_SIZE = "inference-header-content-length"
_REFUSED = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "400", "404"})


@dataclass(frozen=True)
class Message:
    """A message of the corpus.

    Args:
        to: who decodes it: "page", "dense page", "request", "answer METHOD", "grpc SERVICE/METHOD",
            "http PATH" or "http PATH SIZE", SIZE of the JSON at the body's beginning.
        why: what it is.
        raw: without checksums.
        code: what comes of it: "taken", or how it is refused.
    """

    to: str
    why: str
    raw: bytes
    code: str = "taken"


def corpus(*kinds: str) -> list[Message]:
    """Those whose decoder's name begins so."""
    found = json.loads(CORPUS.read_text(encoding="utf-8"))
    every = [Message(**{**one, "raw": bytes.fromhex(one["raw"])}) for one in found]
    return [one for one in every if one.to.split()[0] in kinds]


Decode = Callable[[Message], str]
"""What comes of a message: "taken", or the code with which it was refused."""


@contextmanager
def sync_decoder() -> Iterator[Decode]:
    """A publisher with a segment, and what a replica reads."""
    draw = random.Random(3)
    (rank,) = trainers(1)
    with Publisher(rank, every_s=3600.0) as publisher:
        publisher._numbers = itertools.count(_FIRST_NUMBER)
        train([rank], draw)
        publisher.publish()
        train([rank], draw)
        publisher.publish()

        def decode(message: Message) -> str:
            kind, _, method = message.to.partition(" ")
            try:
                if kind == "page":
                    unpack(memoryview(page_of(message.raw)), SPECS)
                elif kind == "dense":
                    unpack_dense(memoryview(page_of(message.raw)))
                elif kind == "answer":
                    answer_of(method, message.raw)
                else:
                    publisher(sealed(message.raw), [])
            except (DataError, InputError):
                return "refused"
            return "taken"

        yield decode


def page_of(body: bytes) -> bytes:
    """A page with a checksum, of all that follows it."""
    return _PAGE.pack(b"SHPG", _core.crc32(memoryview(body), 0)) + body


@contextmanager
def serve_decoder(folder: Path) -> Iterator[Decode]:
    """A server's methods without its ports, of a model that is trained in the folder."""
    with (
        closing(asyncio.new_event_loop()) as loop,
        Repository([FolderSource(trained(folder, baselines=[]))], every_s=3600) as models,
        Service(models) as service,
    ):
        methods = services(service, "0")
        transport = httpx.ASGITransport(make_app(service, "0"))

        def grpc(path: str, raw: bytes) -> str:
            name, _, method = path.partition("/")
            try:
                methods[name][method](raw)
            except ShoalError as error:
                return Code(code_of(error)).name
            return "taken"

        async def http(path: str, size: str, raw: bytes) -> str:
            async with httpx.AsyncClient(transport=transport, base_url="http://shoal") as client:
                headers = {_SIZE: size} if size else {}
                reply = await client.post(path, content=raw, headers=headers)
            return "taken" if reply.status_code == 200 else str(reply.status_code)

        def decode(message: Message) -> str:
            kind, path, *size = message.to.split()
            if kind == "grpc":
                return grpc(path, message.raw)
            return loop.run_until_complete(http(path, "".join(size), message.raw))

        yield decode


def damaged(message: Message, others: Sequence[bytes], draw: random.Random) -> Message:
    """Some bytes changed, left out, put in, or taken from another message."""
    made = bytearray(message.raw)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, size, what = draw.randrange(len(made) + 1), draw.randint(1, 9), draw.randrange(6)
        if what == 0:
            made[at : at + 1] = draw.randbytes(1)
        elif what == 1:
            made[at : at + 1] = bytes([draw.choice(_EDGES)])
        elif what == 2:
            del made[at : at + size]
        elif what == 3:
            made[at:at] = draw.randbytes(size)
        elif what == 4:
            made[at:at] = made[at : at + size]
        else:
            other = draw.choice(others)
            begin = draw.randrange(len(other) + 1)
            made[at : at + size] = other[begin : begin + draw.randint(1, 40)]
    return Message(message.to, f"{message.why}, damaged", bytes(made))


def fuzz(decode: Decode, known: Sequence[Message], draw: random.Random) -> Iterator[str]:
    """What comes of one damaged message after another.

    Raises:
        AssertionError: one led to something else; its note is what the corpus lacks.
    """
    of_kind: dict[str, list[bytes]] = {}
    for one in known:
        of_kind.setdefault(one.to.split()[0], []).append(one.raw)
    while True:
        message = draw.choice(known)
        made = damaged(message, of_kind[message.to.split()[0]], draw)
        try:
            code = decode(made)
            assert code in {"taken", "refused", *_REFUSED}, code
        except BaseException as error:
            error.add_note(json.dumps({"to": made.to, "why": made.why, "raw": made.raw.hex()}))
            raise
        yield code


def main(arguments: Sequence[str]) -> None:
    """Damage messages for so long, and print what came of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("of", choices=("sync", "serve"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    kinds = {"sync": ("page", "dense", "request", "answer"), "serve": ("grpc", "http")}[args.of]
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        if args.of == "sync":
            decode = stack.enter_context(sync_decoder())
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            decode = stack.enter_context(serve_decoder(folder))
        ends = time.monotonic() + args.seconds
        for code in fuzz(decode, corpus(*kinds), random.Random(args.seed)):
            counts[code] += 1
            if time.monotonic() > ends:
                break
    print(json.dumps({"of": args.of, "seed": args.seed, "messages": counts.total(), **counts}))


if __name__ == "__main__":
    main(sys.argv[1:])
