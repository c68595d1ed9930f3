"""Feature ids with a slot, hashed strings, and the one bijective mix of 64-bit words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address, check_int64
from shoal.errors import ConfigError, DTypeError, InputError, known_name, of_kind

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FidLayout",
    "SlotRegistry",
    "convert_v1_to_v2",
    "hash_strings",
    "ids_of_text",
    "make_fid",
    "max_slot",
    "signature_of",
    "slot_of",
    "switch_slot",
]


_MASK = (1 << 64) - 1
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB


def to_signed(word: int) -> int:
    """The int64 with the same 64 bits as `word` (any Python int, taken modulo 2^64)."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


Word = TypeVar("Word", int, Tensor)  # an id, or the ids of a tensor


def mix64(word: Word) -> Word:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words.

    An int is taken modulo 2^64 and gives 0..2^64-1. An int64 tensor of any shape is read as
    uint64 bits and gives a new int64 tensor of the same shape that holds uint64 bits.
    """
    if isinstance(word, Tensor):
        word = (word ^ _shifted(word, 30)) * to_signed(_FIRST_FACTOR)
        word = (word ^ _shifted(word, 27)) * to_signed(_SECOND_FACTOR)
        return word ^ _shifted(word, 31)
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FIRST_FACTOR) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND_FACTOR) & _MASK
    return word ^ (word >> 31)


def salt(table: str) -> int:
    """The salt of a table, 0..2^64-1: first 8 bytes, little-endian, of SHA-256 of its name."""
    name = of_kind("name of a table", table, str).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little")


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's shift of int64 copies the sign bit, which is masked off."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


FidLayout = Literal["v1", "v2"]

# layout -> (slot bits, signature bits)
BITS: dict[str, tuple[int, int]] = {"v1": (10, 54), "v2": (15, 48)}
TEXT_TYPES = (
    "string",
    "large_string",
    "string_view",
    "binary",
    "large_binary",
    "binary_view",
    "null",
)


def max_slot(layout: FidLayout = "v2") -> int:
    """Largest slot of a layout: 1023 (v1) or 32767 (v2)."""
    return (1 << _bits(layout)[0]) - 1


@overload
def make_fid(slot: int, signature: int, layout: FidLayout = ...) -> int: ...
@overload
def make_fid(slot: Tensor, signature: int, layout: FidLayout = ...) -> Tensor: ...
@overload
def make_fid(slot: int | Tensor, signature: Tensor, layout: FidLayout = ...) -> Tensor: ...


def make_fid(slot: int | Tensor, signature: int | Tensor, layout: FidLayout = "v2") -> int | Tensor:
    """Join slot and signature; signature bits above the layout's width are dropped.

    Args:
        slot: int, or int64 [N].
        signature: any 64-bit int, or int64 [N].

    Raises:
        InputError: a slot outside 0..`max_slot(layout)`.
    """
    _, width = _bits(layout)
    _check_slots(slot, layout)
    bits: Any = signature
    low: int | Tensor = _bits_of(bits) & ((1 << width) - 1)
    high = slot << width
    if isinstance(high, Tensor):
        return high | low
    # torch takes Python ints of at most 63 bits, so an int slot becomes signed first
    return to_signed(high | low) if isinstance(low, int) else to_signed(high) | low


def slot_of(fids: Word, layout: FidLayout = "v2") -> Word:
    """Slot of an id, or of each id of an int64 tensor."""
    _, width = _bits(layout)
    return (_bits_of(fids) >> width) & max_slot(layout)


def signature_of(fids: Word, layout: FidLayout = "v2") -> Word:
    """Bits below the slot: 54 (v1) or 48 (v2) of them."""
    _, width = _bits(layout)
    return _bits_of(fids) & ((1 << width) - 1)


def switch_slot(fids: Word, slot: int, layout: FidLayout = "v2") -> Word:
    """The same signatures under another slot.

    Raises:
        InputError: a slot outside 0..`max_slot(layout)`.
    """
    return make_fid(slot, fids, layout)


def convert_v1_to_v2(fids: Word) -> Word:
    """Move a v1 id to the v2 layout: same slot, and the low 48 of its 54 signature bits.

    Two v1 ids that differ only in signature bits 48..53 become one.
    """
    return make_fid(slot_of(fids, "v1"), fids, "v2")


def hash_strings(
    strings: Sequence[str] | Sequence[bytes] | np.ndarray[Any, Any] | pa.Array | pa.ChunkedArray,
    *,
    slot: int | None = None,
    layout: FidLayout = "v2",
) -> Tensor:
    """Ids of strings: blake2b of their UTF-8 bytes, 8 bytes little-endian, as int64 [N].

    Dictionary-encoded columns are cheapest: their dictionary is hashed. With `slot`
    the id has the slot and the low bits of the hash; without, all 64 bits are the hash.

    Raises:
        DTypeError: not strings or bytes.
        InputError: a missing value, or a slot outside 0..`max_slot(layout)`.
    """
    if slot is not None:
        _check_slots(slot, layout)
    ids_N = _ids_of(strings, spelled=False)
    return ids_N if slot is None else make_fid(slot, ids_N, layout)


def ids_of_text(
    strings: Sequence[str] | Sequence[bytes] | np.ndarray[Any, Any] | pa.Array | pa.ChunkedArray,
    *,
    missing: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Ids of text, int64 [N]: the integer that a text spells, or else the text's hash.

    Each text is read alone: its id does not depend on other texts or on the file. These spell
    integers, also with blanks around them: decimal digits without a plus sign or leading zeros,
    from -2^63 to 2^64-1 (2^63 and more keep their 64 bits, as uint64 columns do), and true and
    false (also True, TRUE, False, FALSE), which are 1 and 0. All other text ("05", "+5", "5.0",
    "-0", "A7") is hashed as `hash_strings` does.

    Args:
        missing: the text whose id a missing value has; None refuses it, and so do dictionaries.
        out: int64 [N], contiguous, on the CPU: where the ids go.

    Raises:
        DTypeError: not strings or bytes.
        InputError: a missing value.
    """
    return _ids_of(strings, spelled=True, missing=missing, out=out)


