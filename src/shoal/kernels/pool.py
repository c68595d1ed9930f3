"""Rows read and pooled into bags, written where a lookup plan wants their columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import sent
from shoal.kernels.initial_values import device_form, retrieved
from shoal.kernels.launch import blocks_of, launch, power_of_2, step_of
from shoal.kernels.rounding import load_weights, storage_of
from shoal.kernels.rows import initial_rows
from shoal.kernels.tables import WEIGHTS_AT, CallGroups, RowForm, ShardLayout, row_address
from shoal.lookup import ADDED, BY_ROW, FIRST_N, MEAN, PoolPlan

LINE_WORDS = 10
GROUP, START, WIDTH, PREFIX, STRIDE, COLUMN, KIND, NTH, ADD = range(9)
ZERO = 4  # beside the pooling numbers of a plan: nothing is read
_TILE = 2048  # elements of a program's block; two rows of a bag are under way together
_HEAVY_TILE = 1024
_MOST_COLUMNS = 128
_MOST_BAGS = 128

_LINE_WORDS = tl.constexpr(LINE_WORDS)
_GROUP, _START, _WIDTH, _PREFIX, _STRIDE, _COLUMN, _KIND, _NTH, _ADD = map(tl.constexpr, range(9))
_MEAN, _FIRST_N, _ZERO = map(tl.constexpr, (MEAN, FIRST_N, ZERO))


@dataclass(frozen=True, slots=True)
class PoolLaunch:
    """Lines of one launch: int64 [L, LINE_WORDS], columns counted in steps of `step`."""

    form: RowForm
    lines_LW: Tensor
    step: int
    block_d: int


@dataclass(frozen=True, slots=True)
class PoolLines:
    """A pool plan on the device, for any number of bags.

    launches: in order. widths, doubles: of each output; rooms: columns it has in the memory that
    outputs share, one memory for float32 and one for float64. even: the width of all outputs where
    they fill one memory, else 0. untouched: outputs that no piece names.
    """

    launches: tuple[PoolLaunch, ...]
    widths: tuple[int, ...]
    doubles: tuple[bool, ...]
    rooms: tuple[int, ...]
    even: int
    untouched: tuple[int, ...]


def pool_lines(plan: PoolPlan, forms_G: Sequence[RowForm], device: torch.device) -> PoolLines:
    """Compile a pool plan; keep what comes back, a plan costs a copy to the device.

    Args:
        plan: checked.
        forms_G: row form of each group's table; equal forms should be one object.
    """
    widths = [output.width for output in plan.outputs]
    form_of = {
        part.output: forms_G[group] for group, pool in enumerate(plan.pools) for part in pool.slices
    }
    doubles = [o in form_of and form_of[o].real is torch.float64 for o in range(len(widths))]
    rooms = [-(-width // 8) * 8 for width in widths]  # outputs start aligned, whatever the widths
    prefixes, filled = [], [0, 0]
    for room, double in zip(rooms, doubles, strict=True):
        prefixes.append(filled[double])
        filled[double] += room
    batches: dict[tuple[int, int, int], list[list[int]]] = {}
    for wave, form, line in _lines(plan, prefixes, forms_G, form_of):
        # Lines that allow wide loads are not held back by those that do not.
        step = min(_step(line), 16 // form.dtype.itemsize)
        batches.setdefault((wave, id(form), step), []).append(line)
    forms = {id(form): form for form in forms_G}
    launches = tuple(
        _launch_of(forms[form], lines, step, device)
        for (_, form, step), lines in sorted(batches.items(), key=lambda item: item[0][0])
    )
    untouched = tuple(o for o in range(len(widths)) if o not in form_of)
    alike = len({*zip(widths, doubles, strict=True)}) == 1 and widths == rooms
    even = widths[0] if alike else 0
    return PoolLines(launches, tuple(widths), tuple(doubles), tuple(rooms), even, untouched)


def _lines(
    plan: PoolPlan,
    prefixes: Sequence[int],
    forms_G: Sequence[RowForm],
    form_of: Mapping[int, RowForm],
) -> Iterator[tuple[int, RowForm, list[int]]]:
    """(wave, form, line in columns): each slice after those whose columns it shares."""
    tables = plan.tables
    waves: dict[int, int] = {}
    before: dict[int, set[int]] = {}
    for _, *run in tables.sums_AM.tolist():
        for first, then in itertools.pairwise(slice_ for slice_ in run if slice_ >= 0):
            before.setdefault(then, set()).add(first)
    for slice_ in sorted(before):  # the slices before one have lower numbers
        waves[slice_] = 1 + max(waves.get(first, 0) for first in before[slice_])
    features = tables.features_F.tolist()
    for number, row in enumerate(tables.slices_S.tolist()):
        group, start, width, output, column, step, role, _, stride = row
        pooling, length = features[group][2] & ~BY_ROW, features[group][3]
        adds = int(role == ADDED)
        for nth in range(max(length, 1)):
            place = prefixes[output], stride, column + nth * step
            line = [group, start, width, *place, pooling, nth, adds, 0]
            yield waves.get(number, 0), forms_G[group], line
    for output, first, stop in tables.gaps:
        if output in form_of:
            place = prefixes[output], plan.outputs[output].width, first
            yield 0, form_of[output], [0, 0, stop - first, *place, ZERO, 0, 0, 0]


def _step(line: Sequence[int]) -> int:
    return min(step_of(line[word]) for word in (START, WIDTH, PREFIX, STRIDE, COLUMN))


def _launch_of(
    form: RowForm, lines: Sequence[Sequence[int]], step: int, device: torch.device
) -> PoolLaunch:
    widest = max(line[WIDTH] for line in lines)
    block_d = min(power_of_2(widest), _MOST_COLUMNS)
    words: list[int] = []
    for line in lines:
        for done in range(0, line[WIDTH], block_d):
            part = list(line)
            part[START] += done
            part[COLUMN] += done
            part[WIDTH] = min(block_d, line[WIDTH] - done)
            for word in (START, WIDTH, PREFIX, STRIDE, COLUMN):
                part[word] //= step
            words += part
    return PoolLaunch(form, sent(words, device).view(-1, LINE_WORDS), step, block_d)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_row(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, ids_ptr, table_B, handles_ptr, weights_ptr, at_B, going_B,
    factor_B, column_D, inside_D, segments_ptr, segments, quantiles_ptr, step,
    WEIGHT_BYTES: tl.constexpr, STORAGE: tl.constexpr, PLAIN: tl.constexpr,
    INITIAL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """[B, D]: the row at one position of each bag times its factor; zeros where there is none."""
    handle = tl.load(handles_ptr + at_B, mask=going_B, other=-1)
    there = going_B & (handle >= 0)
    address = row_address(chunks_ptr, columns, handle, WEIGHT_BYTES, there, WEIGHTS_AT)
    value = load_weights(address, column_D, there[:, None] & inside_D[None, :], STORAGE)
    if INITIAL:
        absent = going_B & (handle < 0)
        if tl.max(absent.to(tl.int32), axis=0) > 0:
            id_B = tl.load(ids_ptr + at_B, mask=absent, other=0)
            fresh = initial_rows(
                tables_ptr, table_B, id_B, absent, column_D, segments_ptr, segments, quantiles_ptr,
                STORAGE,
            )  # fmt: skip
            value = tl.where(absent[:, None], fresh, value)
    if not PLAIN:
        value = retrieved(value, column_D, segments_ptr, segments, step)
    if WEIGHTED:
        weight = tl.load(weights_ptr + at_B, mask=going_B, other=0.0)
        factor_B = factor_B * weight.to(factor_B.dtype)
    return value * factor_B[:, None]


@triton.jit(do_not_specialize=["columns", "bags", "tiles", "step"])  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, ids_ptr, splits_ptr, group_tables_ptr, handles_ptr,
    offsets_ptr, weights_ptr, lines_ptr, out_ptr, bags, tiles,
    segments_ptr, segments, quantiles_ptr, step,
    WEIGHT_BYTES: tl.constexpr, STORAGE: tl.constexpr, PLAIN: tl.constexpr,
    INITIAL: tl.constexpr, WEIGHTED: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr,
    BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    line = lines_ptr + (tl.program_id(0) // tiles) * _LINE_WORDS
    bag = (tl.program_id(0) % tiles).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    live = bag < bags
    group = tl.load(line + _GROUP)
    kind = tl.load(line + _KIND)
    column = tl.load(line + _START) * STEP + tl.arange(0, BLOCK_D)
    inside = tl.arange(0, BLOCK_D) < tl.load(line + _WIDTH) * STEP
    offsets = offsets_ptr + group * bags + bag
    # Nobody has read the offsets before: whatever they hold, rows are of the group's own table.
    first, last = tl.load(splits_ptr + group), tl.load(splits_ptr + group + 1)
    begin = tl.load(offsets, mask=live, other=0)
    end = tl.load(offsets + 1, mask=live, other=0)
    begin = tl.minimum(tl.maximum(begin, first), last)
    end = tl.minimum(tl.maximum(end, begin), last)
    if kind == _FIRST_N:
        begin = tl.minimum(begin + tl.load(line + _NTH), end)
        end = tl.minimum(begin + 1, end)
    if kind == _ZERO:
        end = begin
    count = end - begin
    real = out_ptr.dtype.element_ty
    factor = tl.full([BAGS], 1.0, real)
    if kind == _MEAN:
        many = tl.maximum(count, 1).to(real)
        factor = factor / many if real == tl.float64 else tl.div_rn(factor, many)
    table = tl.zeros([BAGS], tl.int32)
    if INITIAL:
        table += tl.load(group_tables_ptr + group)
    total = tl.zeros([BAGS, BLOCK_D], real)
    for j in range(0, tl.max(count, axis=0), PAIRS):
        value = _scaled_row(
            tables_ptr, chunks_ptr, columns, ids_ptr, table, handles_ptr, weights_ptr,
            begin + j, j < count, factor, column, inside, segments_ptr, segments, quantiles_ptr,
            step, WEIGHT_BYTES, STORAGE, PLAIN, INITIAL, WEIGHTED,
        )  # fmt: skip
        if PAIRS == 2:
            second = _scaled_row(
                tables_ptr, chunks_ptr, columns, ids_ptr, table, handles_ptr, weights_ptr,
                begin + j + 1, j + 1 < count, factor, column, inside, segments_ptr, segments,
                quantiles_ptr, step, WEIGHT_BYTES, STORAGE, PLAIN, INITIAL, WEIGHTED,
            )  # fmt: skip
            total = total + value + second
        else:
            total = total + value
    place = tl.load(line + _PREFIX) * STEP * bags + tl.load(line + _COLUMN) * STEP
    out = out_ptr + place + (bag * tl.load(line + _STRIDE) * STEP)[:, None]
    out = out + tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & inside[None, :]
    if tl.load(line + _ADD) != 0:
        total = tl.load(out, mask=mask, other=0.0) + total
    tl.store(out, total, mask=mask)


def gather_pooled(
    layout: ShardLayout,
    lines: PoolLines,
    groups: CallGroups,
    handles_N: Tensor,
    offsets_GB1: Tensor,
    weights_N: Tensor | None = None,
    *,
    initial: bool = False,
    global_step: int = 0,
) -> tuple[Tensor, ...]:
    """Pool rows: one [B, width] per output, float32 or float64. One launch a form, mostly.

    Bags are summed in order of position, each row times 1 / bag length ("mean"; missing ids
    count) and its weight; that is the compiled core's order. Columns that no piece covers are 0.
    The outputs of one dtype share memory.

    Args:
        lines: of `pool_lines`, for these groups.
        groups: the call; ids and tables are read with `initial` only. A bag takes no positions
            outside its group, whatever the offsets say.
        handles_N: int32 [N]; -1 reads as zeros, or with `initial` as the id's initial value.
        offsets_GB1: int64 [G*B+1] into the positions, group-major.
        weights_N: float32 [N], finite.
        global_step: what OneBit's scale goes by.
    """
    count = groups.tables_G.numel()
    bags = (offsets_GB1.numel() - 1) // max(count, 1)
    outputs, bases = _outputs(lines, bags, handles_N.device)
    if bags == 0:
        return outputs
    unused: Any = handles_N
    for wave in lines.launches:
        ready = device_form(wave.form, handles_N.device)
        light = ready.plain and not initial
        tile = (_TILE if light else _HEAVY_TILE) // wave.block_d
        block = min(max(tile, 8), _MOST_BAGS)
        tiles = blocks_of(bags, block)
        launch(
            _pool, (tiles * wave.lines_LW.shape[0],),
            layout.tables_KT, *layout.chunks,
            groups.ids_N, groups.splits_G1, groups.tables_G, handles_N, offsets_GB1,
            unused if weights_N is None else weights_N,
            wave.lines_LW, bases[wave.form.real is torch.float64], bags, tiles,
            ready.segments_PW, len(wave.form.segments), ready.quantiles_Q, global_step,
            WEIGHT_BYTES=wave.form.weight_bytes, STORAGE=storage_of(wave.form.dtype),
            PLAIN=ready.plain, INITIAL=initial, WEIGHTED=weights_N is not None,
            STEP=wave.step, PAIRS=2 if light else 1, BAGS=block, BLOCK_D=wave.block_d,
            num_warps=min(max(block * wave.block_d // (512 if light else 256), 1), 4),
            enable_fp_fusion=False,
        )  # fmt: skip
    return outputs


def _outputs(
    lines: PoolLines, bags: int, device: torch.device
) -> tuple[tuple[Tensor, ...], dict[bool, Tensor]]:
    """Outputs, and the memories they are parts of: one for float32 and one for float64."""
    bases, parts = {}, {}
    if lines.even and bags and not lines.untouched:  # parts of one shape are made by one call
        double = lines.doubles[0]
        dtype = torch.float64 if double else torch.float32
        base = torch.empty(bags * len(lines.widths), lines.even, dtype=dtype, device=device)
        return tuple(torch.unsafe_split(base, bags)), {double: base}
    for double in set(lines.doubles):
        pairs = zip(lines.rooms, lines.doubles, strict=True)
        rooms = [bags * room for room, own in pairs if own == double]
        dtype = torch.float64 if double else torch.float32
        base = bases[double] = torch.empty(sum(rooms), dtype=dtype, device=device)
        # Tensors of their own: autograd forbids changing views of one base.
        parts[double] = iter(torch.unsafe_split_with_sizes(base, rooms))
    places = zip(lines.widths, lines.doubles, strict=True)
    outputs = tuple([next(parts[double]).resize_(bags, width) for width, double in places])
    for output in lines.untouched:
        outputs[output].zero_()
    return outputs, bases
