"""STALLOC_POISON=1: patterns in fresh and freed memory and behind every block, and who wrote over them.

Contract: every byte of the arena and of the heap's segments that no live block owns holds FREED, save in pools of CUDA
graphs, whose replays write there rightfully; what those have lent holds it until the next replay. A block is filled
with FRESH, and what lies behind it with GUARD, before its owner gets it; it is filled with FREED after its owner gave
it up and before anybody else can get it. So a byte that differs was written by somebody who did not own it. Only owned
ranges are touched: by the thread that allocates or frees them, or with the controller's lock held, which keeps segments
in place; there is no lock of its own to wait for.

What is found is one sentence on standard error at once. It is raised as CorruptionError where Python code can take it:
at the next mark of a step, or allocation of CuPy; a free, and torch's C++ code, cannot. The program then ends with exit
code 1, whatever it does itself.

Nothing here takes memory from stalloc, which would call itself: the fill of one range is the driver's, and so is the
little device memory that the kernels for many ranges need. A fill of one range is queued on the block's stream; a fill
of several, and a check, waits until it is done.
"""

import atexit
import ctypes
import importlib.util
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import compress
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import numpy as np

from stalloc import kernels
from stalloc.core.constants import BLOCK_LIVE, PRIVATE_KINDS, SMALL_LIMIT
from stalloc.core.snapshot import owner_of, segments
from stalloc.device import Device
from stalloc.device.capture import PER_THREAD, is_captured, is_per_thread
from stalloc.device.current_device import AtDevice
from stalloc.errors import CorruptionError
from stalloc.notices import say
from stalloc.sizes import aligned

if TYPE_CHECKING:
    from stalloc.core.state import DeviceState
    from stalloc.kernels import Tables

