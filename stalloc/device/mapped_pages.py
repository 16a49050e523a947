"""Memory by pages: ranges of addresses, and pages of a pool of CuPy's that are mapped to them and unmapped again.

Contract: the addresses of a range are reserved once and stay what they are until it is closed. A page is memory
that the driver made (CUDA driver API, virtual memory management); CuPy's pool holds it, counts it against its limit and
keeps what is free for the next range. The driver unmaps at once: whoever unmaps has waited for the device, and not
while a graph is captured. What the driver refuses is not told as a lack of memory: `Pages.refusal` names it. Another
device may use the memory of a device once the process uses both.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from stalloc.notices import say
from stalloc.sizes import PAGE_BYTES

PageEntries = Callable[[ctypes.CDLL], tuple[int, int]]
#: attributes: mapping; other processes may map it by file descriptors; network cards may reach it
_SUPPORTED, _EXPORTED, _DIRECT_ACCESS = 102, 103, 110
_FILE_DESCRIPTOR, _OUT_OF_MEMORY = 1, 2
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_PROBED_BYTES = 4096


_BYTE = ctypes.c_ubyte


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", _BYTE), ("direct_access", _BYTE), ("usage", ctypes.c_ushort), ("reserved", _BYTE * 4))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, and the status of the last call that was given it: see core/entry/pages.ll."""

    _fields_ = (
        *(("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p)),
        *(("flags", _Flags), ("status", ctypes.c_int)),
    )


class _Access(ctypes.Structure):
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
        driver.cuGetErrorName.argtypes = ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)
    except (OSError, AttributeError):
        return None
    return driver


def _attribute(device: int, number: int) -> int:
    value = ctypes.c_int(0)
    return value.value if _driver().cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0


def _properties(device: int, *, plain: bool = False) -> _Properties:
    properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))
    if not plain:
        properties.handle_types = _FILE_DESCRIPTOR if _attribute(device, _EXPORTED) else 0
        properties.flags.direct_access = int(_attribute(device, _DIRECT_ACCESS) != 0)
    return properties


def _maps_pages(device: int) -> bool:
    """Whether the driver maps memory of a device (its index) in pages of ours."""
    if _driver() is None or not _attribute(device, _SUPPORTED):
        return False
    granularity, properties = ctypes.c_size_t(0), _properties(device)
    status = _driver().cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(properties), 0)
    return status == 0 and granularity.value > 0 and PAGE_BYTES % granularity.value == 0


def _call(name: str, *arguments: Any) -> int:
    try:
        return int(getattr(_driver(), name)(*arguments))
    except ctypes.ArgumentError as error:  # the arguments are right, so this is what ctypes makes of a RecursionError
        raise RecursionError(str(error)) from error


def _told(name: str, status: int) -> str:
    text = ctypes.c_char_p()
    _call("cuGetErrorName", status, ctypes.byref(text))
    return f"{name} says {status}{f' ({text.value.decode()})' if text.value else ''}"


