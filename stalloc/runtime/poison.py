"""STALLOC_POISON=1: patterns in fresh and freed memory and behind every block, and who wrote over them.

Contract: every byte of the arena and of the heap's segments that no live block owns holds FREED, save in pools of CUDA
graphs, whose replays write there rightfully. A block is filled with FRESH, and what lies behind it with GUARD, before
its owner gets it; it is filled with FREED after its owner gave it up and before anybody else can get it. So a byte that
differs was written by somebody who did not own it. Only owned ranges are touched: by the thread that allocates or frees
them, or with the controller's lock held, which keeps segments in place; there is no lock of its own to wait for.

What is found is one sentence on standard error at once. It is raised as CorruptionError where Python code can take it:
at the next mark of a step, or allocation of CuPy; a free, and torch's C++ code, cannot.
"""

import ctypes
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stalloc.core import records
from stalloc.core.constants import ALIGNMENT, BLOCK_LIVE, PRIVATE_KINDS, SMALL_LIMIT
from stalloc.core.snapshot import owner_of, segments
from stalloc.errors import CorruptionError
from stalloc.notices import say
from stalloc.runtime.poison_memory import PoisonMemory, memory_of

if TYPE_CHECKING:
    from stalloc.core.state import DeviceState
    from stalloc.device import Device

