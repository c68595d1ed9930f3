"""Where the gradient of each position of a call lies, and the positions of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import staged
from shoal.kernels.launch import blocks_of, launch
from shoal.kernels.tables import (
    FORM_AT,
    TABLE_AT,
    ShardLayout,
    chunk_word,
    group_of,
    search_steps,
    table_word,
)
from shoal.lookup import Pool

COLD_RUN = 8  # positions of a run that one program adds in turn
SHORTEST_PIECE = 64

_BLOCK = 1024
_SHORT = tl.constexpr(2)  # as many as the step asks for at a time
_COLD = tl.constexpr(COLD_RUN)
_SHORTEST = tl.constexpr(SHORTEST_PIECE)
_DOUBLINGS = tl.constexpr(12)  # pieces of up to 2^18 positions


# Made at every call, as some more below: a named tuple costs a third of a frozen dataclass.
class Runs(NamedTuple):
    """Runs of N positions, listed by row form: form f has a region of its own.

    A region is filled from both ends: runs of one or two places from its first column on, longer
    ones from its last column backwards, so that those of a tile are about as long.

    order_N: int64 [N], the call's positions sorted by handle. "Place" means an index into it.
    runs_WN: int32 [4, N]: handle; first place, or first piece of a run that is cut; number of
        places or pieces; number of places.
    pieces_WP: int32 [2, P]: first place of each piece and the one behind its last.
    cursors_FW: int32 [F, 4]: behind the last short run; number of long runs; behind the last piece;
        behind the region's last column.
    rooms: most runs that each form can have, known without asking the device.
    """

    order_N: Tensor
    runs_WN: Tensor
    pieces_WP: Tensor
    cursors_FW: Tensor
    rooms: tuple[int, ...]

    def first_run(self, form: int) -> int:
        """Where the region of a form begins in `runs_WN`."""
        return sum(self.rooms[:form])

    def last_run(self, form: int) -> int:
        """Where it ends: its last column."""
        return sum(self.rooms[: form + 1]) - 1

    def first_piece(self, form: int) -> int:
        """Where the region of a form begins in `pieces_WP`."""
        return sum(piece_room(room) for room in self.rooms[:form])


def piece_room(positions: int) -> int:
    """Most pieces that so many positions can have."""
    return positions // (COLD_RUN + 1)


@triton.jit
def run_columns(runs_ptr, room, run):  # type: ignore[no-untyped-def]
    """Pointers to the words of each run; multiples of `room`, an int32, need not be one."""
    handles = runs_ptr + run.to(tl.int64)
    firsts = handles + room
    numbers = firsts + room
    return handles, firsts, numbers, numbers + room


@triton.jit
def _piece_length(length):  # type: ignore[no-untyped-def]
    # About four times the root: adding pieces then takes no longer than adding up one of them.
    piece = length * 0 + _SHORTEST
    for _ in tl.static_range(_DOUBLINGS):
        piece = tl.where(piece * piece < 16 * length, 2 * piece, piece)
    return piece


@triton.jit
def _run_length(sorted_ptr, handle, at, head, n):  # type: ignore[no-untyped-def]
    """Places of each run that starts at `at`; 0 for lanes where none does."""
    same = head
    length = head.to(tl.int64)
    for step in tl.static_range(1, _COLD + 1):
        following = tl.load(sorted_ptr + at + step, mask=same & (at + step < n), other=-1)
        same = same & (following == handle)
        length += same.to(tl.int64)
    low = at
    high = tl.where(same, n, at + 1).to(tl.int64)
    while tl.max(high - low, axis=0) > 1:
        middle = (low + high) // 2
        open_ = high - low > 1
        held = tl.load(sorted_ptr + middle, mask=open_, other=-1)
        low = tl.where(open_ & (held == handle), middle, low)
        high = tl.where(open_ & (held != handle), middle, high)
    return tl.where(same, high - at, length)


@triton.jit(do_not_specialize=["columns", "n", "room", "piece_room"])  # type: ignore[untyped-decorator]
def _list_runs(  # type: ignore[no-untyped-def]
    tables_ptr, chunks_ptr, columns, sorted_ptr, runs_ptr, pieces_ptr, cursors_ptr, n, room,
    piece_room, FORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    handle = tl.load(sorted_ptr + at, mask=live, other=-1)
    before = tl.load(sorted_ptr + at - 1, mask=live & (at > 0), other=-1)
    head = (handle >= 0) & (handle != before)
    length = _run_length(sorted_ptr, handle, at, head, n)
    hot = length > _COLD
    piece = _piece_length(length)
    items = tl.where(hot, (length + piece - 1) // piece, length)
    form = handle * 0
    if FORMS > 1:
        table = chunk_word(chunks_ptr, columns, handle, head, TABLE_AT)
        form = table_word(tables_ptr, table, head, FORM_AT).to(tl.int32)
    for number in range(FORMS):
        mine = head & (form == number)
        shorts = (mine & (length <= _SHORT)).to(tl.int32)
        longs = (mine & (length > _SHORT)).to(tl.int32)
        pieces = tl.where(mine & hot, items, 0).to(tl.int32)
        cursors = cursors_ptr + 4 * number
        first_short = tl.atomic_add(cursors, tl.sum(shorts, axis=0), sem="relaxed")
        first_long = tl.atomic_add(cursors + 1, tl.sum(longs, axis=0), sem="relaxed")
        first_piece = tl.atomic_add(cursors + 2, tl.sum(pieces, axis=0), sem="relaxed")
        last = tl.load(cursors + 3) - 1
        short = first_short + tl.cumsum(shorts, axis=0) - 1
        long = last - first_long - tl.cumsum(longs, axis=0) + 1
        run = tl.where(length > _SHORT, long, short).to(tl.int64)
        slot = (first_piece + tl.cumsum(pieces, axis=0) - pieces).to(tl.int64)
        first = tl.where(hot, slot, at)
        handles, firsts, numbers, lengths = run_columns(runs_ptr, room, run)
        tl.store(handles, handle, mask=mine)
        tl.store(firsts, first.to(tl.int32), mask=mine)
        tl.store(numbers, items.to(tl.int32), mask=mine)
        tl.store(lengths, length.to(tl.int32), mask=mine)
        for step in range(tl.max(pieces, axis=0)):
            cut = step < pieces
            start = at + step * piece
            stop = tl.minimum(start + piece, at + length)
            tl.store(pieces_ptr + slot + step, start.to(tl.int32), mask=cut)
            tl.store(pieces_ptr + piece_room + slot + step, stop.to(tl.int32), mask=cut)


def runs_of(
    handles_N: Tensor,
    layout: ShardLayout | None = None,
    rooms: Sequence[int] | None = None,
    *,
    starts_FW: Tensor | None = None,
) -> Runs:
    """Sort a call's positions by row and list the runs; negative handles are left out.

    Args:
        handles_N: int32 [N], N < 2^31; those of several lookups may follow one another.
        layout: the shard's, wanted where its tables have more than one row form.
        rooms: capacity in positions of each form, on the host; [N] if there is one form.
        starts_FW: `region_starts` of the rooms; sent from here if None, which a captured graph
            would do from memory that is gone.
    """
    n = handles_N.numel()
    bounds = (n,) if rooms is None else tuple(rooms)
    room, most_pieces = sum(bounds), sum(piece_room(count) for count in bounds)
    device = handles_N.device
    sorted_N, order_N = torch.sort(handles_N, stable=True)
    words = torch.empty(4 * room + 2 * most_pieces, dtype=torch.int32, device=device)
    runs = Runs(
        order_N,
        words[: 4 * room].view(4, room),
        words[4 * room :].view(2, most_pieces),
        region_starts(bounds, device) if starts_FW is None else starts_FW.clone(),
        bounds,
    )
    if n == 0:
        return runs
    unused = sorted_N if layout is None else layout.tables_KT
    chunks_WC = sorted_N if layout is None else layout.chunks_WC
    launch(
        _list_runs, (blocks_of(n, _BLOCK),),
        unused, chunks_WC, chunks_WC.shape[-1], sorted_N, runs.runs_WN, runs.pieces_WP,
        runs.cursors_FW, n, room, most_pieces,
        FORMS=len(bounds), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return runs


def region_starts(rooms: Sequence[int], device: torch.device) -> Tensor:
    """`Runs.cursors_FW` before any run is listed, on the device."""
    words, run, piece = [], 0, 0
    for count in rooms:
        words += [run, 0, piece, run + count]
        run, piece = run + count, piece + piece_room(count)
    pairs = np.array(words, dtype=np.int32).view(np.int64)
    return staged(pairs, device).view(torch.int32).view(-1, 4)


_SOURCES_BLOCK = 512
_GROUPS_KEPT = 64
_WORDS = 12
_BASE, _STRIDE, _KIND = 0, 1, 2  # address of bag or position 0, bytes to the next, what follows
_LENGTH, _LANE = 3, 4  # first_n: lanes, bytes from one to the next
_BAGS, _OFFSETS, _WEIGHTS = 5, 6, 7  # addresses, or 0: int32, int64, float32
_WITHIN = 8  # first position of the record in the call
_SCALE = 9  # bits of a float64
_POSITION, _SUM, _MEAN, _FIRST_N = 0, 1, 2, 3
_KINDS = {"sum": _SUM, "mean": _MEAN, "first_n": _FIRST_N}

_T_WORDS, _T_MEAN, _T_FIRST_N = map(tl.constexpr, (_WORDS, _MEAN, _FIRST_N))
_T_BASE, _T_STRIDE, _T_KIND, _T_LENGTH, _T_LANE = map(tl.constexpr, range(5))
_T_BAGS, _T_OFFSETS, _T_WEIGHTS, _T_WITHIN, _T_SCALE = map(tl.constexpr, range(5, 10))


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """One group of a plan, and its table's row dim and form."""

    pool: Pool
    dim: int
    form: int = 0


