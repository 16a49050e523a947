"""Pickles as data: only containers, numbers and strings come out, and nothing in the file is ever called.

Two gates. A scan of the opcodes refuses files whose own numbers would make the unpickler reserve absurd memory or
recurse (memo indexes and lengths beyond the file, tuples nested in tuples without end); the unpickler then refuses
every name that the pickle asks for, apart from two plain containers.
"""

import collections
import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numba
import numpy as np

from stalloc.errors import BadInputError

_ADMITTED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
}
_MAX_NESTING = 1000

# How the argument of an opcode is laid out: its bytes, or one of these.
_UNKNOWN, _LINE, _TWO_LINES, _LENGTH1, _LENGTH4, _LENGTH8 = -1, -2, -3, -4, -5, -6
_FINE, _TOO_LONG, _BAD_MEMO, _NESTED, _NO_STOP, _BAD_OPCODE = range(6)
_SENTENCES = {
    _TOO_LONG: "the pickle is cut short",
    _NO_STOP: "the pickle is cut short",
    _BAD_MEMO: "the pickle refers to more objects than it holds",
    _NESTED: "the pickle nests its contents too deeply",
    _BAD_OPCODE: "not a pickle",
}


def _layout() -> np.ndarray:
    table = np.full(256, _UNKNOWN, np.int64)
    special = {
        "decimalnl_short": _LINE,
        "decimalnl_long": _LINE,
        "floatnl": _LINE,
        "stringnl": _LINE,
        "stringnl_noescape": _LINE,
        "unicodestringnl": _LINE,
        "stringnl_noescape_pair": _TWO_LINES,
    }
    lengths = {
        pickletools.TAKEN_FROM_ARGUMENT1: _LENGTH1,
        pickletools.TAKEN_FROM_ARGUMENT4: _LENGTH4,
        pickletools.TAKEN_FROM_ARGUMENT4U: _LENGTH4,
        pickletools.TAKEN_FROM_ARGUMENT8U: _LENGTH8,
    }
    for opcode in pickletools.opcodes:
        if opcode.arg is None:
            size = 0
        elif opcode.arg.n >= 0:
            size = opcode.arg.n
        elif opcode.arg.name in special:
            size = special[opcode.arg.name]
        else:
            size = lengths[opcode.arg.n]
        table[ord(opcode.code)] = size
    return table


_LAYOUT = _layout()
_PUT, _LONG_BINPUT, _STOP = ord("p"), ord("r"), ord(".")
_TUPLES = np.zeros(256, np.bool_)
_TUPLES[[ord("t"), 0x85, 0x86, 0x87]] = True
_NEUTRAL = np.zeros(256, np.bool_)  # between two tuples these do not end a chain of nesting
_NEUTRAL[[ord(code) for code in "(NqrpKMJ0120ghj"] + [0x88, 0x89, 0x94]] = True


@numba.njit(cache=True)
def _scan(data, layout, tuples, neutral, max_nesting):
    position, num_opcodes, nesting = 0, 0, 0
    total = len(data)
    while position < total:
        code = data[position]
        position += 1
        num_opcodes += 1
        size = layout[code]
        argument = position
        if size == _UNKNOWN:
            return _BAD_OPCODE
        if size in (_LINE, _TWO_LINES):
            for _ in range(1 if size == _LINE else 2):
                while position < total and data[position] != 10:
                    position += 1
                position += 1
        elif size < 0:
            width = 1 if size == _LENGTH1 else (4 if size == _LENGTH4 else 8)
            if position + width > total:
                return _TOO_LONG
            length = np.int64(0)
            for i in range(width):
                length |= np.int64(data[position + i]) << (8 * i)
            if length < 0 or length > total - position - width:
                return _TOO_LONG
            position += width + int(length)
        else:
            position += size
        if position > total:
            return _TOO_LONG
        if code in (_LONG_BINPUT, _PUT):
            memo = np.int64(0)
            if code == _PUT:
                for i in range(argument, min(position - 1, argument + 18)):
                    memo = memo * 10 + (np.int64(data[i]) - 48)
                if memo < 0 or position - 1 - argument > 18:
                    return _BAD_MEMO
            else:
                for i in range(4):
                    memo |= np.int64(data[argument + i]) << (8 * i)
            if memo > num_opcodes + 256:
                return _BAD_MEMO
        if tuples[code]:
            nesting += 1
            if nesting > max_nesting:
                return _NESTED
        elif not neutral[code]:
            nesting = 0
        if code == _STOP:
            return _FINE
    return _NO_STOP


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


def load_plain_pickle(path: Path, data: bytes) -> Any:
    """What a pickle of plain containers, numbers and strings holds.

    Raises BadInputError when it asks for anything else, is damaged, or is built to exhaust memory or the stack.
    """
    verdict = _scan(np.frombuffer(data, np.uint8), _LAYOUT, _TUPLES, _NEUTRAL, _MAX_NESTING)
    if verdict != _FINE:
        raise BadInputError(f"{path}: {_SENTENCES[verdict]}: give an intact torch.cuda.memory snapshot.")
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _Forbidden as error:
        raise BadInputError(
            f"{path}: the pickle asks for {str(error)[:200]!r}, which a snapshot never does, so it was not loaded: "
            f"get the file from a source you trust, as torch.cuda.memory._snapshot() returned it."
        ) from error
    except RecursionError as error:
        raise BadInputError(f"{path}: {_SENTENCES[_NESTED]}: give an intact torch.cuda.memory snapshot.") from error
    except MemoryError as error:
        raise BadInputError(f"{path}: the pickle does not fit into memory: record fewer steps.") from error
    except Exception as error:  # the unpickler raises almost any type on damaged data
        raise BadInputError(
            f"{path}: damaged pickle ({type(error).__name__}): give an intact torch.cuda.memory snapshot."
        ) from error
