"""How much memory torch may try cuDNN's algorithms with, which it does not ask a pluggable allocator.

Contract: after `answer(torch, allocator)` what torch asks with `cacheInfo` (under `torch.backends.cudnn.benchmark`,
before it tries a convolution's algorithms) is answered with all that is free, where torch's pluggable allocator raises
an error. The allocator has this one virtual function replaced, in a table of its own; where it is not found where the
C++ ABI has it, or the process may not read its own memory as a file, everything stays as it was.
"""

import ctypes
import struct
from pathlib import Path
from typing import Any

from stalloc.runtime.interruptions import persistent_entry

_FUNCTION = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoE{}Pm"
_INDEX_TYPES = {"a": 0x7F, "i": 0x7FFF_FFFF}  # a device's index is a byte, before torch 2.3 an int
_LIBRARIES = ("libtorch_cuda.so", "libtorch_python.so")
_WORD, _MOST_FUNCTIONS = 8, 64
_BEFORE = 2  # words of a table in front of its functions: where the object begins, and its type
_HELD_AT = 16  # bytes: after the head of a Python object, pybind11 has the address of what it holds


def answer(torch: Any, allocator: Any) -> bool:
    """Answer for this allocator of torch's; False if it is not made as expected, and then untouched."""
    function, mask = _refusal(Path(torch.__file__).parent / "lib")
    try:
        own_memory = open("/proc/self/mem", "rb", buffering=0)  # noqa: SIM115 (closed below)
    except OSError:
        return False  # not mounted, or this process may not look into itself
    with own_memory as memory:
        held = _words(memory, id(allocator) + _HELD_AT, 1)
        table = _words(memory, held[0], 1) if held else ()
        words = _words(memory, table[0] - _BEFORE * _WORD, _BEFORE + _MOST_FUNCTIONS) if table else ()
    if function == 0 or words.count(function) != 1:
        return False

    def say_what_is_free(_: int, device: int, largest: int) -> int:
        index = device & mask
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        ctypes.c_size_t.from_address(largest).value = torch.cuda.mem_get_info(index)[0] + unused
        return 1

    entry = persistent_entry(say_what_is_free)
    made = (ctypes.c_uint64 * len(words))(*(entry if one == function else one for one in words))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # for ever: torch gives memory back after Python has ended
    ctypes.c_uint64.from_address(held[0]).value = ctypes.addressof(made) + _BEFORE * _WORD
    return True


def _refusal(folder: Path) -> tuple[int, int]:
    """The address of torch's function, and the bits of a device's index in a word; 0 if there is none."""
    for name in _LIBRARIES:
        for kind, mask in _INDEX_TYPES.items():
            try:
                function = getattr(ctypes.CDLL(str(folder / name)), _FUNCTION.format(kind))
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value or 0, mask
    return 0, 0


def _words(memory: Any, address: int, num: int) -> tuple[int, ...]:
    """Words of this process at an address that may be none; fewer, or nothing, where it has no memory."""
    try:
        memory.seek(address)
        found = memory.read(num * _WORD)
    except (OSError, OverflowError, ValueError):
        return ()
    return struct.unpack(f"{len(found) // _WORD}Q", found[: len(found) // _WORD * _WORD])