class GradGroups(NamedTuple):
    """The groups of one record: where their gradients lie. Made by `per_position` or `pooled`.

    facts: all that decides the rest but `kept`; words: makes numpy int64 [G, words]; counts:
    positions of each group; forms: row form of each; scaled: some factor is not 1; kept: what the
    addresses point into.
    """

    facts: tuple[Any, ...]
    words: Callable[[], Any]
    counts: tuple[int, ...]
    forms: tuple[int, ...]
    scaled: bool
    kept: tuple[Tensor, ...]


class Sources(NamedTuple):
    """Gradients of the N positions of a call, in the order of its sorted runs.

    addresses_N: int64 [N], 0 where a position has no gradient; factors_N: float32 or float64 [N],
    None if all are 1; alignments: bytes that all addresses of a form are multiples of (16 at most).
    """

    addresses_N: Tensor
    factors_N: Tensor | None
    alignments: tuple[int, ...]
    kept: tuple[Tensor, ...]


@triton.jit(do_not_specialize=["n", "bounds", "batch", "steps"])  # type: ignore[untyped-decorator]
def _find_bags(offsets_ptr, bags_ptr, n, bounds, batch, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    bag = at * 0
    for step in range(steps):
        further = bag + ((at * 0 + 1) << (steps - 1 - step))
        inside = live & (further < bounds)
        start = tl.load(offsets_ptr + further, mask=inside, other=0)
        bag = tl.where(inside & (start <= at), further, bag)
    tl.store(bags_ptr + at, (bag % batch).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["n", "groups"])  # type: ignore[untyped-decorator]
def _write_sources(  # type: ignore[no-untyped-def]
    words_ptr, order_ptr, addresses_ptr, factors_ptr, n, groups, STEPS: tl.constexpr,
    POOLED: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    position = tl.load(order_ptr + at, mask=live, other=0)
    splits_ptr = words_ptr + groups.to(tl.int64) * _T_WORDS
    group = group_of(splits_ptr, groups, position, live, STEPS)
    words = words_ptr + group * _T_WORDS
    bag = position - tl.load(splits_ptr + group, mask=live, other=0)
    address = tl.load(words + _T_BASE, mask=live, other=0)
    stride = tl.load(words + _T_STRIDE, mask=live, other=0)
    if POOLED:
        kind = tl.load(words + _T_KIND, mask=live, other=0)
        within = position - tl.load(words + _T_WITHIN, mask=live, other=0)
        bags_ptr = tl.load(words + _T_BAGS, mask=live, other=0).to(tl.pointer_type(tl.int32))
        found = tl.load(bags_ptr + within, mask=live & (kind > 0), other=0)
        bag = tl.where(kind > 0, found.to(tl.int64), bag)
        starts = tl.load(words + _T_OFFSETS, mask=live, other=0).to(tl.pointer_type(tl.int64)) + bag
        start = tl.load(starts, mask=live & (kind >= _T_MEAN), other=0)
        lane = tl.where(kind == _T_FIRST_N, within - start, 0)
        address += lane * tl.load(words + _T_LANE, mask=live, other=0)
        length = tl.load(words + _T_LENGTH, mask=live, other=0)
        dropped = (kind == _T_FIRST_N) & ((lane < 0) | (lane >= length))
        stride = tl.where(dropped, 0, stride)
        address = tl.where(dropped, 0, address)
    tl.store(addresses_ptr + at, address + bag * stride, mask=live)
    if FACTORS:
        real = factors_ptr.dtype.element_ty
        scale = tl.load(words + _T_SCALE, mask=live, other=0)
        factor = scale.to(tl.float64, bitcast=True).to(real)
        if POOLED:
            weights = tl.load(words + _T_WEIGHTS, mask=live, other=0)
            weighted = live & (weights != 0)
            weights_ptr = weights.to(tl.pointer_type(tl.float32)) + within
            factor *= tl.load(weights_ptr, mask=weighted, other=1.0).to(real)
            averaged = live & (kind == _T_MEAN)
            stop = tl.load(starts + 1, mask=averaged, other=1)
            share = tl.maximum(tl.where(averaged, stop - start, 1), 1).to(real)
            factor = tl.div_rn(factor, share) if real == tl.float32 else factor / share
        tl.store(factors_ptr + at, factor, mask=live)


def bags_of(offsets_GB1: Tensor, batch: int, positions: int) -> Tensor:
    """Each position's bag in its group, int32 [N]; needs no gradient.

    Args:
        offsets_GB1: int64 [G*B+1] on the device, group-major.
        batch: B, bags of a group.
        positions: N, the last offset.
    """
    bags_N = torch.empty(positions, dtype=torch.int32, device=offsets_GB1.device)
    if positions == 0:
        return bags_N
    bounds = offsets_GB1.numel() - 1
    launch(
        _find_bags, (blocks_of(positions, _SOURCES_BLOCK),),
        offsets_GB1, bags_N, positions, bounds, batch, search_steps(bounds),
        BLOCK=_SOURCES_BLOCK,
    )  # fmt: skip
    return bags_N


def per_position(
    grads: Sequence[Tensor], *, scale: float = 1.0, forms: Sequence[int] | None = None
) -> GradGroups:
    """Groups whose gradient has a row of its own for each position.

    Args:
        grads: [n_g, D_g] per group, in the row form's `real` dtype.
        scale: factor on every gradient.
        forms: row form of each group's table; None means 0.
    """
    kept, facts_G = _rows(grads)
    counts = tuple([grad.shape[0] for grad in kept])
    forms_G = (0,) * len(kept) if forms is None else tuple(forms)

    def words() -> Any:
        made = np.zeros((len(counts), _WORDS), dtype=np.int64)
        made[:, _BASE], made[:, _STRIDE], _ = _columns(facts_G)
        made[:, _SCALE] = np.float64(scale).view(np.int64)
        return made

    return GradGroups((facts_G, counts, forms_G, scale), words, counts, forms_G, scale != 1.0, kept)


_RowFacts = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]


def _rows(grads: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], _RowFacts]:
    """Gradients with their columns next to each other; of each its address, strides and dtype."""
    facts = _facts(grads)
    if any([strides[-1] != 1 for _, strides, _ in facts]):
        grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        facts = _facts(grads)
    return tuple(grads), facts