class Pages:
    def __init__(self, device: int, entries: PageEntries) -> None:
        """`entries` gives the C functions that make and release a page with a driver: see `core.entry.page_entries`.

        Memory that network cards and other processes may reach is preferred; where that is refused it is plain.
        Raises MemoryError if the driver maps no memory of this device, or what is mapped does not keep its bytes.
        """
        import cupy

        self.device = device
        if not _maps_pages(device):
            raise MemoryError(f"the driver maps no memory of device {device}")
        self._lock = threading.RLock()
        self._ranges: weakref.WeakSet[PageRange] = weakref.WeakSet()
        self._users = [device]  # who may use the pages
        self._unmapped: list[Any] = []  # pages that go to the next address, or back to the pool
        self._others: dict[int, int] = {}  # addresses that a page has beside one, by its handle
        for plain in (False, True):
            self.refusal = ""  #: what the driver said when it refused a page for another reason than a lack of memory
            self.failure = ""  #: the same of the last call that failed, whatever the reason, until pages are mapped
            properties = self._properties = _properties(device, plain=plain)
            allocator = cupy.cuda.CFunctionAllocator(ctypes.addressof(properties), *entries(_driver()), properties)
            #: a `cupy.cuda.MemoryPool` whose pointers are handles of the driver's, a page each
            self.pool = cupy.cuda.MemoryPool(allocator.malloc)
            _probe(self)
            if not self.refusal:
                break
        else:
            raise MemoryError(self.refusal)
        _open_to_each_other(self)

    def _done(self, name: str, status: int) -> bool:
        """Whether a call was done; else it is noted."""
        if status:
            self.failure = _told(name, status)
            if status != _OUT_OF_MEMORY:
                self.refusal = self.refusal or self.failure
        return status == 0

    def _does(self, name: str, *arguments: Any) -> bool:
        return self._done(name, _call(name, *arguments))

    def _allow(self, address: int, size_bytes: int, users: list[int]) -> int:
        access = (_Access(_Location(_ON_DEVICE, index), _READ_AND_WRITE) for index in users)
        return _call("cuMemSetAccess", address, size_bytes, (_Access * len(users))(*access), len(users))

    def open_to(self, device: int) -> None:
        """Let another device use the pages, from now on and those that are mapped, if the driver lets it."""
        with self._lock:
            runs = [run for one in self._ranges for run in page_runs(one.mapped())]
            for address, size_bytes in runs:
                if status := self._allow(address, size_bytes, [device]):
                    told = _told("cuMemSetAccess", status)
                    why = f"device {device} cannot use memory of device {self.device} ({told})"
                    say(f"{why}: where tensors are copied between them, choose STALLOC_ARENA=pool or --arena pool.")
                    return
            self._users.append(device)

    def reserve(self, size_bytes: int) -> "PageRange | None":
        """Addresses for so many bytes (whole pages), without memory; None if the driver has none."""
        address = ctypes.c_uint64(0)
        if status := _call("cuMemAddressReserve", ctypes.byref(address), size_bytes, PAGE_BYTES, 0, 0):
            self.failure = _told("cuMemAddressReserve", status)  # shorter ones may be had
            return None
        made = PageRange(self, address.value, size_bytes)
        self._ranges.add(made)
        return made

    def free_addresses(self, address: int, size_bytes: int) -> None:
        _call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, count: int, held: dict[int, Any]) -> bool:
        """Map pages from an address on, which `held` has by address then; False, and none, if the device lacks them."""
        end = address + count * PAGE_BYTES
        with self._lock:
            is_mapped = self._map_each(range(address, end, PAGE_BYTES), held)
            if is_mapped and self._done("cuMemSetAccess", self._allow(address, end - address, self._users)):
                self.failure = ""
                return True
        self.unmap(address, count, held)
        self.free_unmapped()
        return False

    def _map_each(self, addresses: range, held: dict[int, Any]) -> bool:
        import cupy

        try:
            with cupy.cuda.Stream.null:  # CuPy's pool keeps what is free apart by stream
                for at in addresses:
                    if at in held:
                        continue
                    page = self._unmapped.pop() if self._unmapped else self.pool.malloc(PAGE_BYTES)
                    if not page.ptr:
                        return self._done("cuMemCreate", self._properties.status)
                    held[at] = page  # what is mapped is held, wherever this is interrupted
                    if not self._does("cuMemMap", at, PAGE_BYTES, 0, page.ptr, 0):
                        del held[at]  # the driver unmaps no range of which a part is not mapped
                        return False
        except cupy.cuda.memory.OutOfMemoryError:
            return False
        return True

    @property
    def unmapped_bytes(self) -> int:
        """Bytes of pages that were unmapped and not given back yet; they are used for the addresses mapped next."""
        return len(self._unmapped) * PAGE_BYTES

    def free_unmapped(self) -> None:
        """Give the pages that were unmapped, and what the pool has free, back to the device."""
        self._unmapped.clear()
        self.pool.free_all_blocks()

    def share(self, address: int, page: Any, held: dict[int, Any]) -> bool:
        """Map a page that has an address already to another one, which `held` has then; False if that failed."""
        self._others[page.ptr] = self._others.get(page.ptr, 0) + 1  # first: interrupted, there are not less
        with self._lock:
            if not self._does("cuMemMap", address, PAGE_BYTES, 0, page.ptr, 0):
                self._has_another(page)
                return False
            held[address] = page
            return self._done("cuMemSetAccess", self._allow(address, PAGE_BYTES, self._users))

    def unmap(self, address: int, count: int, held: dict[int, Any]) -> None:
        """Unmap those of so many pages that `held` has; the device must be done with them."""
        end = address + count * PAGE_BYTES
        if count > len(held):  # a range is as long as the device's memory, and most of it has none
            pages = sorted(page for page in held if address <= page < end)
        else:
            pages = [page for page in range(address, end, PAGE_BYTES) if page in held]
        for begin, size_bytes in page_runs(pages):
            self._does("cuMemUnmap", begin, size_bytes)
            unmapped = [held.pop(at) for at in range(begin, begin + size_bytes, PAGE_BYTES)]
            self._unmapped += [page for page in unmapped if not self._has_another(page)] if self._others else unmapped

    def _has_another(self, page: Any) -> bool:
        """Whether a page that has one address less now still has one."""
        others = self._others.pop(page.ptr, 0)
        if others > 1:
            self._others[page.ptr] = others - 1
        return others > 0


