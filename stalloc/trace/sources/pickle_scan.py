"""What a pickle would build, found out by following its opcodes without building anything.

Contract: a pickle that passes holds dictionaries, lists and short flat tuples of strings, numbers, truth values and
None, nested at most MAX_DEPTH deep and without cycles; its keys are strings and integers; its numbers are of 64 bits;
nothing is called but the making of an empty dictionary; and what it builds takes memory in proportion to its own
length. So loading it, and comparing or hashing any key or tuple of it, is linear in that length. Containers may be
shared, as snapshots share their stacks: to walk all of them again and again is not bounded by this.
"""

import enum

import numpy as np

from stalloc.compiled import BORROWING, inner, njit
from stalloc.trace.sources import pickle_opcodes as op

MAX_DEPTH = 64
MAX_TUPLE = 16
MAX_GLOBALS = 16
_MAX_INTEGER_BYTES = 9  # 64 bits and a sign
_MAX_NUMBER_CHARACTERS = 40

# Estimates of the bytes that CPython takes.
_ITEM_BYTES, _PAIR_BYTES, _TABLE_BYTES = 9, 36, 100


class Verdict(enum.IntEnum):
    """Why a pickle is refused."""

    FINE = 0
    NO_PICKLE = 1
    CUT_SHORT = 2
    BAD_MEMO = 3
    NESTED = 4
    UNUSUAL = 5
    BAD_KEY = 6
    LONG_NUMBER = 7
    CALLS = 8
    CYCLE = 9
    INCONSISTENT = 10
    NO_ROOM = 11
    """The tables of the scan are too small: it is done again with larger ones."""


(
    _FINE,
    _NO_PICKLE,
    _CUT_SHORT,
    _BAD_MEMO,
    _NESTED,
    _UNUSUAL,
    _BAD_KEY,
    _LONG_NUMBER,
    _CALLS,
    _CYCLE,
    _WRONG,
    _NO_ROOM,
) = (int(verdict) for verdict in Verdict)


_CONTAINER = np.dtype([("kind", np.int8), ("depth", np.int8), ("is_complete", np.bool_)])
"""A list or dictionary is complete once it is put into another container, and then no more is put into it."""

_STATE = np.dtype(
    [
        ("height", np.int64),  # of the stack
        ("floor", np.int64),  # the height at the last mark: opcodes take no values from below
        ("num_marks", np.int64),
        ("num_memoized", np.int64),
        ("num_containers", np.int64),
        ("num_globals", np.int64),
        ("estimate", np.int64),  # bytes of memory
    ]
)


def scan(data: bytes) -> tuple[Verdict, list[tuple[int, int]], int]:
    """(verdict, the globals asked for, bytes that the contents take in memory).

    A global is a pair of positions in the data: of two lines that follow each other (the second is -1), or of the
    opcodes of two strings.
    """
    num_containers = sum(data.count(code) for code in (b"]", b"}", b"l", b"d", b"R", b"t", b"\x85", b"\x86", b"\x87"))
    containers, marks = np.zeros(num_containers, _CONTAINER), np.zeros(MAX_DEPTH, np.int64)
    found = np.full((MAX_GLOBALS, 2), -1, np.int64)
    room = 1 << 16
    while True:
        so_far = np.zeros(1, _STATE)
        stack, memo = np.empty(room, np.int64), np.full(room, op.NOTHING, np.int64)
        verdict = _scan(np.frombuffer(data, np.uint8), op.OPCODES, stack, memo, marks, containers, found, so_far)
        if verdict != _NO_ROOM:
            return Verdict(verdict), found[: so_far["num_globals"][0]].tolist(), int(so_far["estimate"][0])
        room *= 8


@njit(**BORROWING)
def _scan(data, rules, stack, memo, marks, containers, found, state):
    """The verdict; a record of what the pickle has done so far is `state[0]`."""
    s = state[0]
    position = num_opcodes = 0
    while position < len(data):
        at, argument = position, position + 1
        rule = rules[data[at]]
        what, value = rule.what, rule.value
        num_opcodes += 1
        # the number in the argument, or the length of what follows
        verdict, position, number = _read_argument(data, rule.argument, argument)
        if verdict != _FINE:
            return verdict
        s.estimate += rule.memory_bytes
        if what in (op.PUT, op.MEMOIZE):
            verdict = _memoize(s.num_memoized if what == op.MEMOIZE else number, num_opcodes, stack, memo, s)
            value = op.NOTHING
        elif what == op.GET:
            value = memo[number] if number < len(memo) else op.NOTHING
            verdict = _BAD_MEMO if value == op.NOTHING else _FINE
        elif what == op.STRING:
            value = op.FIRST_STRING - at
            s.estimate += position - argument
        elif what in (op.SKIP, op.FRAME, op.MARK):
            value = op.NOTHING
            if what == op.MARK:
                verdict = _mark(marks, s)
            elif what == op.FRAME and not 0 <= number <= len(data) - position:
                verdict = _CUT_SHORT
        elif what == op.LONG:
            verdict = _LONG_NUMBER if number > _MAX_INTEGER_BYTES else _FINE
        elif what == op.LINE_NUMBER:
            verdict = _LONG_NUMBER if position - argument > _MAX_NUMBER_CHARACTERS else _FINE
        elif what == op.STOP:
            return _FINE if s.height == 1 and s.num_marks == 0 else _WRONG
        elif what == op.REFUSE:
            return _UNUSUAL
        elif what != op.PUSH:
            verdict, value = _take(rule, argument, stack, marks, containers, found, s)
        if verdict != _FINE:
            return verdict
        if value == op.NOTHING:
            continue
        if s.height == len(stack):
            return _NO_ROOM
        stack[s.height] = value
        s.height += 1
    return _CUT_SHORT


