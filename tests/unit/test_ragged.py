from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import DeviceUnavailable, DTypeError, InputError, ShapeError, UnknownName
from shoal.ragged import KeyedRagged, Ragged

INT64 = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.lists(INT64, max_size=4), max_size=5)


@st.composite
def keyed_lists(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    batch = draw(st.integers(0, 4))
    rows = st.lists(st.lists(INT64, max_size=3), min_size=batch, max_size=batch)
    keys = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    return {key: draw(rows) for key in keys}


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def batch() -> KeyedRagged:
    return KeyedRagged.from_lists(
        {"user": [[1], [2]], "item": [[3, 4], []], "tags": [[], [5, 6]]},
        {"user": [[0.1], [0.2]], "item": [[0.3, 0.4], []], "tags": [[], [0.5, 0.6]]},
    )


@given(ROWS)
def test_ragged_round_trips(rows: list[list[int]]) -> None:
    ragged = Ragged.from_lists(rows).validate()
    assert ragged.to_lists() == rows
    assert ragged.batch_size == len(rows)
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert Ragged.from_lengths(ragged.values, ragged.lengths).to_lists() == rows


@given(ROWS.filter(bool))
@settings(deadline=None)
def test_ragged_to_nested_and_back_shares_storage(rows: list[list[int]]) -> None:
    ragged = Ragged.from_lists(rows)
    nested = ragged.to_nested()
    assert [part.tolist() for part in nested.unbind()] == rows
    back = Ragged.from_nested(nested)
    assert back.to_lists() == rows
    assert back.values.data_ptr() == ragged.values.data_ptr()
    assert back.offsets_B1.data_ptr() == ragged.offsets_B1.data_ptr()


@given(keyed_lists())
def test_keyed_round_trips(features: dict[str, list[list[int]]]) -> None:
    keyed = KeyedRagged.from_lists(features).validate()
    assert keyed.to_lists() == features
    assert keyed.lengths.shape == (len(features), keyed.batch_size)
    assert {key: keyed[key].to_lists() for key in keyed.keys} == features
    splits = keyed.key_splits.tolist()
    for index, key in enumerate(features):
        flat = [id_ for row in features[key] for id_ in row]
        assert keyed.values_N[splits[index] : splits[index + 1]].tolist() == flat


@given(keyed_lists(), st.randoms(use_true_random=False))
def test_select_reorders(features: dict[str, list[list[int]]], random: object) -> None:
    keys = list(features)
    random.shuffle(keys)  # type: ignore[attr-defined]
    chosen = keys[: max(1, len(keys) - 1)]
    picked = KeyedRagged.from_lists(features).select(chosen).validate()
    assert picked.keys == tuple(chosen)
    assert picked.to_lists() == {key: features[key] for key in chosen}


@given(st.lists(keyed_lists(), min_size=1, max_size=3))
def test_cat_appends_batches(parts: list[dict[str, list[list[int]]]]) -> None:
    keys = list(parts[0])
    parts = [
        {key: part.get(key, [[]] * len(next(iter(part.values())))) for key in keys}
        for part in parts
    ]
    joined = KeyedRagged.cat([KeyedRagged.from_lists(part) for part in parts]).validate()
    want = {key: [row for part in parts for row in part[key]] for key in keys}
    assert joined.to_lists() == want


def test_feature_major_layout(batch: KeyedRagged) -> None:
    assert batch.batch_size == 2
    assert batch.values_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.offsets_FB1.tolist() == [0, 1, 2, 4, 4, 4, 6]
    assert batch.lengths.tolist() == [[1, 1], [2, 0], [0, 2]]
    assert batch.key_splits.tolist() == [0, 2, 4, 6]


def test_feature_is_a_view(batch: KeyedRagged) -> None:
    item = batch["item"]
    assert item.values.data_ptr() == batch.values_N[2:].data_ptr()
    assert item.offsets_B1.tolist() == [0, 2, 2]
    torch.testing.assert_close(batch.weights_of("tags"), torch.tensor([0.5, 0.6]))


def test_select_keeps_weights_and_views_neighbours(batch: KeyedRagged) -> None:
    assert batch.select(("user", "item", "tags")) is batch
    view = batch.select(("item", "tags"))
    assert view.values_N.data_ptr() == batch.values_N[2:].data_ptr()
    torch.testing.assert_close(view.weights_N, torch.tensor([0.3, 0.4, 0.5, 0.6]))
    moved = batch.select(("tags", "user"))
    torch.testing.assert_close(moved.weights_N, torch.tensor([0.5, 0.6, 0.1, 0.2]))


def test_cat_follows_first_key_order_and_keeps_weights(batch: KeyedRagged) -> None:
    joined = KeyedRagged.cat([batch, batch.select(("tags", "item", "user"))])
    assert joined.keys == batch.keys
    assert joined.to_lists()["item"] == [[3, 4], [], [3, 4], []]
    torch.testing.assert_close(joined.weights_of("user"), torch.tensor([0.1, 0.2, 0.1, 0.2]))


def test_from_dict_takes_lists_and_ragged() -> None:
    keyed = KeyedRagged.from_dict({"a": Ragged.from_lists([[1], []]), "b": [[2], [3, 4]]})
    assert keyed.to_lists() == {"a": [[1], []], "b": [[2], [3, 4]]}
    assert keyed.weights_N is None
    assert keyed.weights_of("a") is None


def test_keyed_nested_shares_storage(batch: KeyedRagged) -> None:
    nested = batch.to_nested()
    assert nested.shape[0] == 6
    back = KeyedRagged.from_nested(batch.keys, nested)
    assert back.to_lists() == batch.to_lists()
    assert back.values_N.data_ptr() == batch.values_N.data_ptr()
    assert back.offsets_FB1.data_ptr() == batch.offsets_FB1.data_ptr()


def test_nested_of_torch_is_viewed() -> None:
    nested = torch.nested.nested_tensor([int64(1, 2), int64(3)], layout=torch.jagged)
    ragged = Ragged.from_nested(nested)
    assert ragged.to_lists() == [[1, 2], [3]]
    assert ragged.values.data_ptr() == nested.values().data_ptr()
    assert ragged.offsets_B1.data_ptr() == nested.offsets().data_ptr()


def test_moving_to_the_same_device_copies_nothing(batch: KeyedRagged) -> None:
    moved = batch.to("cpu")
    assert moved.values_N.data_ptr() == batch.values_N.data_ptr()
    assert Ragged.from_lists([[1]]).to("cpu").to_lists() == [[1]]


def test_moving_takes_everything_along(batch: KeyedRagged) -> None:
    moved = batch.to("meta")
    assert moved.weights_N is not None
    assert {t.device.type for t in (moved.values_N, moved.offsets_FB1, moved.weights_N)} == {"meta"}


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((1, 2, 3), "first offset: got 1"),
        ((0, 2, 1, 3), "offset 2: got 1; allowed: at least 2"),
        ((0, 2), "last offset: got 2; allowed: 3"),
    ],
)
def test_validate_reads_offsets(offsets: tuple[int, ...], message: str) -> None:
    values = int64(7, 8, 9)
    with pytest.raises(ShapeError, match=message):
        Ragged(values, int64(*offsets)).validate()
    with pytest.raises(ShapeError, match=message):
        KeyedRagged(("a",), values, int64(*offsets)).validate()


