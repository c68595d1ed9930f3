"""The Shard interface: the only owner of row state, and the values that cross it."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from shoal.errors import DTypeError, InputError, of_kind
from shoal.lookup import PoolPlan
from shoal.table.native import closed_snapshot
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Cursor, Entry, RowChunk, TableStats
from shoal.uncompiled import uncompiled

NanPolicy = Literal["raise", "skip", "clip"]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step knows that a shard may not look up by itself; bad values are an InputError.

    Args:
        global_step: optimizer steps done before this one.
        event_time_s: event time of the batch in whole seconds (0..2^32-1); stamps last-seen.
        learning_rates: table name -> one rate per segment, for tables that differ from their
            spec's rate at this step; others use `optimizer.rate(global_step)`.
        nan_policy: what a row's sum of gradients that is not finite does: "raise" before anything
            changed (also a single gradient that is not); "skip" leaves the row alone and counts
            it; "clip" puts 0 for NaN, and `nan_clip` for infinities.
            On CUDA "raise" does not wait for the device: rows with a non-finite gradient are
            left alone as under "skip", the others step, and NonFiniteGradient is raised at a
            later method, at the latest at `Shard.check`.
    """

    global_step: int = 0
    event_time_s: int = 0
    learning_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    nan_policy: NanPolicy = "raise"
    nan_clip: float = 1.0

    def __post_init__(self) -> None:
        remedy = "Pass the number of optimizer steps done."
        whole("global_step", self.global_step, 0, _MAX_STEP, remedy=remedy)
        event_time(self.event_time_s)
        if self.nan_policy not in _POLICIES:
            got, allowed = repr(self.nan_policy), ", ".join(_POLICIES)
            raise InputError("nan_policy", got, allowed, "Name one of them.")
        allowed = "a finite number above 0"
        _finite("nan_clip", self.nan_clip, allowed)
        if self.nan_clip <= 0:
            remedy = "Pass what infinities become, say 1.0."
            raise InputError("nan_clip", self.nan_clip, allowed, remedy)
        finite_rates(self.learning_rates)


# Made at every call: a named tuple is made in a third of a frozen dataclass's time.
class IdGroups(NamedTuple):
    """Ids of several tables in one call.

    Args:
        ids_N: int64 [N], contiguous, on the shard's device.
        splits_G1: int64 [G+1] on the CPU; group g is `ids_N[splits[g]:splits[g+1]]`.
        tables_G: int32 [G] on the CPU; index into `Shard.specs` of each group's table.
    """

    ids_N: Tensor
    splits_G1: Tensor
    tables_G: Tensor


@runtime_checkable
class Ticket(Protocol):
    """What a training lookup returns. `end()` (or apply, or garbage collection) releases it.

    Rows under a live ticket are neither evicted nor reused.
    """

    @property
    def groups(self) -> IdGroups: ...

    @property
    def admitted_N(self) -> Tensor:
        """bool [N]: the id has a row."""

    @property
    def found_N(self) -> Tensor:
        """bool [N]: the id had a row before this lookup."""

    def end(self) -> None: ...


class Found(NamedTuple):
    """Rows of a `find`: per group [n_g, D_g] weights (zeros when missing) and bool [N]."""

    weights: tuple[Tensor, ...]
    found_N: Tensor


@dataclass(frozen=True, slots=True)
class GradRecord:
    """One backward's gradient for one ticket: pooled (plan given) or per position.

    Args:
        ticket: the forward's ticket.
        grads: with a plan, one [B, width] per output; else one [n_g, D_g] per group.
        plan, offsets_GB1, weights_N: what `gather_pooled` was given.
        scale: factor on every gradient (loss normalisation, grad_reduce).
    """

    ticket: Ticket
    grads: tuple[Tensor, ...]
    plan: PoolPlan | None = None
    offsets_GB1: Tensor | None = None
    weights_N: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SummedGrads:
    """Gradients summed per admitted row: per table k unique ids [U_k] and sums [U_k, D_k].

    `tables` are indices into `Shard.specs`; ids come in order of first appearance.
    `counts` are occurrences per id.
    """

    tables: tuple[int, ...]
    ids: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]


