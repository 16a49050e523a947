"""What a pickle would build, found out by following its opcodes without building anything.

Contract: a pickle that passes holds dictionaries, lists and short flat tuples of strings, numbers, truth values and
None, nested at most MAX_DEPTH deep and without cycles; its keys are strings and integers; its numbers are of 64 bits;
nothing is called but the making of an empty dictionary; and what it builds takes memory in proportion to its own
length. So loading it, and comparing or hashing any key or tuple of it, is linear in that length. Containers may be
shared, as snapshots share their stacks: to walk all of them again and again is not bounded by this.
"""

import pickletools
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit

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

# what it does, takes, pushes or makes or fills, and the bytes of memory that this takes, for the opcodes of these names
_RULES = {
    "PROTO": (SKIP, 0, 0, 0),
    "FRAME": (FRAME, 0, 0, 0),
    "MARK": (MARK, 0, 0, 0),
    "STOP": (STOP, 0, 0, 0),
    "NONE": (PUSH, 0, NONE, 0),
    "NEWTRUE NEWFALSE BININT1": (PUSH, 0, NUMBER, 0),
    "BININT2 BININT": (PUSH, 0, NUMBER, 32),
    "BINFLOAT": (PUSH, 0, FLOAT, 32),
    "EMPTY_TUPLE": (PUSH, 0, EMPTY_TUPLE, 0),
    "INT LONG": (LINE_NUMBER, 0, NUMBER, 32),
    "FLOAT": (LINE_NUMBER, 0, FLOAT, 32),
    "LONG1 LONG4": (LONG, 0, NUMBER, 32),
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8": (STRING, 0, 0, 56),
    "PUT BINPUT LONG_BINPUT": (PUT, 0, 0, 8),
    "MEMOIZE": (MEMOIZE, 0, 0, 8),
    "GET BINGET LONG_BINGET": (GET, 0, 0, 0),
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
    """A row for each byte; what no snapshot needs has REFUSE."""
    known = {name: rule for names, rule in _RULES.items() for name in names.split()}
    table = np.zeros(256, _RULE)
    table["argument"] = ARG_UNKNOWN
    for opcode in pickletools.opcodes:
        table[ord(opcode.code)] = (_argument(opcode), *known.get(opcode.name, (REFUSE, 0, 0, 0)))
    return table


OPCODES = _rules()


MAX_DEPTH = 64
MAX_TUPLE = 16
MAX_GLOBALS = 16
_MAX_INTEGER_BYTES = 9  # 64 bits and a sign
_MAX_NUMBER_CHARACTERS = 40
_BYTES_A_VALUE = 12  # remembered, or a container: in snapshots there are 14 and more
_MAX_SKIPPED = 256  # numbers of remembered values that are not used

# Estimates of the bytes that CPython takes.
_ITEM_BYTES, _PAIR_BYTES, _TABLE_BYTES = 9, 36, 100


(
    FINE,
    _NO_PICKLE,
    _CUT_SHORT,
    _BAD_MEMO,
    _NESTED,
    UNUSUAL,
    _BAD_KEY,
    _LONG_NUMBER,
    _CALLS,
    _CYCLE,
    _WRONG,
    _NO_ROOM,  # the tables of the scan are too small: it goes on with larger ones
) = range(12)
REFUSALS = {
    _NO_PICKLE: "not a pickle",
    _CUT_SHORT: "the pickle is cut short",
    _BAD_MEMO: "the pickle refers to more objects than it holds",
    _NESTED: f"the pickle nests its contents too deeply, beyond {MAX_DEPTH} levels",
    UNUSUAL: "the pickle holds kinds of objects that no snapshot has",
    _BAD_KEY: "a key of a dictionary in the pickle is neither a string nor an integer",
    _LONG_NUMBER: "the pickle holds a number beyond 64 bits",
    _CALLS: "the pickle asks for calls, which a snapshot never does",
    _CYCLE: "a container in the pickle holds itself, or grows after it was used",
    _WRONG: "damaged pickle",
}

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
        ("position", np.int64),  # of the next opcode
        ("num_opcodes", np.int64),
        ("num_cuts", np.int64),
        ("key", np.int64),  # the string that was last seen to be the key of what is left out
        ("is_key_last", np.bool_),  # it was pushed by the last opcode
        ("cut_list", np.int64),  # the list that is left out, -1: none
        ("cut_height", np.int64),  # the height with it on top
        ("cut_from", np.int64),  # where its next items begin
        ("cut_memoized", np.int64),  # num_memoized there
        ("num_copied", np.int64),  # bytes
        ("missing_at", np.int64),  # the first opcode that is kept and refers to what is not, -1: none
    ]
)
_CUT = np.dtype([(name, np.int64) for name in ("begin", "end", "num_memoized", "copy_begin", "copy_end")])
"""A range that is left out. In its place stand so many MEMOIZE, or the copy of a string that was left out before."""


