"""Requests that were refused for lack of memory, as far as the record shows them.

Contract: an event of a refused request has no address; in a trace it has what was free on the device, as torch's have.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.core.constants import ACTION_OOM
from stalloc.core.state import DeviceState


class Refusals:
    """Of one device's record."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._noted: list[tuple[int, int]] = []  # events before each of them, bytes that were free then

    def forget(self) -> None:
        """The record begins anew."""
        self._noted.clear()

    def note(self, free_bytes: int) -> None:
        """A request is refused, with so much free on the device."""
        self._noted.append((int(self._state.record.num_events), free_bytes))

    def with_free_bytes(self, action: Column, address: Column) -> Column:
        """The addresses of events, where those of refused requests are what was free on the device."""
        errors = np.flatnonzero(action == ACTION_OOM)
        if not len(errors) or not self._noted:
            return address
        events, free_bytes = np.array(self._noted, np.int64).T
        events = events - self._state.first_event
        last = np.searchsorted(events, errors, side="right") - 1
        address = address.copy()
        address[errors[last >= 0]] = free_bytes[last[last >= 0]]
        return address