def _facts(grads: Sequence[Tensor]) -> _RowFacts:
    return tuple([(grad.data_ptr(), grad.stride(), grad.dtype) for grad in grads])


def _columns(facts: _RowFacts) -> Any:
    """int64 [3, rows]: addresses, bytes to the next row, bytes of an element."""
    found = [(start, strides[0] * d.itemsize, d.itemsize) for start, strides, d in facts]
    return np.array(found, dtype=np.int64).reshape(-1, 3).T


def pooled(
    groups: Sequence[PooledGroup],
    grads: Sequence[Tensor],
    offsets_GB1: Tensor,
    counts: Sequence[int],
    *,
    bags_N: Tensor | None = None,
    weights_N: Tensor | None = None,
    scale: float = 1.0,
) -> GradGroups:
    """Groups whose gradient is that of their pooled outputs.

    Args:
        groups: one per group of the record; the same tuple at every call saves the host work.
        grads: [B, width] per output, in the row form's `real` dtype.
        offsets_GB1: int64 [G*B+1] on the device, group-major.
        counts: positions of each group, on the host.
        bags_N: `bags_of` these offsets; found here if None.
        weights_N: float32 [N] on the device, or None.
        scale: factor on every gradient.
    """
    batch = (offsets_GB1.numel() - 1) // max(len(groups), 1)
    if bags_N is None:
        bags_N = bags_of(offsets_GB1, batch, sum(counts))
    fixed = _pool_words(groups)
    kept, rows = _rows(grads)
    more, joined = _rows([flatten_slices(groups[g], kept) for g in fixed.parted])
    offsets, bags = offsets_GB1.data_ptr(), bags_N.data_ptr()
    weights = 0 if weights_N is None else weights_N.data_ptr()

    def words() -> Any:
        made = fixed.words_GW.copy()
        starts, strides, sizes = _columns(rows)[:, fixed.outputs_G]
        made[:, _BASE] = starts + fixed.columns_G * sizes
        made[:, _STRIDE] = strides
        made[:, _LANE] *= sizes
        made[fixed.parted, _BASE], made[fixed.parted, _STRIDE], _ = _columns(joined)
        made[:, _BAGS] = bags
        made[:, _OFFSETS] = offsets + 8 * batch * np.arange(len(groups))
        made[:, _WEIGHTS] = weights
        made[:, _SCALE] = np.float64(scale).view(np.int64)
        return made

    places = bags, offsets, weights
    facts = (fixed, rows, joined, *places, batch, tuple(counts), scale)
    scaled = scale != 1.0 or weights_N is not None or fixed.averaged
    kept += (bags_N, offsets_GB1, *more, *(() if weights_N is None else (weights_N,)))
    return GradGroups(facts, words, tuple(counts), fixed.forms, scaled, kept)


