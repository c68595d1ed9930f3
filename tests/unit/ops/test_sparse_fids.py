from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.errors import DTypeError, InputError, ShapeError, UnknownName
from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    SliceConfig,
    sharding_sparse_fids,
)
from shoal.ragged import KeyedRagged
from support import ops_reference as reference
from support.layout_case import make_case

CONFIGS = FeatureConfigs(
    {
        "a": FeatureConfig("t", (2,)),
        "b": FeatureConfig("s", (3,)),
        "c": FeatureConfig("t", (1, 3)),
        "d": FeatureConfig("t", (2,), "firstn", 2),
    },
    {"all": OutConfig((SliceConfig("a", 0, 2), SliceConfig("b", 0, 2)))},
)
# Keys out of order; "d" is missing, "x" is not configured.
BATCH = KeyedRagged.from_lists(
    {"c": [[4, 5], [4]], "x": [[8], [9]], "a": [[4, 7, 4], []], "b": [[], [1, 3, 1]]}
)


@pytest.fixture(params=["reference", "core"])
def shard(request: pytest.FixtureRequest) -> Any:
    return reference.sharding_sparse_fids if request.param == "reference" else sharding_sparse_fids


def lists(found: Any) -> dict[str, list[int]]:
    return {key: fids.tolist() for key, fids in found.fids.items()}


def test_lists_by_table_and_shard(shard: Any) -> None:
    found = shard(BATCH, 2, CONFIGS)
    assert lists(found) == {"s:0": [], "s:1": [1, 3], "t:0": [4, 4], "t:1": [7, 5]}
    assert {key: s.tolist() for key, s in found.row_splits.items()} == {
        "s:0": [0, 0],
        "s:1": [0, 2],
        "t:0": [0, 1, 2, 2],
        "t:1": [0, 1, 2, 2],
    }
    # a: 4 7 4, b: 1 3 1, c: 4 5 4; rows of "c" stand after those of "a", which are 2 wide.
    assert found.index.rows_N.tolist() == [0, 0, 0, 0, 3, 0, 2, 2, 2]
    assert found.index.buffer_N.tolist() == [2, 3, 2, 1, 1, 1, 2, 3, 2]
    assert found.index.cell_splits_C1.tolist() == [0, 3, 3, 3, 6, 8, 9, 9, 9]
    assert found.index.cells_RF.tolist() == [[[0, 2, 0], [2, 2, 0], [4, 2, 0], [0, 0, 0]]]
    assert found.emb_sizes_TP.tolist() == [[0, 6], [6, 6]]


def test_every_occurrence_without_unique(shard: Any) -> None:
    found = shard(BATCH, 2, CONFIGS, unique=False)
    assert lists(found) == {"s:0": [], "s:1": [1, 3, 1], "t:0": [4, 4, 4, 4], "t:1": [7, 5]}
    assert found.index.rows_N.tolist() == [0, 0, 2, 0, 3, 6, 4, 2, 8]


def test_shard_major_vectors_of_version_4(shard: Any) -> None:
    found = shard(BATCH, 2, CONFIGS)
    assert found.fid_list_by_shard.tolist() == [4, 4, 1, 3, 7, 5]
    assert found.fid_list_table_row_length.tolist() == [0, 2, 2, 2]
    assert found.fid_list_shard_row_lenth.tolist() == [2, 4]
    assert found.fid_list_emb_row_lenth.tolist() == [0, 6, 6, 6]
    assert found.fid_list_emb_row_lenth.dtype == torch.int32


@pytest.mark.parametrize(
    ("rule", "shards"), [("unsigned_mod", [0, 1, 2, 1, 0]), ("floormod", [2, 0, 2, 1, 0])]
)
def test_negative_ids(shard: Any, rule: str, shards: list[int]) -> None:
    """2**64 % 3 is 1, so the two rules differ on negative ids."""
    ids = [-1, -(2**63) + 1, 2**63 - 3, 1, 0]
    ids = [-1, -3, 5, 1, 0]
    got = shard(KeyedRagged.from_lists({"a": [ids]}), 3, CONFIGS, rule=rule)
    want = [(i % 2**64 if rule == "unsigned_mod" else i) % 3 for i in ids]
    assert (got.index.buffer_N - 3).tolist() == want == shards