FRESH, FREED, GUARD = 0xFF, 0xFB, 0xFD
GUARD_BYTES = 16  # behind every block at least, whatever it asked for; rounding adds to that
_MAX_SAID = 100  # sentences; a broken program writes again and again
_REMEMBERED = 1 << 16  # blocks that are gone, to name the one that memory belonged to
_LIBRARIES = tuple(
    str(Path(path)) + os.sep
    for path in {str(Path(__file__).parents[1]), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
)


class Owner(NamedTuple):
    """A block of somebody's."""

    address: int
    requested_bytes: int
    rounded_bytes: int
    stream: int  #: raw handle
    place: str  #: the line of the program that allocated it; empty where no Python code did

    def __str__(self) -> str:
        line = f", allocated at {self.place}" if self.place else ""
        return f"a block of {self.requested_bytes:,} bytes at {self.address:#x} (stream {self.stream:#x}{line})"


class Poison:
    """The patterns of one device. Nothing here raises but `raise_found`."""

    def __init__(self, state: "DeviceState", memory: PoisonMemory) -> None:
        self.state = state
        self.found: list[str] = []  #: a sentence each
        self._memory: PoisonMemory | None = memory  # None: it is over, blocks are served as they are
        self._raised = 0  # of `found`
        self._live: dict[int, Owner] = {}
        self._gone: deque[Owner] = deque(maxlen=_REMEMBERED)
        self._waiting: list[int] = []  # blocks that were freed while a graph was captured
        self._of_graphs: set[int] = set()  # bases of segments that hold no pattern

    def stop(self, why: str) -> None:
        """Look no further: what is free may be written to from now on."""
        self._memory = None
        if why:
            say(f"STALLOC_POISON stops checking: {why}")

    def raise_found(self) -> None:
        """Raise CorruptionError for what was found since the last time, if anything was."""
        fresh, self._raised = self.found[self._raised :], len(self.found)
        if fresh:
            more = f" ({len(fresh) - 1} more on standard error)" if len(fresh) > 1 else ""
            raise CorruptionError(fresh[0] + more)

    # --- what stands in the place of the core's entries

    def allocate(self, requested_bytes: int, stream: int) -> int:
        """Serve a request and get the block ready for its owner."""
        if self._memory is None or requested_bytes <= 0:
            return self.state.malloc(requested_bytes, stream)
        self._do(self._free_waiting)
        address = self.state.malloc(requested_bytes + GUARD_BYTES, stream)
        if address:
            self._do(self._begin, address, requested_bytes, _calling_line())
        return address

    def free(self, address: int) -> None:
        """Free a block; while a graph is captured, which must not learn of our fills, after the capture."""
        block = self._owner(address) if address else None
        if self._memory is None or block is None or block.is_private:
            self.state.free(address)
        elif self.state.record.private_kind:
            self._waiting.append(address)
        else:
            self._do(self._free_waiting)
            if block.state == BLOCK_LIVE:
                self._do(self._ending, address)
            self.state.free(address)  # shared with others: `ending` comes when those are done

    def _free_waiting(self, memory: PoisonMemory) -> None:
        while self._waiting and not self.state.record.private_kind:
            self.free(self._waiting.pop())

    def _begin(self, memory: PoisonMemory, address: int, requested: int, place: str) -> None:
        block = self._owner(address)
        if block is None or block.is_private:
            return
        rounded, stream = block.size_bytes, block.raw_stream
        if memory.mismatches([(address, rounded)], FREED, stream)[0]:
            self._name_writer(memory, address, rounded, "when it was to be handed out again")
        memory.fill(address, requested, FRESH, stream)
        memory.fill(address + requested, rounded - requested, GUARD, stream)
        self._live[address] = Owner(address, requested, rounded, stream, place)

    # --- what the controller does

    def _ending(self, memory: PoisonMemory, address: int) -> None:
        """A block is about to be free, and nobody uses it any more."""
        block, owner = self._owner(address), self._live.pop(address, None)
        if block is None or block.is_private:
            return
        if owner is not None:
            guard = owner.address + owner.requested_bytes
            size = owner.rounded_bytes - owner.requested_bytes
            if memory.mismatches([(guard, size)], GUARD, owner.stream)[0]:
                self._name_owner(memory, owner, "when it was freed")
            self._gone.append(owner)
        memory.fill(address, int(block.size_bytes), FREED, int(block.raw_stream))

    def ending(self, address: int) -> None:
        """The other streams of a freed block are done: it is about to be free."""
        self._do(self._ending, address)

    def taken(self, base: int, size_bytes: int) -> None:
        """A segment or an arena came from the device; nobody has any of it yet."""
        self._do(self._taken, base, size_bytes)

    def _taken(self, memory: PoisonMemory, base: int, size_bytes: int) -> None:
        if self.state.record.private_kind:
            self._of_graphs.add(base)
            return
        memory.fill(base, size_bytes, FREED, 0)
        memory.mismatches([], FREED, None)  # streams that do not wait for the default one may be the first to use it

    def returned(self, base: int, size_bytes: int) -> None:
        """A segment or an arena in which nothing lives is about to go back to the device."""
        self._do(self._returned, base, size_bytes)

    def _returned(self, memory: PoisonMemory, base: int, size_bytes: int) -> None:
        if base in self._of_graphs:
            self._of_graphs.discard(base)
        elif not self.state.record.private_kind and memory.mismatches([(base, size_bytes)], FREED, None)[0]:
            self._name_writer(memory, base, size_bytes, "when it went back to the device")

    def check(self) -> None:
        """Look at everything, with the controller's lock held, which keeps segments in place."""
        if not self.state.record.private_kind:
            self._do(self._free_waiting)
            self._do(self._check)

    def _check(self, memory: PoisonMemory) -> None:
        live = list(self._live.copy().values())
        guards = [(one.address + one.requested_bytes, one.rounded_bytes - one.requested_bytes) for one in live]
        for owner, count in zip(live, memory.mismatches(guards, GUARD, None), strict=True):
            # a block that another thread has freed meanwhile holds FREED; that was looked at then
            if count and self._live.get(owner.address) is owner:
                self._name_owner(memory, owner, "at the end of a step")
        served = self.state.record.total.num_allocs
        free = self._free_ranges()
        counts = memory.mismatches(free, FREED, None)
        if self.state.record.total.num_allocs == served:  # else some of it is another thread's by now
            for (address, size), count in zip(free, counts, strict=True):
                if count:
                    self._name_writer(memory, address, size, "at the end of a step")

    def _free_ranges(self) -> list[tuple[int, int]]:
        ranges = []
        for segment in segments(self.state):
            if segment.kind < PRIVATE_KINDS:
                for block in segment.blocks:
                    used = -(-block.requested_bytes // ALIGNMENT) * ALIGNMENT
                    if used < block.size_bytes:
                        ranges.append((block.address + used, block.size_bytes - used))
        return ranges

    # --- sentences

    def _name_owner(self, memory: PoisonMemory, owner: Owner, when: str) -> None:
        guard, size = owner.address + owner.requested_bytes, owner.rounded_bytes - owner.requested_bytes
        what, _ = self._written(memory, guard, size, GUARD, owner.stream)
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
        memory.fill(address, size, byte, stream)
        shown = bytes(data[first : min(last + 1, first + 16)]).hex(" ")
        count = "1 byte was" if len(changed) == 1 else f"{len(changed):,} bytes were"
        return f"{count} written from {address + first:#x} on ({shown})", address + first

    def _tell(self, sentence: str) -> None:
        self.found.append(sentence)
        if len(self.found) <= _MAX_SAID:
            say(f"memory corruption: {sentence}")

    # --- helpers

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something with the memory; an error ends the looking, never the program."""
        memory = self._memory
        if memory is None:
            return
        try:
            action(memory, *arguments)
        except KeyboardInterrupt:  # it would vanish in the C code that called: raise it again where Python runs
            import _thread

            _thread.interrupt_main()
        except Exception as error:
            self.stop(f"{type(error).__name__}: {error}")

    def _owner(self, address: int) -> records.Owner | None:
        return owner_of(self.state.address, address)


def _calling_line() -> str:
    """The line of the program that this thread is at, below libraries; empty if there is no Python code."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<frozen")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Watch:
    """All devices of a process under poison: the entries that torch and CuPy get, and the program's end."""

    def __init__(self) -> None:
        self.devices: dict[int, Poison] = {}  #: by the address of the state
        self._pid = os.getpid()

    def add(self, device: "Device", state: "DeviceState") -> Poison | None:
        """Watch a device; None, and a sentence, if its memory does not exist."""
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
        """Raise CorruptionError for what was found on any device since the last time."""
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