FRESH, FREED, GUARD = 0xFF, 0xFB, 0xFD
GUARD_BYTES = 16  # behind every block at least, whatever it asked for; rounding adds to that
_MAX_SAID = 100  # sentences; a broken program writes again and again
_REMEMBERED = 1 << 16  # blocks that are gone, to name the one that memory belonged to
_PIECE = 32 << 20  # bytes read to the host at a time where no kernel can look
Ranges = Sequence[tuple[int, int]]  #: address and bytes of each
_LIBRARIES = tuple(
    str(Path(path)) + os.sep
    for path in {str(Path(__file__).parents[1]), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
)


class HostMemory:
    """A virtual GPU whose memory is plain memory of this process: nothing runs beside the host."""

    def fill(self, ranges: Ranges, byte: int, stream: int) -> None:
        """Fill ranges that share no byte, in the order of a stream (raw handle)."""
        kernels.host_fill(*_columns(ranges), byte)

    def mismatches(self, ranges: Ranges, byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ; after what the stream (None: any) was given so far."""
        return [int(count) for count in kernels.host_mismatches(*_columns(ranges), byte)]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range."""
        copy = np.empty(size_bytes, np.uint8)
        kernels.host_copy([address], [copy.ctypes.data], [size_bytes])
        return copy


class GpuMemory:
    """A device behind CuPy: one range by the driver, many by the batched kernels, or without them one by one."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._of_thread = threading.local()  # each thread has tables of its own, so that launches may run side by side

    def fill(self, ranges: Ranges, byte: int, stream: int) -> None:
        """Queue the fill of a range on a stream; several are filled by one launch, which is waited for."""
        import cupy

        ranges = [one for one in ranges if one[1]]
        tables = self._tables() if len(ranges) > 1 else None
        if tables is not None:
            import torch

            self._wait(stream)
            with torch.cuda.device(self._index):
                kernels.batched_fill(*_columns(ranges), byte, check=False, tables=tables)
            return
        with AtDevice(self._index):
            handle = _handle(stream)
            if handle is None:  # of another thread: nothing can be queued on it from here
                cupy.cuda.runtime.deviceSynchronize()
            for address, size_bytes in ranges:
                cupy.cuda.runtime.memsetAsync(address, byte, size_bytes, handle or 0)
            if handle is None:
                cupy.cuda.runtime.deviceSynchronize()

    def mismatches(self, ranges: Ranges, byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ; waits."""
        self._wait(stream)
        tables = self._tables()
        if tables is None:
            return [self._mismatches_through_host(*one, byte) for one in ranges]
        import torch

        with torch.cuda.device(self._index):
            return [int(count) for count in kernels.batched_mismatches(*_columns(ranges), byte, tables=tables)]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range; waits for the device."""
        import cupy

        copy = np.empty(size_bytes, np.uint8)
        with AtDevice(self._index):
            cupy.cuda.runtime.deviceSynchronize()
            cupy.cuda.runtime.memcpy(copy.ctypes.data, address, size_bytes, cupy.cuda.runtime.memcpyDeviceToHost)
        return copy

    def _wait(self, stream: int | None) -> None:
        """Until a stream (None: any) has done what it was given."""
        import cupy

        with AtDevice(self._index):
            handle = _handle(stream) if stream is not None else None
            if handle is None:
                cupy.cuda.runtime.deviceSynchronize()
            else:
                cupy.cuda.runtime.streamSynchronize(handle)

    def _tables(self) -> "Tables | None":
        """Where the tables of this thread's launches go; None unless torch and Triton are there and at work."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or importlib.util.find_spec("triton") is None:
            return None
        if not hasattr(self._of_thread, "tables"):
            self._of_thread.tables = kernels.Tables()
        return self._of_thread.tables

    def _mismatches_through_host(self, address: int, size_bytes: int, byte: int) -> int:
        pieces = [(address + at, min(_PIECE, size_bytes - at)) for at in range(0, size_bytes, _PIECE)]
        return sum(int(np.count_nonzero(self.read(*piece) != byte)) for piece in pieces)


PoisonMemory = HostMemory | GpuMemory  #: writes and checks the poison in the memory of one device


def memory_of(device: Device) -> PoisonMemory | None:
    """The bytes of a device; None for a virtual GPU that keeps none."""
    if device.kind == "cuda":
        return GpuMemory(device.index)
    from stalloc.device import virtual

    gpu = virtual.active_gpu()
    return HostMemory() if gpu is not None and gpu.copy_limit_bytes is None else None


def _columns(ranges: Ranges) -> tuple[list[int], list[int]]:
    """The addresses and the bytes of ranges, as the kernels take them."""
    return [address for address, _ in ranges], [size_bytes for _, size_bytes in ranges]


def _handle(stream: int) -> int | None:
    """What the driver knows a stream by; None for the default stream of another thread. Those have one handle for all
    threads, and go by a name of the thread's (stalloc.integrations.cupy_allocator)."""
    if not is_per_thread(stream):
        return stream
    return PER_THREAD if stream >> 4 == threading.get_ident() else None


class Owner(NamedTuple):
    address: int
    requested_bytes: int
    rounded_bytes: int
    stream: int  #: raw handle
    place: str  #: the line of the program that allocated it; empty where no Python code did

    @property
    def guard(self) -> tuple[int, int]:
        """Address and bytes of what lies behind it."""
        return self.address + self.requested_bytes, self.rounded_bytes - self.requested_bytes

    def __str__(self) -> str:
        line = f", allocated at {self.place}" if self.place else ""
        return f"a block of {self.requested_bytes:,} bytes at {self.address:#x} (stream {self.stream:#x}{line})"


_P = ParamSpec("_P")


def _looking(
    action: Callable[Concatenate["Poison", PoisonMemory, _P], None],
) -> Callable[Concatenate["Poison", _P], None]:
    """A method that gets the memory, unless it is over; an error ends the looking, never the program."""

    @wraps(action)
    def look(self: "Poison", *args: _P.args, **named: _P.kwargs) -> None:
        memory, hot = self.memory, self.state.record.hot
        if memory is None:
            return
        if not hot.private_kind and is_captured(int(hot.last_stream)):
            self.stop("a graph is captured that neither torch nor CuPy told of, and its capture forbids to look.")
            return
        try:
            action(self, memory, *args, **named)
        except KeyboardInterrupt:  # it would vanish in the C code that called: raise it again where Python runs
            import _thread

            _thread.interrupt_main()
        except Exception as error:
            self.stop(f"{type(error).__name__}: {error}")

    return look


class Poison:
    """The patterns of one device. Nothing here raises but `raise_found`."""

    def __init__(self, state: "DeviceState", memory: PoisonMemory) -> None:
        self.state = state
        self.found: list[str] = []  #: a sentence each
        self.memory: PoisonMemory | None = memory  #: None: it is over, blocks are served as they are
        self._raised = 0  # of `found`
        self._live: dict[int, Owner] = {}
        self._gone: deque[Owner] = deque(maxlen=_REMEMBERED)
        self._waiting: list[int] = []  # blocks that were freed while a graph was captured
        self._of_graphs: set[int] = set()  # bases of segments that hold no pattern
        self._lent: dict[int, int] = {}  # loans of graphs that were freed since the last replay: address -> bytes

    def stop(self, why: str) -> None:
        """Look no further: what is free may be written to from now on."""
        self.memory = None
        if why:
            say(f"STALLOC_POISON stops checking: {why}")

    def raise_found(self) -> None:
        fresh, self._raised = self.found[self._raised :], len(self.found)
        if fresh:
            more = f" ({len(fresh) - 1} more on standard error)" if len(fresh) > 1 else ""
            raise CorruptionError(fresh[0] + more)

    # --- what stands in the place of the core's entries

    def allocate(self, requested_bytes: int, stream: int) -> int:
        """Serve a request and get the block ready for its owner."""
        self._free_waiting()
        if self.memory is None or requested_bytes <= 0:
            return self.state.malloc(requested_bytes, stream)
        address = self.state.malloc(requested_bytes + GUARD_BYTES, stream)
        if address:
            self._begin(address, requested_bytes, _calling_line())
        return address

    def free(self, address: int) -> None:
        """Free a block; while a graph is captured, which must not learn of our fills, after the capture."""
        self._free_waiting()
        block = owner_of(self.state.address, address) if address else None
        if self.memory is None or block is None or block.is_private:
            self.state.free(address)
        elif self.state.record.hot.private_kind:
            self._waiting.append(address)
        else:
            self._free([address])

    def _free(self, addresses: list[int]) -> None:
        owners = {address: owner_of(self.state.address, address) for address in addresses}
        self.ending([address for address, owner in owners.items() if owner and owner.state == BLOCK_LIVE])
        for address in addresses:
            self.state.free(address)  # shared with others: `ending` comes when those are done

    def _free_waiting(self) -> None:
        """Free what was freed while a graph was captured, if that is over: at once, and filled by one launch."""
        if self._waiting and not self.state.record.hot.private_kind:
            addresses = []
            while self._waiting:  # other threads may take some, or add
                addresses.append(self._waiting.pop())
            self._free(addresses)

    @_looking
    def _begin(self, memory: PoisonMemory, address: int, requested: int, place: str) -> None:
        block = owner_of(self.state.address, address)
        if block is None or block.is_private:
            return
        rounded, stream = block.size_bytes, block.raw_stream
        if block.is_loan:
            self._forget_lent(address, rounded)
        elif memory.mismatches([(address, rounded)], FREED, stream)[0]:
            self._name_writer(memory, address, rounded, "when it was to be handed out again")
        owner = Owner(address, requested, rounded, stream, place)
        memory.fill([(address, requested)], FRESH, stream)
        memory.fill([owner.guard], GUARD, stream)
        self._live[address] = owner

    # --- what the controller does

    @_looking
    def ending(self, memory: PoisonMemory, addresses: list[int]) -> None:
        """Blocks that nobody uses any more, other streams neither, are about to be free."""
        by_stream: dict[int, list[tuple[int, int]]] = {}
        for address in addresses:
            block = owner_of(self.state.address, address)
            if block is not None and not block.is_private:
                if block.is_loan:
                    self._lent[address] = block.size_bytes
                by_stream.setdefault(block.raw_stream, []).append((address, block.size_bytes))
        for stream, blocks in by_stream.items():
            owners = [owner for address, _ in blocks if (owner := self._live.pop(address, None)) is not None]
            for owner in compress(owners, memory.mismatches([owner.guard for owner in owners], GUARD, stream)):
                self._name_owner(memory, owner, "when it was freed")
            self._gone.extend(owners)
            memory.fill(blocks, FREED, stream)

    @_looking
    def taken(self, memory: PoisonMemory, base: int, size_bytes: int) -> None:
        """A segment or an arena came from the device; nobody has any of it yet."""
        if self.state.record.hot.private_kind:
            self._of_graphs.add(base)
            return
        memory.fill([(base, size_bytes)], FREED, 0)
        memory.mismatches([], FREED, None)  # streams that do not wait for the default one may be the first to use it

    @_looking
    def returned(self, memory: PoisonMemory, base: int, size_bytes: int) -> None:
        """A segment or an arena in which nothing lives is about to go back to the device."""
        self._forget_lent(base, size_bytes)
        if base in self._of_graphs:
            self._of_graphs.discard(base)
        elif not self.state.record.hot.private_kind and memory.mismatches([(base, size_bytes)], FREED, None)[0]:
            self._name_writer(memory, base, size_bytes, "when it went back to the device")

    def _forget_lent(self, base: int, size_bytes: int) -> None:
        """What was lent in this range is another's from here on."""
        lent = self._lent.copy().items()
        self._lent = {at: size for at, size in lent if at + size <= base or base + size_bytes <= at}

    def check_loans(self) -> None:
        """A graph is about to be replayed: nobody may have written to what was lent, after it was freed."""
        if self._lent:
            self._check_loans()

    @_looking
    def _check_loans(self, memory: PoisonMemory) -> None:
        lent, self._lent = list(self._lent.items()), {}
        for address, size in compress(lent, memory.mismatches(lent, FREED, None)):
            self._name_writer(memory, address, size, "when a CUDA graph that had lent it was to be replayed")

    def check(self) -> None:
        """Look at everything, with the controller's lock held, which keeps segments in place."""
        if not self.state.record.hot.private_kind:
            self._free_waiting()
            self._check()

    @_looking
    def _check(self, memory: PoisonMemory) -> None:
        live = list(self._live.copy().values())
        counts = memory.mismatches([owner.guard for owner in live], GUARD, None)
        for owner in compress(live, counts):
            # a block that another thread has freed meanwhile holds FREED; that was looked at then
            if self._live.get(owner.address) is owner:
                self._name_owner(memory, owner, "at the end of a step")
        served = self.state.record.total.num_allocs
        blocks = [one for each in segments(self.state) if each.kind < PRIVATE_KINDS for one in each.blocks]
        ends = ((one.address + one.size_bytes, one.address + aligned(one.requested_bytes)) for one in blocks)
        free = [(used, end - used) for end, used in ends if used < end]
        counts = memory.mismatches(free, FREED, None)
        if self.state.record.total.num_allocs == served:  # else some of it is another thread's by now
            for address, size in compress(free, counts):
                self._name_writer(memory, address, size, "at the end of a step")

    # --- sentences

    def _name_owner(self, memory: PoisonMemory, owner: Owner, when: str) -> None:
        what, _ = self._written(memory, *owner.guard, GUARD, owner.stream)
        self._tell(
            f"{what} past the end of {owner}, as was found {when}: look for an index out of bounds in what works on it."
        )

    def _name_writer(self, memory: PoisonMemory, address: int, size: int, when: str) -> None:
        what, at = self._written(memory, address, size, FREED, 0)
        last = next((one for one in reversed(self._gone) if 0 <= at - one.address < one.rounded_bytes), None)
        owned = f"in what was last {last}, after it was freed" if last is not None else "in memory that nobody has had"
        below = max((one for one in self._live.copy().values() if one.address < at), default=None)
        ended = below.address + below.requested_bytes if below is not None else 0
        near = f"; {at - ended:,} bytes before it ends {below}" if at - ended < SMALL_LIMIT else ""
        self._tell(
            f"{what} {owned}, as was found {when}{near}: look for a kernel or a pointer that outlives its tensor, or "
            "an index far out of bounds."
        )

    def _written(self, memory: PoisonMemory, address: int, size: int, byte: int, stream: int) -> tuple[str, int]:
        """What was written in a range, and where it begins; the pattern is put back, so that it is told once."""
        data = memory.read(address, size)
        changed = np.flatnonzero(data != byte)
        first, last = (int(changed[0]), int(changed[-1])) if len(changed) else (0, 0)
        memory.fill([(address, size)], byte, stream)
        shown = bytes(data[first : min(last + 1, first + 16)]).hex(" ")
        count = "1 byte was" if len(changed) == 1 else f"{len(changed):,} bytes were"
        return f"{count} written from {address + first:#x} on ({shown})", address + first

    def _tell(self, sentence: str) -> None:
        self.found.append(sentence)
        if len(self.found) <= _MAX_SAID:
            say(f"memory corruption: {sentence}")


def _calling_line() -> str:
    """The line of the program that this thread is at, below libraries; empty if there is no Python code."""
    for frame, line in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


class Watch:
    """All devices of a process under poison: the entries that torch and CuPy get, and the program's end."""

    def __init__(self) -> None:
        self.devices: dict[int, Poison] = {}  #: by the address of the state
        self._pid = os.getpid()
        atexit.register(self.at_exit)  # before other handlers of ours, so that it runs after them

    def add(self, device: Device, state: "DeviceState") -> Poison | None:
        memory = memory_of(device)
        if memory is None:
            say(
                "STALLOC_POISON finds nothing on a virtual GPU, which keeps no bytes: use VirtualGPU(copy_limit_bytes="
                "None), whose memory is real, or a real GPU."
            )
            return None
        self.devices[state.address] = Poison(state, memory)
        return self.devices[state.address]

    def allocate(self, state: int, requested_bytes: int, stream: int) -> int:
        """What the entries for allocations call."""
        return self.devices[state].allocate(requested_bytes, stream)

    def free(self, state: int, address: int, nothing: int) -> int:
        """What the entries for frees call."""
        self.devices[state].free(address)
        return 0

    def raise_found(self) -> None:
        for poison in self.devices.values():
            poison.raise_found()

    def forked(self) -> None:
        """In a child of fork nothing is looked at: its device may not answer."""
        for poison in self.devices.values():
            poison.stop("")

    def at_exit(self) -> None:
        """A program in which something was found does not end as if all were well."""
        found = sum(len(poison.found) for poison in self.devices.values())
        if found and os.getpid() == self._pid:
            say(f"memory corruption: {found} findings: the program ends with exit code 1.")
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
            os._exit(1)
