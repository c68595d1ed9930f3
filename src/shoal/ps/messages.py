"""What workers ask parameter servers: one head, and frames of ids, counts and rows.

Rows of a message are those of its groups, one after the other: first all of float32 tables, then
all of float64 tables, in one frame each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from shoal.comm.frames import memory, tensor
from shoal.errors import InputError, ShapeError
from shoal.exchange.wire import WireKind, decode, encode, wire_dtype, wire_elements
from shoal.table.rows import real_dtype
from shoal.table.shard import MAX_TIME_S, IdGroups, NanPolicy, StepContext
from shoal.table.spec import TableSpec

Method = Literal[
    "hello", "find", "lookup", "apply", "assign", "assign_add", "reinitialize",
    "evict", "close_version", "clear", "size", "stats", "entry", "export",
    "average", "health", "count_lost",
]  # fmt: skip
READS = ("find", "lookup")
"""Methods whose reply has rows; one that is sent again does no harm."""

UPDATES = ("apply", "assign", "assign_add", "reinitialize")
"""Methods that change rows: each worker numbers its own, and a repeated number changes nothing."""

REALS = (torch.float32, torch.float64)

MOST_BYTES = 256 << 20
"""Of a frame of a request or a reply, unless a config says otherwise."""

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]


class Head(BaseModel):
    """The head of a request.

    Args:
        method: what to do.
        worker, number: who asks, and its number of this update, from 1; or of this lookup or
            `average`, above all before; 0 of what is neither.
        tables, sizes: of each group: its table, and how many ids it has.
        counted: a frame of int32 occurrences follows the ids.
        sets: sets of rows that follow.
        wire, reply: how rows travel in the request and in the reply; None: as they are.
        step, event_time_s, nan_policy, nan_clip, rates: of the `StepContext`.
        seen: updates that the server had applied when it read the rows of an update.
        argument: what a method without ids takes: a time, a table; with a number, the seconds
            within which the worker may send the request again.
        id: of `entry`.
        share: of `average`: how far weights move towards each other.
        server: `identity` of the server that is meant, once the worker knows it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Method
    worker: Annotated[str, Field(max_length=200)] = ""
    number: Whole = 0
    tables: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = ()
    sizes: tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...] = ()
    counted: bool = False
    sets: Annotated[int, Field(ge=0, le=2)] = 0
    wire: WireKind | None = None
    reply: WireKind | None = None
    step: Whole = 0
    event_time_s: Annotated[int, Field(ge=0, le=MAX_TIME_S)] = 0
    nan_policy: NanPolicy = "raise"
    nan_clip: float = 1.0
    rates: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    seen: Whole | None = None
    argument: Whole = 0
    id: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    server: Annotated[str, Field(max_length=32)] = ""

    def to_bytes(self) -> bytes:
        """As JSON, without what is as by default."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def of(cls, head: bytes) -> Head:
        """From `to_bytes` of anybody.

        Raises:
            InputError: not the head of a request.
        """
        try:
            return cls.model_validate_json(head)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "JSON"
            raise InputError(
                "request to a parameter server",
                got=f"{where}: {first['msg']}",
                allowed="heads that this version of Shoal writes",
                remedy="Run one version of Shoal on workers and servers.",
            ) from None

    def context(self) -> StepContext:
        """Of the step."""
        return StepContext(
            global_step=self.step,
            event_time_s=self.event_time_s,
            learning_rates=self.rates,
            nan_policy=self.nan_policy,
            nan_clip=self.nan_clip,
        )

    def segments(self, specs: Sequence[TableSpec], real: torch.dtype) -> list[tuple[int, int]]:
        """(rows, width) of each group whose rows are of that dtype."""
        pairs = [(n, specs[table]) for table, n in zip(self.tables, self.sizes, strict=True)]
        return [(n, spec.dim) for n, spec in pairs if real_dtype(spec) is real]


def identity(specs: Sequence[TableSpec], index: int, of: int, seed: int) -> str:
    """A short digest of which server it is: its index, their number, tables and seed."""
    parts = repr((index, of, seed, tuple(specs))).encode()
    return hashlib.sha256(parts).hexdigest()[:32]


Segments = list[tuple[int, int]]


def rows_to_frames(
    segments: Sequence[Segments], flats: Sequence[Tensor], kind: WireKind | None
) -> list[memoryview]:
    """Flat rows of each dtype of `REALS`, as they travel."""
    pairs = zip(segments, flats, strict=True)
    return [memory(encode(flat, parts, kind)) for parts, flat in pairs]


def rows_of_frames(
    segments: Sequence[Segments], frames: Sequence[memoryview], kind: WireKind | None
) -> list[Tensor]:
    """Back from `rows_to_frames`.

    Raises:
        ShapeError: other frames than these rows have.
    """
    if len(frames) != len(REALS):
        raise ShapeError(
            "rows of a request",
            got=f"{len(frames)} frames",
            allowed=len(REALS),
            remedy="Run one version of Shoal on workers and servers.",
        )
    flats = []
    for real, parts, frame in zip(REALS, segments, frames, strict=True):
        count = sum(wire_elements(rows, width, kind) for rows, width in parts)
        flat = tensor(frame, wire_dtype(kind, real), count, "rows")
        flats.append(decode(flat, parts, kind, real))
    return flats


def rows_of_segments(flat_E: Tensor, segments: Segments) -> list[Tensor]:
    """Flat rows as [rows, width] of each segment."""
    pieces = torch.split(flat_E, [rows * width for rows, width in segments])
    return [piece.view(shape) for piece, shape in zip(pieces, segments, strict=True)]


def groups_of(head: Head, ids: memoryview, specs: Sequence[TableSpec]) -> IdGroups:
    """The ids of a request, over their frame.

    Raises:
        InputError: no such table.
        ShapeError: other ids than its sizes say.
    """
    if len(head.tables) != len(head.sizes):
        raise ShapeError(
            "groups of a request",
            got=f"{len(head.tables)} tables and {len(head.sizes)} sizes",
            allowed="one size a table",
            remedy="Run one version of Shoal on workers and servers.",
        )
    if any(table >= len(specs) for table in head.tables):
        raise InputError(
            "tables of a request",
            got=list(head.tables),
            allowed=f"0..{len(specs) - 1}",
            remedy="Give workers and servers the same tables.",
        )
    sizes_G1 = torch.tensor([0, *head.sizes], dtype=torch.int64, device="cpu")
    return IdGroups(
        tensor(ids, torch.int64, sum(head.sizes), "ids"),
        sizes_G1.cumsum(0),
        torch.tensor(head.tables, dtype=torch.int32, device="cpu"),
    )