class RowsById(Protocol):
    """Rows of several tables by id, of one process or of all ranks.

    Methods are ordered as called. Every method checks its whole input before it changes anything;
    empty input is fine. All 2^64 int64 ids are legal.

    Ids, weights and rows are on `device`, and so are rows and flags that methods return. Splits
    and table indices of groups, row chunks and entries are on the CPU.
    """

    @property
    def device(self) -> torch.device:
        """Where ids are given and rows are returned."""

    @property
    def specs(self) -> tuple[TableSpec, ...]: ...

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts."""

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        """`apply` without a ticket: inserts what is missing (admission applies), sums duplicates.

        seen_weights: per group [n_g, D_g], the weights the gradients were computed at; only
        delay-compensated optimizers read it.
        """

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; optimizer state of existing rows untouched. The last duplicate wins."""

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N], 1 existed, 0 inserted, in input order."""

    def evict(self, now_s: int) -> int:
        """Drop rows expired at event time `now_s`; returns how many. Never pinned ones.

        `capacity_rows` needs no eviction of its own: inserts keep it.
        """

    def close_version(self) -> int:
        """Close the current version, open the next; returns the closed one. Waits for writers."""

    def export(self, table: int) -> RowChunk:
        """All rows of a table, ordered by hash (placement.hash_ids)."""

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None."""

    def size(self, table: int) -> int:
        """Rows of a table."""

    def clear(self, table: int) -> None:
        """Drop all rows of a table. Live tickets make it raise TicketError."""

    def stats(self) -> tuple[TableStats, ...]: ...

    def check(self) -> None:
        """Raise what kernels found since the last call; waits for the device.

        Raises:
            NonFiniteGradient: a row's sum of gradients was not finite under nan_policy="raise".
        """


