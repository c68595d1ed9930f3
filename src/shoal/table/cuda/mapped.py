"""Device memory for rows that grow: addresses reserved once, memory mapped ahead of its use."""

from __future__ import annotations

import ctypes
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

_ALIGNED = 512
_PIECE_BYTES = 16 << 20  # that a worker maps at a time: no longer are the driver's locks held
_LEAST_AHEAD, _MOST_AHEAD = 32 << 20, 256 << 20
_AHEAD = 16  # one such part of what is in use, within these


class Mapper(Protocol):
    """Addresses of a device, and memory behind them.

    granularity: what sizes and addresses of mapped memory are multiples of.
    """

    granularity: int

    def reserve(self, size: int) -> int:
        """The first of `size` addresses that nobody else gets."""
        ...

    def map(self, address: int, size: int) -> None:
        """Put memory behind reserved addresses. Any thread may call it.

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
    """Hands out a device's memory from its lowest address on; given back all at once, when this
    object goes.

    A worker maps what is taken next, so that growing waits for the driver only where it outruns
    the worker. It starts with the first `take` after `look_ahead`.

    Args:
        mapper: of the device.
        most: bytes that can ever be taken.
    """

    def __init__(self, mapper: Mapper, most: int) -> None:
        self._mapper = mapper
        self._most = most // mapper.granularity * mapper.granularity
        self._start = mapper.reserve(self._most)
        self._used = self._mapped = 0
        self._pieces: list[tuple[int, int]] = []
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        finalizer = weakref.finalize(self, mapper.free, self._start, self._most, self._pieces)
        finalizer.atexit = False  # the process gives all back

    @property
    def bytes_mapped(self) -> int:
        """Bytes of the device that are taken from others."""
        return self._mapped

    def take(self, size: int) -> int:
        """Address of `size` bytes, a multiple of 512; contents are whatever was there.

        Raises:
            torch.OutOfMemoryError: the device has none left; nothing has changed.
        """
        end = self._used + (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        if end > self._most:
            raise _no_memory(size)
        if end > self._mapped:
            self._settle()
            self._map_now(end)
        address, self._used = self._start + self._used, end
        if self._worker is not None:
            self._start_worker(self._worker)
        return address

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._used

    def take_back(self, used: int) -> None:
        """Have only so many of the bytes handed out: nobody uses the others."""
        self._used = used

    def look_ahead(self) -> None:
        """Map ahead from here on: what is taken grows."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "shoal-memory")

    def _start_worker(self, worker: ThreadPoolExecutor) -> None:
        ahead = min(max(self._used // _AHEAD, _LEAST_AHEAD), _MOST_AHEAD)
        busy = self._under_way is not None and not self._under_way.done()
        if busy or self._mapped - self._used > ahead // 2:
            return
        self._under_way = worker.submit(self._map_ahead, min(self._used + ahead, self._most))

    def _settle(self) -> None:
        """Wait for the worker. What it had no memory for is asked for again where it is needed."""
        future, self._under_way = self._under_way, None
        if future is not None:
            future.exception()

    def _map_now(self, end: int) -> None:
        size = end - self._mapped
        try:
            self._map(size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what torch holds and nobody uses
            self._map(size)

    def _map_ahead(self, end: int) -> None:
        while self._mapped < end:
            self._map(min(end - self._mapped, _PIECE_BYTES))

    def _map(self, size: int) -> None:
        """Map so many bytes more at least; never called by two threads at a time."""
        unit = self._mapper.granularity
        piece = self._start + self._mapped, (size + unit - 1) // unit * unit
        self._mapper.map(*piece)
        self._pieces.append(piece)
        self._mapped += piece[1]


def row_memory(device: torch.device) -> RowMemory | None:
    """Mapped memory of a device; None where its driver cannot map: torch's allocator serves."""
    if device.type != "cuda" or device.index is None:
        return None
    most = torch.cuda.mem_get_info(device)[1]  # initialises the driver, too
    mapper = CudaMapper.of(device.index)
    if mapper is None:
        return None
    made = RowMemory(mapper, most)
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
