"""Device memory for rows that grow: many addresses reserved once, memory put behind them later."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

_ALIGNED = 512
_ADDRESSES = 4  # times the bytes of the device: tables have addresses for rows to come


class Mapper(Protocol):
    """Addresses of a device, and memory behind them.

    granularity: what sizes and addresses of mapped memory are multiples of.
    """

    granularity: int

    def reserve(self, size: int) -> int:
        """The first of `size` addresses that nobody else gets."""
        ...

    def map(self, address: int, size: int) -> None:
        """Put memory behind reserved addresses.

        Raises:
            torch.OutOfMemoryError: the device has none left.
        """
        ...

    def free(self, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
        """Give back reserved addresses and the memory behind them, when the device is done.

        pieces: address and size of each `map`.
        """
        ...


class RowMemory:
    """Hands out addresses of a device from the lowest on, and puts memory behind them when told.

    All is given back at once, when this object goes.

    Args:
        mapper: of the device.
        most: addresses that can ever be taken.
    """

    def __init__(self, mapper: Mapper, most: int) -> None:
        unit = mapper.granularity
        self._mapper = mapper
        self._most = most // unit * unit
        self._start = mapper.reserve(self._most)
        self._used = 0
        self._backed = np.zeros(self._most // unit, dtype=np.bool_)  # units with memory behind
        self._pieces: list[tuple[int, int]] = []
        finalizer = weakref.finalize(self, mapper.free, self._start, self._most, self._pieces)
        finalizer.atexit = False  # the process gives all back

    @property
    def bytes_mapped(self) -> int:
        """Bytes of the device that are taken from others."""
        return sum(size for _, size in self._pieces)

    @property
    def used(self) -> int:
        """Addresses handed out."""
        return self._used

    def take(self, size: int) -> int:
        """The first of `size` addresses, a multiple of 512. There may be nothing behind them.

        Raises:
            torch.OutOfMemoryError: no more addresses; nothing has changed.
        """
        end = self._used + (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        if end > self._most:
            raise _no_memory(size)
        address, self._used = self._start + self._used, end
        return address

    def take_back(self, used: int) -> None:
        """Have only so many addresses handed out: nobody uses the others."""
        self._used = used

    def back(self, parts: Sequence[tuple[int, int]]) -> None:
        """Have memory behind these parts, each an address and a size; contents are whatever was
        there. Those that have some keep it.

        Raises:
            torch.OutOfMemoryError: the device has none left; some parts may have memory now.
        """
        unit, units = self._mapper.granularity, [np.zeros(0, dtype=np.int64)]
        for address, size in parts:
            first, last = address - self._start, address - self._start + size
            units.append(np.arange(first // unit, -(-last // unit)))
        wanted = np.unique(np.concatenate(units))
        lacking = wanted[~self._backed[wanted]]
        for run in np.split(lacking, np.flatnonzero(np.diff(lacking) > 1) + 1):
            if run.size:
                self._map(int(run[0]), run.size)

    def _map(self, first: int, units: int) -> None:
        unit = self._mapper.granularity
        piece = self._start + first * unit, units * unit
        try:
            self._mapper.map(*piece)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what torch holds and nobody uses
            self._mapper.map(*piece)
        self._pieces.append(piece)
        self._backed[first : first + units] = True


def row_memory(device: torch.device) -> RowMemory | None:
    """Mapped memory of a device; None where its driver cannot map: torch's allocator serves."""
    if device.type != "cuda" or device.index is None:
        return None
    most = torch.cuda.mem_get_info(device)[1]  # initialises the driver, too
    mapper = CudaMapper.of(device.index)
    if mapper is None:
        return None
    made = RowMemory(mapper, _ADDRESSES * most)
    _MADE.setdefault(device.index, weakref.WeakSet()).add(made)
    return made


_MADE: dict[int, weakref.WeakSet[RowMemory]] = {}


def mapped_bytes(device: torch.device) -> int:
    """Bytes of a device that rows of this process's tables have, which torch does not count."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(made.bytes_mapped for made in _MADE.get(index, ()))


def _no_memory(size: int) -> torch.OutOfMemoryError:
    """As torch words it, for who reads the size out of it."""
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")


class _Location(ctypes.Structure):
    """CUmemLocation: a device by its number."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_DEVICE, _PINNED, _READ_AND_WRITE = 1, 1, 3  # as cuda.h numbers them
_MAPS, _OUT_OF_MEMORY = 102, 2


class CudaMapper:
    """Memory of a GPU through the driver's virtual memory management, found at run time.

    index: of the device.
    """

    def __init__(self, index: int, driver: Any) -> None:
        self._driver = driver
        self._index = index
        self._location = _Location(_DEVICE, index)
        self._wanted = _Allocation(_PINNED, 0, self._location)
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), self._ref, ctypes.c_int(0))
        self.granularity = unit.value

    @classmethod
    def of(cls, index: int) -> CudaMapper | None:
        """Of a device; None where the driver or the device has no such thing."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        device, maps = ctypes.c_int(), ctypes.c_int()
        cls._check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)))
        asked = driver.cuDeviceGetAttribute(ctypes.byref(maps), ctypes.c_int(_MAPS), device)
        cls._check("cuDeviceGetAttribute", asked)
        return cls(index, driver) if maps.value else None

    @property
    def _ref(self) -> Any:
        return ctypes.byref(self._wanted)

    def reserve(self, size: int) -> int:
        """See `Mapper`."""
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        length, any_alignment = ctypes.c_size_t(size), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), length, any_alignment, none, none)
        return address.value

    def map(self, address: int, size: int) -> None:
        """See `Mapper`."""
        handle, length, none = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        place, access = ctypes.c_uint64(address), _Access(self._location, _READ_AND_WRITE)
        with torch.cuda.device(self._index):
            made = self._driver.cuMemCreate(ctypes.byref(handle), length, self._ref, none)
            if made == _OUT_OF_MEMORY:
                raise _no_memory(size)
            self._check("cuMemCreate", made)
            try:
                self._call("cuMemMap", place, length, ctypes.c_size_t(0), handle, none)
            finally:
                self._call("cuMemRelease", handle)  # the mapping holds the memory
            count = ctypes.c_size_t(1)
            self._call("cuMemSetAccess", place, length, ctypes.byref(access), count)

    def free(self, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
        """See `Mapper`."""
        torch.cuda.synchronize(self._index)
        for start, length in pieces:
            self._call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(length))
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._driver, name)(*arguments))

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result:
            raise RuntimeError(f"{name} of the CUDA driver failed with error {result}")
