from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, DTypeError, InputError, UnknownName
from shoal.ids import (
    SlotRegistry,
    convert_v1_to_v2,
    hash_strings,
    ids_of_text,
    make_fid,
    max_slot,
    signature_of,
    slot_of,
    switch_slot,
)

LAYOUTS = [("v1", 1023, 54), ("v2", 32767, 48)]
BITS64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("layout", "top", "width"), LAYOUTS)
def test_layout_numbers(layout: str, top: int, width: int) -> None:
    assert max_slot(layout) == top
    fid = make_fid(1, 100, layout)
    assert fid == (1 << width) + 100
    assert (slot_of(fid, layout), signature_of(fid, layout)) == (1, 100)
    wrapped = make_fid(top, 1 << width, layout)
    assert (slot_of(wrapped, layout), signature_of(wrapped, layout)) == (top, 0)


@pytest.mark.parametrize(("layout", "top", "width"), LAYOUTS)
@pytest.mark.parametrize("slot_as", [int, lambda slot: torch.tensor([0, slot])])
def test_slots_out_of_range_raise(layout: str, top: int, width: int, slot_as) -> None:  # type: ignore[no-untyped-def]
    for slot in (top + 1, -1):
        with pytest.raises(InputError, match=rf"got {slot}; allowed: 0..{top}"):
            make_fid(slot_as(slot), 5, layout)
        with pytest.raises(InputError):
            switch_slot(make_fid(1, 5, layout), slot, layout)


def test_v2_never_sets_the_sign_bit() -> None:
    assert make_fid(32767, 2**48 - 1) == 2**63 - 1


def test_v1_ids_of_high_slots_are_negative() -> None:
    fid = make_fid(1023, 0, "v1")
    assert fid == -(1 << 54)
    assert slot_of(fid, "v1") == 1023
    assert slot_of(fid % 2**64, "v1") == 1023


def test_entry_id_gives_its_slot() -> None:
    assert slot_of(1 << 48) == 1


@pytest.mark.parametrize(("layout", "top", "width"), LAYOUTS)
@given(data=st.data())
def test_tensors_agree_with_ints(layout: str, top: int, width: int, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, top), min_size=1, max_size=5))
    bits = [data.draw(BITS64) for _ in slots]
    signatures_N = torch.from_numpy(np.array(bits, dtype=np.uint64).view(np.int64))
    fids = [make_fid(slot, bit, layout) for slot, bit in zip(slots, bits, strict=True)]
    fids_N = make_fid(torch.tensor(slots), signatures_N, layout)
    assert fids_N.tolist() == fids
    assert make_fid(slots[0], signatures_N, layout).tolist()[0] == fids[0]
    assert slot_of(fids_N, layout).tolist() == [slot_of(fid, layout) for fid in fids] == slots
    kept = [bit % 2**width for bit in bits]
    assert signature_of(fids_N, layout).tolist() == [signature_of(f, layout) for f in fids] == kept


@given(st.integers(0, 1023), BITS64)
def test_v1_to_v2_keeps_slot_and_low_48_bits(slot: int, signature: int) -> None:
    fid = make_fid(slot, signature, "v1")
    moved = convert_v1_to_v2(fid)
    assert (slot_of(moved), signature_of(moved)) == (slot, signature % 2**48)
    assert convert_v1_to_v2(torch.tensor([fid])).tolist() == [moved]


@pytest.mark.parametrize(("layout", "top", "width"), LAYOUTS)
def test_switch_slot_replaces_the_slot_only(layout: str, top: int, width: int) -> None:
    fid = make_fid(top, 2**width - 7, layout)
    assert switch_slot(fid, 3, layout) == make_fid(3, 2**width - 7, layout)
    assert switch_slot(torch.tensor([fid]), 3, layout).tolist() == [switch_slot(fid, 3, layout)]