class SlotRegistry:
    """Feature names and their slots, one to one, each registered explicitly.

    A slot never follows from a name or from the order of calls, so ids mean the same in every
    run.

    Args:
        slots: name -> slot, registered at once.
        layout: bounds the slots.

    Raises:
        ConfigError: as `register`.
    """

    def __init__(self, slots: Mapping[str, int] | None = None, *, layout: FidLayout = "v2") -> None:
        self.layout: FidLayout = layout
        self._max_slot = max_slot(layout)
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        for name, slot in of_kind("slots", slots or {}, Mapping).items():
            self.register(name, slot)

    def register(self, name: str, slot: int) -> None:
        """Bind a name to a slot; the same pair may be registered again.

        Raises:
            ConfigError: a slot out of range, or a name or slot with another binding.
        """
        if not 0 <= slot <= self._max_slot:
            allowed = f"0..{self._max_slot} ({self.layout})"
            raise ConfigError(f"slot of {name!r}", slot, allowed, remedy="Pick a free slot.")
        if self._slots.get(name, slot) != slot:
            allowed = f"{self._slots[name]}, its slot so far"
            raise ConfigError(f"slot of {name!r}", slot, allowed, remedy="Register it once.")
        if self._names.get(slot, name) != name:
            allowed = f"{self._names[slot]!r}, its name so far"
            raise ConfigError(f"name of slot {slot}", name, allowed, remedy="Pick a free slot.")
        self._slots[name] = slot
        self._names[slot] = name

    def slot(self, name: str) -> int:
        """Slot of a name.

        Raises:
            UnknownName: the name was never registered.
        """
        known_name("slot name", name, self._slots, remedy="Register it first.")
        return self._slots[name]

    def name(self, slot: int) -> str:
        """Name of a slot.

        Raises:
            UnknownName: the slot was never registered.
        """
        known_name("slot", slot, self._names, remedy="Register it first.")
        return self._names[slot]

    def items(self) -> Iterator[tuple[str, int]]:
        """(name, slot) pairs in order of registration."""
        return iter(tuple(self._slots.items()))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: object) -> bool:
        return name in self._slots


