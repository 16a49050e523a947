"""What a pickle would build, found out by following its opcodes without building anything.

Contract: a pickle that passes holds dictionaries, lists and short flat tuples of strings, numbers, truth values and
None, nested at most MAX_DEPTH deep and without cycles; its keys are strings and integers; its numbers are of 64 bits;
nothing is called but the making of an empty dictionary; and what it builds takes memory in proportion to its own
length. So loading it, and comparing or hashing any key or tuple of it, is linear in that length. Containers may be
shared, as snapshots share their stacks: to walk all of them again and again is not bounded by this.
"""

import enum
from typing import Any

import numpy as np

from stalloc.compiled import njit
from stalloc.trace.sources.pickle_opcodes import (
    ARG_DECIMAL_LINE,
    ARG_LENGTH1,
    ARG_LENGTH4,
    ARG_TWO_LINES,
    ARG_UNKNOWN,
    CALL,
    DICT,
    EMPTY_TUPLE,
    FACTORY,
    FILL,
    FIRST_STRING,
    FRAME,
    GET,
    GLOBAL,
    LINE_NUMBER,
    LONG,
    MAKE,
    MARK,
    MEMOIZE,
    NOTHING,
    NUMBER,
    OPCODES,
    PUSH,
    PUT,
    REFUSE,
    SKIP,
    STACK_GLOBAL,
    STOP,
    STRING,
    TO_MARK,
    TUPLE,
)

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


def scan(data: bytes) -> tuple[Verdict, list[tuple[int, int]], int]:
    """(verdict, the globals asked for, bytes that the contents take in memory).

    A global is a pair of positions in the data: of two lines that follow each other (the second is -1), or of the
    opcodes of two strings.
    """
    num_containers = sum(data.count(code) for code in (b"]", b"}", b"l", b"d", b"R", b"t", b"\x85", b"\x86", b"\x87"))
    containers = np.zeros(num_containers, _CONTAINER)
    found = np.full((MAX_GLOBALS, 2), -1, np.int64)
    room = 1 << 16
    while True:
        stack, memo = np.empty(room, np.int64), np.full(room, NOTHING, np.int64)
        verdict, num_globals, estimate = _scan(np.frombuffer(data, np.uint8), OPCODES, stack, memo, containers, found)
        if verdict != _NO_ROOM:
            return Verdict(verdict), found[:num_globals].tolist(), int(estimate)
        room *= 8


_CONTAINER = np.dtype([("kind", np.int8), ("depth", np.int8), ("is_complete", np.bool_)])
"""A list or dictionary is complete once it is put into another container, and then no more is put into it."""


