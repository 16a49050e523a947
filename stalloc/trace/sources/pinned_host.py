"""Pinned host memory in snapshots of torch.cuda.memory: `host_segments` and `host_traces` (newer releases of PyTorch).

Contract: what is read is a summary, which readers of the snapshot show as a note; the traces of devices do not depend
on it. Both keys may be missing, empty, or of another shape than is known here: then one note says so, and nothing else
changes. They are taken to be written as those of a device are, whose allocator pytorch/pytorch#182407 says to mimic:
segments with blocks, events with an action, an address and a size, in one list or in a list of lists.
"""

from collections import Counter
from typing import Any

from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace.record import MAX_BYTES
from stalloc.trace.sites import MAX_DEPTH, UNKNOWN, Frame, site_name
from stalloc.trace.sources.snapshot_budget import Budget

KEYS = ("host_segments", "host_traces")
_MOST_SITES = 20
_SHOWN_SITES = 3
_LONGEST_NAME = 200
_LARGER = {"alloc": 1}
_SMALLER = {"free_completed": 1, "free": 1}


def pinned_host(budget: Budget, snapshot: dict[Any, Any]) -> dict[str, Any]:
    """What goes into the info of a trace: `pinned_host` and the `notes` on it; empty where a snapshot has none.

    `pinned_host`: `num_blocks`, `bytes`, `used_bytes`, `num_events`, `used_peak_bytes` (of the events, None without)
    and `sites`, pairs of a line and the bytes in use that it asked for, most first.
    """
    if not any(snapshot.get(key) for key in KEYS):
        return {}
    try:
        found = _read(budget, snapshot)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        what = printable(f"{type(error).__name__}: {error}", 100)
        return {"notes": [f"pinned host memory is left out: {' and '.join(KEYS)} are not as known here ({what})"]}
    return {"pinned_host": found, "notes": [_note(found)]}


def _read(budget: Budget, snapshot: dict[Any, Any]) -> dict[str, Any]:
    sites: Counter[str] = Counter()
    names = _Names()
    num_blocks = total = used = 0
    for segment in budget.spend(snapshot.get("host_segments") or []):
        total += _size(segment["total_size"] if "total_size" in segment else segment["size"])
        num_blocks += 1
        for block in budget.spend(segment.get("blocks", [])):
            size = _size(block["size"])
            if block["state"] != "inactive":
                used += size
                sites[names.of(block)] += size
    events = _events(budget, snapshot.get("host_traces") or [])
    used_peak = _peak(events)
    if not sites:  # segments without stacks, or none: by the events
        sites = _live_sites(events, names)
    return {
        "num_blocks": num_blocks,
        "bytes": total,
        "used_bytes": used,
        "num_events": len(events),
        "used_peak_bytes": used_peak,
        "sites": [[name, size] for name, size in sites.most_common(_MOST_SITES)],
    }


def _size(value: Any) -> int:
    size = int(value)
    if not 0 <= size < MAX_BYTES:
        raise ValueError(f"a size of {str(value)[:30]} bytes")
    return size


def _events(budget: Budget, traces: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for entry in budget.spend(traces):
        events += budget.spend(entry) if isinstance(entry, list | tuple) else [entry]
    return [event for event in events if event["action"] in _LARGER or event["action"] in _SMALLER]


def _peak(events: list[dict[str, Any]]) -> int | None:
    """The most that was in use at a time, beyond what was before the events."""
    live: dict[int, int] = {}
    now = most = 0
    for event in events:
        address = int(event["addr"])
        if event["action"] in _LARGER:
            live[address] = _size(event["size"])
            now += live[address]
            most = max(most, now)
        else:
            now -= live.pop(address, 0)
    return most if events else None


def _live_sites(events: list[dict[str, Any]], names: "_Names") -> Counter[str]:
    live = {}
    for event in events:
        if event["action"] in _LARGER:
            live[int(event["addr"])] = event
        else:
            live.pop(int(event["addr"]), None)
    sites: Counter[str] = Counter()
    for event in live.values():
        sites[names.of(event)] += _size(event["size"])
    return sites


class _Names:
    """Names of stacks, each list of frames read once: many blocks and events share one."""

    def __init__(self) -> None:
        self._of_list: dict[int, str] = {}

    def of(self, told: dict[str, Any]) -> str:
        """The line that a block or an event is of."""
        frames = told.get("frames")
        if not frames or not isinstance(frames, list | tuple):
            return UNKNOWN
        if id(frames) not in self._of_list:
            stack = [Frame(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames[:MAX_DEPTH]]
            self._of_list[id(frames)] = printable(site_name(stack), _LONGEST_NAME)
        return self._of_list[id(frames)]


def _note(found: dict[str, Any]) -> str:
    text = f"pinned host memory: {human_bytes(found['bytes'])} in {plural(found['num_blocks'], 'block')}, "
    text += f"{human_bytes(found['used_bytes'])} in use"
    if found["used_peak_bytes"] is not None:
        text += f", {human_bytes(found['used_peak_bytes'])} at the most by its events"
    shown = [f"{printable(name, 60)} {human_bytes(size)}" for name, size in found["sites"][:_SHOWN_SITES]]
    return f"{text}{'; asked for at ' if shown else ''}{', '.join(shown)}"
