"""All ranks or none: calls that ranks make together, and work that all of them do or undo."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives
from shoal.comm.watch import ALIKE
from shoal.errors import CheckpointError, CollectiveFailed, InputError, ShoalError

T = TypeVar("T")


def together(collectives: Collectives, what: str, work: Callable[[], T]) -> list[T]:
    """Do a rank's part of some work; what it returned on every rank, by rank.

    Args:
        collectives: the ranks; all of them call this.
        what: the work, for messages.
        work: this rank's part, without collectives. Its result is picklable.

    Raises:
        CheckpointError: another rank's part failed; it says which and why. Here its own error is
            raised, whatever it is.
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
    told = None if failure is None else " ".join(f"{_name(failure)}{failure}".split())
    said = collectives.gather_objects((told, value), what=what)
    if isinstance(failure, ShoalError | MemoryError):
        raise failure
    wrong = [(rank, text) for rank, (text, _) in enumerate(said) if text is not None]
    if wrong:
        raise CheckpointError(
            what,
            got="; ".join(f"on rank {rank}: {text}" for rank, text in wrong),
            allowed="success on every rank",
            remedy="Mend what is named, and try again.",
        ) from failure
    return [one for _, one in said]


def _name(error: Exception) -> str:
    return "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "


_CALL, _TIME, _BAD, _SETS = range(4)
_WORDS = 4


class Agreed:
    """What ranks told each other before a call.

    sizes: int64 [W, X] on the CPU, sent and received. time_s: latest of any rank. sets: sets of
    values that ranks with ids send, -1 if no rank has any.
    """

    __slots__ = ("sets", "sizes", "time_s")

    def __init__(self, sent_WX: Tensor, received_WX: Tensor) -> None:
        self.sizes = sent_WX[:, _WORDS:], received_WX[:, _WORDS:]
        self.time_s = int(received_WX[:, _TIME].max())
        self.sets = int(received_WX[:, _SETS].max())


def agree(
    collectives: Collectives,
    calls: tuple[str, ...],
    call: str,
    sizes_WX: Tensor,
    *,
    time_s: int,
    sets: int,
    wrong: ShoalError | None,
) -> Agreed:
    """Exchange sizes, and raise on every rank alike unless all came with the same good call.

    Args:
        calls: all names.
        sets: sets of values this rank sends, or -1 if it has no ids.
        wrong: what is wrong with this rank's input; it is raised once the others know.

    Raises:
        InputError: another rank's input is wrong, or it made another call.
    """
    ranks = collectives.world_size
    header_WX = torch.zeros(ranks, _WORDS, dtype=torch.int64, device="cpu")
    header_WX[:, _CALL] = zlib.crc32(call.encode())
    header_WX[:, _TIME] = time_s if wrong is None else 0
    header_WX[:, _BAD] = wrong is not None
    header_WX[:, _SETS] = sets
    both_WX = torch.cat([header_WX, sizes_WX], dim=1)
    found = collectives.exchange_sizes(both_WX, what=call).wait()
    if wrong is not None:
        raise wrong
    heads_WX = found.received_WX
    bad = heads_WX[:, _BAD].nonzero().flatten().tolist()
    names = {zlib.crc32(name.encode()): name for name in calls}
    made = [names.get(int(number), "no verb of a table") for number in heads_WX[:, _CALL].tolist()]
    counts = {int(number) for number in heads_WX[:, _SETS].tolist() if number >= 0}
    if set(made) != {call}:
        got, allowed = f"{made} by rank", "the same verb on every rank"
    elif bad:
        got, allowed = f"wrong input on ranks {bad}", "good input on every rank"
    elif len(counts) > 1:
        got, allowed = "seen_weights on some ranks", "on all ranks or none"
    else:
        return Agreed(found.sent_WX, heads_WX)
    remedy = "Nothing was changed; see the other ranks' errors."
    raise InputError(f"{call} over ranks", got=got, allowed=allowed, remedy=remedy)


def finish(collectives: Collectives, call: str, work: Callable[[], object]) -> None:
    """Do this rank's part, then learn how the others' went.

    Raises:
        CollectiveFailed: another rank's part failed; this rank's is done.
        ShoalError: this rank's part failed, as it raised.
    """
    wrong: ShoalError | None = None
    try:
        work()
    except ShoalError as error:
        wrong = error
    flags_W1 = torch.full(
        (collectives.world_size, 1), int(wrong is not None), dtype=torch.int64, device="cpu"
    )
    found = collectives.exchange_sizes(flags_W1, what=call).wait()
    if not found.received_WX.any():
        return
    text = None if wrong is None else f"{type(wrong).__name__}: {wrong}"
    texts = collectives.gather_objects(text, what=call)
    if wrong is not None:
        raise wrong
    rank = next(i for i, told in enumerate(texts) if told is not None)
    raise CollectiveFailed(
        f"{call} on rank {rank}",
        got=texts[rank],
        allowed="success on every rank",
        remedy="Other ranks did their part; see that rank's error.",
    )


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
        raise _unlike([word >> _TIME_BITS for word in words], tables)
    return max(word & ((1 << _TIME_BITS) - 1) for word in words)


def _unlike(words: Sequence[int], tables: str) -> CollectiveFailed:
    found = ""
    for what, bits, text in _SAID:
        values = [word & ((1 << bits) - 1) for word in words]
        words = [word >> bits for word in words]
        if len(set(values)) > 1:
            found = f"{what} by rank: {', '.join(map(text, values))}"
    return CollectiveFailed(
        f"lookup in tables {tables} over ranks", got=found, allowed="the same", remedy=ALIKE
    )