@dataclass(frozen=True, slots=True, eq=False)
class _PoolWords:
    """What is the same at every call of some pooled groups.

    words_GW: KIND, LENGTH and LANE (in columns) are filled; outputs_G, columns_G: where the only
    slice of a group that is read in place starts; parted: groups that are not.
    """

    groups: Sequence[PooledGroup]
    words_GW: Any
    outputs_G: Any
    columns_G: Any
    parted: list[int]
    forms: tuple[int, ...]
    averaged: bool


_pool_words_kept: dict[int, _PoolWords] = {}


def _pool_words(groups: Sequence[PooledGroup]) -> _PoolWords:
    """Made once for each object that lists groups: pass the same tuple at every call."""
    kept = _pool_words_kept.get(id(groups))
    if kept is not None:
        return kept
    words = np.zeros((len(groups), _WORDS), dtype=np.int64)
    parted = []
    for g, group in enumerate(groups):
        pool, only = group.pool, group.pool.slices[0]
        if len(pool.slices) > 1 or only.width < group.dim:
            parted.append(g)
        words[g, _KIND] = _KINDS[pool.pooling]
        if pool.pooling == "first_n":
            # A gradient that is put together has its rows side by side.
            words[g, _LENGTH] = pool.length
            words[g, _LANE] = group.dim if g in parted else only.stride
    made = _PoolWords(
        groups,
        words,
        np.array([group.pool.slices[0].output for group in groups], dtype=np.int64),
        np.array([group.pool.slices[0].column for group in groups], dtype=np.int64),
        parted,
        tuple(group.form for group in groups),
        any(group.pool.pooling == "mean" for group in groups),
    )
    if isinstance(groups, tuple):
        if len(_pool_words_kept) >= _GROUPS_KEPT:
            _pool_words_kept.clear()
        # The value holds its groups, so the identity in the key stays taken.
        _pool_words_kept[id(groups)] = made
    return made


