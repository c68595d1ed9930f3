"""Every error Shoal raises, as one tree.

ShoalError
├── ConfigError           a setting, spec or override is wrong           (ValueError)
│   ├── UnknownName       a name that does not exist; lists the nearest  (KeyError)
│   ├── LaunchError       launcher variables that contradict each other
│   └── MissingPackage    a package of an extra is not installed         (ImportError)
├── InputError            data of a call is wrong                        (ValueError)
│   ├── ShapeError        wrong shape, length or offsets
│   ├── DTypeError        wrong dtype, device or kind of object          (TypeError)
│   └── NonFiniteGradient a gradient holds NaN or infinity
├── DataError             a file or stream is missing, empty or malformed
├── TableFull             a fixed-capacity table has no slot for new ids
├── TicketError           a ticket was used after its end or by another shard
├── CheckpointError       saved state is missing, damaged or of another model
├── CollectiveFailed      ranks did not finish a collective together          (RuntimeError)
├── ServerLost            a server gave no answer in time            (RuntimeError)
├── OutOfDeviceMemory     a device allocation failed; the shard is unchanged
└── DeviceUnavailable     a requested device or backend is not available

A message reports what was wrong, what was got, what is allowed and how to fix it. The classes take
these four parts, by name or in this order:
`raise ShapeError("grads of table 'user'", got=..., allowed=..., remedy=...)`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveFailed",
    "ConfigError",
    "DTypeError",
    "DataError",
    "DeviceUnavailable",
    "InputError",
    "LaunchError",
    "MissingPackage",
    "NonFiniteGradient",
    "OutOfDeviceMemory",
    "ServerLost",
    "ShapeError",
    "ShoalError",
    "TableFull",
    "TicketError",
    "UnknownName",
    "all_of_kind",
    "collective_failed",
    "describe",
    "did_you_mean",
    "known_name",
    "no_package",
    "of_kind",
    "out_of_device_memory",
    "unknown_name",
]


class ShoalError(Exception):
    """Root of the tree; catch it to catch every error that Shoal raises on purpose.

    `describe` formats the message from what was wrong, what was got, what is allowed and the
    remedy. Without a remedy, `what` is the whole message.
    """

    def __init__(
        self, what: object = "", got: object = None, allowed: object = None, remedy: str = ""
    ) -> None:
        text = describe(str(what), got=got, allowed=allowed, remedy=remedy) if remedy else what
        super().__init__(text)


class ConfigError(ShoalError, ValueError):
    """A setting, spec or override is wrong."""


class UnknownName(ConfigError, KeyError):
    """A table, feature, segment or key that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LaunchError(ConfigError):
    """Variables of a launcher contradict each other, or are incomplete."""


class MissingPackage(ConfigError, ImportError):
    """A package of an extra is not installed; `name` is the module that was not found."""


class InputError(ShoalError, ValueError):
    """The data of a call is wrong; nothing was changed."""


class ShapeError(InputError):
    """Wrong shape, length or offsets."""


class DTypeError(InputError, TypeError):
    """Wrong dtype or device of a tensor, or an object of another kind."""


class NonFiniteGradient(InputError):
    """A gradient holds NaN or infinity and the policy is to raise; tables are unchanged."""


class DataError(ShoalError):
    """A file or stream is missing, empty or malformed."""


class TableFull(ShoalError):
    """A fixed-capacity table has no slot for new ids; the table is unchanged."""


class TicketError(ShoalError):
    """A ticket was used after its end, or by a shard that did not issue it."""


class CheckpointError(ShoalError):
    """Saved state is missing, damaged or of another model."""


class CollectiveFailed(ShoalError, RuntimeError):
    """A collective did not finish: a rank died, left, or did not join in time.

    The ranks no longer agree on what was sent, so the job ends here and resumes from a checkpoint.
    """


class ServerLost(ShoalError, RuntimeError):
    """A server gave no answer in time: it is down, or cannot be reached."""


class OutOfDeviceMemory(ShoalError, MemoryError):
    """A device allocation failed; the shard is unchanged."""


class DeviceUnavailable(ShoalError, RuntimeError):
    """A requested device or backend is not available on this machine."""


_SHOWN = 8_000  # letters of what was got, and of what is allowed
_NOTHING = re.compile(r"(?<![\w.-])0\.\.-1\b")


