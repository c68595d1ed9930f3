"""CRC-32 of the compiled core against zlib's, which the files of a checkpoint are defined by."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from shoal import _core

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
WAYS = [_core.crc32, _core.crc32_by_tables]


@pytest.mark.parametrize("crc32", WAYS)
class TestChecksum:
    def test_is_zlibs_at_every_length_and_alignment(self, crc32: Callable[..., int]) -> None:
        for start in range(17):
            for size in range(300):
                part = BYTES[start : start + size]
                assert crc32(part) == zlib.crc32(part), (start, size)

    @pytest.mark.parametrize("size", [1000, 4095, 4096, 4097, 65_519])
    def test_is_zlibs_for_long_buffers(self, crc32: Callable[..., int], size: int) -> None:
        assert crc32(BYTES[:size].tobytes()) == zlib.crc32(BYTES[:size])

    def test_goes_on_from_what_was_before(self, crc32: Callable[..., int]) -> None:
        whole = zlib.crc32(BYTES)
        for cut in (0, 1, 63, 64, 65, 127, 1000, len(BYTES) - 1, len(BYTES)):
            assert crc32(BYTES[cut:], crc32(BYTES[:cut])) == whole

    def test_takes_any_contiguous_buffer(self, crc32: Callable[..., int]) -> None:
        data = bytes(range(100))
        for buffer in (data, bytearray(data), memoryview(data)[:], np.frombuffer(data, np.int32)):
            assert crc32(buffer) == zlib.crc32(data)
        assert crc32(b"") == 0

    def test_refuses_what_is_no_buffer(self, crc32: Callable[..., int]) -> None:
        with pytest.raises(TypeError, match="bytes-like"):
            crc32("text")
        with pytest.raises((BufferError, ValueError)):
            crc32(BYTES[::2])


class TestCopy:
    @pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 16_384, 40_001])
    @pytest.mark.parametrize(("start", "at"), [(0, 0), (1, 0), (0, 5), (3, 64), (7, 33)])
    def test_copies_what_it_sums(self, size: int, start: int, at: int) -> None:
        given = BYTES[start : start + size]
        to = bytearray(b"\xaa" * (at + len(given) + 7))
        view = memoryview(to)[at : at + len(given)]
        assert _core.crc32_copy(view, given, 5) == zlib.crc32(given, 5)
        assert bytes(view) == given.tobytes()
        assert to[:at] == b"\xaa" * at and to[-7:] == b"\xaa" * 7

    def test_refuses_other_sizes_and_what_cannot_be_written(self) -> None:
        with pytest.raises(ValueError, match="other sizes"):
            _core.crc32_copy(bytearray(3), b"four")
        with pytest.raises(BufferError):
            _core.crc32_copy(b"four", b"four")