def flatten_slices(group: PooledGroup, grads: Sequence[Tensor]) -> Tensor:
    """Gradient of a group's whole rows per bag: [B, D], or [B, length * D] for first_n."""
    lanes, slices = group.pool.lanes, group.pool.slices
    in_row = sorted(slices, key=lambda part: part.start)
    edges = [part.start for part in in_row], [part.stop for part in in_row]
    if lanes == 1 and [*edges[0], group.dim] == [0, *edges[1]]:  # no gap, no overlap
        spans = ((part.output, part.column, part.column + part.width) for part in in_row)
        return torch.cat([grads[output][:, first:last] for output, first, last in spans], dim=1)
    like = grads[slices[0].output]
    flat_BLD = like.new_zeros(like.shape[0], lanes, group.dim)
    for part in slices:
        reach = (lanes - 1) * part.stride + part.width
        columns = grads[part.output][:, part.column : part.column + reach]
        flat_BLD[:, :, part.start : part.stop] += columns.unfold(1, part.width, part.stride)
    return flat_BLD.flatten(1)


def sources_of(runs: Runs, records: Sequence[GradGroups]) -> Sources:
    """Addresses and factors of all positions, in the order of the runs; one launch.

    Args:
        runs: of the handles of all records, one record after the other.
        records: as many positions as the runs have.
    """
    n, device = runs.order_N.numel(), runs.order_N.device
    sent_words = _words_on(device, len(runs.rooms), records)
    addresses_N = torch.empty(n, dtype=torch.int64, device=device)
    factors_N = None
    if sent_words.factors is not None:
        factors_N = torch.empty(n, dtype=sent_words.factors, device=device)
    kept = records[0].kept if len(records) == 1 else sum([r.kept for r in records], ())
    sources = Sources(addresses_N, factors_N, sent_words.alignments, kept)
    if n == 0:
        return sources
    launch(
        _write_sources, (blocks_of(n, _SOURCES_BLOCK),),
        sent_words.words, runs.order_N, addresses_N,
        addresses_N if factors_N is None else factors_N, n, sent_words.groups,
        STEPS=search_steps(sent_words.groups), POOLED=sent_words.pooled,
        FACTORS=factors_N is not None, BLOCK=_SOURCES_BLOCK,
    )  # fmt: skip
    return sources


