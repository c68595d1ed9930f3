"""Tiles of rows under way in a step, and what the host knows of a step before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.gradients import Runs, Sources, run_columns
from shoal.kernels.launch import power_of_2, shared_programs
from shoal.kernels.rounding import (
    FLOAT32,
    FLOAT64,
    load_weights,
    quad_words,
    rounding_domain,
    stochastic_bits,
    storage_of,
    stream_key,
    words_at,
)
from shoal.kernels.step_rules import kernel_rule
from shoal.kernels.tables import (
    ALARMED_AT,
    COUNT_LINE,
    COUNTS_AT,
    FIRST_COLUMN_AT,
    NONFINITE_AT,
    SALT_AT,
    SEED_AT,
    SEEN_AT,
    STATE_AT,
    VERSIONS_AT,
    WEIGHTS_AT,
    RowForm,
    SegmentForm,
    id_of,
    row_address,
    table_word,
    uint32_ptr,
)
from shoal.rules.compressors import OneBit

MOST_COLUMNS = 1024  # of a tile
_TILE_BYTES = 4096
_MOST_ROWS = 128
_WARPS = 4
# On each multiprocessor: far more than it holds, so that the last ones leave it idle briefly.
_PROGRAMS = 64
_FORMS_KEPT = 256


class Stamp(NamedTuple):
    """What a step knows besides rows and gradients.

    version: version that stepped rows get; event_time_s: at most 2^32 - 1; nan_policy: "raise" and
    "skip" leave a row with a non-finite sum as it is and count it, "clip" puts 0 for NaN and
    nan_clip, with the sign, for infinities.
    """

    version: int
    event_time_s: int
    global_step: int
    nan_policy: str = "raise"
    nan_clip: float = 1.0

    @property
    def clip(self) -> float:
        """`nan_clip`, or -1 where nothing is clipped, -2 where that is an alarm besides."""
        if self.nan_policy == "clip":
            return self.nan_clip
        return -2.0 if self.nan_policy == "raise" else -1.0

    @property
    def domain(self) -> int:
        """The word that keys the step's rounding."""
        return rounding_domain(self.global_step)


