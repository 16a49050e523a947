"""Compiled: the waves of all blocks that wait for nothing that has not moved, and of plain cycles.

Contract: `start` and `finish` of a block are the waves at which its copies may begin and at which its source is free;
finish stays -1 for what is in or behind a cycle that is not plain. A plain cycle is one whose blocks each wait for
just one other: its smallest block goes into the bounce buffer, the others follow one by one, and it comes back last.

Columns are (n,), blocks in order of their sources: block i waits for the blocks [low[i], high[i]) except itself, and
behind[back_low[i]:back_high[i]] wait for it.
"""

import numpy as np

from stalloc.compiled import njit
from stalloc.sizes import ALIGNMENT_BYTES

BATCH_START, BATCH_END, USED, FILLED, TAKEN = range(5)  # words of `now`: the bounce buffer's batch, the queue


@njit(nogil=True)
def begin(low, high, missing, queue, now):
    """Count what each block waits for and queue those that wait for nothing."""
    for i in range(len(low)):
        missing[i] = high[i] - low[i] - (1 if low[i] <= i < high[i] else 0)
        if missing[i] == 0:
            queue[now[FILLED]] = i
            now[FILLED] += 1


@njit(nogil=True)
def _release(i, freed, behind, back_low, back_high, missing, start, finish, queue, now):
    """The source of a block is free from a wave on: whoever waits for nothing else is queued."""
    for at in range(back_low[i], back_high[i]):
        j = behind[at]
        if j != i and finish[j] < 0:
            start[j] = max(start[j], freed)
            missing[j] -= 1
            if missing[j] == 0:
                queue[now[FILLED]] = j
                now[FILLED] += 1


@njit(nogil=True)
def drain(behind, back_low, back_high, duration, through, missing, start, finish, queue, now):
    """Give waves to what is queued, and to what that lets go. `through`: by the bounce buffer, one after the other."""
    while now[TAKEN] < now[FILLED]:
        i = queue[now[TAKEN]]
        now[TAKEN] += 1
        if through[i]:
            start[i] = max(start[i], now[BATCH_END])
            now[BATCH_START] = now[BATCH_END] = start[i] + duration[i]
            now[USED] = 0
        finish[i] = start[i] + duration[i]
        _release(i, finish[i], behind, back_low, back_high, missing, start, finish, queue, now)


@njit(nogil=True)
def break_plain(
    low, high, behind, back_low, back_high, size, slides, missing, start, finish, queue, now, place, back, limit
):
    """Break the plain cycles that a bounce buffer of `limit` bytes can; how many there were.

    place[i] becomes the place of a block that goes through the bounce buffer and back[i] the wave at which it leaves.
    """
    n = len(low)
    seen = np.zeros(n, np.int64)
    ring = np.zeros(n, np.int64)
    count = 0
    for first in range(n):
        i, length = first, 0
        while i >= 0 and finish[i] < 0 and missing[i] == 1 and seen[i] == 0 and not slides[i]:
            seen[i] = first + 1
            ring[length] = i
            length += 1
            following = -1
            for j in range(low[i], high[i]):
                if j != i and finish[j] < 0:
                    following = j
            i = following
        if i < 0 or length == 0 or seen[i] != first + 1 or finish[i] >= 0:
            continue
        head = 0
        while ring[head] != i:
            head += 1
        members = length - head
        smallest, wave = head, 0
        for at in range(head, length):
            wave = max(wave, start[ring[at]])
            if size[ring[at]] < size[ring[smallest]]:
                smallest = at
        victim = ring[smallest]
        if size[victim] > limit:
            continue
        if now[USED] + size[victim] > limit:
            now[BATCH_START], now[USED] = now[BATCH_END], 0
        wave = max(wave, now[BATCH_START])
        place[victim], back[victim] = now[USED], wave + members
        now[USED] += (size[victim] + (ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES
        now[BATCH_END] = max(now[BATCH_END], wave + members + 1)
        for step in range(members):
            at = smallest - step  # each waits for the one after it, so that they move in the opposite order
            member = ring[at if at >= head else at + members]
            start[member], finish[member] = wave + step, wave + step + 1
        for at in range(head, length):
            _release(ring[at], finish[ring[at]], behind, back_low, back_high, missing, start, finish, queue, now)
        count += 1
    return count
