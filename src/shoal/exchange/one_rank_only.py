"""Verbs of a shard that have no meaning over ranks: they say where to go instead."""

from __future__ import annotations

from typing import Any, NoReturn

from shoal.errors import ConfigError, describe

__all__ = ["OneRankOnly"]


class OneRankOnly:
    """Lookups with tickets, and rows in bulk: verbs of one rank's shard.

    A training lookup is the exchange's own; rows in bulk are each rank's part of a checkpoint.
    """

    __slots__ = ()

    def find_pooled(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `EmbeddingCollection` pools."""
        raise _refused("find_pooled", "Call the collection, or `find`.")

    def find_or_init(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `EmbeddingCollection` looks up for training."""
        raise _refused("find_or_init", "Call the collection, `assign_add` or `reinitialize`.")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("gather", "Call `find`.")

    def gather_pooled(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("gather_pooled", "Call the collection.")

    def apply(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("apply of records", "Call the optimizer's step, or `apply_ids`.")

    def sum_grads(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: gradients are summed at their owner."""
        raise _refused("sum_grads", "Use the rank's own shard.")

    def apply_summed(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: gradients are summed at their owner."""
        raise _refused("apply_summed", "Use the rank's own shard.")

    def snapshot(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank saves its own part."""
        raise _refused("snapshot", "Use the rank's own shard, or save a checkpoint.")

    @property
    def incarnation(self) -> NoReturn:
        """Refused: every rank's shard has its own."""
        raise _refused("incarnation", "Use the rank's own shard.")

    def changes(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank tells of its own rows."""
        raise _refused("changes", "Use the rank's own shard.")

    def release(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank keeps deletions of its own."""
        raise _refused("release", "Use the rank's own shard.")

    def resume(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank goes on by itself."""
        raise _refused("resume", "Use the rank's own shard.")

    def expect(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("expect", "Load each rank's part into its own shard.")

    def load(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("load", "Load each rank's part into its own shard.")

    def admission_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank saves its own part."""
        raise _refused("admission_state", "Use the rank's own shard.")

    def load_admission_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("load_admission_state", "Use the rank's own shard.")


def _refused(verb: str, remedy: str) -> ConfigError:
    allowed = "find, assign, assign_add, reinitialize, apply_ids, entry, export, size, stats"
    return ConfigError(
        describe("verb of a table over ranks", got=verb, allowed=allowed, remedy=remedy)
    )
