"""Which event of a trace is meant by --at: an index, or the last out-of-memory error; who asked for memory then."""

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace import Action, Trace
from stalloc.trace.sites import UNKNOWN, read_sites, site_name

_NO_DEVICE_FREE = ("kineto", "rmm log")  # sources of traces


def moment_text(event: int) -> str:
    """The moment after an event as people read it; -1: before the first."""
    return f"after event {event:,}" if event >= 0 else "when recording began"


def is_oom(trace: Trace, event: int) -> bool:
    """Whether an event is an out-of-memory error."""
    return 0 <= event < len(trace.action) and trace.action[event] == Action.OOM


def last_oom(trace: Trace) -> int | None:
    """The last out-of-memory error of a trace."""
    found = np.flatnonzero(trace.action == Action.OOM)
    return int(found[-1]) if len(found) else None


def device_free(trace: Trace, event: int) -> int | None:
    """What was free on the device at an out-of-memory error; None where such files do not say."""
    return None if trace.info.get("source") in _NO_DEVICE_FREE else int(trace.address[event])


def event_at(trace: Trace, at: int | str, others: str) -> int:
    """The event of an index or of "oom"; `others` names what else --at may be.

    Raises BadInputError for one that the trace does not have.
    """
    if at == "oom":
        event = last_oom(trace)
        if event is None:
            raise BadInputError(
                f"device {trace.device} has no out-of-memory event: use --at {others} or the index of an event."
            )
        return event
    try:
        event = int(at)
    except ValueError:
        raise BadInputError(f"--at is {at!r}: give {others}, oom or the index of an event.") from None
    if not 0 <= event < trace.num_events:
        raise BadInputError(f"device {trace.device} has events 0 to {trace.num_events - 1}: there is no event {event}.")
    return event


def asked_by(trace: Trace, event: int) -> str:
    """The call site of an event that asks for memory."""
    sites = read_sites(trace)
    if sites is None or sites.event_site[event] < 0:
        return UNKNOWN
    return site_name(sites.stack(int(sites.event_site[event])))
