"""What the core is to ask Python next: the one place that sets these fields; a new record or schedule clears them."""

from stalloc.core.constants import AT_ANY_REQUEST
from stalloc.core.device_tables import DeviceTables


class Triggers:
    """When the core of one device enters Python; it clears a trigger before it asks, and may be told the same twice."""

    def __init__(self, tables: DeviceTables) -> None:
        self._record, self._write = tables.record, tables.write

    def at_boundary(self) -> None:
        """Ask where the cycle begins again."""
        self._record.triggers.ask_at_boundary = max(self._record.triggers.ask_at_boundary, 1)

    def at_any_request(self) -> None:
        """Ask at the next request that may be planned."""
        self._record.triggers.ask_at_boundary = AT_ANY_REQUEST

    @property
    def boundary_is_asked(self) -> bool:
        """Whether either of these is set."""
        return bool(self._record.triggers.ask_at_boundary)

    def after_iterations(self, count: int) -> None:
        """Ask where the cycle has begun again so many times; 0: not for their number."""
        steps = self._record.iterations.iterations_ever
        self._write({"ask_at_boundary": int(count == 1), "ask_after_iterations": steps + count if count > 1 else 0})

    def after_misses(self, count: int) -> None:
        """Ask once misses outnumber hits by so many; 0: never."""
        self._record.triggers.ask_after_misses = count

    def after_requests(self, count: int) -> None:
        """Ask at a miss once so many more requests were served."""
        self._record.triggers.doubt_at = self._record.total.num_allocs + count

    def above(self, allocated_bytes: int) -> None:
        """Ask before each request with which more than so many bytes would be allocated; 0: never."""
        self._record.triggers.ask_above = allocated_bytes

    def at_recorded(self, num_requests: int) -> None:
        """Ask once the record has so many requests above TINY; 0: never."""
        self._record.triggers.check_at = num_requests
