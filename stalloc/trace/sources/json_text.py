"""Long JSON as text: where the elements of one list lie, so that only those that matter are ever decoded.

A profiler trace may hold gigabytes of which a thousandth is about memory, and decoded JSON takes some twenty times its
text. The scan builds no objects, and decoding is bounded by the length of an element.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, njit
from stalloc.errors import BadInputError

MAX_ELEMENT_BYTES = 1 << 20
_FOUND, _NOT_FOUND, _CUT_SHORT, _DAMAGED = range(4)
_QUOTE, _BACKSLASH, _COMMA, _COLON = (ord(character) for character in '"\\,:')
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = (ord(character) for character in "[]{}")


def list_elements(path: Path, data: bytes, key: str | None) -> tuple[Column, Column] | None:
    """Where each element of a list begins and ends in `data`, as (k,) byte positions [begin, end).

    The list is the value of `key` in the outermost object, or the outermost list itself with None. Returns None when
    there is no such list; raises BadInputError when the text is cut short or no JSON.
    """
    text, name = np.frombuffer(data, np.uint8), np.frombuffer((key or "").encode(), np.uint8)
    places = np.empty((2, 4096), np.int64)
    verdict, count = _scan(text, name, places)
    if count > places.shape[1]:
        places = np.empty((2, count), np.int64)
        verdict, count = _scan(text, name, places)
    if verdict == _CUT_SHORT:
        raise BadInputError(f"{path}: the JSON is cut short: copy the file again, or let the profiler finish writing.")
    if verdict == _DAMAGED:
        raise BadInputError(f"{path}: not readable as JSON: copy or export the file again.")
    return (places[0, :count], places[1, :count]) if verdict == _FOUND else None


def decode(path: Path, text: bytes, what: str) -> Any:
    """What a piece of JSON holds; BadInputError, naming it as `what`, if damaged, too long or too deep."""
    if len(text) > MAX_ELEMENT_BYTES:
        raise BadInputError(f"{path}: {what} is {len(text)} bytes long, longer than recorders write: export it again.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: {what} is not readable as JSON: copy or export the file again.") from error


def wanted_elements(data: bytes, wanted: re.Pattern[bytes], begin: Column, end: Column) -> list[int]:
    """Which of the elements that lie at [begin, end) hold what a pattern finds, in order, each once."""
    if not len(begin):
        return []
    found = np.fromiter((match.start() for match in wanted.finditer(data)), np.int64)
    element = np.searchsorted(begin, found, side="right") - 1
    return np.unique(element[(element >= 0) & (found < end[element])]).tolist()


@njit(**BORROWING)
def _scan(data, key, places):
    """What came of it, and how many elements there are; writes where those begin and end, as far as there is room."""
    total, depth, position, count = len(data), 0, 0, 0
    list_depth, found, complete = 0, False, False
    element, expected = -1, False  # where the element began; whether the next value in the object is the one wanted
    name_begin, name_end = 0, 0  # the last string in the outermost object
    while position < total:
        byte = data[position]
        if byte in (32, 10, 13, 9):
            position += 1
            continue
        if complete or (depth == 0 and byte not in (_OPEN_LIST, _OPEN_OBJECT)):
            return _DAMAGED, 0
        inside = list_depth > 0 and depth == list_depth
        if inside and byte in (_COMMA, _CLOSE_LIST):
            if element < 0 and (byte == _COMMA or count > 0):
                return _DAMAGED, 0
            if element >= 0:
                if count < places.shape[1]:
                    places[0, count], places[1, count] = element, position
                count += 1
                element = -1
        elif inside and element < 0:
            element = position
        if byte == _QUOTE:
            closing = position + 1
            while closing < total and data[closing] != _QUOTE:
                closing += 2 if data[closing] == _BACKSLASH else 1
            if closing >= total:
                return _CUT_SHORT, 0
            if depth == 1:
                name_begin, name_end = position + 1, closing
            position = closing
        elif byte in (_OPEN_LIST, _OPEN_OBJECT):
            wanted = expected if len(key) else depth == 0
            if byte == _OPEN_LIST and wanted and not found and depth == (1 if len(key) else 0):
                list_depth, found = depth + 1, True
            depth += 1
        elif byte in (_CLOSE_LIST, _CLOSE_OBJECT):
            if depth == list_depth:
                list_depth = 0
            depth -= 1
            complete = depth == 0
        elif byte == _COLON and depth == 1:
            expected = name_end - name_begin == len(key) > 0
            for i in range(len(key)):
                expected = expected and data[name_begin + i] == key[i]
        elif byte == _COMMA and depth == 1:
            expected = False
        position += 1
    if not complete:
        return _CUT_SHORT, 0
    return (_FOUND if found else _NOT_FOUND), count
