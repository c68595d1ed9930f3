"""Rows on the device: initial values, rounding and reads have the bits of the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels import initial_values
from shoal.kernels.initial_values import initialise
from shoal.kernels.rounding import (
    quad_words,
    rounding_domain,
    stochastic_bits,
    storage_of,
    words_at,
)
from shoal.kernels.rows import gather
from shoal.kernels.tables import COUNT_ISSUED, COUNT_READY, CallGroups
from shoal.rules.compressors import FixedR8, Float16, OneBit
from shoal.rules.initializers import (
    BatchSoftmaxInit,
    Constant,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
    column_words,
    stream_key,
)
from shoal.rules.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.device_rows import (
    DEVICES,
    DTYPES,
    DeviceRows,
    draw_ids,
    form_of,
    plain_table,
)
from support.reference_row import fresh_state, initial_row, retrieved
from support.rounding import stochastic_round

SEED = -5
WIDTHS = [1, 3, 4, 8, 16, 24, 64, 128, 257] if torch.cuda.is_available() else [1, 3, 8, 24, 257]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mixed(dtype: str, compressed: bool = False) -> TableSpec:
    """Every law, on columns that start at any remainder of 4, wider than a block."""
    return TableSpec(
        name="mixed",
        dtype=dtype,  # type: ignore[arg-type]
        segments=(
            Segment(name="a", dim=5, initializer=Uniform(-0.3, 0.7), optimizer=Adam()),
            Segment(
                name="b",
                dim=6,
                initializer=Normal(0.1, 2.0),
                optimizer=Adagrad(initial_accumulator=0.1),
                compressor=FixedR8(1.5) if compressed else Float16(),
            ),
            Segment(name="c", dim=1, initializer=Constant(1.0 / 3.0), optimizer=SGD()),
            Segment(
                name="d",
                dim=20,
                initializer=TruncatedNormal(-1.0, 0.5),
                optimizer=RowWiseAdagrad(),
                compressor=OneBit(step_size=3) if compressed else Float16(),
            ),
            Segment(name="e", dim=2, initializer=Ones(), optimizer=SGD()),
            Segment(name="f", dim=3, initializer=Zeros(), optimizer=SGD()),
            Segment(name="g", dim=1, initializer=BatchSoftmaxInit(7.0), optimizer=SGD()),
        ),
    )


def initial_weights(spec: TableSpec, ids: list[int]) -> Tensor:
    rows = [initial_row(spec, id_, SEED, torch.float32) for id_ in ids]
    return torch.stack([*rows, torch.zeros(spec.dim)])[:-1].to(DTYPES[spec.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_rows_start_as_the_rules_say(device: str, dtype: str) -> None:
    spec, other = mixed(dtype), plain_table("other", 3)
    shard = DeviceRows.make([other, spec], device, SEED)
    ids = draw_ids(150)
    handles_N = shard.insert((1, ids), (0, ids[:3]), version=2**32 - 1, time_s=2**31 + 7)
    assert torch.equal(shard.weights(handles_N[:150]), initial_weights(spec, ids))
    assert torch.equal(shard.weights(handles_N[150:]), initial_weights(other, ids[:3]))
    state = fresh_state(spec, form_of(spec).real)
    assert torch.equal(shard.state(handles_N[:150]), state.expand(150, -1))
    for handle in handles_N[::40].tolist():
        chunk, place = shard.tables.chunk_of(handle)
        assert int(chunk.versions[place]) == -1
        assert int(chunk.seen[place]) == 2**31 + 7 - 2**32
        assert int(chunk.counts[place]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_core_stores_and_reads_the_same(device: str, dtype: str) -> None:
    spec = mixed(dtype, compressed=True)
    core = CpuShard([spec], seed=SEED)
    shard = DeviceRows.make([spec], device, SEED)
    ids = draw_ids(64)
    groups = IdGroups(
        torch.tensor(ids), torch.tensor([0, 64]), torch.tensor([0], dtype=torch.int32)
    )
    core.find_or_init(groups, ctx=StepContext(event_time_s=9)).end()
    chunk = core.export(0)
    call = shard.tables.groups((0, chunk.ids.tolist()))
    handles_N = shard.insert((0, chunk.ids.tolist()), time_s=9)
    assert torch.equal(shard.weights(handles_N), chunk.weights)
    assert torch.equal(shard.state(handles_N), chunk.state)
    one, place = shard.tables.chunk_of(int(handles_N[5]))
    got = (int(column[place]) for column in (one.versions, one.seen, one.counts))
    wanted = (int(column[5]) for column in (chunk.versions, chunk.last_seen_s, chunk.counts))
    assert tuple(got) == tuple(wanted)
    out = poisoned(64, spec, device)
    core.last_step = 17
    gather(shard.tables.layout, shard.forms[0], call, out, handles_N=handles_N, global_step=17)
    found = core.find(IdGroups(chunk.ids, groups.splits_G1, groups.tables_G))
    assert torch.allclose(out.cpu(), found.weights[0], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_rows_of_many_tables_start_together_and_only_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        initial_values, "_MOST_TABLES", 16
    )  # so that a program looks more than once
    specs = [plain_table(f"t{k}", 4 if k % 3 else 8) for k in range(40)]
    shard = DeviceRows.make(specs, device, SEED)
    ids = draw_ids(12)
    first = shard.insert(*((k, ids[: k % 5]) for k in range(40)))
    shard.tables.weights_of(int(first[0])).fill_(9.0)
    again = shard.insert(*((k, ids[: k % 7]) for k in range(40)))
    expected = [initial_weights(specs[k], ids[: k % 7]) for k in range(40)]
    at = 0
    for k in range(40):
        rows = again[at : at + k % 7].tolist()
        at += k % 7
        for handle, row in zip(rows, expected[k], strict=True):
            kept = torch.full_like(row, 9.0) if handle == int(first[0]) else row
            assert torch.equal(shard.tables.weights_of(handle).cpu(), kept)


def test_settling_makes_rows_ready_and_tells_the_host(device: str) -> None:
    shard = DeviceRows.make([plain_table("a", 4), plain_table("b", 4)], device)
    counters_KC = shard.tables.layout.counters_KC
    counters_KC.copy_(torch.arange(counters_KC.numel()).view(counters_KC.shape))
    expected = counters_KC.cpu().clone()
    expected[:, COUNT_READY] = expected[:, COUNT_ISSUED]
    assert torch.equal(shard.settle(), expected)
    assert torch.equal(counters_KC.cpu(), expected)


def test_nothing_new_writes_nothing(device: str) -> None:
    shard = DeviceRows.make([plain_table("a", 4)], device)
    for bound in (0, 1000):
        initialise(shard.tables.layout, shard.forms[0], 0, bound, version=1, event_time_s=0)
    assert bool(shard.tables.chunks[0].weights.isnan().all())


@triton.jit
def _draw(ids_ptr, key_ptr, quads_ptr, lanes_ptr, first, domain, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)
    id_ = tl.load(ids_ptr + row)
    key = tl.load(key_ptr)
    place = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(quads_ptr + place, quad_words(key, id_, first, domain, 2).to(tl.int64))
    column = first * 4 + tl.arange(0, 8)
    words = words_at(key, id_[:, None], column[None, :], domain)
    tl.store(lanes_ptr + place, words.to(tl.int64))


@pytest.mark.parametrize("step", [0, 5, 2**31 - 1])
def test_random_words_are_those_of_the_rules(device: str, step: int) -> None:
    ids, key = torch.tensor(draw_ids(16)), stream_key(7, "t")
    signed = torch.tensor([key - (1 << 64) if key >> 63 else key], device=device)
    quads, lanes = (torch.empty(16, 8, dtype=torch.int64, device=device) for _ in range(2))
    domain = rounding_domain(step)
    _draw[(1,)](ids.to(device), signed, quads, lanes, 3, domain, ROWS=16)
    expected = column_words(ids, key=key, column_start=12, dim=8, domain=domain % 2**32)
    assert torch.equal(quads.cpu(), expected)
    assert torch.equal(lanes.cpu(), expected)


@triton.jit
def _round(values_ptr, words_ptr, out_ptr, n, STORAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + at, mask=at < n, other=0.0)
    word = tl.load(words_ptr + at, mask=at < n, other=0).to(tl.uint32)
    tl.store(out_ptr + at, stochastic_bits(value, word, STORAGE), mask=at < n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_has_the_bits_of_the_rules(device: str, dtype: torch.dtype) -> None:
    drawn = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([1.0, 1e-7, 1e-41, 6e4])
    odd = [0.0, -0.0, 65504.0, 65519.99, 65520.0, 3.4e38, 2**-24, 2**-25, -(2**-26), 1.0]
    edges = torch.tensor([*odd, float("inf"), -float("inf"), float("nan")])
    values = torch.cat([(drawn * scales[:, None]).flatten(), edges])
    ids, key = torch.tensor(draw_ids(len(values))), stream_key(7, "t")
    place = {"key": key, "column_start": 5}
    words = column_words(ids, dim=1, domain=rounding_domain(9), **place)[:, 0].contiguous()
    out = torch.empty(len(values), dtype=torch.int16, device=device)
    _round[(1,)](
        values.to(device), words.to(device), out, len(values),
        STORAGE=storage_of(dtype), BLOCK=1024,
    )  # fmt: skip
    expected = stochastic_round(values[:, None], dtype, ids_U=ids, global_step=9, **place)[:, 0]
    got = out.cpu().view(dtype)
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(out.cpu()[~nan], expected.view(torch.int16)[~nan])


def poisoned(rows: int, spec: TableSpec, device: str) -> Tensor:
    return torch.full((rows, spec.dim), torch.nan, dtype=form_of(spec).real, device=device)


def read_rows(spec: TableSpec, stored: Tensor, step: int) -> Tensor:
    """What training reads of stored weights [n, D]."""
    wide = stored.to(form_of(spec).real)
    return torch.stack([retrieved(spec, row, step) for row in wide])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
def test_reads_give_rows_zeros_or_initial_values(device: str, dtype: str, compressed: bool) -> None:
    spec = mixed(dtype, compressed)
    shard = DeviceRows.make([spec], device, SEED)
    ids = draw_ids(60)
    shard.insert((0, ids[:40]))
    call = shard.tables.groups((0, [*ids[5:60], *ids[:5]]))
    handles_N = shard.look_up(call)
    assert (handles_N >= 0).tolist() == [id_ in ids[:40] for id_ in call.ids_N.tolist()]
    expected = read_rows(spec, initial_weights(spec, call.ids_N.tolist()), 100)
    for initial in (False, True):
        out = poisoned(60, spec, device)
        options = {"initial": initial, "global_step": 100}
        gather(shard.tables.layout, shard.forms[0], call, out, handles_N=handles_N, **options)
        there = (handles_N >= 0).cpu()[:, None] | initial
        wanted = torch.where(there, expected, 0.0)
        if compressed:
            assert torch.allclose(out.cpu(), wanted, rtol=0, atol=1e-6)
        else:
            assert torch.equal(out.cpu(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("find", [False, True], ids=["handles", "ids"])
def test_reads_of_any_width(device: str, dim: int, find: bool) -> None:
    spec = plain_table("t", dim)
    shard = DeviceRows.make([spec], device, SEED)
    ids = draw_ids(70)
    shard.insert((0, ids[::2]))
    handles_N = shard.look_up(shard.tables.groups((0, ids)))
    call = shard.tables.groups((0, ids))
    out, found_N = poisoned(50, spec, device), torch.zeros(70, dtype=torch.bool, device=device)
    form, layout = shard.forms[0], shard.tables.layout
    rows: dict[str, Any] = {"found_N": found_N} if find else {"handles_N": handles_N}
    gather(layout, form, call, out, start=10, stop=60, **rows)
    if find:
        assert found_N.tolist() == [10 <= i < 60 and i % 2 == 0 for i in range(70)]
    expected = initial_weights(spec, ids)
    expected[1::2] = 0
    assert torch.equal(out.cpu(), expected[10:60])


@pytest.mark.parametrize("find", [False, True], ids=["handles", "ids"])
def test_groups_of_other_forms_are_left_alone(device: str, find: bool) -> None:
    specs = [plain_table("a", 8), plain_table("b", 4), plain_table("c", 8)]
    shard = DeviceRows.make(specs, device, SEED)
    ids = draw_ids(30)
    parts = ((0, ids[:7]), (1, ids[7:12]), (2, []), (2, ids[12:20]), (1, ids[20:22]), (0, ids[22:]))
    shard.insert((0, ids[1:]), (1, ids[1:]), (2, ids[1:]))
    call = shard.tables.groups(*parts)
    handles_N = shard.look_up(call)
    found_N = torch.zeros(30, dtype=torch.bool, device=device)
    for number, starts in ((0, [8, -1, -1, 0, -1, 15]), (1, [-1, 0, -1, -1, 5, -1])):
        rows = 23 if number == 0 else 7
        out = poisoned(rows, specs[number], device)
        out_rows_G = torch.tensor(starts, device=device)
        form, layout = shard.forms[number], shard.tables.layout
        read: dict[str, Any] = {"found_N": found_N} if find else {"handles_N": handles_N}
        gather(layout, form, call, out, out_rows_G=out_rows_G, initial=not find, **read)
        expected = torch.zeros(rows, specs[number].dim)
        for (table, group), at in zip(parts, starts, strict=True):
            if at >= 0 and group:
                expected[at : at + len(group)] = initial_weights(specs[table], list(group))
                if find and ids[0] in group:
                    expected[at] = 0
        assert torch.equal(out.cpu(), expected)
    if find:
        assert found_N.tolist() == [i > 0 for i in range(30)]


def test_reading_nothing(device: str) -> None:
    spec = plain_table("t", 8)
    shard = DeviceRows.make([spec], device)
    call: CallGroups = shard.tables.groups((0, []))
    none = torch.empty(0, dtype=torch.int32, device=device)
    out = poisoned(0, spec, device)
    gather(shard.tables.layout, shard.forms[0], call, out, handles_N=none)
    gather(shard.tables.layout, shard.forms[0], call, out, found_N=none.bool())
