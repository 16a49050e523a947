"""Pickles as data: only containers, numbers and strings come out, and nothing in the file is ever called.

Two gates. `pickle_scan` follows the opcodes and refuses what no snapshot holds, before anything is built; the unpickler
then refuses every name that the pickle asks for, apart from two plain containers.
"""

import collections
import gc
import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.trace.sources.pickle_scan import FINE, REFUSALS, UNUSUAL, scan

_ADMITTED = {("collections", kind.__name__): kind for kind in (collections.OrderedDict, collections.defaultdict)}
_READ_AHEAD_BYTES = 1 << 17  # what the unpickler looks ahead, if it can: without frames it else reads value by value
_FREE_BYTES, _MAX_DENSITY = 64 << 20, 32  # snapshots take 11 to 22 bytes of memory for each of their own


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _Forbidden(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _Forbidden("an object stored elsewhere")


class _Forbidden(Exception):
    pass


def load_plain_pickle(path: Path, data: bytes, left_out: str = "") -> Any:
    """What a pickle of plain containers, numbers and strings holds; lists under the key `left_out` may be empty.

    Raises BadInputError when it asks for anything else, is damaged, or is built to exhaust memory, time or the stack.
    """
    verdict, wanted, memory_bytes, cuts = scan(data, left_out.encode())
    for name in (_name(data, *places) for places in wanted):
        if name not in _ADMITTED:
            raise _refusal(path, ".".join(name))
    if verdict != FINE:
        raise BadInputError(f"{path}: {REFUSALS[verdict]}: give an intact torch.cuda.memory snapshot.")
    if memory_bytes > _FREE_BYTES + _MAX_DENSITY * len(data):
        raise BadInputError(f"{path}: {REFUSALS[UNUSUAL]}, {memory_bytes:,} bytes of them: give an intact one.")
    if memory_bytes > memory_limit_bytes():
        raise BadInputError(f"{path}: the pickle does not fit into memory: record fewer steps.")
    try:
        plain = io.BytesIO(data if cuts is None else _without(data, cuts))
        return _PlainUnpickler(io.BufferedReader(plain, _READ_AHEAD_BYTES)).load()
    except _Forbidden as error:
        raise _refusal(path, str(error)) from error
    except MemoryError as error:
        raise BadInputError(f"{path}: the pickle does not fit into memory: record fewer steps.") from error
    except Exception as error:  # the unpickler raises almost any type on damaged data
        raise BadInputError(
            f"{path}: damaged pickle ({type(error).__name__}): give an intact torch.cuda.memory snapshot."
        ) from error


def _without(data: bytes, cuts: Column) -> bytes:
    """The data without these ranges; what each would remember is remembered of the list before it."""
    pieces: list[bytes] = []
    at = 0
    for begin, end, num_memoized, copy_begin, copy_end in cuts.tolist():
        pieces += (data[at:begin], pickle.MEMOIZE * num_memoized, data[copy_begin:copy_end])
        at = end
    return b"".join([*pieces, data[at:]])


def _name(data: bytes, module: int, name: int) -> tuple[str, str]:
    """The global that is asked for at these positions."""
    if name < 0:
        name = data.index(b"\n", module) + 1
        lines = data[module : name - 1], data[name : data.index(b"\n", name)]
        return lines[0].decode("utf-8", "replace"), lines[1].decode("utf-8", "replace")
    return _string(data, module), _string(data, name)


def _string(data: bytes, at: int) -> str:
    """The string that the opcode at a position pushes."""
    opcodes = io.BytesIO(data)
    opcodes.seek(at)
    try:
        return str(next(pickletools.genops(opcodes))[1])
    except ValueError:  # no text
        return "?"


def _refusal(path: Path, name: str) -> BadInputError:
    return BadInputError(
        f"{path}: the pickle asks for {name[:200]!r}, which a snapshot never does, so it was not loaded: "
        f"get the file from a source you trust, as torch.cuda.memory._snapshot() returned it."
    )


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for cycles, of which there are none, while millions of containers are made and read."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