class FormCall(NamedTuple):
    """A row form's share of a call: its runs, what they sum, and what launches read of both.

    counts_N: int32 [N], occurrences of each position in the order of the runs; None means 1 each.
    """

    number: int
    form: RowForm
    runs: Runs
    sources: Sources
    counts_N: Tensor | None = None

    @property
    def room(self) -> int:
        """Most runs that there can be."""
        return self.runs.rooms[self.number]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.runs.order_N.device

    def run_words(self) -> tuple[Tensor | int, ...]:
        """Arguments for `run_words` and `runs_listed`: runs, room, cursors, form, first, last."""
        runs, number = self.runs, self.number
        ends = runs.first_run(number), runs.last_run(number)
        return runs.runs_WN, runs.runs_WN.shape[1], runs.cursors_FW, number, *ends

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Addresses, factors and counts by place; what there is none of is never read."""
        addresses, factors = self.sources.addresses_N, self.sources.factors_N
        return (
            addresses,
            addresses if factors is None else factors,
            addresses if self.counts_N is None else self.counts_N,
        )

    def constants(self) -> dict[str, Any]:
        """What kernels know of `gradients` when they are compiled."""
        return {
            "ALIGN": self.sources.alignments[self.number],
            "FACTORS": self.sources.factors_N is not None,
            "COUNTED": self.counts_N is not None,
        }


@dataclass(frozen=True, slots=True)
class StepForm:
    """What launches want to know of a row form.

    real: Triton's dtype of arithmetic; pitch: elements from one row of sums to the next, D padded
    to 16 bytes; fused: the one segment's constants where a launch can sum and step in one go;
    segments: constants of each segment's launch, None where plain torch has to step it.
    """

    form: RowForm
    real: Any
    pitch: int
    largest: float
    fused: dict[str, Any] | None
    segments: tuple[dict[str, Any] | None, ...]


_forms: dict[int, StepForm] = {}


def step_form(form: RowForm) -> StepForm:
    """The constants of a form, made once for each form object."""
    kept = _forms.get(id(form))
    if kept is not None:
        return kept
    unit = 16 // form.real.itemsize
    segments = tuple(_constants(form, segment) for segment in form.segments)
    made = StepForm(
        form=form,
        real=_real(form),
        pitch=(form.dim + unit - 1) // unit * unit,
        largest=torch.finfo(form.real).max,
        fused=segments[0] if len(segments) == 1 else None,
        segments=segments,
    )
    if len(_forms) >= _FORMS_KEPT:
        _forms.clear()
    # The value holds its form, so the identity in the key stays taken.
    _forms[id(form)] = made
    return made


def forget_forms() -> None:
    """Make all constants from scratch, for other tile shapes."""
    _forms.clear()


def columns_of_tile(dim: int) -> int:
    """Columns of a tile: a whole row of `dim` columns if they are no more than MOST_COLUMNS."""
    return min(power_of_2(dim), MOST_COLUMNS)


def rows_of_tile(dim: int, real: torch.dtype, most: int = _MOST_ROWS, size: int = 1) -> int:
    """Rows of a tile of `size` times the usual bytes."""
    return min(max(size * _TILE_BYTES // real.itemsize // columns_of_tile(dim), 1), most)


def programs_of(most: int, device: torch.device) -> int:
    """Programs that share work of which the host knows a bound only."""
    return shared_programs(most, device, _PROGRAMS)


def _real(form: RowForm) -> Any:
    return tl.float64 if form.real is torch.float64 else tl.float32


def _constants(form: RowForm, segment: SegmentForm) -> dict[str, Any] | None:
    if isinstance(segment.compressor, OneBit) or segment.dim > MOST_COLUMNS:
        return None
    rule = kernel_rule(segment.optimizer)
    if rule is None:
        return None
    return {
        "DIM": segment.dim,
        "RATE": segment.rate,
        "WEIGHT_BYTES": form.weight_bytes,
        "STATE_BYTES": form.state_bytes,
        "STORAGE": storage_of(form.dtype),
        "REAL": _real(form),
        "VECTORS": rule.vectors,
        "SCALARS": rule.scalars,
        "RULE": rule.kind,
        "PARAMS": rule.params,
        "ROWS": rows_of_tile(segment.dim, form.real),
        "BLOCK_D": columns_of_tile(segment.dim),
        "SHIFT": form.shift,
        "num_warps": _WARPS,
        # As the compiled core and the reference round: each operation by itself.
        "enable_fp_fusion": False,
    }


_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def item_where(  # type: ignore[no-untyped-def]
    addresses_ptr, partials, first, item, items, hot, PITCH_BYTES: tl.constexpr
):  # fmt: skip
    """An item of each run: index, there or not, a place or a piece, and its sum's address."""
    at = first + item
    on = item < items
    cold = on & (hot == 0)
    address = tl.load(addresses_ptr + at, mask=cold, other=0)
    return at, on, cold, tl.where(on & hot, partials + at * PITCH_BYTES, address)


