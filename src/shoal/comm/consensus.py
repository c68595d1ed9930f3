"""All ranks or none, the same on every rank, and what rank 0 finds: how ranks agree.

Everything here is a collective call: all ranks make it, in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Pending, ReduceOp, Sizes
from shoal.comm.mismatched_calls import ALIKE
from shoal.errors import CheckpointError, CollectiveFailed, ConfigError, InputError, ShoalError

T = TypeVar("T")


def together(
    collectives: Collectives,
    what: str,
    work: Callable[[], T],
    *,
    failed: type[ShoalError] = CheckpointError,
    remedy: str = "Mend what is named, and try again.",
) -> list[T]:
    """Do a rank's part of some work; what it returned on every rank, by rank.

    Args:
        collectives: the ranks; all of them call this.
        what: the work, for messages.
        work: this rank's part, without collectives. Its result is picklable.
        failed, remedy: of the error when another rank's part failed.

    Raises:
        CheckpointError, or `failed`: another rank's part failed; it says which and why. Here its
            own error is raised, whatever it is.
        CollectiveFailed: a rank is gone.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except CollectiveFailed:
        raise
    except Exception as error:  # noqa: BLE001 - every rank hears of it, whatever it is
        failure = error
    kind = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
    text = None if failure is None else " ".join(f"{kind}{failure}".split())
    found = collectives.gather_objects((text, value), what=what)
    if isinstance(failure, ShoalError | MemoryError):
        raise failure
    wrong = [(rank, text) for rank, (text, _) in enumerate(found) if text is not None]
    if wrong:
        raise failed(
            what,
            got="; ".join(f"on rank {rank}: {text}" for rank, text in wrong),
            allowed="success on every rank",
            remedy=remedy,
        ) from failure
    return [one for _, one in found]


def as_first_rank(control: Collectives, find: Callable[[], T], *, what: str) -> T:
    """What rank 0 finds, on every rank.

    Args:
        control: collectives between the hosts of all ranks.
        find: called on rank 0 only.
        what: its result is, for errors.

    Raises:
        ShoalError: what rank 0 raised, on every rank; a ConfigError that names any other error.
        CollectiveFailed: a rank died or did not come in time.
    """
    found: tuple[T] | ShoalError | None = None
    own: Exception | None = None
    if control.rank == 0:
        try:
            found = (find(),)
        except ShoalError as error:
            # Errors with further `args` keep their kind, not their parts: the text has them.
            own, found = error, type(error)(str(error))
        except Exception as error:  # noqa: BLE001 - raised again once the others know
            own, found = error, ConfigError(f"rank 0: {type(error).__name__}: {error}")
    found = control.gather_objects(found, what=what)[0]
    if own is not None:
        raise own  # with its traceback
    if isinstance(found, ShoalError):
        raise found
    if found is None:
        raise ConfigError(
            what,
            got="nothing from rank 0",
            allowed="what rank 0 found",
            remedy="Start every rank with the same command.",
        )
    return found[0]


def require_same(
    control: Collectives,
    what: str,
    value: T,
    *,
    remedy: str,
    shown: Callable[[T, T], tuple[object, object]] = lambda theirs, first: (theirs, first),
) -> None:
    """Check that every rank has the same picklable value.

    Args:
        control: collectives between the hosts of all ranks.
        what: the value is, for errors.
        value: this rank's.
        remedy: what to do about another.
        shown: what an error shows of another rank's value and of rank 0's.

    Raises:
        ConfigError: on every rank, if any differs.
        CollectiveFailed: a rank died or did not come in time.
    """
    found = control.gather_objects(value, what=what)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            there, here = shown(theirs, found[0])
            got = f"{there} on rank {rank}, {here} on rank 0"
            allowed = "the same on every rank"
            raise ConfigError(what, got=got, allowed=allowed, remedy=remedy)


def reduced(collectives: Collectives, values: Tensor, op: ReduceOp, *, what: str) -> Tensor:
    """Values combined over ranks, on the values' own device."""
    (found,) = collectives.all_reduce(values.to(collectives.device), op, what=what).wait()
    return found.to(values.device)


def flagged(collectives: Collectives, flag: Tensor, *, what: str) -> Tensor:
    """Which ranks have a bool scalar set, uint8 [W]; the device is not waited for."""
    flags_W = torch.zeros(collectives.world_size, dtype=torch.uint8, device=flag.device)
    flags_W[collectives.rank] = flag
    return reduced(collectives, flags_W, "max", what=what)


