"""Publishers of small tables that are trained at random, and replicas that follow them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal import Segment, TableSpec
from shoal.checkpoint import Contents, LoadOptions, load
from shoal.checkpoint.saving import Saving, begin
from shoal.comm.transport import Secret, Server
from shoal.errors import ServerLost
from shoal.placement import Placement, hash_ids, owners, row_wise
from shoal.rules.admission import Admission
from shoal.rules.optimizers import Adagrad
from shoal.sync.publisher import Publisher
from shoal.sync.replica import Replica
from shoal.table.factory import make_shard
from shoal.table.hosting import HostedTables, hosted_specs
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups, Shard, StepContext

SPECS = (
    TableSpec(name="user", segments=(Segment(dim=4, optimizer=Adagrad()),)),
    TableSpec(name="item", segments=(Segment(dim=2),), admission=Admission(threshold=2)),
    TableSpec(name="word", segments=(Segment(dim=3),), dtype="float16"),
    TableSpec(name="exact", segments=(Segment(dim=2),), dtype="float64"),
)
WAIT_S = 60.0
SECRET = Secret("a token of the tests")


def trainers(count: int, placement: Placement | None = None) -> list[HostedTables]:
    """The shards of `count` ranks; rows of all tables spread by hash, or as placed."""
    if placement is None:
        placed = [one for spec in SPECS for one in row_wise(spec.name, spec.dim, count)]
        placement = Placement(count, tuple(placed))
    return [
        HostedTables(SPECS, make_shard(hosted_specs(SPECS, placement, rank), seed=1), placement)
        for rank in range(count)
    ]


def groups(table: int, ids: Sequence[int]) -> IdGroups:
    splits = torch.tensor([0, len(ids)])
    return IdGroups(torch.tensor(ids), splits, torch.tensor([table], dtype=torch.int32))


def train(ranks: Sequence[HostedTables], draw: random.Random) -> None:
    """A step on a few rows, some of them new; now and then some are deleted."""
    for table, spec in enumerate(SPECS):
        ids = torch.tensor([draw.randrange(400) for _ in range(60)])
        grads = torch.randn(len(ids), spec.dim).to(real_dtype(spec))
        ctx = StepContext(event_time_s=draw.randrange(1000))
        removes, clears = draw.random() < 0.3, draw.random() < 0.03
        for number, rank in enumerate(ranks):
            kept = held(rank, table, number, ids)
            if kept is None:
                continue
            shard: Any = rank.shard
            local = [one.name for one in shard.specs].index(spec.name)
            shard.apply_ids(groups(local, ids[kept].tolist()), [grads[kept]], ctx=ctx)
            if removes:
                shard.remove(groups(local, ids[kept].tolist()[:5]))
            if clears:
                shard.clear(local)


def held(rank: HostedTables, table: int, number: int, ids: Tensor) -> Tensor | None:
    """Which of these ids a rank has rows of; None: it does not have the table."""
    assert rank.placement is not None
    spec = SPECS[table]
    (hosted,) = rank.placement.of(spec.name)
    if number not in hosted.ranks:
        return None
    if hosted.replicated:
        return torch.ones(len(ids), dtype=torch.bool)
    return owners(hosted, hash_ids(spec.hash_name, ids)) == number


def exported(shards: Sequence[Shard], name: str) -> list[Tensor]:
    """Ids in order, and weights and metadata by id, of a table."""
    chunks = [
        shard.export(index)
        for shard in shards
        for index, spec in enumerate(shard.specs)
        if spec.name == name
    ]
    ids = torch.cat([chunk.ids for chunk in chunks])
    order = torch.argsort(ids)
    names = "weights", "versions", "last_seen_s", "counts"
    columns = [torch.cat([getattr(chunk, name) for chunk in chunks])[order] for name in names]
    return [ids[order], *columns]


def assert_same(replicas: Replica | Sequence[Replica], ranks: Sequence[HostedTables]) -> None:
    """Rows, times and counts of replicas, together, and of a trainer's ranks."""
    every = [replicas] if isinstance(replicas, Replica) else replicas
    for spec in SPECS:
        placement = ranks[0].placement
        whole = placement is not None and placement.of(spec.name)[0].replicated
        theirs = exported([rank.shard for rank in (ranks[:1] if whole else ranks)], spec.name)
        for ours, wanted in zip(
            exported([one.shard for one in every], spec.name), theirs, strict=True
        ):
            assert torch.equal(ours, wanted)


def wait(replica: Replica, publishers: Sequence[Publisher]) -> None:
    """Until a replica has all that was trained by now."""
    versions = [publisher.publish() for publisher in publishers]
    ends = time.monotonic() + WAIT_S
    while any(
        one.state != "AVAILABLE" or one.version < version
        for one, version in zip(replica.status(), versions, strict=True)
    ):
        assert time.monotonic() < ends, replica.status()
        time.sleep(0.02)


@contextmanager
def serving(
    ranks: Sequence[HostedTables],
    handler: Callable[[Publisher], Any] = lambda one: one,
    **options: Any,
) -> Iterator[tuple[list[Publisher], list[str]]]:
    """A publisher a rank, which take turns only when asked, and their addresses."""
    with ExitStack() as stack:
        publishers, addresses = [], []
        for number, tables in enumerate(ranks):
            publisher = Publisher(tables, rank=number, every_s=3600.0, **options)
            stack.enter_context(publisher)
            server = Server("tcp://127.0.0.1:0", handler(publisher), secret=SECRET)
            stack.callback(server.stop)
            publishers.append(publisher)
            addresses.append(server.address)
        yield publishers, addresses


def following(addresses: Sequence[str], *, reply_s: float = WAIT_S, **options: Any) -> Replica:
    return Replica(SPECS, addresses, every_s=0.01, reply_s=reply_s, secret=SECRET, **options)


class Line:
    """A publisher behind a line that may be down, or lose and damage what it carries."""

    def __init__(self, publisher: Publisher, draw: random.Random | None = None) -> None:
        self.publisher, self.draw = publisher, draw
        self.down = False

    def __call__(self, head: bytes, frames: Any) -> tuple[bytes, list[bytes]]:
        fate = 0.5 if self.draw is None else self.draw.random()
        if self.down or fate < 0.1:
            raise ServerLost("a request", got="lost", allowed="a line that is up", remedy="Wait.")
        said, pages = self.publisher(head, frames)
        if pages and fate < 0.3:
            at = random.randrange(len(pages[0]))
            pages = [pages[0][:at] + bytes([pages[0][at] ^ 1]) + pages[0][at + 1 :]]
        if fate > 0.98:
            time.sleep(1.2)  # longer than a replica waits
        return said, pages


def save(rank: HostedTables, folder: Path, step: int, **options: Any) -> Saving:
    """A checkpoint of a trainer of one rank, with a dense module."""
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, float(step))
    contents = Contents(tables={"model": rank}, modules={"model": module})
    saving = begin(folder, contents, step=step, position=0, concurrent=False, **options)
    saving.wait()
    return saving


def resumed(folder: Path) -> tuple[HostedTables, str, Any]:
    """A trainer that starts again from the newest checkpoint, the id of that, and its cursor."""
    (rank,) = trainers(1)
    unknown = frozenset({"module:model"})
    loaded = load(
        folder, Contents(tables={"model": rank}), options=LoadOptions(allow_unknown=unknown)
    )
    assert loaded.cursors is not None
    return rank, loaded.manifest.id, loaded.cursors["model"]
