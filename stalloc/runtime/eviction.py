"""The last memory there is: what a program holds and can do without for now, let go of when a request does not fit.

Contract: who lets go is called with the lock of its device's memory held, and without that of the core: it may free and
copy, wait for streams and enter torch, but asks for no memory of the device. It is never called while a graph is
captured. What is allocated decides first, which is the same in each step that does the same, so that steps with
evictions can be planned. Where the device ran out before, by fragmentation, less may be allocated from then on.
"""

from collections.abc import Callable

from stalloc.core.state import DeviceState
from stalloc.figures import human_bytes
from stalloc.runtime import decisions
from stalloc.sizes import whole_pages

Evict = Callable[[int], int]
"""Lets go of at least so many bytes, if it can; how many."""


class Eviction:
    """Evicts what a program can do without from the memory of one device; before `begin`, nothing is evicted."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._evict: Evict | None = None
        self._cap_bytes = self._most_bytes = 0  # that are held; that are allocated before something has to go
        self._is_busy = False

    def begin(self, cap_bytes: int, evict: Evict) -> None:
        """Call `evict` before more than so many bytes are allocated, or held; 0: when the device has no more."""
        self._evict = evict
        self._cap_bytes = self._most_bytes = cap_bytes
        self._state.triggers.above(cap_bytes)

    def end(self) -> None:
        self._evict = None
        self._state.triggers.above(0)

    def keep_cap(self, size_bytes: int) -> None:
        """A request (bytes, rounded) is about to make more allocated than may be."""
        self._lets_go(self._state.record.total.allocated_bytes + size_bytes - self._most_bytes)

    def makes_room(self, size_bytes: int) -> bool:
        """The device has no more for a request (bytes): have as much let go of; whether any was."""
        record = self._state.record
        if self._evict is not None and not self._is_busy:
            self._most_bytes = decisions.most_before_eviction(
                self._most_bytes, record.total.allocated_bytes, record.statistics.reserved_bytes
            )
            self._state.triggers.above(self._most_bytes)
        return self._lets_go(size_bytes)

    def _lets_go(self, size_bytes: int) -> bool:
        if self._evict is None or size_bytes <= 0 or self._is_busy:
            return False
        self._is_busy = True
        try:
            return self._evict(size_bytes) > 0
        finally:
            self._is_busy = False

    def told(self, size_bytes: int) -> str:
        if self._evict is None:
            return ""
        enough = human_bytes(self._state.record.statistics.reserved_bytes + whole_pages(size_bytes))
        if not self._cap_bytes:
            return " All that may be evicted was evicted before."
        return (
            f" The cap of {human_bytes(self._cap_bytes)} cannot be kept: what could be evicted was, and what is left "
            "are parameters, gradients, optimizer state and what is being computed with. A cap of "
            f"{enough} serves this request; what comes after it may need more."
        )