def rank_rows(collectives: Collectives, row: Sequence[float], *, what: str) -> Pending:
    """Begin to gather every rank's row of numbers, float64 [W, X]: one small all-reduce."""
    every_WX = torch.zeros(collectives.world_size, len(row), dtype=torch.float64, device="cpu")
    every_WX[collectives.rank] = torch.tensor(row, dtype=torch.float64, device="cpu")
    return collectives.all_reduce(every_WX, "sum", what=what)


_CALL, _TIME, _BAD, _SETS = range(4)
_WORDS = 4


def agree(
    collectives: Collectives,
    calls: tuple[str, ...],
    call: str,
    sizes_WX: Tensor,
    *,
    time_s: int,
    sets: int,
    wrong: ShoalError | None = None,
) -> tuple[Sizes, int, int]:
    """Exchange sizes, and raise on every rank alike unless all came with the same good call.

    Args:
        calls: all names.
        sets: sets of values this rank sends, or -1 if it has no ids.
        wrong: what is wrong with this rank's input; it is raised once the others know.

    Returns:
        the sizes as exchanged, the latest time of any rank, and the sets of values that ranks with
        ids send, -1 if no rank has any.

    Raises:
        InputError: another rank's input is wrong, or it made another call.
    """
    ranks = collectives.world_size
    header_WX = torch.zeros(ranks, _WORDS, dtype=torch.int64, device="cpu")
    header_WX[:, _CALL] = zlib.crc32(call.encode())
    header_WX[:, _TIME] = time_s
    header_WX[:, _BAD] = wrong is not None
    header_WX[:, _SETS] = sets
    both_WX = torch.cat([header_WX, sizes_WX], dim=1)
    found = collectives.exchange_sizes(both_WX, what=call).wait()
    if wrong is not None:
        raise wrong
    heads_WX = found.received_WX
    bad = heads_WX[:, _BAD].nonzero().flatten().tolist()
    names = {zlib.crc32(name.encode()): name for name in calls}
    made = [names.get(int(crc), "no method of a table") for crc in heads_WX[:, _CALL].tolist()]
    counts = {int(number) for number in heads_WX[:, _SETS].tolist() if number >= 0}
    if set(made) != {call}:
        got, allowed = f"{made} by rank", "the same method on every rank"
    elif bad:
        got, allowed = f"wrong input on ranks {bad}", "good input on every rank"
    elif len(counts) > 1:
        got, allowed = "seen_weights on some ranks", "on all ranks or none"
    else:
        sizes = Sizes(found.sent_WX[:, _WORDS:], heads_WX[:, _WORDS:])
        return sizes, int(heads_WX[:, _TIME].max()), int(heads_WX[:, _SETS].max())
    remedy = "Nothing was changed; see the other ranks' errors."
    raise InputError(f"{call} over ranks", got=got, allowed=allowed, remedy=remedy)


# What ranks say of a lookup, in one word that goes with its sizes: (what it is, bits, its text).
_TIME_BITS = 32
_LOOKUP = 0x1FE  # on top: no size, time or usual float has these bits
_KINDS = ("evaluation", "training without init_on_lookup", "training", "another call")
_SAID: tuple[tuple[str, int, Callable[[int], str]], ...] = (
    ("backward passes of the tables", 11, str),
    ("optimizer steps", 10, str),
    ("the call", 2, _KINDS.__getitem__),
    ("the call", 9, lambda value: "a lookup" if value == _LOOKUP else "another call"),
)


def said(time_s: int, *, backs: int, step: int, kind: int) -> int:
    """What all ranks must say alike of a lookup, and its event time, as an int64.

    kind: 0 evaluation, 1 training that inserts later, 2 training.
    """
    word, at = time_s, _TIME_BITS
    for (_, bits, _), value in zip(_SAID, (backs, step, kind, _LOOKUP), strict=True):
        word |= (value & ((1 << bits) - 1)) << at
        at += bits
    return word - (1 << 64)


def latest_time(words: Sequence[int], rank: int, tables: str) -> int:
    """The latest event time of what ranks said, once they all said the same besides.

    Raises:
        CollectiveFailed: they did not; on every rank alike.
    """
    own = words[rank] >> _TIME_BITS
    if any(word >> _TIME_BITS != own for word in words):
        found, rest = "", [word >> _TIME_BITS for word in words]
        for what, bits, text in _SAID:
            values = [word & ((1 << bits) - 1) for word in rest]
            rest = [word >> bits for word in rest]
            if len(set(values)) > 1:
                found = f"{what} by rank: {', '.join(map(text, values))}"
        what = f"lookup in tables {tables} over ranks"
        raise CollectiveFailed(what, got=found, allowed="the same", remedy=ALIKE)
    return max(word & ((1 << _TIME_BITS) - 1) for word in words)