def describe(what: str, *, got: object, allowed: object, remedy: str) -> str:
    """Format an error message: what was wrong, what was got, what is allowed, the remedy.

    Of what is long the beginning is shown; a range of nothing is none.
    """
    parts = [str(got), _NOTHING.sub("none", str(allowed))]
    got, allowed = (f"{x[:_SHOWN]}... ({len(x):,} letters)" if x[_SHOWN:] else x for x in parts)
    return f"{what}: got {got}; allowed: {allowed}. {remedy}"


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A question with the one or two nearest names; empty if none is near."""
    near = difflib.get_close_matches(str(got), list(known), n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def of_kind(what: str, value: Any, *kinds: type) -> Any:
    """A value that has to be of one of these kinds.

    Raises:
        DTypeError: it is of another.
    """
    if isinstance(value, kinds):
        return value
    got = f"{value!r:.100} ({type(value).__name__})"
    allowed = " or ".join(kind.__name__ for kind in kinds)
    raise DTypeError(what, got, allowed, "Pass an object of that kind.")


def all_of_kind(what: str, values: Any, *kinds: type) -> tuple[Any, ...]:
    """Several values, each of which has to be of one of these kinds.

    Raises:
        DTypeError: one is of another, or it is one value alone.
    """
    several = isinstance(values, Iterable) and not isinstance(values, (str, *kinds))
    found = tuple(values) if several else of_kind(what, values, list, tuple)
    for value in found:
        if not isinstance(value, kinds):
            of_kind(f"one of {what}", value, *kinds)
    return found


# By the module that they bring, where its name is another one.
_PACKAGES = {"google": "protobuf", "grpc": "grpcio", "zmq": "pyzmq"}


def no_package(what: str, module: str, extra: str, allowed: str = "") -> MissingPackage:
    """Build a `MissingPackage` for a module that was not found, and that an extra brings."""
    top = module.partition(".")[0]
    error = MissingPackage(
        what,
        got=f"no package {_PACKAGES.get(top) or top.replace('_', '-')}",
        allowed=allowed or f"the packages of the extra {extra!r}",
        remedy=f"pip install 'shoal[{extra}]'.",
    )
    error.name = module
    return error


_LISTED = 50


def unknown_name(what: str, got: object, known: Iterable[str], *, remedy: str = "") -> UnknownName:
    """Build an `UnknownName` that suggests the nearest names and lists all (of many, 50)."""
    names = sorted(known)
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    hint = " ".join(filter(None, (did_you_mean(str(got), names), remedy)))
    return UnknownName(
        f"unknown {what}",
        got=repr(got) if isinstance(got, str) else f"{got!r:.100}",
        allowed=", ".join(names[:_LISTED]) + more or "none",
        remedy=hint or "Check the spelling.",
    )


def known_name(what: str, got: object, known: Collection[object], *, remedy: str = "") -> None:
    """Check that a name is one of those known.

    Raises:
        UnknownName: it is not.
    """
    if got not in known:
        raise unknown_name(what, got, map(str, known), remedy=remedy)


def collective_failed(
    what: str,
    *,
    rank: int,
    world_size: int,
    step: int,
    elapsed_s: float,
    timeout_s: float,
    reason: str,
    remedy: str = "Look at the other ranks' logs for the first that stopped, and start again from "
    "the last checkpoint.",
) -> CollectiveFailed:
    """Build a `CollectiveFailed` that names the collective, the rank, the step and the times."""
    return CollectiveFailed(
        f"collective {what!r} at step {step} on rank {rank} of {world_size}",
        got=f"{reason} after {elapsed_s:.1f} s",
        allowed=f"all ranks to take part within {timeout_s:.1f} s",
        remedy=remedy,
    )


def out_of_device_memory(what: str, wanted_bytes: int, free_bytes: int) -> OutOfDeviceMemory:
    """Build an `OutOfDeviceMemory` that names what does not fit, and the remedy."""
    return OutOfDeviceMemory(
        f"device memory for {what}",
        got=f"{wanted_bytes:,} bytes wanted",
        allowed=f"{free_bytes:,} bytes free",
        remedy="Keep rows in host memory (host_rows=HostRows(...)), give the table a row budget "
        "(capacity_rows with on_full='lru' or 'lfu'), or look up smaller batches.",
    )
