"""What a table is: its name, its row layout, its limits. Frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Literal

from shoal.errors import ConfigError, unknown_name
from shoal.rules.admission import Admission
from shoal.rules.compressors import Compressor, Float32
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Initializer, Uniform
from shoal.rules.optimizers import Adagrad, Optimizer
from shoal.rules.rule import Checked, named, whole

RowDType = Literal["float32", "float16", "bfloat16", "float64"]
ServedDType = Literal["float32", "float16", "bfloat16", "float64", "int8"]
OnFull = Literal["raise", "lru", "lfu"]
CachePolicy = Literal["lru", "lfu"]

MAX_DIM = 1 << 14
MAX_THREADS = 1024
_MAX_ROWS = (1 << 31) - 2
_MAX_CAPACITY = (1 << 63) - 1
_MAX_FIRST_COLUMN = (1 << 30) - 1

_CAPACITY = whole(1, _MAX_CAPACITY, remedy="Leave it out for a table that grows.")
_EXPECTED = whole(0, _MAX_ROWS, remedy="It is a hint: leave it out when unsure.")
_BYTES = whole(
    0, _MAX_CAPACITY, remedy="Give the device memory for rows; 0 keeps none between batches."
)
_PART = "Leave it out unless the table is part of another."


@dataclass(frozen=True, kw_only=True)
class Segment(Checked):
    """A column range of a row with its own initializer, optimizer and compressor.

    Monolith calls it a slice.

    Args:
        dim: columns, 1 or more.
        name: what learning rates and layouts bind to; distinct in its table.
        initializer: of new rows.
        optimizer: rule of its columns; it has their optimizer state.
        compressor: what training reads and serving stores.

    Raises:
        ConfigError: a `dim` out of range, or one that the optimizer cannot have.
    """

    dim: Annotated[int, whole(1, MAX_DIM, remedy="Split wider rows over several tables.")]
    name: str = "vec"
    initializer: Initializer = field(default_factory=Uniform)
    optimizer: Optimizer = field(default_factory=Adagrad)
    compressor: Compressor = field(default_factory=Float32)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        self.optimizer.check_dim(self.dim)

    def described(self) -> str:
        return f"segment {self.name!r}"

    @property
    def state_width(self) -> int:
        """Floats of optimizer state a row carries for this segment."""
        return self.optimizer.state_width(self.dim)


@dataclass(frozen=True, kw_only=True)
class TableSpec(Checked):
    """A named set of rows.

    Args:
        name: unique in its collection; part of the key of every initial value.
        segments: column ranges, left to right; row dim D is the sum of their dims.
        dtype: storage of weights; 16-bit rows are rounded stochastically on update, optimizer
            state is float32 (float64 for float64 rows). "int8" is for serving on a CPU: whole
            numbers times a scale a row, rounded to nearest.
        capacity_rows: most rows the table may hold; None grows without limit.
        on_full: what happens at `capacity_rows`: "raise" `TableFull` before anything changed,
            or evict the least recently ("lru") or least frequently ("lfu") used rows.
        expected_rows: rows to make room for at once; a hint, never a limit.
        admission: which ids get a row; None admits each at the first occurrence.
        expiry: which rows `evict(now_s)` drops; None keeps all.
        hashed_as: the name that keys hashes, initial values and rounding; None means `name`.
        first_column: where this row starts in the row of `hashed_as`. A table of columns
            [first_column, first_column + D) of another has the bits of those columns.

    Raises:
        ConfigError: a value out of range, no segments, or two of one name.
    """

    name: Annotated[str, named("Name the table.")]
    segments: tuple[Segment, ...]
    dtype: ServedDType = "float32"
    capacity_rows: Annotated[int | None, _CAPACITY.or_none()] = None
    on_full: OnFull = "raise"
    expected_rows: Annotated[int, _EXPECTED] = 0
    admission: Admission | None = None
    expiry: Expiry | None = None
    hashed_as: Annotated[str | None, named(_PART).or_none()] = None
    first_column: Annotated[int, whole(0, _MAX_FIRST_COLUMN, remedy=_PART)] = 0

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not self.segments:
            raise ConfigError(
                f"segments of table {self.name!r}",
                got="none",
                allowed="one or more",
                remedy="Give the table at least one Segment(dim=...).",
            )
        names = [segment.name for segment in self.segments]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"segment names of table {self.name!r}",
                got=names,
                allowed="distinct names",
                remedy="Name each segment: Segment(name=..., dim=...).",
            )

    def described(self) -> str:
        return f"table {self.name!r}"

    @property
    def hash_name(self) -> str:
        """The name whose salt keys hashes, initial values and rounding."""
        return self.name if self.hashed_as is None else self.hashed_as

    @cached_property
    def dim(self) -> int:
        """Row dim D."""
        return sum(segment.dim for segment in self.segments)

    @cached_property
    def stored_width(self) -> int:
        """Elements of a row's weights as stored: D, and the 4 bytes of an int8 row's scale."""
        return self.dim + 4 if self.dtype == "int8" else self.dim

    @cached_property
    def state_width(self) -> int:
        """Optimizer-state width S, in floats."""
        return sum(segment.state_width for segment in self.segments)

    @cached_property
    def spans(self) -> tuple[tuple[int, int, Segment], ...]:
        """Columns [start, stop) of each segment, and the segment."""
        stops = accumulate(segment.dim for segment in self.segments)
        return tuple((stop - s.dim, stop, s) for stop, s in zip(stops, self.segments, strict=True))

    def columns(self, segment: str) -> tuple[int, int]:
        """Column range [start, stop) of a segment.

        Raises:
            UnknownName: no such segment.
        """
        for start, stop, candidate in self.spans:
            if candidate.name == segment:
                return start, stop
        raise unknown_name(
            f"segment of table {self.name!r}", segment, [s.name for s in self.segments]
        )


@dataclass(frozen=True, kw_only=True)
class HostRows(Checked):
    """Rows of a GPU's tables in pinned host memory, those in use in a cache on the device.

    A shard has all its rows there, or, without this value, all on the device. Results do not
    depend on it.

    Args:
        cache_bytes: device memory for rows. 0 keeps none from one batch to the next; each batch
            then takes what its distinct rows need, at most one row a position.
        policy: whose slot is taken first: the least recently ("lru") or the least frequently
            ("lfu") used rows'; a batch counts as one use, and counts age.

    Raises:
        ConfigError: bad cache_bytes or policy.
    """

    cache_bytes: Annotated[int, _BYTES] = 0
    policy: CachePolicy = "lru"
