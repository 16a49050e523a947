"""All devices of a process under STALLOC_POISON: the entries that torch and CuPy get, and the end of the program.

Contract: a program in which something was found ends with exit code 1, whatever it does itself.
"""

import atexit
import ctypes
import os
import sys
from typing import TYPE_CHECKING

from stalloc.notices import say
from stalloc.poison.poison import Poison
from stalloc.poison.poison_memory import memory_of

if TYPE_CHECKING:
    from stalloc.core.state import DeviceState
    from stalloc.device import Device


class Watch:
    """All devices of a process under poison: the entries that torch and CuPy get, and the program's end."""

    def __init__(self) -> None:
        self.devices: dict[int, Poison] = {}  #: by the address of the state
        self._pid = os.getpid()
        atexit.register(self.at_exit)  # before other handlers of ours, so that it runs after them

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