def test_bad_ids_and_layouts() -> None:
    with pytest.raises(DTypeError, match=r"int32"):
        slot_of(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(DTypeError):
        make_fid(torch.tensor([1.0]), 2)
    with pytest.raises(InputError, match="64 bits"):
        slot_of(2**64)
    with pytest.raises(UnknownName, match="unknown fid layout"):
        slot_of(1, "v3")  # type: ignore[call-overload]


def test_hash_is_golden() -> None:
    # first 8 bytes, little-endian, of `printf a | b2sum -l 64` and of the empty string
    assert hash_strings(["a", "", "é"]).tolist() == [
        3405396810240292928,
        -5426141060434712860,
        3394012004367669963,
    ]


@pytest.mark.parametrize(
    "strings",
    [
        ("a", "b", "a"),
        [b"a", b"b", b"a"],
        np.array(["a", "b", "a"]),
        np.array(["a", "b", "a"], dtype=object),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.chunked_array([["a"], ["b", "a"]]),
        pa.chunked_array([pa.array(x).dictionary_encode() for x in (["a"], ["b", "a"])]),
        pa.array(["x", "a", "b", "a"])[1:],
    ],
    ids=lambda strings: type(strings).__name__,
)
def test_every_kind_of_column_hashes_alike(strings: object) -> None:
    ids = hash_strings(strings).tolist()  # type: ignore[arg-type]
    assert ids == hash_strings(["a", "b", "a"]).tolist()
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize(
    "strings", [[], np.array([], dtype=str), pa.chunked_array([], pa.string())]
)
def test_no_strings_give_no_ids(strings: object) -> None:
    ids = hash_strings(strings, slot=3)  # type: ignore[arg-type]
    assert ids.dtype == torch.int64
    assert ids.shape == (0,)


def test_texts_of_any_length_have_the_hash_of_hashlib() -> None:
    # Around words and blocks of blake2b, in one call: neighbours are hashed together.
    lengths = [0, 1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1000]
    texts = [bytes((7 * k + i) % 256 for i in range(k)) for k in lengths for _ in range(2)]
    texts = [texts[(11 * k) % len(texts)] for k in range(3 * len(texts))]
    words = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
    expected = [int.from_bytes(word, "little", signed=True) for word in words]
    for kind in (pa.binary(), pa.large_binary()):
        column = pa.array(texts, kind)
        assert hash_strings(column).tolist() == expected
        assert hash_strings(column.slice(5)).tolist() == expected[5:]
        assert hash_strings(column.dictionary_encode()).tolist() == expected


def test_hashed_ids_carry_their_slot() -> None:
    full = hash_strings(["a", "b"])
    fids = hash_strings(["a", "b"], slot=9)
    assert slot_of(fids).tolist() == [9, 9]
    assert torch.equal(signature_of(fids), signature_of(full))
    assert slot_of(hash_strings(["a"], slot=1023, layout="v1"), "v1").tolist() == [1023]
    with pytest.raises(InputError):
        hash_strings(["a"], slot=32768)


@pytest.mark.parametrize("strings", [["a", None], pa.array(["a", None]).dictionary_encode()])
def test_missing_strings_raise(strings: object) -> None:
    with pytest.raises(InputError, match="fill_null"):
        hash_strings(strings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strings", [[1, 2], ["a", 1], [["a"]], np.array([["a"]]), pa.array([1.5]), [object()]]
)
def test_other_columns_raise(strings: object) -> None:
    with pytest.raises(DTypeError, match="make_fid"):
        hash_strings(strings)  # type: ignore[arg-type]


def test_registry_knows_what_was_registered() -> None:
    slots = SlotRegistry({"user": 7})
    slots.register("item", 2)
    slots.register("item", 2)
    assert (slots.slot("user"), slots.name(2)) == (7, "item")
    assert dict(slots.items()) == {"user": 7, "item": 2}
    assert len(slots) == 2
    assert "user" in slots
    assert "slot_3" not in slots


def test_registry_never_invents_a_slot() -> None:
    slots = SlotRegistry({"user": 7})
    with pytest.raises(UnknownName, match="Register"):
        slots.slot("slot_3")
    with pytest.raises(UnknownName):
        slots.name(3)


@pytest.mark.parametrize(("name", "slot"), [("user", 8), ("other", 7), ("far", 1024), ("low", -1)])
def test_registry_refuses_conflicts(name: str, slot: int) -> None:
    slots = SlotRegistry({"user": 7}, layout="v1")
    with pytest.raises(ConfigError):
        slots.register(name, slot)
    assert dict(slots.items()) == {"user": 7}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("12", 12),
        ("-7", -7),
        (" 12\t", 12),
        ("999999999999999999", 10**18 - 1),
        ("1234567890123456789", 1234567890123456789),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9223372036854775808", -(2**63)),
        ("18446744073709551615", -1),
        ("true", 1),
        ("False", 0),
        (b"12", 12),
    ],
)
def test_text_that_spells_an_integer_is_that_integer(text: str | bytes, number: int) -> None:
    assert ids_of_text([text]).tolist() == [number]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A7",
        "NA",
        "05",
        "+5",
        "-0",
        "5.0",
        "5e3",
        "1_0",
        "0x1F",
        "\u0665",
        "1 2",
        "12\n3",
        "tRue",
        "-9223372036854775809",
        "18446744073709551616",
        "1" * 25,
        b"\xff12",
    ],
)
def test_other_text_is_hashed_as_it_is(text: str | bytes) -> None:
    assert torch.equal(ids_of_text([text]), hash_strings([text]))


@pytest.mark.slow
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8"))))
def test_the_id_of_a_text_does_not_depend_on_others(mixed: list[int | str]) -> None:
    texts = [str(value) for value in mixed]
    ids = ids_of_text(texts).tolist()
    assert ids == [ids_of_text([text]).item() for text in texts]
    for value, own in zip(mixed, ids, strict=True):
        assert isinstance(value, str) or own == value


def test_missing_text_has_no_id() -> None:
    with pytest.raises(InputError, match="nulls"):
        ids_of_text(pa.array(["a", None]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view()])
def test_missing_text_may_have_the_id_of_another(kind: pa.DataType) -> None:
    texts = [None, "left out", "A7", None, "12", "a text of more than 16 bytes", ""] * 9
    expected = ids_of_text([text or ("none" if text is None else "") for text in texts])
    column = pa.array(texts).cast(kind)
    assert torch.equal(ids_of_text(column, missing="none"), expected)
    # Bits of a slice need not begin at a byte.
    assert torch.equal(ids_of_text(column.slice(9), missing="none"), expected[9:])
    out = torch.zeros(2, 60, dtype=torch.int64)
    ids_of_text(column.slice(3), missing="none", out=out[1])
    assert torch.equal(out, torch.stack([torch.zeros_like(expected[3:]), expected[3:]]))
    whole = pa.array(["b", "a", "b"])
    for one in (whole, whole.dictionary_encode()):
        assert ids_of_text(one, out=out[0, :3]).tolist() == hash_strings(whole).tolist()
        assert out[0, :3].tolist() == hash_strings(whole).tolist()
        out.zero_()
