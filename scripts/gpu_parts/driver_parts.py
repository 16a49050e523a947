"""What the driver says, asked directly: no library stands between, so a status is the driver's own."""

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from part import IS_REAL, check, note, step, use_device

MIB = 1 << 20
MODE, PROHIBITED = "compute mode (0: shared, 3: one process)", 2
BY_PAGES = 102
ATTRIBUTES = {
    MODE: 20, "memory by pages": BY_PAGES, "exported as file descriptors": 103,
    "RDMA with it": 110, "memory pools": 115, "capability major": 75, "capability minor": 76,
}  # fmt: skip
MANY_PAGES, MANY_CALLS = 8192, 256  # what fails late; the first are a quarter of what a step of a 7B model maps
KERNEL = 'extern "C" __global__ void seven(int *numbers) { numbers[threadIdx.x] = 7; }'


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte), ("direct_access", ctypes.c_ubyte), ("rest", ctypes.c_ubyte * 6),
    )  # fmt: skip


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """libcuda.so.1, of which each call is timed and its status kept."""

    def __init__(self) -> None:
        use_device()
        self._library = ctypes.CDLL("libcuda.so.1")
        self.failures: list[str] = []
        self.times_us: dict[str, list[float]] = {}

    def name(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return f"{status} ({text.value.decode() if text.value else 'a status without a name'})"

    def call(self, function: str, *arguments: Any, about: str = "", is_one_of_many: bool = False) -> bool:
        """Call a function; whether it succeeded. It is noted that it begins, in case it does not end."""
        if not is_one_of_many:
            note(begins=f"{function} {about}".strip())
        started = time.perf_counter_ns()
        status = getattr(self._library, function)(*arguments)
        self.times_us.setdefault(function, []).append((time.perf_counter_ns() - started) / 1e3)
        if status:
            number = len(self.times_us[function])
            sentence = f"{function} says {self.name(status)}{f': {about}' if about else ''}, call {number}"
            self.fails(sentence)
        return status == 0

    def fails(self, sentence: str) -> None:
        self.failures.append(sentence)
        note(failed=sentence)

    def integer(self, function: str, *arguments: Any, about: str = "") -> int:
        value = ctypes.c_int(-1)
        return value.value if self.call(function, ctypes.byref(value), *arguments, about=about) else -1

    def check(self) -> None:
        check(not self.failures, self.failures[0] if self.failures else "")


def driver() -> None:
    """Versions, devices, attributes, peers, and whether a context can be made on each device."""
    note(python=platform.python_version(), kernel=platform.release(), cpus=os.cpu_count())
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
        try:
            print(subprocess.run(command, capture_output=True, text=True, timeout=15, check=False).stdout)
        except (OSError, subprocess.TimeoutExpired) as error:
            note(told=f"{' '.join(command)}: {error}")
    try:
        with open("/proc/self/mem", "rb"):
            pass
    except OSError as error:
        note(told=f"/proc/self/mem: {error.strerror}")
    own = Driver()
    if own.call("cuInit", 0):
        version, count = own.integer("cuDriverGetVersion"), own.integer("cuDeviceGetCount")
        note(driver_cuda=version, devices=count)
        for index in range(count):
            device, name = own.integer("cuDeviceGet", index), ctypes.create_string_buffer(100)
            own.call("cuDeviceGetName", name, 100, device)
            total = ctypes.c_size_t()
            own.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
            facts = {text: own.integer("cuDeviceGetAttribute", number, device) for text, number in ATTRIBUTES.items()}
            peers = [peer for peer in range(count) if peer != index and _reaches(own, device, peer)]
            note(device=index, name=name.value.decode(), total_bytes=total.value, peers=peers, **facts)
            if facts[MODE] == PROHIBITED:
                own.fails(f"device {index} is in compute mode prohibited (attribute 20 is 2): nvidia-smi -c 0 ends it")
        for index in range(count):
            context = ctypes.c_void_p()
            if own.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index, about=f"device {index}"):
                own.call("cuDevicePrimaryCtxRelease_v2", index, about=f"device {index}")
    own.check()


def _reaches(own: Driver, device: int, peer: int) -> bool:
    return own.integer("cuDeviceCanAccessPeer", device, peer, about=f"{device} to {peer}") == 1