class Scanned(NamedTuple):
    """What a pickle would build."""

    verdict: int  #: FINE, or a key of REFUSALS
    wanted: list[tuple[int, int]]
    """The globals asked for, each a pair of positions in the data: of two lines that follow each other (the second is
    -1), or of the opcodes of two strings."""
    memory_bytes: int  #: what the contents take
    cuts: Column | None
    """(k,) ranges of the data to leave out, and what to put in their place; None: it has to be whole."""


def scan(data: bytes, left_out: bytes = b"") -> Scanned:
    """Follow the opcodes of a pickle, and find the contents of lists that are under the key `left_out`.

    Without the cuts the same is built, but those lists are empty. The data has to be whole where something else refers
    to a container in them, or to more text than there is data, and where a pickle numbers what it remembers by itself,
    as protocols before the fourth do.
    """
    marks, found = np.zeros(MAX_DEPTH, np.int64), np.full((MAX_GLOBALS, 2), -1, np.int64)
    state = np.zeros(1, _STATE)
    for name in ("key", "cut_list", "missing_at"):
        state[name] = -1
    room, key = 1024 + len(data) // _BYTES_A_VALUE, np.frombuffer(left_out, np.uint8)
    stack, memo, is_cut = np.zeros(room, np.int64), np.full(room, NOTHING, np.int64), np.zeros(room, np.bool_)
    containers, cuts = np.zeros(room, _CONTAINER), np.zeros(room, _CUT)
    content = np.frombuffer(data, np.uint8)
    told = state[0]
    while (
        verdict := _scan(content, OPCODES, stack, memo, is_cut, marks, containers, found, cuts, key, state)
    ) == _NO_ROOM:
        if told["height"] == len(stack):
            stack = _longer(stack)
        elif told["num_containers"] == len(containers):
            containers = _longer(containers)
        elif told["num_cuts"] == len(cuts):
            cuts = _longer(cuts)
        else:
            memo, is_cut = _longer(memo, NOTHING), _longer(is_cut)
    kept = cuts[: told["num_cuts"]] if left_out and told["missing_at"] < 0 else None
    return Scanned(verdict, found[: told["num_globals"]].tolist(), int(told["estimate"]), kept)


def _longer(column: Column, rest: int = 0) -> Column:
    longer = np.full(4 * len(column), rest, column.dtype) if rest else np.zeros(4 * len(column), column.dtype)
    longer[: len(column)] = column
    return longer


@njit(**BORROWING)
def _scan(data, rules, stack, memo, is_cut, marks, containers, found, cuts, key, state):
    """The verdict; `state[0]` has what the pickle has done so far, from which it goes on where there was no room."""
    s = state[0]
    position, num_opcodes = s.position, s.num_opcodes
    while position < len(data):
        at, argument, rule = position, position + 1, rules[data[position]]
        what, value = rule.what, rule.value
        verdict, position, number = _read_argument(data, rule.argument, argument)
        if verdict != FINE:
            return verdict
        if what == MEMOIZE:
            number = s.num_memoized
        is_full = s.height == len(stack) or s.num_containers == len(containers) or s.num_cuts == len(cuts)
        num_opcodes += 1
        if is_full or (what in (PUT, MEMOIZE) and len(memo) <= number <= num_opcodes + _MAX_SKIPPED):
            s.position, s.num_opcodes = at, num_opcodes - 1
            return _NO_ROOM
        s.estimate += rule.memory_bytes
        was_key_last, s.is_key_last = s.is_key_last, False
        if what in (PUT, MEMOIZE):
            verdict, value = _memoize(number, num_opcodes, stack, memo, s), NOTHING
            s.is_key_last = was_key_last
            if what == PUT:
                s.missing_at = 0
            elif at == s.cut_from:
                _keep_list(position, stack, s)
        elif what == GET:
            value = memo[number] if number < len(memo) else NOTHING
            verdict = _BAD_MEMO if value == NOTHING else FINE
            s.is_key_last = value == s.key
            if verdict == FINE and s.missing_at < 0 and is_cut[number]:
                _refer(data, rules, value, at, position, stack, cuts, s)
        elif what == STRING:
            value = FIRST_STRING - at
            _push_string(data, key, argument, position, value, s)
        elif what in (SKIP, FRAME, MARK):
            value = NOTHING
            if what == MARK:
                verdict = _mark(marks, s)
            elif what == FRAME:
                verdict = FINE if 0 <= number <= len(data) - position else _CUT_SHORT
                _cut(cuts, at, position, s)  # its length would be another one
        elif what in (LONG, LINE_NUMBER):
            is_long = number > _MAX_INTEGER_BYTES if what == LONG else position - argument > _MAX_NUMBER_CHARACTERS
            verdict = _LONG_NUMBER if is_long else FINE
        elif what == STOP:
            return FINE if s.height == 1 and s.num_marks == 0 else _WRONG
        elif what == REFUSE:
            return UNUSUAL
        elif what != PUSH:
            verdict, value = _take(rule, argument, stack, marks, containers, found, s)
            if was_key_last and what == MAKE and rule.takes == 0 and rule.value == LIST:
                _begin_list(value, position, s)
            if what == FILL and s.cut_list >= 0 and stack[s.height - 1] == s.cut_list:
                _leave_out(cuts, is_cut, position, s)
        if verdict != FINE:
            return verdict
        if value != NOTHING:
            stack[s.height] = value
            s.height += 1
    return _CUT_SHORT