def test_shared_and_missing_features_are_packed_as_one_cell(shard: Any) -> None:
    batch = KeyedRagged.from_lists({"a": [[1, 2], []], "c": [[3], [4]]})
    found = shard(batch, 1, CONFIGS, shared=("a",))
    packed = found.monolith(3)
    assert packed.feature_offset.tolist() == [0, 2, 2, 3, 4]
    assert packed.nfl_offset.tolist() == [1 << 31, 1 | 1 << 31, 2, 4 | 1 << 31]
    assert packed.fid_offset.tolist() == [1 << 32, 1 << 32 | 2, 1 << 32 | 4, 1 << 32 | 8]


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_packed_offsets_are_those_of_monolith(shard: Any, version: Any) -> None:
    case = make_case(8, (5, 6, 4), one_width=version == 1)
    del case.ids["fc_slot_3"]
    case.__post_init__()
    more = [[]] * (case.batch_size - 1)
    batch = KeyedRagged.from_lists(
        {name: cells + (more if name in case.shared else []) for name, cells in case.ids.items()}
    )
    found = shard(batch, case.ps_num, case.configs, shared=case.shared)
    got, want = found.monolith(version), case.offsets(version)
    for name in ("fid_offset", "feature_offset", "nfl_offset"):
        one, other = getattr(got, name), getattr(want, name)
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist(), name
    if version == 2:
        assert [s.tolist() for s in got.fid_list_row_split] == [
            s.tolist() for s in want.fid_list_row_split
        ]
    if version == 4:
        assert torch.equal(got.fid_list_emb_row_lenth, want.fid_list_emb_row_lenth)
    if version == 5:
        assert got.emb_size.tolist() == [b.numel() for b in case.buffers(5)]
        assert [got.nfl_size.item(), got.feature_size.item(), got.fid_size.item()] == [
            len(want.nfl_offset),
            len(want.feature_offset),
            len(want.fid_offset),
        ]


def test_threads_give_the_same(shard: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = KeyedRagged.from_lengths(
        ("a", "b", "c"),
        torch.randint(-500, 500, (3000,), generator=generator),
        torch.full((3, 100), 10),
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = shard(batch, 4, CONFIGS)
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: shard(batch, 4, CONFIGS), range(8)))
    finally:
        torch.set_num_threads(threads)
    for one in found:
        assert torch.equal(one.fid_list, want.fid_list)
        assert torch.equal(one.index.rows_N, want.index.rows_N)


@pytest.mark.parametrize("lists_", [{"a": [[], []]}, {"x": [[1], []]}, {"a": [], "b": []}])
def test_empty_batches(shard: Any, lists_: dict[str, list[list[int]]]) -> None:
    found = shard(KeyedRagged.from_lists(lists_), 2, CONFIGS)
    assert all(fids.numel() == 0 for fids in found.fids.values())
    assert found.index.batch_size == len(next(iter(lists_.values())))
    for version in (2, 3, 4, 5):
        assert found.monolith(version).fid_offset.numel() == 0


def test_bad_input_is_refused(shard: Any) -> None:
    for error, message, call in (
        (InputError, "sharding_sparse_fids: ps_num: got 0", lambda: shard(BATCH, 0, CONFIGS)),
        (UnknownName, "shared feature", lambda: shard(BATCH, 2, CONFIGS, shared=("x",))),
        (UnknownName, "rule", lambda: shard(BATCH, 2, CONFIGS, rule="mod")),
        (InputError, "beyond the first", lambda: shard(BATCH, 2, CONFIGS, shared=("c",))),
        (DTypeError, "device of the batch: got meta", lambda: shard(BATCH.to("meta"), 2, CONFIGS)),
        (DTypeError, "int64", lambda: KeyedRagged(("a",), BATCH.values_N.int(), torch.zeros(2))),
    ):
        with pytest.raises(error, match=message):
            call()
    for offsets in ([0, 2, 1, 3], [1, 2, 3, 3], [0, 1, 2, 2], [0, -1, 2, 3]):
        keys, size = ("a", "b", "c"), torch.tensor([1, 2, 3])
        keyed = KeyedRagged(keys, size, torch.tensor(offsets))
        made = FeatureConfigs(
            {key: CONFIGS.feature_configs[key] for key in keys}, CONFIGS.out_configs
        )
        with pytest.raises(ShapeError, match="offset"):
            shard(keyed, 2, made)


def test_offsets_beyond_32_bits_need_the_index(shard: Any) -> None:
    found = shard(BATCH, 2, CONFIGS)
    found.index.rows_N[0] = 1 << 32
    with pytest.raises(InputError, match="largest offset: got 4294967296"):
        found.monolith(3)


def test_version_1_needs_one_width_per_table(shard: Any) -> None:
    with pytest.raises(InputError, match="widths of the features of table 't'"):
        shard(BATCH, 2, CONFIGS).monolith(1)
