"""Which requests of a graph outlive its capture, by their size: a library's workspace is made once and kept.

Contract: a wrong guess costs memory, never correctness. Engines run a step once before they capture it. What that run
requested and freed is freed in the capture, too; a size of which nothing was ever freed is taken to last. It is known
as far as requests are recorded, which they are while stalloc looks for steps.
"""

import numpy as np

from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, ALIGNMENT
from stalloc.core.state import DeviceState


class LastingSizes:
    """Of one device."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._requested: set[int] = set()  # sizes, bytes rounded as the core does it
        self._freed: set[int] = set()
        self._begin = 0  # the first event that was not looked at
        self._words = np.empty(0, np.int64)  # which the core reads

    def tell(self) -> None:
        """Look at what was recorded since the last capture began, and tell the core."""
        end = int(self._state.record.num_events)
        begin = self._begin if self._begin <= end else 0  # it began anew
        action, sizes = self._state.recorded_sizes(begin, end)
        rounded = (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
        self._requested.update(np.unique(rounded[action == ACTION_ALLOC]).tolist())
        self._freed.update(np.unique(rounded[action == ACTION_FREE_COMPLETED]).tolist())
        words = np.array(sorted(self._requested - self._freed), np.int64)
        self._state.write(lasting_sizes=words.ctypes.data, num_lasting_sizes=len(words))
        self._words, self._begin = words, end
