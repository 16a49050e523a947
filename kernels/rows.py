"""Compiled: the rows of a work table, one block after the other.

Contract: `count_rows` and `write_rows` cut every block in the same way: up to the grid, on it, behind it. Sections: 0
long on the 16-byte grid, 1 long on the 4-byte grid, 2 long anywhere, 3 small on the 16-byte grid, 4 small anywhere.
"""

import numpy as np

from stalloc.compiled import njit

SMALL_VECTOR_BYTES = 512  # a row of the small sections has at most so many bytes: on the 16-byte grid,
SMALL_BYTES = 64  # or anywhere
_CLASSES = 64  # of sizes, by which what is left over is sorted


@njit(nogil=True)
def _cut(source, target, size, alone):
    """Head, body (bytes) and the body's section of one block; `alone`: the source's place does not matter."""
    apart = 0 if alone else source - target
    if size <= SMALL_BYTES and (apart & 15 != 0 or (target | size) & 15 != 0):
        return 0, size, 4
    if apart & 3 != 0:
        return 0, size, 2
    grain = 16 if apart & 15 == 0 else 4
    head = -target & (grain - 1)
    body = (size - head) & -grain
    if grain == 4:
        return head, body, 1
    return head, body, 3 if body <= SMALL_VECTOR_BYTES else 0


@njit(nogil=True)
def count_rows(source, target, size, alone, chunk, lengths):
    """Add up the rows of each section, (5,); long bodies are cut into chunks of `chunk` bytes."""
    for i in range(len(size)):
        head, body, section = _cut(source[i], target[i], size[i], alone)
        if body > 0:
            lengths[section] += (body + chunk - 1) // chunk if section < 3 else 1
        lengths[4] += (head > 0) + (size[i] > head + body)


@njit(nogil=True)
def _write(rows, at, source, target, count, turn):
    rows[at, 0] = source
    rows[at, 1] = target
    rows[at, 2] = count
    rows[at, 3] = turn & 15


@njit(nogil=True)
def write_rows(source, target, size, alone, fixed, chunk, first, rows):
    """Write the rows; section s begins at first[s]. `fixed`: a source is not an address of bytes and stays as it is.

    Full chunks come first, then what is left over in falling classes of size: with units handed out to and fro
    (triton_code.batched) every program gets nearly as many bytes.
    """
    n = len(size)
    left, place = np.zeros(n, np.int64), np.zeros((3, _CLASSES), np.int64)
    for i in range(n):
        head, body, section = _cut(source[i], target[i], size[i], alone)
        step = 0 if fixed else 1
        if section < 3:
            for at in range(head, head + body - chunk + 1, chunk):
                _write(rows, first[section], source[i] + step * at, target[i] + at, chunk, at)
                first[section] += 1
            left[i] = body % chunk
        elif body > 0:
            _write(rows, first[section], source[i] + step * head, target[i] + head, body, head)
            first[section] += 1
        if head > 0:
            _write(rows, first[4], source[i], target[i], head, 0)
            first[4] += 1
        behind = head + body
        if size[i] > behind:
            _write(rows, first[4], source[i] + step * behind, target[i] + behind, size[i] - behind, behind)
            first[4] += 1
    most = 1
    for i in range(n):
        most = max(most, left[i] + 1)
    for i in range(n):
        if left[i] > 0:
            section = _cut(source[i], target[i], size[i], alone)[2]
            place[section, _CLASSES - 1 - left[i] * _CLASSES // most] += 1
    for section in range(3):
        at = first[section]
        for nth in range(_CLASSES):
            count = place[section, nth]
            place[section, nth] = at
            at += count
        first[section] = at
    for i in range(n):
        if left[i] > 0:
            head, body, section = _cut(source[i], target[i], size[i], alone)
            at, nth = head + body - left[i], _CLASSES - 1 - left[i] * _CLASSES // most
            _write(rows, place[section, nth], source[i] + (0 if fixed else at), target[i] + at, left[i], at)
            place[section, nth] += 1
