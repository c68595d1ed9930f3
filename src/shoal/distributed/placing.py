"""Which collections share rows, where their tables go, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.embedding import EmbeddingCollection
from shoal.errors import ConfigError, describe, unknown_name
from shoal.placement import Placement
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.table.factory import shard_like
from shoal.table.hosting import check_placement, hosted_spec, hosted_specs, plan_placement
from shoal.table.resplit import move_in
from shoal.table.shard import Shard
from shoal.table.spec import Segment, TableSpec

__all__ = ["Family", "Placing", "families_of", "placed"]

Placing = Placement | Mapping[str, str] | None

# A shard has a table; this is that of a rank to which a placement gives none.
_NOTHING = TableSpec(
    name="(no table)", segments=(Segment(dim=1, optimizer=SGD(lr=0.0), initializer=Zeros()),)
)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Collections, by name, that share one shard of whole tables, and where those go."""

    collections: Mapping[str, EmbeddingCollection]
    shard: Shard
    placement: Placement

    def part_of(self, rank: int) -> Shard:
        """The shard of a rank, with its share of the rows that are there."""
        specs = hosted_specs(self.shard.specs, self.placement, rank)
        part = shard_like(self.shard, specs or (_NOTHING,))
        move_in(self.shard, part, self.placement, rank)
        return part

    def silent_on(self, rank: int) -> tuple[str, ...]:
        """Tables of a rank's shard that an earlier rank holds too and speaks for."""
        return tuple(
            hosted_spec(spec, hosted).name
            for spec in self.shard.specs
            for hosted in self.placement.of(spec.name)
            if hosted.replicated and hosted.ranks[0] != rank
        )


def families_of(
    collections: Mapping[str, EmbeddingCollection],
    placing: Placing,
    world_size: int,
    local_world_size: int,
) -> tuple[Family, ...]:
    """Collections by shard, with their placements.

    Raises:
        UnknownName: a placement of a table that no collection has.
        ConfigError: a placement for another number of ranks, or that does not fit the tables.
    """
    shards: dict[int, Shard] = {}
    members: dict[int, dict[str, EmbeddingCollection]] = {}
    for name, collection in collections.items():
        shards[id(collection.shard)] = collection.shard
        members.setdefault(id(collection.shard), {})[name] = collection
    every = [spec for shard in shards.values() for spec in shard.specs]
    placement = placed(every, placing, world_size, local_world_size)
    found = []
    for key, shard in shards.items():
        names = {spec.name for spec in shard.specs}
        own = Placement(world_size, tuple(h for h in placement.hosted if h.table in names))
        check_placement(shard.specs, own)
        found.append(Family(members[key], shard, own))
    return tuple(found)


def placed(
    specs: Sequence[TableSpec], placing: Placing, world_size: int, local_world_size: int
) -> Placement:
    """The placement of some tables; those of one name are placed alike.

    Raises:
        UnknownName, ConfigError: as `families_of`.
    """
    named = {spec.name: spec for spec in specs}
    if isinstance(placing, Placement):
        for table in placing.tables():
            if table not in named:
                raise unknown_name("table of a placement", table, named)
        if placing.world_size != world_size:
            raise ConfigError(
                describe(
                    "world_size of a placement",
                    got=placing.world_size,
                    allowed=f"{world_size}, the ranks of this job",
                    remedy="Plan again for this job, or name sharding types only.",
                )
            )
        return placing
    return plan_placement(
        tuple(named.values()), world_size, kinds=placing, local_world_size=local_world_size
    )
