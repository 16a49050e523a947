"""Which line of the program asked for each request, while somebody wants to know.

Contract: while it is on, every request costs a walk over the thread's Python frames, about a microsecond; while it is
off nothing, since another malloc serves. A request whose stack is not known (a thread that Python never knew, a table
that is full) is given none, never another's. The last requests are known by the table of calls, a ring; what lives from
before those only if `keep_live` was called at least once in as many requests.
"""

import atexit
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import ACTION_ALLOC, ACTION_OOM, MAX_REQUEST
from stalloc.core.entry import sited_malloc
from stalloc.trace.sites import MAX_DEPTH, Frame, StackCollector, site_name

_MAX_STACKS = 1 << 17  # distinct ones; the table that finds them by their hashes is a third larger
_TABLE_PAIRS = 1 << 18
_MAX_CALLS = 1 << 22  # as many as there are events in a record
_WORD = (1 << 64) - 1
_WATCHING, _OPERATOR = os.path.join("device", "watched_work.py"), os.path.join("torch", "_ops.py")
Stack = list[dict[str, Any]]


class CallSites:
    """The stacks of the requests of this process."""

    def __init__(self, malloc: int, max_calls: int = _MAX_CALLS) -> None:
        """`malloc`: the address of what serves; `max_calls`: that are known, a power of two."""
        self._malloc, self._max_calls = malloc, max_calls
        self._sited = 0  # the address of the same with stacks, once it is made
        self.is_on = False
        self._plain = malloc  # what serves while nothing is noted
        self._refusing = 0  # what answers instead, 0: nothing does
        self._word = ctypes.c_int64(malloc)
        self._num_calls = ctypes.c_int64(0)
        self._calls: Column = np.empty((0, 4), np.int64)
        self._table: Column = np.empty((0, 2), np.int64)
        self._stacks: list[Stack] = []
        self._kept: dict[int, dict[int, int]] = {}  # by device: of what lived at the last look, address and stack
        self._kept_at = 0  # calls at that look
        self._codes: list[list[CodeType]] = []  # kept, so that no other code object gets the address of one

    @property
    def malloc_word(self) -> int:
        return ctypes.addressof(self._word)

    @property
    def malloc(self) -> int:
        return self._word.value

    @property
    def num_calls(self) -> int:
        """Requests noted so far, those included that the ring has lost."""
        return self._num_calls.value

    def begin(self) -> None:
        if not self._sited:
            self._calls = np.zeros((self._max_calls, 4), np.int64)  # takes memory as far as it is written
            self._table = np.zeros((_TABLE_PAIRS, 2), np.int64)
            self._sited = sited_malloc(self._malloc, self._table, self._calls, self._num_calls, self._enter)
            atexit.register(self.end)  # no thread is to wait for Python when it ends
        self.is_on = True
        self._serve()

    def end(self) -> None:
        self.is_on = False
        self._serve()

    def stand_in(self, malloc: int) -> None:
        """Let another malloc, at this address, serve while nothing is noted; 0: the core's."""
        self._plain = malloc or self._malloc
        self._serve()

    def refuse(self, refusing: int) -> None:
        """Let another malloc, at this address, answer every request; 0: no longer."""
        self._refusing = refusing
        self._serve()

    def _serve(self) -> None:
        self._word.value = self._refusing or (self._sited if self.is_on else self._plain)

    def _enter(self, key: int, *_: int) -> int:
        """The number, from 1 on, of the stack from which this is called, by its hash; 0 if there is no room for it."""
        mask, key = len(self._table) - 1, key & _WORD
        at = (key >> 8) & mask
        keys, signed = self._table[:, 0], np.uint64(key).astype(np.int64)
        while keys[at] not in (0, signed):
            at = (at + 1) & mask
        if keys[at] == signed:  # another thread was here first
            return int(self._table[at, 1])
        if len(self._stacks) == _MAX_STACKS:
            return 0
        stack = _stack(sys._getframe(1))
        self._codes.append([code for code, _ in stack])
        names = [(code.co_filename, line, code.co_name) for code, line in stack]
        self._stacks.append([{"filename": file, "line": line, "name": name} for file, line, name in names])
        self._table[at] = signed, len(self._stacks)
        return len(self._stacks)

    def _noted(self, state: int, first_call: int) -> Column:
        end, room = self.num_calls, len(self._calls)
        if end <= room:
            rows = self._calls[first_call:end]
        else:
            rows = self._calls[np.arange(max(first_call, end - room), end) % room]
        never_recorded = (rows[:, 1] == 0) & (rows[:, 2] > MAX_REQUEST)
        return rows[(rows[:, 0] == state) & ~never_recorded]

    def of_events(
        self, state: int, first_call: int, first_event: int, action: Column, address: Column, size: Column
    ) -> Column:
        """(m,) the stack of each event of a record, from 0 on; -1: not known.

        `state` is the address of the device's state; call `first_call` is the first after event `first_event`, which is
        below 0 where the record is a ring that has lost it. The calls that were given one address come in the same
        order as the events that have it: the first is the first of them, of rings the last is the last.
        """
        stacks = np.full(len(action), -1, np.int64)
        asks = np.flatnonzero((action == ACTION_ALLOC) | (action == ACTION_OOM))
        asks = asks[asks >= first_event]
        rows = self._noted(state, first_call)
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        asks = asks[np.argsort(address[asks], kind="stable")]
        places = address[asks]
        first, last = np.searchsorted(rows[:, 1], places), np.searchsorted(rows[:, 1], places, side="right")
        if first_event >= 0 and self.num_calls - first_call <= len(self._calls):
            found = first + np.arange(len(asks)) - np.searchsorted(places, places)
        else:
            found = last + np.arange(len(asks)) - np.searchsorted(places, places, side="right")
        known = (found >= first) & (found < last)
        asks, found = asks[known], found[known]
        agree = rows[found, 2] == size[asks]
        stacks[asks[agree]] = rows[found[agree], 3] - 1
        return stacks

    def columns(self, event_stack: Column, site: Column) -> dict[str, Column]:
        """What belongs into `Trace.extra`, given the stacks of the events and of the requests."""
        collector = StackCollector()
        number = np.array([*(collector.add(frames) for frames in self._stacks), -1], np.int64)  # -1 picks the last
        return collector.columns(number[site], number[event_stack])

    def stacks_at(self, state: int, addresses: Sequence[int]) -> list[Stack]:
        number = self._numbers_at(state)
        return [self._stacks[number[at] - 1] if number.get(at) else [] for at in addresses]

    def _numbers_at(self, state: int) -> dict[int, int]:
        """The number of the stack that asked last for each address of a device, as far as that is known."""
        is_recent = self.num_calls - self._kept_at <= len(self._calls)
        number = dict(self._kept.get(state, {})) if is_recent else {}
        rows = self._noted(state, 0)[::-1]
        places, last = np.unique(rows[:, 1], return_index=True)
        number.update(zip(places.tolist(), rows[last, 3].tolist(), strict=True))
        return number

    @property
    def is_look_due(self) -> bool:
        return self.is_on and self.num_calls - self._kept_at > self._max_calls // 4

    def keep_live(self, live: Mapping[int, Sequence[int]]) -> None:
        calls, kept = self.num_calls, {}
        for state, addresses in live.items():
            number = self._numbers_at(state)
            kept[state] = {at: number[at] for at in addresses if at in number}
        self._kept, self._kept_at = kept, calls

    def names_at(self, state: int, addresses: Sequence[int]) -> list[str]:
        stacks = self.stacks_at(state, addresses)
        distinct = {id(stack): stack for stack in stacks}
        names = {key: site_name([Frame(**frame) for frame in stack]) for key, stack in distinct.items()}
        return [names[id(stack)] for stack in stacks]


def this_call_site() -> str:
    return site_name([Frame(code.co_filename, line, code.co_name) for code, line in _stack(sys._getframe(1))])


def _stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """The code and the line of a frame and of those that called it; the checker of the order of work is left out."""
    stack: list[tuple[CodeType, int]] = []
    while frame is not None and len(stack) < MAX_DEPTH:
        if not frame.f_code.co_filename.endswith(_WATCHING):
            stack.append((frame.f_code, frame.f_lineno or 0))
        elif stack and stack[-1][0].co_filename.endswith(_OPERATOR):  # which it calls
            stack.pop()
        frame = frame.f_back
    return stack