def test_dtypes_are_int64_only() -> None:
    with pytest.raises(DTypeError, match=r"values: got torch.int32"):
        Ragged(int64(1).int(), int64(0, 1))
    with pytest.raises(DTypeError, match=r"offsets: got torch.int32"):
        Ragged(int64(1), int64(0, 1).int())
    with pytest.raises(DTypeError, match=r"lengths: got torch.int32"):
        KeyedRagged.from_lengths(("a",), int64(1), int64(1).int())
    with pytest.raises(DTypeError, match="weights_N"):
        KeyedRagged(("a",), int64(1), int64(0, 1), int64(1))


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="one dimension"):
        Ragged(int64(1).view(1, 1), int64(0, 1))
    with pytest.raises(ShapeError, match="number of offsets: got 0"):
        Ragged(int64(), int64())
    with pytest.raises(ShapeError, match="multiple of 2"):
        KeyedRagged(("a", "b"), int64(1), int64(0, 1))
    with pytest.raises(ShapeError, match="weights_N"):
        KeyedRagged(("a",), int64(1), int64(0, 1), torch.ones(2))
    with pytest.raises(ShapeError, match="one batch size"):
        KeyedRagged.from_lists({"a": [[1]], "b": []})
    with pytest.raises(ShapeError, match="weights of 'a'"):
        KeyedRagged.from_lists({"a": [[1, 2]]}, {"a": [[0.5]]})


@pytest.mark.parametrize("rows", [[1, 2], [[1], None], 5])
def test_an_example_is_a_list_of_ids(rows: Any) -> None:
    with pytest.raises(DTypeError, match="a list for each example"):
        KeyedRagged.from_lists({"a": rows})


def test_devices_must_agree() -> None:
    with pytest.raises(DTypeError, match="device of offsets"):
        Ragged(int64(1), int64(0, 1).to("meta"))


@pytest.mark.parametrize("keys", [(), ("a", "a")])
def test_keys_are_distinct_and_some(keys: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="keys"):
        KeyedRagged(keys, int64(), int64(0))


def test_empty_selection_is_an_error(batch: KeyedRagged) -> None:
    with pytest.raises(InputError, match="keys"):
        batch.select(())


def test_unknown_keys_list_the_nearest(batch: KeyedRagged) -> None:
    for look in (batch.__getitem__, batch.weights_of, lambda key: batch.select((key,))):
        with pytest.raises(UnknownName, match=r"'itm'.*item"):
            look("itm")
    with pytest.raises(UnknownName, match="later batch"):
        KeyedRagged.cat([batch.select(("user",)), batch])


