"""What a program asks of PyTorch's caching allocator from the first request on, by the allocator's own history.

Contract: nothing is allocated, and no statistics are begun anew. A moment is the number of events before it.
"""

from bisect import bisect_right
from typing import Any

import torch

from stalloc.errors import SetupError


class AskedHistory:
    """The history of the current device; to be made before the program uses it."""

    def __init__(self) -> None:
        torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 40))

    def moment(self) -> int:
        """How many allocations and frees there were."""
        told = torch.cuda.memory_stats_as_nested_dict().get("allocation", {}).get("all", {})
        return int(told.get("allocated", 0) + told.get("freed", 0))

    def requests(self) -> "Requests":
        """All of them until now. Raises SetupError where the program itself began counts or history anew."""
        traces = torch.cuda.memory._snapshot()["device_traces"] if torch.cuda.is_initialized() else []
        done = [one for one in (traces[torch.cuda.current_device()] if traces else []) if one["action"] in _COUNTED]
        if len(done) != self.moment():
            raise SetupError(
                "it records memory history or resets PyTorch's accumulated statistics by itself: leave that out here"
            )
        return Requests(done)


_COUNTED = ("alloc", "free_completed")


class Requests:
    """Allocations of a history in order; a request's row is its place among them."""

    def __init__(self, done: list[dict[str, Any]]) -> None:
        streams: dict[int, int] = {0: 0}
        self.sizes: list[int] = []
        self.streams: list[int] = []  #: of each request; the default stream is 0
        self.events: list[int] = []  #: the row of an allocation, -1 - row where its memory was free again
        self._at: dict[int, tuple[list[int], list[int]]] = {}  # address: when it was allocated, and those rows
        live: dict[int, int] = {}
        for moment, one in enumerate(done):
            address = one["addr"]
            if one["action"] == "alloc":
                live[address] = row = len(self.sizes)
                times, rows = self._at.setdefault(address, ([], []))
                times.append(moment)
                rows.append(row)
                self.sizes.append(one["size"])
                self.streams.append(streams.setdefault(one["stream"], len(streams)))
                self.events.append(row)
            else:
                self.events.append(-1 - live.pop(address))

    def at(self, moment: int, address: int) -> int:
        """The last request before a moment that was given an address; -1: none."""
        times, rows = self._at.get(address, ([], []))
        found = bisect_right(times, moment - 1)
        return rows[found - 1] if found else -1
