"""One config for all ranks: rank 0 reads it, every rank gets it, or no rank goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from shoal.comm.collectives import Collectives
from shoal.config.compose import to_yaml
from shoal.errors import ConfigError, ShoalError, describe

__all__ = ["as_first_rank", "load_synced_config", "require_same"]

T = TypeVar("T")
Tree = TypeVar("Tree", bound=BaseModel)


def as_first_rank(votes: Collectives, find: Callable[[], T], *, what: str) -> T:
    """What rank 0 finds, on every rank; a collective call.

    Args:
        votes: collectives between the hosts of all ranks.
        find: called on rank 0 only.
        what: its result is, for errors.

    Raises:
        ShoalError: what rank 0 raised, on every rank; a ConfigError that tells of any other error.
        CollectiveFailed: a rank died or did not come in time.
    """
    found: tuple[T] | ShoalError | None = None
    own: Exception | None = None
    if votes.rank == 0:
        try:
            found = (find(),)
        except ShoalError as error:
            # Errors with further `args` keep their kind, not their parts: the text has them.
            own, found = error, type(error)(str(error))
        except Exception as error:  # noqa: BLE001 - raised again once the others know
            own, found = error, ConfigError(f"rank 0: {type(error).__name__}: {error}")
    found = votes.gather_objects(found, what=what)[0]
    if own is not None:
        raise own  # with its traceback
    if isinstance(found, ShoalError):
        raise found
    if found is None:
        raise ConfigError(
            describe(
                what,
                got="nothing from rank 0",
                allowed="what rank 0 found",
                remedy="Start every rank with the same command.",
            )
        )
    return found[0]


def load_synced_config(votes: Collectives, load: Callable[[], Tree]) -> Tree:
    """The config that rank 0 loads, on every rank; nothing has started when this raises.

    Files and SHOAL_* variables of the other ranks are not read.

    Args:
        votes: collectives between the hosts of all ranks.
        load: reads the config; called on rank 0 only.

    Raises:
        ShoalError: what rank 0 raised, on every rank; a ConfigError that tells of any other error.
        ConfigError: ranks that got different configs: other versions of this package.
        CollectiveFailed: a rank died or did not come in time.
    """
    found = as_first_rank(votes, load, what="config of rank 0")
    require_same(votes, found)
    return found


def require_same(votes: Collectives, config: BaseModel) -> None:
    """Check that every rank has the same settings.

    Raises:
        ConfigError: on every rank, if any differ; it names the lines.
        CollectiveFailed: a rank died or did not come in time.
    """
    text = to_yaml(config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = votes.gather_objects(digest, what="vote on the config")
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    texts = votes.gather_objects(text, what="configs that differ")
    theirs = set(texts[other].splitlines())
    lines = [line.strip() for line in texts[0].splitlines() if line not in theirs]
    own = set(texts[0].splitlines())
    others = [line.strip() for line in texts[other].splitlines() if line not in own]
    raise ConfigError(
        describe(
            "config over ranks",
            got=f"rank 0: {'; '.join(lines[:5]) or 'less'}; "
            f"rank {other}: {'; '.join(others[:5]) or 'less'}",
            allowed="the same on every rank",
            remedy="Start every rank with the same file, variables, overrides and version.",
        )
    )