class PageRange:
    """A range of addresses, from `ptr` on, of which pages have memory."""

    def __init__(self, pages: Any, address: int, size_bytes: int) -> None:
        self._pages, self.ptr, self.size_bytes = pages, address, size_bytes
        self._held: dict[int, Any] = {}  # page by address

    def close(self) -> None:
        """Give the memory and the addresses back; the device must be done with them. Once closed it does nothing.

        There is no finaliser: what a signal's handler raises in one would never be heard of.
        """
        self._pages.unmap(self.ptr, self.size_bytes // PAGE_BYTES, self._held)
        size_bytes, self.size_bytes = self.size_bytes, 0
        if size_bytes:
            self._pages.free_addresses(self.ptr, size_bytes)

    @property
    def mapped_bytes(self) -> int:
        return len(self._held) * PAGE_BYTES

    def map(self, address: int, size_bytes: int) -> bool:
        """Give whole pages memory that have none; False if the device lacks it, and all is as before."""
        return bool(self._pages.map(address, size_bytes // PAGE_BYTES, self._held))

    def share(self, address: int, other: "PageRange", other_address: int) -> bool:
        """Give a page the memory that another range has at an address; False if that failed."""
        page = other._held[other_address // PAGE_BYTES * PAGE_BYTES]
        return bool(self._pages.share(address, page, self._held))

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take the memory of whole pages away; the device must be done with them."""
        self._pages.unmap(address, size_bytes // PAGE_BYTES, self._held)

    def lacking(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What of the addresses [begin, end) has no memory, in whole pages: address and bytes of each range."""
        pages = range(begin // PAGE_BYTES * PAGE_BYTES, end, PAGE_BYTES)
        return page_runs([page for page in pages if page not in self._held])

    def page_identity(self, address: int) -> int:
        """A number for the memory of the page at `address`, which is equal wherever that memory is mapped."""
        return int(self._held[address].ptr)

    def mapped(self) -> list[int]:
        return sorted(self._held)


def page_runs(pages: list[int]) -> list[tuple[int, int]]:
    """Pages by their addresses, ascending, as ranges: address and bytes of each."""
    found: list[tuple[int, int]] = []
    begin = end = -1
    for page in pages:
        if page != end:
            if begin < end:
                found.append((begin, end - begin))
            begin = page
        end = page + PAGE_BYTES
    return [*found, (begin, end - begin)] if begin < end else found


_made: list[Pages] = []  # of the devices that this process uses
_making = threading.Lock()
os.register_at_fork(after_in_child=_made.clear)


def _open_to_each_other(pages: Pages) -> None:
    """Let this device and those that are used already reach each other's pages, as far as they can.

    Only those: entries for peers cost the driver time at each page, and a peer that nobody uses may refuse.
    """
    from cupy.cuda import runtime

    with _making:
        for other in _made:
            for one, its_user in ((pages, other.device), (other, pages.device)):
                if one.device != its_user and runtime.deviceCanAccessPeer(its_user, one.device):
                    one.open_to(its_user)
        _made.append(pages)


def _probe(pages: Pages) -> None:
    """Raise MemoryError unless bytes that are written to mapped pages are read again; a full device is not tried."""
    from cupy.cuda import runtime

    memory = pages.reserve(2 * PAGE_BYTES)
    if memory is None:
        pages.refusal = pages.failure  # of addresses there is no lack
        return
    if not memory.map(memory.ptr, 2 * PAGE_BYTES):
        memory.close()
        return
    wanted = ctypes.create_string_buffer(bytes(range(256)) * (_PROBED_BYTES // 256), _PROBED_BYTES)
    read = ctypes.create_string_buffer(_PROBED_BYTES)
    for at in (memory.ptr, memory.ptr + PAGE_BYTES - _PROBED_BYTES // 2):
        runtime.memcpy(at, ctypes.addressof(wanted), _PROBED_BYTES, runtime.memcpyHostToDevice)
        runtime.memcpy(ctypes.addressof(read), at, _PROBED_BYTES, runtime.memcpyDeviceToHost)
        if read.raw != wanted.raw:
            raise MemoryError(f"mapped pages of device {pages.device} do not keep what is written to them")
    memory.close()
    pages.free_unmapped()
