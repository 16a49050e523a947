"""Entry points with a policy: what must be done as a whole, and what is checked on the way."""

from typing import TYPE_CHECKING

from stalloc.core.entry import Handler, free_by, slow_entry
from stalloc.runtime.interruptions import is_interruption

if TYPE_CHECKING:
    from stalloc.poison.poison import Watch


def persistent_entry(handler: Handler) -> int:
    """A `slow_entry` for what has to be done as a whole, whatever interrupts it, and may be done twice.

    An error of its own is raised where the thread's Python code goes on.
    """

    def again(first: int, second: int, third: int, errors: list[BaseException]) -> int:
        return handler(first, second, third) if is_interruption(errors[-1]) else 0

    return slow_entry(handler, again)


def checked_entries(watch: "Watch") -> tuple[int, int]:
    """The core's entries by way of Python, for STALLOC_POISON."""
    return slow_entry(watch.allocate), free_by(slow_entry(watch.free))