@triton.jit  # type: ignore[untyped-decorator]
def item_rows(  # type: ignore[no-untyped-def]
    address, factors_ptr, at, weighted, column,
    DIM: tl.constexpr, ALIGN: tl.constexpr, REAL: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """[R, D] gradients at byte addresses (0: none), times the factors of `weighted` places."""
    rows = tl.multiple_of(address.to(tl.pointer_type(REAL)), ALIGN)
    inside = (address != 0)[:, None] & (column < DIM)[None, :]
    value = tl.load(rows[:, None] + column[None, :], mask=inside, other=0.0)
    if FACTORS:
        factor = tl.load(factors_ptr + at, mask=weighted, other=1.0).to(REAL)
        value = value * factor[:, None]
    return value


@triton.jit
def item_tallies(counts_ptr, tallies_ptr, at, on, hot):  # type: ignore[no-untyped-def]
    """Occurrences that an item of each run stands for."""
    cold = tl.load(counts_ptr + at, mask=on & (hot == 0), other=0).to(tl.int64)
    return cold + tl.load(tallies_ptr + at, mask=on & hot, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def rates_of(rates_ptr, columns, table, live, RATE: tl.constexpr, REAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rate of a segment of each row's table."""
    at = table.to(tl.int64) * columns + RATE
    return tl.load(rates_ptr + at, mask=live, other=0.0).to(REAL)


@triton.jit  # type: ignore[untyped-decorator]
def accepted(g, live, LARGEST: tl.constexpr, CLIP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Summed gradients as the policy has them, and the rows that may take them."""
    good = live
    if CLIP >= 0:
        g = tl.where(g != g, 0.0, g)
        g = tl.where(g > LARGEST, CLIP, tl.where(g < -LARGEST, -CLIP, g))
    else:
        bad = tl.max((tl.abs(g) <= LARGEST).to(tl.int32) ^ 1, axis=1)
        good = live & (bad == 0)
        g = tl.where(good[:, None], g, 0.0)
    return g, good


@triton.jit  # type: ignore[untyped-decorator]
def count_nonfinite(counters_ptr, table, bad, CLIP: tl.constexpr):  # type: ignore[no-untyped-def]
    at = table.to(tl.int64) * COUNT_LINE
    tl.atomic_add(counters_ptr + at + NONFINITE_AT, at * 0 + 1, mask=bad, sem="relaxed")
    if CLIP < -1:
        tl.atomic_add(counters_ptr + at + ALARMED_AT, at * 0 + 1, mask=bad, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, handle, live, column, inside,
    COLUMN: tl.constexpr, STATE_COLUMN: tl.constexpr, DIM: tl.constexpr,
    WEIGHT_BYTES: tl.constexpr, STATE_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    REAL: tl.constexpr, VECTORS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """A segment's weights, three state vectors [R, D] and two numbers [R]; what is not: dummies.

    Lanes without a row or column hold state that no rule divides by 0 for.
    """
    address = row_address(chunks_ptr, columns, handle, WEIGHT_BYTES, live, WEIGHTS_AT)
    w = load_weights(address, COLUMN + column, inside, STORAGE)
    s0, s1, s2 = w, w, w
    p0 = tl.zeros([handle.shape[0]], REAL)
    p1 = p0
    if VECTORS + SCALARS > 0:
        address = row_address(chunks_ptr, columns, handle, STATE_BYTES, live, STATE_AT)
        state = tl.multiple_of(address.to(tl.pointer_type(REAL)), 16)
        vectors = state[:, None] + (STATE_COLUMN + column)[None, :]
        if VECTORS > 0:
            s0 = tl.load(vectors, mask=inside, other=1.0)
        if VECTORS > 1:
            s1 = tl.load(vectors + DIM, mask=inside, other=1.0)
        if VECTORS > 2:
            s2 = tl.load(vectors + 2 * DIM, mask=inside, other=1.0)
        numbers = state + STATE_COLUMN + VECTORS * DIM
        if SCALARS > 0:
            p0 = tl.load(numbers, mask=live, other=0.5)
        if SCALARS > 1:
            p1 = tl.load(numbers + 1, mask=live, other=0.5)
    return w, s0, s1, s2, p0, p1


@triton.jit  # type: ignore[untyped-decorator]
def store_weights(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, handle, payload, table, live, start, column, inside, w, domain,
    COLUMN: tl.constexpr, WEIGHT_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    REAL: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Store weights of a segment's columns from `start` on; 16-bit ones are rounded by chance."""
    address = row_address(chunks_ptr, columns, payload, WEIGHT_BYTES, live, WEIGHTS_AT)
    if STORAGE == FLOAT32 or STORAGE == FLOAT64:  # noqa: SIM109
        rows = tl.multiple_of(address.to(tl.pointer_type(REAL)), 16)
        tl.store(rows[:, None] + (COLUMN + column)[None, :], w, mask=inside)
    else:
        id = id_of(chunks_ptr, columns, handle, live)
        seed = table_word(tables_ptr, table, live, SEED_AT)
        key = stream_key(seed, table_word(tables_ptr, table, live, SALT_AT))
        first = table_word(tables_ptr, table, live, FIRST_COLUMN_AT).to(tl.int32) + COLUMN
        if (COLUMN + SHIFT) % 4 == 0 and BLOCK_D % 4 == 0:
            word = quad_words(key, id, (first + start) // 4, domain, BLOCK_D // 4)
        else:
            word = words_at(key[:, None], id[:, None], first[:, None] + column[None, :], domain)
        rows = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
        bits = stochastic_bits(w, word, STORAGE)
        tl.store(rows[:, None] + (COLUMN + column)[None, :], bits, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, handle, payload, table, live, column, inside,
    w, s0, s1, s2, p0, p1, domain,
    COLUMN: tl.constexpr, STATE_COLUMN: tl.constexpr, DIM: tl.constexpr,
    WEIGHT_BYTES: tl.constexpr, STATE_BYTES: tl.constexpr, STORAGE: tl.constexpr,
    REAL: tl.constexpr, VECTORS: tl.constexpr, SCALARS: tl.constexpr, BLOCK_D: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Store what `load_rows` loaded."""
    store_weights(
        tables_ptr, chunks_ptr, columns, handle, payload, table, live, 0, column, inside, w, domain,
        COLUMN, WEIGHT_BYTES, STORAGE, REAL, BLOCK_D, SHIFT,
    )  # fmt: skip
    if VECTORS + SCALARS > 0:
        address = row_address(chunks_ptr, columns, payload, STATE_BYTES, live, STATE_AT)
        state = tl.multiple_of(address.to(tl.pointer_type(REAL)), 16)
        vectors = state[:, None] + (STATE_COLUMN + column)[None, :]
        if VECTORS > 0:
            tl.store(vectors, s0, mask=inside)
        if VECTORS > 1:
            tl.store(vectors + DIM, s1, mask=inside)
        if VECTORS > 2:
            tl.store(vectors + 2 * DIM, s2, mask=inside)
        numbers = state + STATE_COLUMN + VECTORS * DIM
        if SCALARS > 0:
            tl.store(numbers, p0, mask=live)
        if SCALARS > 1:
            tl.store(numbers + 1, p1, mask=live)


@triton.jit
def load_stamps(chunks_ptr, columns, handle, live):  # type: ignore[no-untyped-def]
    """Last-seen time and count of each row, int64."""
    # Here and below, all addresses are asked for before the first of them is used.
    seen = uint32_ptr(chunks_ptr, columns, handle, live, SEEN_AT)
    counts = uint32_ptr(chunks_ptr, columns, handle, live, COUNTS_AT)
    last = tl.load(seen, mask=live, other=0).to(tl.int64)
    return last, tl.load(counts, mask=live, other=0).to(tl.int64)


@triton.jit
def store_stamps(  # type: ignore[no-untyped-def]
    chunks_ptr, columns, handle, live, last, count, version, event_time_s, occurrences
):  # fmt: skip
    """Version, last-seen time (the later one) and count (it stays at its largest) of each row."""
    versions = uint32_ptr(chunks_ptr, columns, handle, live, VERSIONS_AT)
    seen = uint32_ptr(chunks_ptr, columns, handle, live, SEEN_AT)
    counts = uint32_ptr(chunks_ptr, columns, handle, live, COUNTS_AT)
    tl.store(versions, (last * 0 + version).to(tl.uint32), mask=live)
    tl.store(seen, tl.maximum(last, event_time_s).to(tl.uint32), mask=live)
    tl.store(counts, tl.minimum(count + occurrences, _WORD).to(tl.uint32), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def run_words(  # type: ignore[no-untyped-def]
    runs_ptr, room, cursors_ptr, form, first_run, last_run, begin, tile, size, ROWS: tl.constexpr
):
    """A tile of the form's runs from `begin` on, `size` of them; long ones come first.

    Returns their numbers, which of them there are, and handle, first place or piece, items, places.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < size
    number = begin + row
    longs = tl.load(cursors_ptr + 4 * form + 1)
    run = tl.where(number < longs, last_run - number, first_run + number - longs)
    handles, firsts, numbers, lengths = run_columns(runs_ptr, room, run)
    handle = tl.load(handles, mask=live, other=0)
    first = tl.load(firsts, mask=live, other=0)
    items = tl.load(numbers, mask=live, other=0)
    return row, live, handle, first, items, tl.load(lengths, mask=live, other=0)


@triton.jit
def runs_listed(cursors_ptr, form, first_run):  # type: ignore[no-untyped-def]
    """How many runs a form has."""
    shorts = tl.load(cursors_ptr + 4 * form) - first_run
    return shorts + tl.load(cursors_ptr + 4 * form + 1)
