"""The most that blocks of several streams (torch's record_stream) may take: what they do where nothing is done before
the host waits for it, while on the virtual GPU all is done at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stalloc.sizing.side_by_side import Asked, RunSeen


def shared_blocks(seen: list[dict[str, int]], late: list[dict[str, int]]) -> dict[str, int] | None:
    """Its figures, from the devices of a run and of one with late events; None if those are the same."""
    names = {"active_peak_bytes": "live_peak_bytes", "reserved_peak_bytes": "taken_bytes"}
    before, most = ({key: max((one.get(key, 0) for one in run), default=0) for key in names} for run in (seen, late))
    return {shown: most[key] for key, shown in names.items()} if before != most else None


def findings_of(
    asked: Asked, seen: RunSeen, run: Callable[[Sequence[Asked]], list[RunSeen]]
) -> tuple[dict[str, Any], int]:
    """What a run could not know, and how many runs more that took."""
    found = dict(seen.findings)
    if not found.pop("shares_blocks", False):
        return found, 0
    work = dataclasses.replace(asked.work, keep_history=False, delays_events=True)
    (late,) = run([dataclasses.replace(asked, work=work, name=f"{asked.name}, nothing done before the host waits")])
    found["shared_blocks"] = shared_blocks(seen.devices, late.devices)
    return found, 1