class _SentWords(NamedTuple):
    """Words of all groups of a call and where their positions begin, on the device.

    factors: dtype of factors, None if all are 1; pooled: some gradient is of a bag.
    """

    words: Tensor
    groups: int
    alignments: tuple[int, ...]
    factors: torch.dtype | None
    pooled: bool


_sent_words_kept: dict[tuple[Any, ...], _SentWords] = {}


def _words_on(device: torch.device, forms: int, records: Sequence[GradGroups]) -> _SentWords:
    """Sent once for each stream as long as gradients lie where they lay: memory of equal steps
    is mostly the same."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    key = (device, stream, forms, *[record.facts for record in records])
    kept = _sent_words_kept.get(key)
    if kept is not None:
        return kept
    lines, splits = _call_words(records)
    wide = any(t.dtype is torch.float64 for record in records for t in record.kept)
    scaled = any(record.scaled for record in records)
    forms_G = [form for record in records for form in record.forms]
    made = _SentWords(
        staged(np.concatenate([lines.reshape(-1), splits]), device),
        len(lines),
        _alignments(lines, forms_G, forms),
        (torch.float64 if wide else torch.float32) if scaled else None,
        bool((lines[:, _KIND] != _POSITION).any()),
    )
    if len(_sent_words_kept) >= _GROUPS_KEPT:
        _sent_words_kept.clear()
    _sent_words_kept[key] = made
    return made


def _call_words(records: Sequence[GradGroups]) -> tuple[Any, Any]:
    """Words of all groups, and where each group's positions begin in the call."""
    lines = np.concatenate([record.words() for record in records])
    counts = np.array([n for record in records for n in record.counts], dtype=np.int64)
    positions = np.array([sum(record.counts) for record in records], dtype=np.int64)
    groups = [len(record.counts) for record in records]
    lines[:, _WITHIN] = np.repeat(np.cumsum(positions) - positions, groups)
    return lines, np.cumsum(counts) - counts


def _alignments(lines: Any, forms: list[int], number: int) -> tuple[int, ...]:
    """Of each form the power of two, 16 at most, that all addresses are multiples of."""
    bits, own = lines[:, _BASE] | lines[:, _STRIDE] | lines[:, _LANE], np.array(forms)
    words = [int(np.bitwise_or.reduce(bits[own == form])) | 16 for form in range(number)]
    return tuple([word & -word for word in words])
