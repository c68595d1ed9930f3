"""Device memory for rows that grow: many addresses reserved once, memory put behind them later."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from shoal.errors import DeviceUnavailable, OutOfDeviceMemory

_ALIGNED = 512
_ADDRESSES = 4  # times the bytes of the device: tables have addresses for rows to come


class Mapper(Protocol):
    """Addresses of a device, and memory behind them.

    granularity: what sizes and addresses of mapped memory are multiples of.
    """

    granularity: int

    def reserve(self, size: int) -> int:
        """The first of `size` addresses that nobody else gets.

        Raises:
            OutOfDeviceMemory: the process has fewer left.
        """
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
        least: as few will do, where the process has no more; None: `most`.

    Raises:
        OutOfDeviceMemory: the process has fewer addresses left.
    """

    def __init__(self, mapper: Mapper, most: int, least: int | None = None) -> None:
        unit = mapper.granularity
        self._mapper = mapper
        self._most = most // unit * unit
        while True:
            try:
                self._start = mapper.reserve(self._most)
                break
            except OutOfDeviceMemory:
                fewer = self._most // 2 // unit * unit
                if fewer < (most if least is None else least) // unit * unit:
                    raise
                self._most = fewer
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
            OutOfDeviceMemory: no more addresses; nothing has changed.
        """
        end = self._used + (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        if end > self._most:
            raise OutOfDeviceMemory(
                "addresses for rows of a GPU shard",
                got=f"{size:,} bytes wanted on top of {self._used:,}",
                allowed=f"{self._most:,} bytes in all, with memory behind them or not",
                remedy="Spread the tables over more shards, or give them a row budget "
                "(capacity_rows with on_full='lru' or 'lfu').",
            )
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
    """Mapped memory of a device; None where its driver cannot map: torch's allocator serves.

    Raises:
        OutOfDeviceMemory: the process has no addresses left for another shard.
    """
    if device.type != "cuda" or device.index is None:
        return None
    most = torch.cuda.mem_get_info(device)[1]  # initialises the driver, too
    mapper = CudaMapper.of(device.index)
    if mapper is None:
        return None
    made = RowMemory(mapper, _ADDRESSES * most, most)
    with _MAKING:
        _MADE.setdefault(device.index, weakref.WeakSet()).add(made)
    return made


_MADE: dict[int, weakref.WeakSet[RowMemory]] = {}
_MAKING = threading.Lock()  # shards are made in any thread


def mapped_bytes(device: torch.device) -> int:
    """Bytes of a device that rows of this process's tables have, which torch does not count."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _MAKING:
        alive = list(_MADE.get(index, ()))
    return sum(made.bytes_mapped for made in alive)


def _no_memory(size: int, why: str = "") -> torch.OutOfMemoryError:
    """As torch words it, for who reads the size out of it."""
    text = f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.{why}"
    return torch.OutOfMemoryError(text)


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
        reserve = self._driver.cuMemAddressReserve
        reserved = reserve(ctypes.byref(address), length, any_alignment, none, none)
        if reserved == _OUT_OF_MEMORY:
            raise OutOfDeviceMemory(
                f"addresses for rows of a shard on cuda:{self._index}",
                got=f"{size:,} bytes of addresses wanted; the driver has no such range left",
                allowed="what the process has not reserved for shards that are alive",
                remedy="Make fewer shards: put tables in one collection, and let go of those that "
                "are not used any more.",
            )
        self._check("cuMemAddressReserve", reserved)
        return address.value

    def map(self, address: int, size: int) -> None:
        """See `Mapper`. Keeps to `torch.cuda.set_per_process_memory_fraction`."""
        self._check_share(size)
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
            try:
                self._call("cuMemSetAccess", place, length, ctypes.byref(access), count)
            except DeviceUnavailable:
                self._call("cuMemUnmap", place, length)
                raise

    def _check_share(self, size: int) -> None:
        """Raise if so much more is beyond the share of the device that this process may take."""
        share = torch.cuda.get_per_process_memory_fraction(self._index)
        if share >= 1:
            return
        device = torch.device("cuda", self._index)
        taken = mapped_bytes(device) + torch.cuda.memory_reserved(device)
        most = int(share * torch.cuda.mem_get_info(device)[1])
        if taken + size > most:
            why = f" {taken:,} bytes are taken, and this process may take {most:,} ({share:.0%})."
            raise _no_memory(size, why)

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
            raise DeviceUnavailable(
                "memory of a GPU for rows",
                got=f"error {result} from {name} of the CUDA driver",
                allowed="0; CUresult in cuda.h names the others",
                remedy="Look for an earlier error of the GPU in this process and in the system's "
                "log, and start the process again; if it comes back, update the driver.",
            )
