"""What a snapshot of torch.cuda.memory says beside events and segments: annotations, settings, notes of a converter.

Contract: everything here may be missing; what is there is walked within a budget, and only text is taken for text.
Pinned host memory (`host_segments` and `host_traces` of newer releases) becomes a summary, which readers show as a
note: both keys are taken to be written as those of a device are, whose allocator pytorch/pytorch#182407 says to mimic
(segments with blocks, events with an action, an address and a size, in one list or in a list of lists); in any other
shape one note says so, and nothing else changes.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, MAX_BYTES
from stalloc.trace.sites import MAX_DEPTH, UNKNOWN, Frame, site_name
from stalloc.trace.storage import is_plain


class Budget:
    """Items that may still be walked: a pickle may hold one list under many names, and so be larger than its file."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._left = path, num_bytes + 1000

    def spend(self, items: Any) -> list[Any]:
        if not isinstance(items, list | tuple):
            raise TypeError(f"a {type(items).__name__} where a list belongs")
        self._left -= len(items)
        if self._left < 0:
            raise BadInputError(f"{self._path}: the pickle repeats its contents endlessly: give an intact snapshot.")
        return list(items)


KEYS = ("host_segments", "host_traces")
_MOST_SITES = 20
_SHOWN_SITES = 3
_LONGEST_NAME = 200
_ALLOC, _FREES = "alloc", {"free_completed", "free"}


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
    used_peak, live = _followed(events)
    if not sites:  # segments without stacks, or none: by the events
        for event in live:
            sites[names.of(event)] += _size(event["size"])
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
    return [event for event in events if event["action"] in _FREES | {_ALLOC}]


def _followed(events: list[dict[str, Any]]) -> tuple[int | None, Iterable[dict[str, Any]]]:
    """The most that was in use at a time, beyond what was before the events; and what is in use after them."""
    live: dict[int, dict[str, Any]] = {}
    now = most = 0
    for event in events:
        address = int(event["addr"])
        if event["action"] == _ALLOC:
            live[address] = event
            now += _size(event["size"])
            most = max(most, now)
        elif address in live:
            now -= _size(live.pop(address)["size"])
    return most if events else None, live.values()


class _Names(dict[int, str]):
    """Names of stacks, each list of frames read once: many blocks and events share one."""

    def of(self, told: dict[str, Any]) -> str:
        """The line that a block or an event is of."""
        frames = told.get("frames")
        if not frames or not isinstance(frames, list | tuple):
            return UNKNOWN
        if id(frames) not in self:
            stack = [Frame(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames[:MAX_DEPTH]]
            self[id(frames)] = printable(site_name(stack), _LONGEST_NAME)
        return self[id(frames)]


def _note(found: dict[str, Any]) -> str:
    text = f"pinned host memory: {human_bytes(found['bytes'])} in {plural(found['num_blocks'], 'block')}, "
    text += f"{human_bytes(found['used_bytes'])} in use"
    if found["used_peak_bytes"] is not None:
        text += f", {human_bytes(found['used_peak_bytes'])} at the most by its events"
    shown = [f"{printable(name, 60)} {human_bytes(size)}" for name, size in found["sites"][:_SHOWN_SITES]]
    return f"{text}{'; asked for at ' if shown else ''}{', '.join(shown)}"


class SnapshotNotes:
    """What a snapshot says beside events and segments; anything may be missing."""

    def __init__(self, path: Path, budget: Budget, snapshot: dict[str, Any]) -> None:
        self._path = path
        self._converted = snapshot.get("stalloc")  # what `stalloc convert` says of a snapshot that it wrote
        annotations = snapshot.get("external_annotations")
        notes = budget.spend(annotations) if isinstance(annotations, list) else []
        if not all(isinstance(note, dict) for note in notes):
            raise TypeError("an annotation that is no dictionary")
        self._annotations: list[dict[str, Any]] = notes
        self._pinned = pinned_host(budget, snapshot)
        settings = snapshot.get("allocator_settings")
        self._settings = _plain_settings(budget, settings) if isinstance(settings, dict) else None

    @property
    def of_host(self) -> str:
        """What is said of pinned host memory; empty for nothing."""
        return " ".join(self._pinned.get("notes", []))

    def info(self, device: int) -> dict[str, Any]:
        """What goes into the trace of a device."""
        info: dict[str, Any] = {"source": "torch snapshot", "file": self._path.name, "notes": []}
        if isinstance(self._converted, dict):
            said = self._converted["devices"][str(device)]
            notes, source = said["notes"][:20], said["source"]
            if not all(isinstance(text, str) for text in [*notes, source]):
                raise TypeError("a note that is no text")
            info["notes"] = [printable(note, 300) for note in notes]
            info["converted_from"] = printable(source, 100)
        info |= {**self._pinned, "notes": [*info["notes"], *self._pinned.get("notes", [])]}
        if self._settings is not None:
            info["allocator_settings"] = dict(self._settings)
        return info

    def marks(self, budget: Budget, device: int, time_us: Column) -> list[tuple[int, int, str]]:
        """The marks of a device, with times (m,): profiler steps are steps, all other annotations are phases."""
        annotations = budget.spend(self._annotations)
        placed: list[tuple[int, int, str]] = []
        if all("mark" in note for note in annotations):  # ours: places without a clock
            for note in annotations:
                event, kind = (int(number) for number in note["mark"])
                if note["device"] == device:
                    placed.append((event, kind, _name(note)))
        elif len(time_us) and time_us[0] > 0:
            for note in annotations:
                if note.get("device", device) != device or note.get("stage") not in ("START", "END"):
                    continue
                name, begins = _name(note), note["stage"] == "START"
                event = int(np.searchsorted(time_us, int(note["time_us"])))
                if not name.startswith("ProfilerStep#"):
                    placed.append((event, MARK_PHASE_BEGIN if begins else MARK_PHASE_END, name))
                elif begins:
                    placed.append((event, MARK_STEP, name))
        return sorted(placed, key=lambda mark: mark[0])


def _plain_settings(budget: Budget, settings: dict[Any, Any]) -> dict[str, Any]:
    """The settings whose values are plain, or dictionaries of plain ones."""
    plain: dict[str, Any] = {}
    for key in budget.spend(list(settings)):
        value = settings[key]
        if is_plain(value) or (isinstance(value, dict) and all(map(is_plain, budget.spend(list(value.values()))))):
            plain[str(key)] = value
    return plain


def _name(annotation: dict[str, Any]) -> str:
    name = annotation["name"]
    if not isinstance(name, str):
        raise TypeError("an annotation without a name")
    return name
