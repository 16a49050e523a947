"""Memory in one range of addresses that grows and shrinks at its end, by the driver's virtual memory management.

Contract: the addresses are reserved once, as many as may ever be needed, and stay what they are; memory is mapped to
their begin in pieces, so that more of it needs no second copy and less gives the rest back to the device. Before memory
goes the device is waited for, since the driver unmaps at once (CUDA driver API, virtual memory management): that must
not be while a graph is captured.
"""

import ctypes
import itertools
import sys
from functools import cache
from typing import Any

_PIECE = 32 << 20  # bytes that are mapped, and can be given back, as one
_GRANULE = 2 << 20  # bytes; what the driver maps on every GPU so far
_SUPPORTED, _DIRECT_ACCESS = 102, 110  # attributes: mapping; other devices on the bus (network cards) may reach it
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_access", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    """The driver with its functions' types; None where there is none, or one without these functions."""
    size, address = ctypes.c_size_t, ctypes.c_uint64
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetAttribute.argtypes = ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int
        driver.cuMemGetAllocationGranularity.argtypes = ctypes.POINTER(size), ctypes.POINTER(_Properties), ctypes.c_int
        driver.cuMemAddressReserve.argtypes = ctypes.POINTER(address), size, size, address, ctypes.c_uint64
        driver.cuMemAddressFree.argtypes = address, size
        driver.cuMemCreate.argtypes = ctypes.POINTER(address), size, ctypes.POINTER(_Properties), ctypes.c_uint64
        driver.cuMemRelease.argtypes = (address,)
        driver.cuMemMap.argtypes = address, size, size, address, ctypes.c_uint64
        driver.cuMemUnmap.argtypes = address, size
        driver.cuMemSetAccess.argtypes = address, size, ctypes.POINTER(_Access), size
    except (OSError, AttributeError):
        return None
    return driver


def _attribute(device: int, number: int) -> int:
    value = ctypes.c_int(0)
    return value.value if _driver().cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0


def _properties(device: int) -> _Properties:
    properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))
    properties.flags.direct_access = int(_attribute(device, _DIRECT_ACCESS) != 0)
    return properties


def supports_mapping(device: int) -> bool:
    """Whether memory of a device (its index) can be mapped in granules of 2 MiB."""
    if _driver() is None or not _attribute(device, _SUPPORTED):
        return False
    granularity, properties = ctypes.c_size_t(0), _properties(device)
    status = _driver().cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(properties), 0)
    return status == 0 and granularity.value > 0 and _GRANULE % granularity.value == 0


class MappedRange:
    """Memory of one device, from `ptr` on; none at first."""

    def __init__(self, device: int, most_bytes: int) -> None:
        """Reserve addresses for `most_bytes`. Raises MemoryError if the driver has none, or maps no memory."""
        if not supports_mapping(device):
            raise MemoryError(f"the driver maps no memory of device {device}")
        self._device, self._ends = device, [0]
        self.most_bytes = -(-most_bytes // _GRANULE) * _GRANULE
        address = ctypes.c_uint64(0)
        status = _driver().cuMemAddressReserve(ctypes.byref(address), self.most_bytes, _GRANULE, 0, 0)
        if status:
            raise MemoryError(f"the driver reserved no {self.most_bytes} bytes of addresses (status {status})")
        self.ptr = address.value

    @property
    def size_bytes(self) -> int:
        """The memory that is there now."""
        return self._ends[-1]

    def __del__(self) -> None:
        if getattr(self, "ptr", 0) and not sys.is_finalizing():  # then the driver takes everything back
            self._cut(1)
            _driver().cuMemAddressFree(self.ptr, self.most_bytes)

    def grow(self, size_bytes: int) -> bool:
        """Have at least so many bytes (a multiple of 2 MiB); False if the device lacks them, and all is as before."""
        kept = len(self._ends)
        if size_bytes > self.most_bytes:
            return False
        begin = self.size_bytes
        while self.size_bytes < size_bytes:
            if not self._map(min(_PIECE, size_bytes - self.size_bytes)):
                self._cut(kept)
                return False
        if begin < self.size_bytes and not self._open(begin):
            self._cut(kept)
            return False
        return True

    def least_bytes(self, size_bytes: int) -> int:
        """What would be there after `shrink`: whole pieces."""
        return next((end for end in self._ends if end >= size_bytes), self.size_bytes)

    def shrink(self, size_bytes: int) -> None:
        """Give back the pieces beyond so many bytes."""
        kept = sum(end <= self.least_bytes(size_bytes) for end in self._ends)
        if kept < len(self._ends):
            self._cut(kept)

    def _map(self, size_bytes: int) -> bool:
        """Add a piece; its handle is let go of at once, so that the memory is the mapping's."""
        driver, handle, properties = _driver(), ctypes.c_uint64(0), _properties(self._device)
        if driver.cuMemCreate(ctypes.byref(handle), size_bytes, ctypes.byref(properties), 0):
            return False
        mapped = driver.cuMemMap(self.ptr + self.size_bytes, size_bytes, 0, handle, 0) == 0
        driver.cuMemRelease(handle)
        if mapped:
            self._ends.append(self.size_bytes + size_bytes)
        return mapped

    def _open(self, begin: int) -> bool:
        """Let the device, and those that can reach it, use what was mapped from `begin` on."""
        from cupy.cuda import runtime

        others = range(runtime.getDeviceCount())
        able = [i for i in others if i == self._device or runtime.deviceCanAccessPeer(i, self._device)]
        access = (_Access * len(able))(*(_Access(_Location(_ON_DEVICE, i), _READ_AND_WRITE) for i in able))
        return _driver().cuMemSetAccess(self.ptr + begin, self.size_bytes - begin, access, len(able)) == 0

    def _cut(self, kept: int) -> None:
        """Keep the first so many ends."""
        if len(self._ends) > kept:
            import cupy

            with cupy.cuda.Device(self._device) as device:
                device.synchronize()  # kernels that are queued may still use it
            for begin, end in itertools.pairwise(self._ends[kept - 1 :]):
                _driver().cuMemUnmap(self.ptr + begin, end - begin)
            del self._ends[kept:]