@njit()
def _scan(data, rules, stack, memo, containers, found):
    total = len(data)
    position = num_opcodes = num_globals = estimate = height = num_marks = num_memoized = num_containers = 0
    marks = np.empty(MAX_DEPTH, np.int64)
    floor = 0  # the height at the last mark: opcodes take no values from below
    verdict = _CUT_SHORT
    while position < total:
        at = position
        rule = rules[data[at]]
        what, layout = rule.what, rule.argument
        position += 1
        num_opcodes += 1
        argument = position
        number: Any = np.int64(0)  # in the argument, or the length of what follows
        if layout >= 0:
            position += layout
            if position > total:
                break
            for i in range(layout):
                number |= np.int64(data[argument + i]) << (8 * i)
        elif layout >= ARG_TWO_LINES:
            if layout == ARG_UNKNOWN:
                verdict = _NO_PICKLE
                break
            lines = 2 if layout == ARG_TWO_LINES else 1
            while position < total and lines:
                byte = data[position]
                position += 1
                if byte == 10:
                    lines -= 1
                elif layout == ARG_DECIMAL_LINE:
                    if byte < 48 or byte > 57 or position - argument > 12:
                        lines = -1
                        break
                    number = number * 10 + (byte - 48)
            if lines:
                verdict = _CUT_SHORT if lines > 0 else _BAD_MEMO
                break
        else:
            width = 1 if layout == ARG_LENGTH1 else (4 if layout == ARG_LENGTH4 else 8)
            if position + width > total:
                break
            for i in range(width):
                number |= np.int64(data[position + i]) << (8 * i)
            position += width
            if number < 0 or number > total - position:
                break
            position += number

        if what == SKIP:
            continue
        if what == MARK:
            if num_marks == MAX_DEPTH:
                verdict = _NESTED
                break
            floor = marks[num_marks] = height
            num_marks += 1
            continue
        if what == FRAME:
            if number < 0 or number > total - position:
                break
            continue
        estimate += rule.memory_bytes
        value = rule.value
        if what in (PUT, MEMOIZE):
            if what == MEMOIZE:
                number = num_memoized
            if number > num_opcodes + 256 or height == floor:
                verdict = _BAD_MEMO
                break
            if number >= len(memo):
                verdict = _NO_ROOM
                break
            if memo[number] == NOTHING:
                num_memoized += 1
            memo[number] = stack[height - 1]
            continue
        if what == GET:
            if number >= len(memo) or memo[number] == NOTHING:
                verdict = _BAD_MEMO
                break
            value = memo[number]
        elif what == STRING:
            value = FIRST_STRING - at
            estimate += position - argument
        elif what == LONG:
            if number > _MAX_INTEGER_BYTES:
                verdict = _LONG_NUMBER
                break
        elif what == LINE_NUMBER:
            if position - argument > _MAX_NUMBER_CHARACTERS:
                verdict = _LONG_NUMBER
                break
        elif what != PUSH:
            # the opcode takes stack[first:height]
            first = height - rule.takes
            if rule.takes == TO_MARK:
                if num_marks == 0:
                    verdict = _WRONG
                    break
                first = floor
                num_marks -= 1
                floor = marks[num_marks - 1] if num_marks else 0
            num_items = height - first
            if first < floor or (what == FILL and first == floor):
                verdict = _WRONG
                break
            if what == STOP:
                verdict = _FINE if height == 1 and num_marks == 0 else _WRONG
                break
            if what == REFUSE:
                verdict = _UNUSUAL
                break
            if what in (GLOBAL, STACK_GLOBAL):
                if num_globals == MAX_GLOBALS:
                    verdict = _CALLS
                    break
                if what == GLOBAL:
                    found[num_globals, 0] = argument
                else:
                    if stack[first] > FIRST_STRING or stack[first + 1] > FIRST_STRING:
                        verdict = _WRONG
                        break
                    found[num_globals, 0] = FIRST_STRING - stack[first]
                    found[num_globals, 1] = FIRST_STRING - stack[first + 1]
                num_globals += 1
                height = first
            elif what == MAKE and rule.value == TUPLE and num_items == 0:
                value = EMPTY_TUPLE
            else:
                if what == FILL:
                    container = stack[first - 1]
                    if container < 0 or containers[container].kind != rule.value:
                        verdict = _WRONG
                        break
                    value = NOTHING
                else:
                    container = value = num_containers
                    num_containers += 1
                    containers[container].kind = rule.value
                    containers[container].depth = 0
                    containers[container].is_complete = False
                    if what == CALL:
                        if stack[first] != FACTORY or stack[first + 1] != EMPTY_TUPLE:
                            verdict = _CALLS
                            break
                        height, num_items = first, 0
                kind, depth = containers[container].kind, containers[container].depth
                estimate += _ITEM_BYTES * num_items
                if kind == DICT and num_items:
                    estimate += _PAIR_BYTES * (num_items // 2) + (_TABLE_BYTES if depth == 0 else 0)
                    verdict = _WRONG if num_items % 2 else _CUT_SHORT
                    for i in range(first, height, 2):
                        if stack[i] != NUMBER and stack[i] > FIRST_STRING:
                            verdict = _BAD_KEY
                elif kind == TUPLE and num_items > MAX_TUPLE:
                    verdict = _UNUSUAL
                if num_items:
                    depth = max(depth, 1)
                for i in range(first, height):
                    item = stack[i]
                    if item >= 0:
                        containers[item].is_complete = True
                        depth = max(depth, containers[item].depth + 1)
                        if kind == TUPLE:
                            verdict = _UNUSUAL
                    elif item == FACTORY:
                        verdict = _UNUSUAL
                if depth > MAX_DEPTH:
                    verdict = _NESTED
                if containers[container].is_complete:  # it holds itself, or is part of another one already
                    verdict = _CYCLE
                if verdict != _CUT_SHORT:
                    break
                containers[container].depth = depth
                height = first
                if value == NOTHING:
                    continue
        if height == len(stack):
            verdict = _NO_ROOM
            break
        stack[height] = value
        height += 1
    return verdict, num_globals, estimate