@inner(forceinline=True, **BORROWING)
def _read_argument(data, layout, argument):
    """(verdict, position of the next opcode, number) of the argument at a position."""
    position, total, number = argument, len(data), np.int64(0)
    if layout >= 0 or layout < ARG_TWO_LINES:
        width = layout if layout >= 0 else 1 if layout == ARG_LENGTH1 else 4 if layout == ARG_LENGTH4 else 8
        if position + width > total:
            return _CUT_SHORT, position, number
        for i in range(width):
            number |= np.int64(data[position + i]) << (8 * i)
        position += width
        if layout < 0:
            if number < 0 or number > total - position:
                return _CUT_SHORT, position, number
            position += number
    elif layout == ARG_UNKNOWN:
        return _NO_PICKLE, position, number
    else:
        lines = 2 if layout == ARG_TWO_LINES else 1
        while lines:
            if position == total:
                return _CUT_SHORT, position, number
            byte = data[position]
            position += 1
            if byte == 10:
                lines -= 1
            elif layout == ARG_DECIMAL_LINE:
                if byte < 48 or byte > 57 or position - argument > 12:
                    return _BAD_MEMO, position, number
                number = number * 10 + (byte - 48)
    return FINE, position, number


@inner(forceinline=True, **BORROWING)
def _push_string(data, key, argument, position, value, s):
    """Note whether it is the key: before the text, its length takes up to eight bytes of the argument."""
    s.estimate += position - argument
    begin = position - len(key)
    if len(key) == 0 or not argument < begin <= argument + 8 or data[argument] != len(key):
        return
    for i in range(len(key)):
        if data[begin + i] != key[i]:
            return
    s.key, s.is_key_last = value, True


@inner(**BORROWING)
def _cut(cuts, begin, end, s):
    """Leave a range out, in place of those that lie in it."""
    while s.num_cuts and cuts[s.num_cuts - 1].begin >= begin:
        s.num_cuts -= 1
        s.num_copied -= cuts[s.num_cuts].copy_end - cuts[s.num_cuts].copy_begin
    cut = cuts[s.num_cuts]
    cut.begin, cut.end, cut.num_memoized, cut.copy_begin, cut.copy_end = begin, end, 0, 0, 0
    s.num_cuts += 1


@inner(**BORROWING)
def _leave_out(cuts, is_cut, position, s):
    """Cut what was just put into the list, and note the remembered values that go with it."""
    _cut(cuts, s.cut_from, position, s)
    cuts[s.num_cuts - 1].num_memoized = s.num_memoized - s.cut_memoized
    is_cut[s.cut_memoized : s.num_memoized] = True
    if s.missing_at >= s.cut_from:
        s.missing_at = -1
    _begin_items(position, s)


@inner(**BORROWING)
def _begin_list(container, position, s):
    s.cut_list, s.cut_height = container, s.height + 1
    _begin_items(position, s)


@inner(**BORROWING)
def _keep_list(position, stack, s):
    """What was just remembered may be the list itself, which stays."""
    if s.height and stack[s.height - 1] == s.cut_list:
        _begin_items(position, s)


@inner(**BORROWING)
def _begin_items(position, s):
    s.cut_from, s.cut_memoized = position, s.num_memoized


