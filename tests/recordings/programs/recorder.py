"""Saving what a program allocated, so that a second run writes nearly the same bytes.

Clocks are counted, folders are cut off, and only Python's frames are kept. Beside each snapshot stands what torch
itself counted while it was recorded: requests, and the peaks of requested and of reserved bytes.
"""

import gzip
import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
_PROGRAMS = str(Path(__file__).parent)
_LIBRARIES = str(Path(torch.__file__).parents[1])
_FIRST_MICROSECOND = 1_700_000_000_000_000
_FIRST_ADDRESS = 0x7F00_0000_0000


class Recorder:
    """Writes recordings of one process to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: list[int] = []

    def begin(self) -> None:
        """From here on requests are recorded."""
        torch.cuda.init()
        self._before = []
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
            counts = torch.cuda.memory_stats(device)
            self._before.append(counts.get("allocation.all.allocated", 0) - counts.get("allocation.all.current", 0))
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)

    def save(self, name: str) -> dict[str, Any]:
        """Write a snapshot and what torch counted; returns the snapshot as it was written."""
        snapshot = torch.cuda.memory._snapshot()
        counted = {}
        for device, before in enumerate(self._before):
            counts = torch.cuda.memory_stats(device)
            if counts.get("allocation.all.allocated"):
                counted[device] = {
                    "requests": counts["allocation.all.allocated"] - before,
                    "requested_peak_bytes": counts["requested_bytes.all.peak"],
                    "reserved_peak_bytes": counts["reserved_bytes.all.peak"],
                }
        plain = _plain(snapshot)
        self.write(f"{name}.pickle.gz", pickle.dumps(plain, protocol=4))
        if counted:
            self.write(f"{name}.counted.json", json.dumps(counted).encode())
        return plain

    def save_error(self, name: str, error: BaseException) -> None:
        """Write what Python says of an error on standard error, without the functions of the virtual GPU."""
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list(f for f in told.stack if "/stalloc/device/" not in f.filename)
        self.write(f"{name}.log", without_folders("".join(told.format())).encode())

    def write(self, name: str, data: bytes) -> None:
        """Write a file, compressed where its name says so."""
        packed = gzip.compress(data, 9, mtime=0) if name.endswith(".gz") else data
        (self._folder / name).write_bytes(packed)


def without_folders(text: str) -> str:
    """A text that names files of a program or of torch without the folders of this machine."""
    return text.replace(_PROGRAMS + "/", "").replace(_LIBRARIES + "/", "")


def _plain(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot without what differs from run to run: clocks and streams are numbered, addresses begin alike."""
    events = [event for device in snapshot["device_traces"] for event in device]
    rows = [*events, *snapshot.get("external_annotations", [])]
    for moment, row in enumerate(sorted(rows, key=lambda row: row["time_us"])):
        row["time_us"] = _FIRST_MICROSECOND + 10 * moment
    streams: dict[int, int] = {0: 0}
    places = [event["addr"] for event in events if event["action"] not in ("oom", "snapshot")]
    shift = _FIRST_ADDRESS - min(*places, *(segment["address"] for segment in snapshot["segments"]))
    stacks: dict[tuple[tuple[str, int, str], ...], list[dict[str, Any]]] = {}
    for row in [*events, *snapshot["segments"], *[b for segment in snapshot["segments"] for b in segment["blocks"]]]:
        if "stream" in row:
            row["stream"] = streams.setdefault(row["stream"], len(streams))
        for name in {"addr", "address"} & row.keys() if row.get("action") not in ("oom", "snapshot") else ():
            row[name] += shift
        frames = [(without_folders(one["filename"]), one["line"], one["name"]) for one in row.get("frames", [])]
        kept = tuple(frame for frame in frames if not frame[0].startswith(("/", "<")))
        row["frames"] = stacks.setdefault(kept, [{"filename": f, "line": n, "name": name} for f, n, name in kept])
    return snapshot


def renumbered(trace: dict[str, Any]) -> dict[str, Any]:
    """A profiler's trace without what differs from run to run, and without the calls of Python and their folders."""
    events = [event for event in trace["traceEvents"] if event.get("cat") not in ("python_function", "fwdbwd")]
    timed = [event for event in events if event.get("ph") != "M"]
    ends = {moment for event in timed for moment in (event["ts"], event["ts"] + event.get("dur", 0))}
    clock = {moment: 10 * number for number, moment in enumerate(sorted(ends))}
    numbers: dict[object, int] = {}
    addresses = [event["args"]["Addr"] for event in timed if "Addr" in event.get("args", {})]
    shift = _FIRST_ADDRESS - min(addresses)
    for event in events:
        for name in ("pid", "tid"):
            if name in event:
                event[name] = numbers.setdefault(event[name], len(numbers))
        if event.get("ph") != "M":
            event["dur"] = clock[event["ts"] + event.get("dur", 0)] - clock[event["ts"]]
            event["ts"] = clock[event["ts"]]
        if "Addr" in event.get("args", {}):
            event["args"]["Addr"] += shift
    kept = {name: trace[name] for name in ("schemaVersion", "deviceProperties", "displayTimeUnit") if name in trace}
    return kept | {"traceEvents": events}