def pages() -> None:
    """Memory by pages, call by call, at 2, 16 and 64 MiB: alone, for peers, for network cards, for other processes."""
    own = Driver()
    context = ctypes.c_void_p()
    if own.call("cuInit", 0) and own.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0, about="device 0"):
        own.call("cuCtxSetCurrent", context)
        if own.integer("cuDeviceGetAttribute", BY_PAGES, 0) == 0:
            own.fails("memory by pages is not offered by the driver (attribute 102 is 0): stalloc takes blocks")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        own.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        note(free_bytes=free.value, total_bytes=total.value)
        if free.value < 64 * MIB:
            own.fails(f"cuMemGetInfo tells {free.value} of {total.value} bytes free: somebody else has the memory")
        peers = [one for one in range(1, own.integer("cuDeviceGetCount")) if _reaches(own, one, 0)]
        rdma = own.integer("cuDeviceGetAttribute", 110, 0) == 1
        exported = own.integer("cuDeviceGetAttribute", 103, 0) == 1
        ways: dict[str, dict[str, Any]] = {"alone": {}, "for network cards": {"rdma": 1}}
        ways["for other processes"] = {"export": 1}
        if peers:
            ways["for peers"] = {"peers": peers}
        elif not own.failures:
            note(told="no other device reaches device 0")
        for way, is_offered in (("for network cards", rdma), ("for other processes", exported)):
            if not is_offered:
                note(told=f"memory by pages {way} is not offered by the driver")
                del ways[way]
        _reserves_twice(own, total.value)
        for way, what in ways.items():
            for mib in (2, 16, 64):
                _one_size(own, mib * MIB, f"{mib} MiB {way}", **what)
        _many(own, min(MANY_PAGES, free.value // (8 * MIB)))
    own.check()


def _reserves_twice(own: Driver, total_bytes: int) -> None:
    address, length, none = ctypes.c_uint64(), ctypes.c_size_t(total_bytes // MIB * MIB * 2), ctypes.c_uint64(0)
    about = f"{length.value} bytes of addresses"
    if own.call("cuMemAddressReserve", ctypes.byref(address), length, none, none, none, about=about):
        own.call("cuMemAddressFree", address, length, about=about)


def _one_size(own: Driver, size: int, about: str, rdma: int = 0, export: int = 0, peers: Sequence[int] = ()) -> None:
    """Reserve, create, map, allow, write, read, unmap, release, free: five times, with the median time of each."""
    own.times_us.clear()
    properties = Properties(type=1, handle_types=export, location=Location(1, 0), direct_access=rdma)
    access = (Access * (1 + len(peers)))(*(Access(Location(1, index), 3) for index in (0, *peers)))
    for _ in range(5):
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        length, none = ctypes.c_size_t(size), ctypes.c_uint64(0)
        if not own.call("cuMemAddressReserve", ctypes.byref(address), length, none, none, none, about=about):
            break
        if own.call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), none, about=about):
            if own.call("cuMemMap", address, length, none, handle, none, about=about):
                if own.call("cuMemSetAccess", address, length, access, ctypes.c_size_t(len(access)), about=about):
                    _keeps_bytes(own, address.value, size, about)
                own.call("cuMemUnmap", address, length, about=about)
            own.call("cuMemRelease", handle, about=about)
        own.call("cuMemAddressFree", address, length, about=about)
    note(size=about, median_us={name: round(statistics.median(times), 1) for name, times in own.times_us.items()})


def _many(own: Driver, count: int) -> None:
    """Many pages of 2 MiB at a time, each mapped on its own, as a program has them."""
    own.times_us.clear()
    about = f"{count} times 2 MiB"
    note(begins=about)
    address, handles, none = ctypes.c_uint64(), (ctypes.c_uint64 * count)(), ctypes.c_uint64(0)
    whole, page = ctypes.c_size_t(2 * MIB * count), ctypes.c_size_t(2 * MIB)
    properties, access = Properties(type=1, location=Location(1, 0)), Access(Location(1, 0), 3)

    def call(function: str, *arguments: Any) -> bool:
        return own.call(function, *arguments, about=about, is_one_of_many=True)

    if count and call("cuMemAddressReserve", ctypes.byref(address), whole, none, none, none):
        for index in range(count):
            at, made = ctypes.c_uint64(address.value + 2 * MIB * index), ctypes.byref(handles, 8 * index)
            if not call("cuMemCreate", made, page, ctypes.byref(properties), none):
                break
            if not call("cuMemMap", at, page, none, ctypes.c_uint64(handles[index]), none):
                call("cuMemRelease", ctypes.c_uint64(handles[index]))
                handles[index] = 0
                break
            call("cuMemSetAccess", at, page, ctypes.byref(access), ctypes.c_size_t(1))
        for index, handle in enumerate(handles):
            if handle:
                call("cuMemUnmap", ctypes.c_uint64(address.value + 2 * MIB * index), page)
                call("cuMemRelease", ctypes.c_uint64(handle))
        call("cuMemAddressFree", address, whole)
    note(size=about, median_us={name: round(statistics.median(times), 1) for name, times in own.times_us.items()})


def _keeps_bytes(own: Driver, address: int, size: int, about: str) -> None:
    written = ctypes.create_string_buffer(os.urandom(4096), 4096)
    read = ctypes.create_string_buffer(4096)
    at = ctypes.c_uint64(address + size - 4096)
    if own.call("cuMemcpyHtoD_v2", at, written, ctypes.c_size_t(4096), about=about):
        own.call("cuMemcpyDtoH_v2", read, at, ctypes.c_size_t(4096), about=about)
        if read.raw != written.raw:
            own.fails(f"{about}: what is written to mapped memory is not what is read there")


def _orders_streams(event: int, stream: int) -> None:
    """The calls that stalloc orders streams by, and asks what is done."""
    own, handles = Driver(), (ctypes.c_void_p(event), ctypes.c_void_p(stream))
    own.call("cuStreamIsCapturing", handles[1], ctypes.byref(ctypes.c_int()))
    own.call("cuEventRecord", *handles)
    own.call("cuStreamWaitEvent", handles[1], handles[0], 0)
    mode = ctypes.c_int(2)  # relaxed: a query is allowed whatever is captured
    for _ in range(2):
        own.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    own.call("cuCtxSynchronize")
    own.call("cuEventQuery", handles[0])
    own.check()


def runtime() -> None:
    """The runtime's calls, through CuPy: device, memory, copies, streams, events, waits."""
    use_device()
    with step("import cupy"):
        import cupy
    calls = cupy.cuda.runtime
    note(cupy=cupy.__version__)
    found: dict[str, Any] = {}

    def done(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (calls.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            check(False, f"{name} says {error.status} ({error})")

    def says(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        with step(name):
            return done(name, function, *arguments)

    def of_many(name: str, *arguments: Any) -> Any:
        return done(f"cuda{name[0].upper()}{name[1:]}", getattr(calls, name), *arguments)

    def take(name: str, *arguments: Any) -> Any:
        return says(f"cuda{name[0].upper()}{name[1:]}", getattr(calls, name), *arguments)

    note(devices=take("getDeviceCount"), runtime=take("runtimeGetVersion"))
    take("setDevice", 0)
    note(free_and_total=take("memGetInfo"))
    address, host = take("malloc", MIB), take("hostAlloc", MIB, 0)
    found["stream"] = take("streamCreateWithFlags", 1)
    take("memsetAsync", address, 1, MIB, found["stream"])
    take("memcpyAsync", host, address, MIB, 2, found["stream"])
    take("streamSynchronize", found["stream"])
    event = take("eventCreate")
    take("eventRecord", event, found["stream"])
    take("eventSynchronize", event)
    status = take("eventQuery", event)  # CuPy returns this one's status
    check(not status, f"cudaEventQuery says {status} of an event that was waited for")
    _orders_streams(event, found["stream"])
    take("deviceSynchronize")
    read = ctypes.string_at(host, MIB)
    check(read == b"\x01" * MIB, "memset and a copy to the host give other bytes than were set")
    take("free", address)
    module = cupy.RawModule(code=KERNEL)
    says("cuModuleLoadData", module.compile)
    kernel, array = says("cuModuleGetFunction", module.get_function, "seven"), cupy.zeros(5, dtype=cupy.int32)
    says("cuLaunchKernel", kernel, (1,), (5,), (array,))
    take("deviceSynchronize")
    total = says("a sum by CuPy", lambda: int(array.sum()))
    check(total == 35 or not IS_REAL, f"a kernel that writes five times 7 leaves numbers whose sum is {total}")
    with step(f"{MANY_CALLS} times each call"):
        for _ in range(MANY_CALLS):
            stream, event = of_many("streamCreateWithFlags", 1), of_many("eventCreate")
            address, copied = of_many("malloc", MIB), of_many("hostAlloc", MIB, 0)
            of_many("memcpyAsync", copied, address, MIB, 2, stream)
            of_many("eventRecord", event, stream)
            done("cuLaunchKernel", kernel, (1,), (5,), (array,))
            of_many("eventSynchronize", event)
            of_many("streamSynchronize", stream)
            of_many("deviceSynchronize")
            of_many("free", address)
            of_many("freeHost", copied)
            of_many("eventDestroy", event)
            of_many("streamDestroy", stream)
    take("freeHost", host)


PARTS = (driver, pages, runtime)
