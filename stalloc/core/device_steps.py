"""The steps that one device's program is expected to make, as Python sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stalloc.core import known_steps
from stalloc.core.device_arena import DeviceArena
from stalloc.core.device_tables import DeviceTables
from stalloc.core.records import ExpectedStep, dtype_of, table


@dataclass(frozen=True)
class StepAhead:
    """A step that is expected on the schedule."""

    end: int  #: entry that the cursor is at when it is over
    num_entries: int
    following: tuple[int, int, int]  #: the schedule [begin, end) that is followed after it, and from where


class DeviceSteps:
    """What is expected from the last mark on that Python was told of."""

    def __init__(self, tables: DeviceTables, arena: DeviceArena) -> None:
        self._tables, self._arena = tables, arena
        self._expected = table(ExpectedStep, 0)

    def expect(self, steps: Sequence[StepAhead], overdue: int) -> None:
        """From the mark that was just set on these steps are expected; `overdue`: requests until a mark has to come."""
        assert self._arena.schedule is not None
        schedules_beside = self._arena.schedule.schedules_beside
        words = [(one.end, one.num_entries, *one.following, schedules_beside(one.following[0]), 0, 0) for one in steps]
        rows = np.array(words, np.int64).view(dtype_of(ExpectedStep))[:, 0]
        known_steps.expect_steps(self._tables.address, rows.ctypes.data, len(rows), overdue)
        self._expected = rows

    def end_known(self) -> bool:
        """The program marks a step: whether it is the one that was expected, and nobody has to be told now."""
        return bool(known_steps.end_known_step(self._tables.address))

    def end_all(self) -> list[int]:
        """Nothing is expected from here on; events in the record at the end of each step that came as expected."""
        count = known_steps.end_known_steps(self._tables.address)
        num_events: list[int] = self._expected["num_events"][:count].tolist()
        return num_events