@inner(**BORROWING)
def _refer(data, rules, value, at, position, stack, cuts, s):
    """An opcode refers to a value that was left out: copy it, or note that it is missing."""
    goes_into_list = s.cut_list >= 0 and s.floor >= s.cut_height and stack[s.cut_height - 1] == s.cut_list
    if not goes_into_list and value <= FIRST_STRING:
        begin = FIRST_STRING - value
        _, end, _ = _read_argument(data, rules[data[begin]].argument, begin + 1)
        if s.num_copied + end - begin <= len(data):
            _cut(cuts, at, position, s)
            cuts[s.num_cuts - 1].copy_begin, cuts[s.num_cuts - 1].copy_end = begin, end
            s.num_copied += end - begin
            return
    s.missing_at = at


@inner(**BORROWING)
def _mark(marks, s):
    if s.num_marks == MAX_DEPTH:
        return _NESTED
    s.floor = marks[s.num_marks] = s.height
    s.num_marks += 1
    return FINE


@inner(**BORROWING)
def _memoize(number, num_opcodes, stack, memo, s):
    if number > num_opcodes + _MAX_SKIPPED or s.height == s.floor:
        return _BAD_MEMO
    if memo[number] == NOTHING:
        s.num_memoized += 1
    memo[number] = stack[s.height - 1]
    return FINE


@inner(forceinline=True, **BORROWING)
def _take(rule, argument, stack, marks, containers, found, s):
    """(verdict, value) of an opcode that takes values from the stack; NOTHING: it pushes none."""
    what, value, first = rule.what, rule.value, s.height - rule.takes
    if rule.takes == TO_MARK:
        if s.num_marks == 0:
            return _WRONG, value
        first = s.floor
        s.num_marks -= 1
        s.floor = marks[s.num_marks - 1] if s.num_marks else 0
    if first < s.floor or (what == FILL and first == s.floor):
        return _WRONG, value
    if what in (GLOBAL, STACK_GLOBAL):
        return _ask_for(what, argument, stack, first, found, s), value
    if what == MAKE and value == TUPLE and first == s.height:
        return FINE, np.int64(EMPTY_TUPLE)
    if what == FILL:
        container, value = stack[first - 1], np.int64(NOTHING)
        if container < 0 or containers[container].kind != rule.value:
            return _WRONG, value
    else:
        container = value = s.num_containers
        s.num_containers += 1
        containers[container].kind = rule.value
        containers[container].depth = 0
        containers[container].is_complete = False
    if what == CALL:
        if stack[first] != FACTORY or stack[first + 1] != EMPTY_TUPLE:
            return _CALLS, value
        s.height = first
    return _fill(container, containers, stack, first, s), value


@inner(**BORROWING)
def _ask_for(what, argument, stack, first, found, s):
    """Note where the names of a global are."""
    if s.num_globals == MAX_GLOBALS:
        return _CALLS
    if what == GLOBAL:
        found[s.num_globals, 0] = argument
    else:
        if stack[first] > FIRST_STRING or stack[first + 1] > FIRST_STRING:
            return _WRONG
        found[s.num_globals, 0] = FIRST_STRING - stack[first]
        found[s.num_globals, 1] = FIRST_STRING - stack[first + 1]
    s.num_globals += 1
    s.height = first
    return FINE


@inner(forceinline=True, **BORROWING)
def _fill(container, containers, stack, first, s):
    """Put the values of the stack from `first` on into a container."""
    verdict, num_items = FINE, s.height - first
    kind, depth = containers[container].kind, containers[container].depth
    s.estimate += _ITEM_BYTES * num_items
    if kind == DICT and num_items:
        s.estimate += _PAIR_BYTES * (num_items // 2) + (_TABLE_BYTES if depth == 0 else 0)
        if num_items % 2:
            verdict = _WRONG
        for i in range(first, s.height, 2):
            if stack[i] != NUMBER and stack[i] > FIRST_STRING:
                verdict = _BAD_KEY
    elif kind == TUPLE and num_items > MAX_TUPLE:
        verdict = UNUSUAL
    if num_items:
        depth = max(depth, 1)
    for i in range(first, s.height):
        item = stack[i]
        if item >= 0:
            containers[item].is_complete = True
            depth = max(depth, containers[item].depth + 1)
            if kind == TUPLE:
                verdict = UNUSUAL
        elif item == FACTORY:
            verdict = UNUSUAL
    if depth > MAX_DEPTH:
        verdict = _NESTED
    if containers[container].is_complete:  # it holds itself, or is part of another one already
        verdict = _CYCLE
    if verdict == FINE:
        containers[container].depth = depth
        s.height = first
    return verdict