@inner(forceinline=True, **BORROWING)
def _read_argument(data, layout, argument):
    """(verdict, position of the next opcode, number) of the argument at a position."""
    position, total, number = argument, len(data), np.int64(0)
    if layout >= 0 or layout < op.ARG_TWO_LINES:
        width = layout if layout >= 0 else 1 if layout == op.ARG_LENGTH1 else 4 if layout == op.ARG_LENGTH4 else 8
        if position + width > total:
            return _CUT_SHORT, position, number
        for i in range(width):
            number |= np.int64(data[position + i]) << (8 * i)
        position += width
        if layout < 0:
            if number < 0 or number > total - position:
                return _CUT_SHORT, position, number
            position += number
    elif layout == op.ARG_UNKNOWN:
        return _NO_PICKLE, position, number
    else:
        lines = 2 if layout == op.ARG_TWO_LINES else 1
        while lines:
            if position == total:
                return _CUT_SHORT, position, number
            byte = data[position]
            position += 1
            if byte == 10:
                lines -= 1
            elif layout == op.ARG_DECIMAL_LINE:
                if byte < 48 or byte > 57 or position - argument > 12:
                    return _BAD_MEMO, position, number
                number = number * 10 + (byte - 48)
    return _FINE, position, number


@inner(**BORROWING)
def _mark(marks, s):
    if s.num_marks == MAX_DEPTH:
        return _NESTED
    s.floor = marks[s.num_marks] = s.height
    s.num_marks += 1
    return _FINE


@inner(**BORROWING)
def _memoize(number, num_opcodes, stack, memo, s):
    """Keep the value on top of the stack under a number."""
    if number > num_opcodes + 256 or s.height == s.floor:
        return _BAD_MEMO
    if number >= len(memo):
        return _NO_ROOM
    if memo[number] == op.NOTHING:
        s.num_memoized += 1
    memo[number] = stack[s.height - 1]
    return _FINE


@inner(forceinline=True, **BORROWING)
def _take(rule, argument, stack, marks, containers, found, s):
    """(verdict, value) of an opcode that takes values from the stack; op.NOTHING: it pushes none."""
    what, value, first = rule.what, rule.value, s.height - rule.takes
    if rule.takes == op.TO_MARK:
        if s.num_marks == 0:
            return _WRONG, value
        first = s.floor
        s.num_marks -= 1
        s.floor = marks[s.num_marks - 1] if s.num_marks else 0
    if first < s.floor or (what == op.FILL and first == s.floor):
        return _WRONG, value
    if what in (op.GLOBAL, op.STACK_GLOBAL):
        return _ask_for(what, argument, stack, first, found, s), value
    if what == op.MAKE and value == op.TUPLE and first == s.height:
        return _FINE, np.int64(op.EMPTY_TUPLE)
    if what == op.FILL:
        container, value = stack[first - 1], np.int64(op.NOTHING)
        if container < 0 or containers[container].kind != rule.value:
            return _WRONG, value
    else:
        container = value = s.num_containers
        s.num_containers += 1
        containers[container].kind = rule.value
        containers[container].depth = 0
        containers[container].is_complete = False
    if what == op.CALL:
        if stack[first] != op.FACTORY or stack[first + 1] != op.EMPTY_TUPLE:
            return _CALLS, value
        s.height = first
    return _fill(container, containers, stack, first, s), value


@inner(**BORROWING)
def _ask_for(what, argument, stack, first, found, s):
    """Note where the names of a global are."""
    if s.num_globals == MAX_GLOBALS:
        return _CALLS
    if what == op.GLOBAL:
        found[s.num_globals, 0] = argument
    else:
        if stack[first] > op.FIRST_STRING or stack[first + 1] > op.FIRST_STRING:
            return _WRONG
        found[s.num_globals, 0] = op.FIRST_STRING - stack[first]
        found[s.num_globals, 1] = op.FIRST_STRING - stack[first + 1]
    s.num_globals += 1
    s.height = first
    return _FINE


@inner(forceinline=True, **BORROWING)
def _fill(container, containers, stack, first, s):
    """Put the values of the stack from `first` on into a container."""
    verdict, num_items = _FINE, s.height - first
    kind, depth = containers[container].kind, containers[container].depth
    s.estimate += _ITEM_BYTES * num_items
    if kind == op.DICT and num_items:
        s.estimate += _PAIR_BYTES * (num_items // 2) + (_TABLE_BYTES if depth == 0 else 0)
        if num_items % 2:
            verdict = _WRONG
        for i in range(first, s.height, 2):
            if stack[i] != op.NUMBER and stack[i] > op.FIRST_STRING:
                verdict = _BAD_KEY
    elif kind == op.TUPLE and num_items > MAX_TUPLE:
        verdict = _UNUSUAL
    if num_items:
        depth = max(depth, 1)
    for i in range(first, s.height):
        item = stack[i]
        if item >= 0:
            containers[item].is_complete = True
            depth = max(depth, containers[item].depth + 1)
            if kind == op.TUPLE:
                verdict = _UNUSUAL
        elif item == op.FACTORY:
            verdict = _UNUSUAL
    if depth > MAX_DEPTH:
        verdict = _NESTED
    if containers[container].is_complete:  # it holds itself, or is part of another one already
        verdict = _CYCLE
    if verdict == _FINE:
        containers[container].depth = depth
        s.height = first
    return verdict