def test_cat_needs_batches_alike(batch: KeyedRagged) -> None:
    with pytest.raises(InputError, match="no batches"):
        KeyedRagged.cat([])
    with pytest.raises(InputError, match="weights in some only"):
        KeyedRagged.cat([batch, KeyedRagged.from_lists(batch.to_lists())])


@pytest.mark.parametrize("bad", [1.5, "x", None])
def test_lists_hold_integers(bad: object) -> None:
    with pytest.raises(DTypeError, match="integers"):
        Ragged.from_lists([[1, bad]])  # type: ignore[list-item]


def test_ids_beyond_int64_name_the_remedy() -> None:
    with pytest.raises(InputError, match=r"Subtract 2\*\*64"):
        Ragged.from_lists([[2**63]])


def test_nested_must_be_jagged() -> None:
    with pytest.raises(ShapeError, match="jagged"):
        Ragged.from_nested(int64(1, 2))


class FakeJagged:
    """Stands for torchrec's classes, whose methods these conversions call."""

    def __init__(self, *, values, offsets, weights=None, keys=()):  # type: ignore[no-untyped-def]
        self.parts = (list(keys), values, offsets, weights)
        self.keys = lambda: self.parts[0]
        self.values = lambda: self.parts[1]
        self.offsets = lambda: self.parts[2]
        self.weights_or_none = lambda: self.parts[3]
        self.variable_stride_per_key = lambda: False


class FakeTorchrec:
    KeyedJaggedTensor = FakeJagged
    JaggedTensor = FakeJagged


@pytest.fixture(params=["stand-in", "installed"])
def torchrec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """torchrec's classes, or what stands for them."""
    if request.param == "installed":
        return pytest.importorskip("torchrec")
    monkeypatch.setitem(sys.modules, "torchrec", FakeTorchrec)
    return FakeTorchrec


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def test_keyed_torchrec_shares_storage_both_ways(torchrec, batch: KeyedRagged) -> None:  # type: ignore[no-untyped-def]
    keyed = batch.to_torchrec()
    assert isinstance(keyed, torchrec.KeyedJaggedTensor)
    assert keyed.keys() == ["user", "item", "tags"]
    back = KeyedRagged.from_torchrec(keyed)
    assert back.to_lists() == batch.to_lists()
    mine = addresses(batch.values_N, batch.offsets_FB1, batch.weights_N)
    assert addresses(keyed.values(), keyed.offsets(), keyed.weights_or_none()) == mine
    assert addresses(back.values_N, back.offsets_FB1, back.weights_N) == mine
    unweighted = KeyedRagged(batch.keys, batch.values_N, batch.offsets_FB1)
    assert KeyedRagged.from_torchrec(unweighted.to_torchrec()).weights_N is None


def test_torchrec_shares_storage_both_ways(torchrec, batch: KeyedRagged) -> None:  # type: ignore[no-untyped-def]
    ragged = batch["item"]
    jagged = ragged.to_torchrec()
    assert isinstance(jagged, torchrec.JaggedTensor)
    back = Ragged.from_torchrec(jagged)
    assert back.to_lists() == [[3, 4], []]
    mine = addresses(ragged.values, ragged.offsets_B1)
    assert addresses(jagged.values(), jagged.offsets()) == mine
    assert addresses(back.values, back.offsets_B1) == mine


def test_empty_batches_convert(torchrec) -> None:  # type: ignore[no-untyped-def]
    ragged, keyed = Ragged.from_lists([]), KeyedRagged.from_lists({"a": [], "b": []})
    assert Ragged.from_torchrec(ragged.to_torchrec()).to_lists() == []
    assert KeyedRagged.from_torchrec(keyed.to_torchrec()).to_lists() == {"a": [], "b": []}
    assert Ragged.from_nested(ragged.to_nested()).to_lists() == []
    nested = keyed.to_nested()
    assert KeyedRagged.from_nested(("a", "b"), nested).to_lists() == {"a": [], "b": []}


def test_torchrec_input_is_checked(batch: KeyedRagged) -> None:
    narrow = FakeJagged(keys=["a"], values=int64(1), offsets=int64(0, 1).int())
    assert KeyedRagged.from_torchrec(narrow).to_lists() == {"a": [[1]]}
    narrow.variable_stride_per_key = lambda: True
    with pytest.raises(ShapeError, match="stride"):
        KeyedRagged.from_torchrec(narrow)
    with pytest.raises(InputError, match="weights"):
        Ragged.from_torchrec(FakeJagged(values=int64(1), offsets=int64(0, 1), weights=1))


def test_missing_torchrec_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, batch: KeyedRagged
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(DeviceUnavailable, match="pip install torchrec"):
        batch.to_torchrec()
