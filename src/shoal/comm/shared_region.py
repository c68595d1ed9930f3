"""How the ranks of one host come to share memory: rank 0 makes it, all open it, its name goes."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from shoal import _core
from shoal.comm.collectives import Collectives
from shoal.errors import ConfigError, describe

__all__ = ["join", "refusal"]

logger = logging.getLogger(__name__)

_SLOT_BYTES = 256 << 10
_LEAST_SLOT_BYTES = 16 << 10
_MOST_BYTES = 256 << 20  # of all rings of a group
_SLOTS = 4
_MOST_S = 1e9  # of a timeout; the core counts nanoseconds in 64 bits


@dataclass(frozen=True, slots=True)
class _Home:
    """What ranks that can share memory and see each other's processes have in common."""

    host: str
    boot: str
    processes: str

    @classmethod
    def here(cls) -> _Home:
        return cls(
            socket.gethostname(),
            _text_of(Path("/proc/sys/kernel/random/boot_id")),
            os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else "",
        )


@dataclass(frozen=True, slots=True)
class _Offer:
    """What each rank tells before the region is opened; only rank 0 has a name or an error."""

    home: _Home
    name: str = ""
    token: int = 0
    error: str = ""


def join(bootstrap: Collectives, timeout_s: float) -> _core.SharedGroup:
    """Create the region on rank 0, open it everywhere, and take its name away again.

    Raises:
        ConfigError: the ranks cannot share memory; on every rank alike.
        CollectiveFailed: `bootstrap` failed.
    """
    what = "shared memory"
    mine = _Offer(_Home.here())
    region: _core.SharedRegion | None = None
    if bootstrap.rank == 0:
        region, mine = _create(bootstrap.world_size, mine.home)
    try:
        offers: list[_Offer] = bootstrap.gather_objects(mine, what=what)
        homes = {offer.home for offer in offers}
        if len(homes) > 1:
            hosts = ", ".join(f"{offer.home.host}" for offer in offers)
            raise refusal(
                "hosts of the ranks", hosts, "one host, and one container, for all of them"
            )
        first = offers[0]
        if first.error:
            raise refusal("memory for the rings between ranks", first.error, "some MB in /dev/shm")
        error = ""
        if region is None:
            try:
                region = _core.SharedRegion.open(first.name, first.token)
            except OSError as failure:
                error = str(failure)
        most_s = min(timeout_s, _MOST_S)
        group = _core.SharedGroup(region, bootstrap.rank, most_s) if region else None
        errors = bootstrap.gather_objects(error, what=what)
    finally:
        if mine.name:
            _core.SharedRegion.unlink(mine.name)
    if group is None or any(errors):
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
        raise refusal("shared memory of the ranks", told, "memory that all of them can open")
    group.watch_peers()
    return group


def _create(world_size: int, home: _Home) -> tuple[_core.SharedRegion | None, _Offer]:
    name, token = f"/shoal-{secrets.token_hex(8)}", secrets.randbits(63)
    pairs = max(1, world_size * (world_size - 1))
    slot_bytes = _SLOT_BYTES
    while slot_bytes > _LEAST_SLOT_BYTES and pairs * _SLOTS * slot_bytes > _MOST_BYTES:
        slot_bytes //= 2
    while True:
        try:
            region = _core.SharedRegion.create(name, token, world_size, slot_bytes)
            return region, _Offer(home, name, token)
        except OSError as error:
            if error.errno != errno.ENOSPC or slot_bytes <= _LEAST_SLOT_BYTES:
                return None, _Offer(home, error=str(error))
        slot_bytes //= 2
        logger.warning("little room for shared memory: trying slots of %d KiB", slot_bytes >> 10)


def refusal(what: str, got: object, allowed: str) -> ConfigError:
    """Build the error that says why there is no shared memory and what to use instead."""
    remedy = "Use the collectives over torch.distributed."
    return ConfigError(describe(what, got=got, allowed=allowed, remedy=remedy))


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
