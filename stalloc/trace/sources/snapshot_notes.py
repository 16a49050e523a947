"""What a snapshot of torch.cuda.memory says beside events and segments: annotations, settings, notes of a converter.

Contract: everything here may be missing; what is there is walked within a budget, and only text is taken for text.
"""

from pathlib import Path
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.printable import printable
from stalloc.trace.header import is_plain
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP
from stalloc.trace.sources.pinned_host import pinned_host
from stalloc.trace.sources.snapshot_budget import Budget


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

    def marks(self, budget: Budget, device: int, time_us: Column) -> tuple[Column, Column, Column, tuple[str, ...]]:
        """The mark columns of a device, with times (m,), and the names that they refer to."""
        return _marks(budget.spend(self._annotations), device, time_us)


def _plain_settings(budget: Budget, settings: dict[Any, Any]) -> dict[str, Any]:
    """The settings whose values are plain, or dictionaries of plain ones."""
    plain: dict[str, Any] = {}
    for key in budget.spend(list(settings)):
        value = settings[key]
        if is_plain(value) or (isinstance(value, dict) and all(map(is_plain, budget.spend(list(value.values()))))):
            plain[str(key)] = value
    return plain


def _marks(annotations: list[Any], device: int, time_us: Column) -> tuple[Column, Column, Column, tuple[str, ...]]:
    """Annotations as marks: profiler steps are steps, all others are phases. Placed by wall time, once."""
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
            if name.startswith("ProfilerStep#"):
                if begins:
                    placed.append((event, MARK_STEP, name))
            else:
                placed.append((event, MARK_PHASE_BEGIN if begins else MARK_PHASE_END, name))
    placed.sort(key=lambda mark: mark[0])
    names = tuple(dict.fromkeys(name for _, _, name in placed))
    index = {name: i for i, name in enumerate(names)}
    return (
        np.array([event for event, _, _ in placed], np.int64),
        np.array([kind for _, kind, _ in placed], np.int8),
        np.array([index[name] for _, _, name in placed], np.int64),
        names,
    )


def _name(annotation: dict[str, Any]) -> str:
    name = annotation["name"]
    if not isinstance(name, str):
        raise TypeError("an annotation without a name")
    return name