def _bits(layout: str) -> tuple[int, int]:
    known_name("fid layout", str(layout), BITS)
    return BITS[layout]


def _check_slots(slot: int | Tensor, layout: FidLayout) -> None:
    top = max_slot(layout)
    if not isinstance(slot, int):
        _bits_of(slot)
        wrong = slot[(slot < 0) | (slot > top)]
        if wrong.numel() == 0:
            return
        slot = int(wrong[0])
    if not 0 <= slot <= top:
        remedy = "Slots above that need the v2 layout." if layout == "v1" else "Renumber the slots."
        raise InputError(f"slot of a {layout} id", got=slot, allowed=f"0..{top}", remedy=remedy)


def _bits_of(value: Word) -> Word:
    """The 64 bits of an id: a tensor unchanged, an int as unsigned."""
    if not isinstance(value, int):
        check_int64("ids", value)
        return value
    if not -(1 << 63) <= value < (1 << 64):
        raise InputError("id", got=value, allowed="64 bits", remedy="Hash longer keys first.")
    return value & ((1 << 64) - 1)


def _ids_of(
    strings: Any, *, spelled: bool, missing: str | None = None, out: Tensor | None = None
) -> Tensor:
    """Ids of text, int64 [N]; those of a dictionary are made once."""
    import pyarrow as pa  # `import shoal` needs torch and numpy only

    column = _text_of(strings, nulls=missing is not None)
    if pa.types.is_dictionary(column.type):
        places_N = column.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        known = _ids_of(column.dictionary, spelled=spelled)
        return torch.index_select(known, 0, torch.from_numpy(places_N), out=out)
    if str(column.type) not in ("string", "binary", "large_string", "large_binary"):
        column = column.cast(pa.large_binary())
    n = len(column)
    ids_N = torch.empty(n, dtype=torch.int64, device="cpu") if out is None else out
    if n:
        filler = _id_of_one(missing) if missing is not None and column.null_count else 0
        made = core.ids_of_texts64 if "large" in str(column.type) else core.ids_of_texts32
        valid, offsets, data = (part.address if part else 0 for part in column.buffers())
        made(data, offsets, valid, column.offset, n, spelled, filler, address(ids_N))
    return ids_N


@lru_cache(maxsize=4096)
def _id_of_one(text: str) -> int:
    return int(ids_of_text([text])[0])


def _text_of(strings: Any, *, nulls: bool) -> pa.Array:
    """A column of text in one piece; in a dictionary's there are no nulls, else only if allowed."""
    import pyarrow as pa

    remedy = "Numbers are ids already: give them a slot with make_fid."
    try:
        there = isinstance(strings, (pa.Array, pa.ChunkedArray))
        column = strings if there else pa.array(strings)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise DTypeError("strings", error, "one column of strings", remedy) from error
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    encoded = pa.types.is_dictionary(column.type)
    kind = column.type.value_type if encoded else column.type
    if len(column) == 0:
        return pa.array([], pa.string())
    if str(kind) not in TEXT_TYPES and not pa.types.is_fixed_size_binary(kind):
        allowed = "strings or bytes"
        raise DTypeError("type of strings", got=kind, allowed=allowed, remedy=remedy)
    allowed_nulls = nulls and not encoded
    if (column.null_count and not allowed_nulls) or (encoded and column.dictionary.null_count):
        fill = "Fill them first: pyarrow.compute.fill_null(column, '')."
        raise InputError("strings", got="nulls", allowed="no nulls", remedy=fill)
    return column
