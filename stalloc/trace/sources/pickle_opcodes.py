"""The opcodes of pickles in one table: how long each is, and what it does to the stack, as far as snapshots need it.

Contract: every opcode of every protocol has a row; those that no snapshot needs have REFUSE in it.
"""

import pickletools

import numpy as np

from stalloc.columns import Column

# How the argument of an opcode is laid out: so many bytes, or one of these.
ARG_LENGTH8, ARG_LENGTH4, ARG_LENGTH1, ARG_TWO_LINES, ARG_DECIMAL_LINE, ARG_LINE, ARG_UNKNOWN = range(-7, 0)

# What an opcode does.
REFUSE, SKIP, FRAME, MARK, STOP, PUSH, LINE_NUMBER, LONG, STRING, PUT, MEMOIZE, GET = range(12)
GLOBAL, STACK_GLOBAL, CALL, MAKE, FILL = range(12, 17)

# Values on the stack and in the memo: a container by its number from 0, anything else as one of these.
NONE, NUMBER, FLOAT, FACTORY, EMPTY_TUPLE, NOTHING = -1, -2, -3, -4, -5, -6
FIRST_STRING = -16  # the string of the opcode at byte p is FIRST_STRING - p

LIST, DICT, TUPLE = range(3)

# What an opcode takes from the stack: so many values, or those above the last mark.
TO_MARK = -1

# name: what it does, takes, pushes or makes or fills, and the bytes of memory that this takes
_RULES = {
    "PROTO": (SKIP, 0, 0, 0),
    "FRAME": (FRAME, 0, 0, 0),
    "MARK": (MARK, 0, 0, 0),
    "STOP": (STOP, 0, 0, 0),
    "NONE": (PUSH, 0, NONE, 0),
    "NEWTRUE": (PUSH, 0, NUMBER, 0),
    "NEWFALSE": (PUSH, 0, NUMBER, 0),
    "BININT1": (PUSH, 0, NUMBER, 0),
    "BININT2": (PUSH, 0, NUMBER, 32),
    "BININT": (PUSH, 0, NUMBER, 32),
    "BINFLOAT": (PUSH, 0, FLOAT, 32),
    "EMPTY_TUPLE": (PUSH, 0, EMPTY_TUPLE, 0),
    "INT": (LINE_NUMBER, 0, NUMBER, 32),
    "LONG": (LINE_NUMBER, 0, NUMBER, 32),
    "FLOAT": (LINE_NUMBER, 0, FLOAT, 32),
    "LONG1": (LONG, 0, NUMBER, 32),
    "LONG4": (LONG, 0, NUMBER, 32),
    "UNICODE": (STRING, 0, 0, 56),
    "SHORT_BINUNICODE": (STRING, 0, 0, 56),
    "BINUNICODE": (STRING, 0, 0, 56),
    "BINUNICODE8": (STRING, 0, 0, 56),
    "PUT": (PUT, 0, 0, 8),
    "BINPUT": (PUT, 0, 0, 8),
    "LONG_BINPUT": (PUT, 0, 0, 8),
    "MEMOIZE": (MEMOIZE, 0, 0, 8),
    "GET": (GET, 0, 0, 0),
    "BINGET": (GET, 0, 0, 0),
    "LONG_BINGET": (GET, 0, 0, 0),
    "GLOBAL": (GLOBAL, 0, FACTORY, 0),
    "STACK_GLOBAL": (STACK_GLOBAL, 2, FACTORY, 0),
    "REDUCE": (CALL, 2, DICT, 64),
    "EMPTY_LIST": (MAKE, 0, LIST, 56),
    "LIST": (MAKE, TO_MARK, LIST, 56),
    "EMPTY_DICT": (MAKE, 0, DICT, 64),
    "DICT": (MAKE, TO_MARK, DICT, 64),
    "TUPLE1": (MAKE, 1, TUPLE, 48),
    "TUPLE2": (MAKE, 2, TUPLE, 48),
    "TUPLE3": (MAKE, 3, TUPLE, 48),
    "TUPLE": (MAKE, TO_MARK, TUPLE, 48),
    "APPEND": (FILL, 1, LIST, 0),
    "APPENDS": (FILL, TO_MARK, LIST, 0),
    "SETITEM": (FILL, 2, DICT, 0),
    "SETITEMS": (FILL, TO_MARK, DICT, 0),
}
_RULE = np.dtype([(name, np.int64) for name in ("argument", "what", "takes", "value", "memory_bytes")])
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: ARG_LENGTH1,
    pickletools.TAKEN_FROM_ARGUMENT4: ARG_LENGTH4,
    pickletools.TAKEN_FROM_ARGUMENT4U: ARG_LENGTH4,
    pickletools.TAKEN_FROM_ARGUMENT8U: ARG_LENGTH8,
}


def _argument(opcode: pickletools.OpcodeInfo) -> int:
    argument = opcode.arg
    if argument is None or argument.n >= 0:
        return 0 if argument is None else argument.n
    if argument.n in _LENGTHS:
        return _LENGTHS[argument.n]
    if opcode.name in ("PUT", "GET"):
        return ARG_DECIMAL_LINE
    return ARG_TWO_LINES if argument.name == "stringnl_noescape_pair" else ARG_LINE


def _rules() -> Column:
    table = np.zeros(256, _RULE)
    table["argument"] = ARG_UNKNOWN
    for opcode in pickletools.opcodes:
        table[ord(opcode.code)] = (_argument(opcode), *_RULES.get(opcode.name, (REFUSE, 0, 0, 0)))
    return table


OPCODES = _rules()