class Shard(RowsById, Protocol):
    """All rows, of all tables, that one process owns. Many Python threads may call.

    Next to rows by id: training lookups, whose tickets hold rows until their gradients are applied,
    and pooled reads, all on the shard's device; and rows in bulk for checkpoints, on the CPU.

    Attributes:
        last_step: global step of the last update: what reads without a step use (OneBit's scale).
    """

    last_step: int

    @property
    def seed(self) -> int: ...

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`find`, pooled: one [B, width] per output. Missing ids add zeros but count in a mean.

        offsets_GB1: int64 [G*B+1] into ids_N, group-major (as torchrec's KeyedJaggedTensor).
        """

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> Ticket:
        """Probe, decide admission once, insert admitted ids with their initial value.

        An id that is not admitted keeps its initial value in the ticket; nothing is stored.
        Duplicates are fine. counts_N: occurrences each position stands for (default 1).

        Raises:
            TableFull: a table with on_full="raise" has no room; nothing was inserted.
        """

    def gather(self, ticket: Ticket, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read the ticket's rows now: one [n_g, D_g] per group."""

    def gather_pooled(
        self,
        ticket: Ticket,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        """Read and pool the ticket's rows now: one [B, width] per output."""

    def apply(self, records: Sequence[GradRecord], *, ctx: StepContext) -> None:
        """Sum the gradients per row over all records, one optimizer step per admitted row.

        Stamps version, last-seen (max of event times) and count; ends the tickets.
        """

    def sum_grads(self, records: Sequence[GradRecord]) -> SummedGrads:
        """The per-row sums `apply` would use, materialised; tickets stay live."""

    def apply_summed(
        self, summed: SummedGrads, records: Sequence[GradRecord], *, ctx: StepContext
    ) -> None:
        """`apply` with sums the caller may have changed; ends the records' tickets."""

    @property
    def incarnation(self) -> int:
        """Random, in [1, 2^63). New for a shard, at a load, and when deletions start to be kept.

        For a cursor of another incarnation there is no snapshot but a full one.
        """

    def release(self, version: int | None, consumer: str = "") -> None:
        """A consumer has all up to `version`; None: it wants no more.

        Deletions are kept as far back as the slowest of the consumers known by this call wants, and
        not at all, until a snapshot, once the last one has left. `release(0, name)` makes a
        consumer known that has nothing yet. Beyond 2^28 deletions (4 GiB of $TMPDIR) the oldest go
        at the next snapshot point: a consumer that has not passed them, which may have died, is
        forgotten and takes a full snapshot if it comes back.

        Args:
            version: one that is not closed yet stands for the last closed one; it never falls.
            consumer: whose cursor it is.
        """

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        """Set a snapshot point and keep its rows; at most 8 snapshots are open at once.

        From here on deletions are kept, so that a later snapshot may start at this one's version.
        Snapshots are read and closed in any order; a row that changes is copied once for all open
        ones that need it.

        Args:
            since: only what changed after `since.version`; None: all rows.

        Raises:
            InputError: too many snapshots are open, or `since` is of another incarnation or older
                than the deletions that are kept: take a full one.
        """

    def resume(self, version: int) -> Cursor:
        """After a load: close all versions up to `version` and keep deletions from here on.

        Returns:
            the cursor of a consumer that has everything up to `version`.

        Raises:
            InputError: a version below one that a row is stamped with, or outside [0, 2^32 - 2].
        """

    def expect(self, table: int, rows: int) -> None:
        """So many rows in all are about to be loaded: a hint, so that nothing grows on the way.

        Raises:
            InputError: rows is negative.
            DTypeError: no int.
        """

    def load(self, table: int, chunk: RowChunk) -> None:
        """Upsert rows with their state and metadata."""

    def admission_state(self, table: int) -> AdmissionState:
        """Admission counts of ids that have no row yet."""

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Restore what `admission_state` returned.

        Raises:
            ShapeError: the counters are of another kind or size than the spec's.
        """


MIN_ID, MAX_ID = -(1 << 63), (1 << 63) - 1
MAX_TIME_S = (1 << 32) - 1
LAST_VERSION = (1 << 32) - 2  # one version must remain above that of any row

_POLICIES = get_args(NanPolicy)
_MAX_STEP = (1 << 63) - 1


def whole(what: str, value: object, low: int, high: int, *, remedy: str) -> None:
    """Check that a value is a Python int of low..high; bools and floats are none.

    Raises:
        DTypeError: not an int.
        InputError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{value!r} of type {type(value).__name__}"
        raise DTypeError(what, got=got, allowed=f"an int, {low}..{high}", remedy=remedy)
    if not low <= value <= high:
        raise InputError(what, got=value, allowed=f"{low}..{high}", remedy=remedy)


def event_time(value: object, what: str = "event_time_s") -> None:
    """Check whole seconds since 1970 that 32 bits hold.

    Raises:
        DTypeError: not an int.
        InputError: outside 0..2^32-1.
    """
    whole(what, value, 0, MAX_TIME_S, remedy="Pass seconds since 1970.")


def finite_rates(rates: Mapping[str, tuple[float, ...]]) -> None:
    """Check that learning rates are finite numbers.

    Raises:
        DTypeError: not a number.
        InputError: NaN or infinity.
    """
    for name, row in of_kind("learning rates", rates, Mapping).items():
        for rate in row:
            _finite(f"learning rate of table {name!r}", rate, "finite numbers")


def _finite(what: str, value: Any, allowed: str) -> None:
    try:
        if math.isfinite(value):
            return
    except TypeError:
        got = f"{value!r} of type {type(value).__name__}"
        remedy = "Pass a Python float."
        raise DTypeError(what, got=got, allowed=allowed, remedy=remedy) from None
    except OverflowError:
        pass
    remedy = "Check the schedule or the setting it comes from."
    raise InputError(what, got=value, allowed=allowed, remedy=remedy)


HASHES = 1 << 64  # hashes are in [0, HASHES)
MOST_BITS = 20  # of a histogram
BUFFER_BYTES = 64 << 20  # memory for rows that methods change, before they go to a file


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """The cost so far of keeping a snapshot's rows.

    Args:
        copied_rows: rows copied before a method changed them; those that an older snapshot needed,
            too, count there.
        spilled_bytes: bytes of such rows that went to the temporary file.
        waited_s: seconds that methods waited for that file.
    """

    copied_rows: int
    spilled_bytes: int
    waited_s: float


def not_copied(what: str) -> InputError:
    """What pickle, deepcopy and torch.save of a part of a shard raise."""
    return InputError(
        f"copy of {what}",
        got="pickle, torch.save or deepcopy",
        allowed="use by the shard that it is of",
        remedy="Copy the table or its export(), or save a checkpoint.",
    )


def check_buffer(buffer_bytes: int) -> None:
    """Check the memory for copied rows.

    Raises:
        DTypeError: not an int.
        InputError: outside 0..2^40.
    """
    remedy = "Leave it out for 64 MiB."
    whole("buffer_bytes of a snapshot", buffer_bytes, 0, 1 << 40, remedy=remedy)


@uncompiled
class Snapshot(ABC):
    """The rows that a shard had when `Shard.snapshot` closed a version.

    Between its making and `close` each row is kept as at the snapshot, whatever later methods do
    to it: it is read here, or copied away by the first method that changes it. Copies that do not
    fit the memory set aside for them go to an unlinked file. One thread reads; others train, or
    read snapshots of their own.

    Attributes:
        since, version: rows stamped in `(since, version]` are in it, a closed version; since 0:
            all rows.
        concurrent: whether methods that change rows may be called before `close`. Where not, they
            raise `InputError`; reading methods never do.
    """

    concurrent = True

    def __init__(self, specs: Sequence[TableSpec], since: int, version: int) -> None:
        self._specs = tuple(specs)
        self.since, self.version = since, version
        self._reading = threading.Lock()
        self._open, self._gives_way = True, False

    def __reduce__(self) -> Any:
        raise not_copied("a snapshot")

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits] on the CPU, bits in [0, 20].

        Raises:
            InputError: no such table, bits outside, or the snapshot is closed.
            CheckpointError: copies of changed rows could not be kept.
        """
        remedy = f"A histogram has at most 2^{MOST_BITS} bins."
        whole("bits of a histogram", bits, 0, MOST_BITS, remedy=remedy)
        with self._reading:
            self._check(table)
            return self._histogram(table, bits)

    def read(self, table: int, start: int, stop: int, *, state: bool = True) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h, on the CPU; 0 <= start <= stop <= HASHES.

        Ranges may be asked for in any order, each as often as wanted; ascending order is quick.
        Without `state`, the chunk's state has no columns.

        Raises:
            InputError: no such table, a range outside, or the snapshot is closed.
            CheckpointError: copies of changed rows could not be kept.
        """
        remedy = "Split [0, 2^64) into ranges as Python ints."
        whole("stop of a range of hashes", stop, 0, HASHES, remedy=remedy)
        whole("start of a range of hashes", start, 0, stop, remedy=remedy)
        with self._reading:  # what was found last is filled in; rows are kept until close()
            self._check(table)
            return self._read(table, start, stop, state)

    def deleted(self, table: int) -> Tensor:
        """Ids int64 [U] on the CPU, by h, deleted in `(since, version]`, without a row at
        `version`.

        Raises:
            InputError: no such table, or the snapshot is closed.
            CheckpointError: the log of deletions, or copies of changed rows, could not be kept.
        """
        with self._reading:
            self._check(table)
            return self._deleted(table)

    def give_way(self) -> None:
        """Leave cores to training: later reads use the calling thread only, where they had more."""
        self._gives_way = True

    def close(self) -> None:
        """Forget it, and let go of what it kept and no other open snapshot needs; nothing is copied
        for it from now on. Waits for a read. May be called twice."""
        with self._reading:
            if self._open:
                self._open = False
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check(self, table: int) -> None:
        remedy = "Count the tables as in Shard.specs."
        whole("table index", table, 0, len(self._specs) - 1, remedy=remedy)
        if not self._open:
            raise closed_snapshot()

    @property
    @abstractmethod
    def stats(self) -> SnapshotStats:
        """What it has cost so far; rows that an older snapshot copied for both are not counted."""

    @abstractmethod
    def _histogram(self, table: int, bits: int) -> Tensor: ...
    @abstractmethod
    def _read(self, table: int, start: int, stop: int, state: bool) -> RowChunk: ...
    @abstractmethod
    def _deleted(self, table: int) -> Tensor: ...
    @abstractmethod
    def _close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReadTicket:
    """A lookup that holds no rows; its ids, and how often each occurs, are needed later.

    Args:
        groups: the ids.
        counts_N: int64 [N], occurrences each position stands for; None: 1 each.
    """

    groups: IdGroups
    counts_N: Tensor | None = None

    @property
    def admitted_N(self) -> Tensor:
        """bool [N]: the id has a row; none is held."""
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    @property
    def found_N(self) -> Tensor:
        """bool [N]: the id had a row; none is held."""
        return torch.zeros_like(self.groups.ids_N, dtype=torch.bool)

    def end(self) -> None:
        """Nothing is held."""
