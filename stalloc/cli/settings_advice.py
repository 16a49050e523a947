"""`stalloc simulate --advise`: the settings of PyTorch's allocator, ranked, and the line to export.

The best settings run on all devices of the file and reserve least on the fullest; the file's own settings stay if none
is better by a per cent.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stalloc.allocator_conf import has_expandable_segments, variable_to_set
from stalloc.analysis.moments import device_free, last_oom
from stalloc.analysis.moments import recorded as recorded_peaks
from stalloc.cli.output import (
    command_text,
    file_label,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose, print_table
from stalloc.device.known_gpus import memory_option
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.replay.model_events import recorded_conf
from stalloc.replay.simulation import SWEEP, SWEEP_UNDER_PRESSURE, Candidate, simulate
from stalloc.trace import Action, Trace, load_traces

_WORTH_IT = 0.99  # of what the recorded settings reserve


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One text of settings, on all devices of a file."""

    settings: str
    fits: bool
    reserved_peak_bytes: int
    """The reserved peak on the device that reserves most."""
    device_calls: int
    """How often memory was asked of the driver and given back, on all devices."""


def advise(args: argparse.Namespace) -> int:
    """Rank settings; 0 also when nothing fits, which is a finding."""
    (file,) = args.files
    given = memory_option("--capacity", args.capacity) if args.capacity else None
    with working(f"reading {file_label(file)}"):
        traces = load_traces(file)
    recorded, release = recorded_conf(traces[0]), args.torch or str(traces[0].info.get("torch", ""))
    variable = variable_to_set(release)
    peaks = [peak for peak in (recorded_peaks(trace).reserved_peak_bytes for trace in traces) if peak is not None]
    recorded_bytes = max(peaks, default=None)
    too_short = next(filter(_is_too_short, traces), None)
    result: dict[str, Any] = {"file": file, "variable": variable, "recorded_settings": recorded}
    result |= {"recorded_reserved_peak_bytes": recorded_bytes, "too_short": too_short is not None}
    if too_short is not None:
        write_json(args, result | {"best_settings": None, "export": None, "ranking": []})
        if wants_text(args):
            _print_too_short(file, too_short, recorded)
        return 0
    with working("replaying settings"):
        ranking = _rank(traces, given, release)
    best, usual = ranking[0], next(one for one in ranking if one.settings == recorded)
    usual_bytes = usual.reserved_peak_bytes
    if recorded_bytes is not None:  # a program that returns its cache itself reserves less than a replay
        usual_bytes = min(usual_bytes, recorded_bytes)
    is_better = best.fits and (not usual.fits or best.reserved_peak_bytes < _WORTH_IT * usual_bytes)
    line = f"export {variable}={command_text(best.settings)}" if is_better and best.settings else None
    if is_better and not best.settings:
        line = f"unset {variable}"
    ranked = [asdict(one) for one in ranking]
    write_json(args, result | {"best_settings": best.settings, "export": line, "ranking": ranked})
    if wants_text(args):
        _print(args, ranking, usual, line, recorded_bytes, any(map(_returns_cache, traces)))
    return 0


def _is_too_short(trace: Trace) -> bool:
    """Whether most of the memory at the peak was allocated before the history, so that its placement is not known."""
    if trace.info.get("complete") is True:
        return False
    allocated = int(trace.size[trace.start >= 0].sum())
    return allocated < int(trace.live_bytes(trace.size).max(initial=0))


def _print_too_short(file: str, trace: Trace, recorded: str) -> None:
    console = table_console()
    allocated, held = int(trace.size[trace.start >= 0].sum()), int(trace.live_bytes(trace.size).max(initial=0))
    reserved = recorded_peaks(trace).reserved_peak_bytes
    conf = printable(recorded) or "the defaults"
    said = f" The recorded settings ({conf}) reserved {human_bytes(reserved)}." if reserved else ""
    print_prose(
        console,
        f"The history of {file_label(file)} is too short to rank settings: it allocates {human_bytes(allocated)}, "
        f"and {human_bytes(held)} is held at its peak, most of it from before.{said} Record whole steps, best from the "
        "start of the program.",
    )
    console.print(f"Next: stalloc explain {command_text(file)}")


def _rank(traces: list[Trace], capacity: int | None, release: str) -> list[Ranked]:
    """Every text of settings that the release knows, best first."""
    by_settings: dict[str, list[Any]] = {}
    for trace in traces:
        limit = _device_bytes(trace) if capacity is None else capacity
        texts = dict.fromkeys([recorded_conf(traces[0]), *SWEEP, *(SWEEP_UNDER_PRESSURE if limit else ())])
        if not has_expandable_segments(release):
            kept = recorded_conf(traces[0])  # what was recorded is compared with
            texts = {text: None for text in texts if "expandable_segments" not in text or text == kept}
        for result in simulate(trace, [Candidate("torch", text) for text in texts], limit):
            by_settings.setdefault(result.settings, []).append(result)
    ranking = [
        Ranked(
            settings=text,
            fits=all(one.fits for one in found),
            reserved_peak_bytes=max(one.peak_reserved_bytes for one in found),
            device_calls=sum(one.device_allocs + one.device_frees for one in found),
        )
        for text, found in by_settings.items()
        if len(found) == len(traces)
    ]
    return sorted(ranking, key=lambda one: (not one.fits, one.reserved_peak_bytes, one.device_calls, one.settings))


def _device_bytes(trace: Trace) -> int:
    """What the process could have had when it ran out of memory; 0: it did not, or the file does not say."""
    error = last_oom(trace)
    free = device_free(trace, error) if error is not None else None
    return 0 if error is None or free is None else free + int(trace.reserved_bytes()[error])


def _returns_cache(trace: Trace) -> bool:
    return bool(np.isin(trace.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)).any())


def _print(
    args: argparse.Namespace,
    ranking: list[Ranked],
    usual: Ranked,
    line: str | None,
    reserved: int | None,
    returns_cache: bool,
) -> None:
    console = table_console()
    if reserved is not None and reserved != usual.reserved_peak_bytes:
        returned = reserved < usual.reserved_peak_bytes and returns_cache
        without = ", but without what the program returned by itself (empty_cache)" if returned else ""
        print_prose(
            console,
            f"The file records a reserved peak of {human_bytes(reserved)}; below its requests are replayed from an "
            f"empty device, with the recorded settings too{without}.",
        )
    again = "recorded settings" if reserved is not None and reserved != usual.reserved_peak_bytes else "recorded"
    shown = list(dict.fromkeys([*ranking[: args.top], usual]))
    rows = []
    for one in shown:
        name = printable(one.settings) or "the defaults"
        change = one.reserved_peak_bytes - usual.reserved_peak_bytes
        rows.append(
            [
                name + (f" ({again})" if one is usual else ""),
                human_bytes(one.reserved_peak_bytes),
                f"{change / max(usual.reserved_peak_bytes, 1):+.1%}" if one.fits and usual.fits else "",
                f"{one.device_calls:,}",
                "fits" if one.fits else "runs out",
            ]
        )
    print_table(console, ("settings", "reserved", "change", "device calls", "result"), rows)
    if line is None:
        kept = (
            "nothing that was tried is better than what was recorded" if usual.fits else "nothing that was tried fits"
        )
        print_prose(console, f"{kept}; `stalloc run SCRIPT` plans where blocks live.")
    else:
        console.print(line)
    console.print(f"Next: stalloc explain {command_text(args.files[0])}")
