"""`stalloc dryrun` of one program: what it needs and takes under each allocator, and whether it fits a card.

One run is made after another: two runs of a program at a time may want the same port, or too much of the host's memory.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_report import FIGURES, Need, Offer, allocator_name, print_needs
from stalloc.cli.dryrun_runs import contenders, offer_of
from stalloc.cli.output import wants_text, write_json
from stalloc.cli.program import program_command, run_program
from stalloc.cli.program_writes import program_files
from stalloc.cli.progress import lines_told
from stalloc.cli.sleep_report import seen_phases
from stalloc.device.known_gpus import PLENTY
from stalloc.figures import human_bytes
from stalloc.replay.least_memory import least_memory
from stalloc.sandbox import ProgramFiles
from stalloc.sizing.node import node_memory
from stalloc.sizing.side_by_side import Asked, RunSeen, run_all, warm
from stalloc.sizing.tries import Contender, Otherwise
from stalloc.trace import Trace


def find_needs(args: argparse.Namespace) -> int:
    """Try the program natively and with stalloc; 0 if it fits with stalloc."""
    command, offer = program_command(args), offer_of(args)
    files, tell = program_files(args, command), lines_told()
    tell("importing the libraries")
    warm(dataclasses.replace(offer.gpu, total_bytes=PLENTY), command)
    program = _Program(command, offer, files)
    results, uncertain, native = _results(program, tell)
    node = node_memory(offer.gpu, {None: (native.devices, native.process)}, files_bytes=files.all().written_bytes)
    result = {
        **offer.as_json(),
        **{name: _entry(need) for name, need in results.items()},
        "devices": _by_device(results),
        "sleep": results["stalloc"].sleep,
        "uncertain": uncertain,
        "files": files.all().as_json(),
        "node": node.as_json(),
    }
    if wants_text(args):
        print_needs(result, results, offer, command, node, whole_node=args.node)
    write_json(args, result)
    return EXIT_DONE if results["stalloc"].fits else EXIT_CHECK_FAILED


class _Program:
    """The program, and the allocators that it is run under."""

    def __init__(self, command: list[str], offer: Offer, files: ProgramFiles) -> None:
        self._command, self._files, self.offered = command, files, offer.program_bytes
        card = dataclasses.replace(offer.gpu, total_bytes=offer.program_bytes)
        self.contenders = {one.name: one for one in contenders(card, 0)}

    def run(self, asked: Sequence[Asked]) -> list[RunSeen]:
        """Make these runs. Raises SetupError where the program fails for another reason than memory."""
        return run_all(asked, run_program, 1, lambda *_: None, self._files)

    def asked(self, name: str, size_bytes: int, **how: Any) -> Asked:
        """A run under one allocator on a device of that many bytes; `how`: other fields of its `RunWork`."""
        work = self.contenders[name].work
        gpu = dataclasses.replace(work.gpu, total_bytes=size_bytes)
        work = dataclasses.replace(work, gpu=gpu, at_first_use=True, **how)
        return Asked(command=self._command, work=work, name=name)

    def seen(self, name: str, size_bytes: int, **how: Any) -> RunSeen:
        """What came of it."""
        (seen,) = self.run([self.asked(name, size_bytes, **how)])
        return seen


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """What was seen of one allocator."""

    plenty: RunSeen
    """The run with plenty of memory."""
    card: RunSeen
    """The run with what is offered; that with plenty if it takes no more."""
    fits: bool


def _try(program: _Program, name: str) -> _Tried:
    """Run under one allocator with plenty of memory and, if that takes more than is offered, with what is offered."""
    plenty = program.seen(name, PLENTY, keep_history=name == "native")
    if plenty.completes and all(one["reserved_peak_bytes"] <= program.offered for one in plenty.devices):
        return _Tried(plenty=plenty, card=plenty, fits=True)
    card = program.seen(name, program.offered)
    return _Tried(plenty=plenty, card=card, fits=card.completes)


def _results(program: _Program, tell: Callable[[str], None]) -> tuple[dict[str, Need], dict[str, Any], RunSeen]:
    """The needs by allocator, what the native run could not know, and that run."""
    tried: dict[str, _Tried] = {}
    results: dict[str, Need] = {}
    for number, (name, one) in enumerate(program.contenders.items(), start=1):
        if name == "expandable" and not tried["native"].plenty.uses_torch:
            continue
        tell(f"running the program under {allocator_name(name)}, {number} of {len(program.contenders)}")
        tried[name] = _try(program, name)
        traces = tried["native"].plenty.traces
        if traces:
            tell(f"replaying what it needs under {allocator_name(name)}")
        results[name] = _need(tried[name], _replayed(traces, one), program.offered)
    otherwise = Otherwise(program.run)
    uncertain = _uncertain(program, otherwise, tried["native"].plenty, results["native"])
    ours = results["stalloc"]
    if ours.needed_by == "replay" and len(ours.devices) == 1:
        tell(f"running the program under stalloc with {human_bytes(ours.needed_bytes)}")
        results["stalloc"] = _confirmed(program, ours)
    if (shared := uncertain["shared_blocks"]) and shared["taken_bytes"] > program.offered:
        tell("running the program with work done later")
        uncertain["order_decides"] = [
            told
            for name, one in tried.items()
            if one.fits and (told := otherwise.decides(name, program.asked(name, program.offered), one.card))
        ]
    return results, uncertain, tried["native"].plenty


def _replayed(traces: Sequence[Trace], one: Contender) -> dict[int, int]:
    """The least memory of each device, by replay; empty without a history, or a model with these settings."""
    if one.candidate is None:
        return {}
    return {trace.device: least_memory(trace, one.candidate) for trace in traces}


def _need(tried: _Tried, replayed: dict[int, int], offered: int) -> Need:
    """What one allocator was seen to do, the runs before the replay."""
    devices, sleep = {}, seen_phases(tried.plenty, tried.card)
    phases = sleep["phases"] if sleep is not None and len(tried.plenty.devices) == 1 else []
    awake = max((one["allocated_peak_bytes"] for one in phases), default=0)
    for device in tried.plenty.devices:
        taken = device["reserved_peak_bytes"]
        # a replay knows of no sleep
        least = awake or max(replayed.get(device["device"], taken), device["allocated_peak_bytes"])
        least = min(least, offered, taken) if tried.fits else min(least, taken)
        devices[device["device"]] = {
            "needed_bytes": least,
            "taken_bytes": taken,
            "allocated_peak_bytes": device["allocated_peak_bytes"],
        }
    largest = {key: max((entry[key] for entry in devices.values()), default=0) for key in FIGURES}
    by, uses_torch = "replay" if replayed else "reserved", tried.plenty.uses_torch
    return Need(fits=tried.fits, needed_by=by, uses_torch=uses_torch, devices=devices, sleep=sleep, **largest)


def _confirmed(program: _Program, need: Need) -> Need:
    """What stalloc needs, found by running: the replay is exact for PyTorch's allocator, and may be a page off here."""
    least, page = need.needed_bytes, 2 << 20
    for size in (least, least + page, least + max(2 * page, least // 100)):
        if size >= need.taken_bytes:
            break
        if program.seen("stalloc", size).completes:
            return _with_need(need, size)
    return _with_need(need, min(need.taken_bytes, program.offered) if need.fits else need.taken_bytes)


def _with_need(need: Need, size_bytes: int) -> Need:
    devices = {index: {**figures, "needed_bytes": size_bytes} for index, figures in need.devices.items()}
    return dataclasses.replace(need, needed_bytes=size_bytes, needed_by="run", devices=devices)


def _uncertain(program: _Program, otherwise: Otherwise, plenty: RunSeen, need: Need) -> dict[str, Any]:
    """What the native run could not know, with its figures for the least and the most that cuDNN may ask for."""
    uncertain = {"shared_blocks": None, **otherwise.findings_of(program.asked("native", PLENTY), plenty)}
    convolutions = uncertain["convolutions"]
    if convolutions["unknown_bytes"]:
        seen = [need]
        for which in ("least", "most"):
            one = program.seen("native", PLENTY, keep_history=True, workspaces=which)
            tried = _Tried(plenty=one, card=one, fits=True)
            seen.append(_need(tried, _replayed(one.traces, program.contenders["native"]), PLENTY))
        allocated = [one.allocated_peak_bytes for one in seen]
        convolutions["allocated_peak_bytes"] = [min(allocated), max(allocated)]
        # tries, and no range: in how many pieces memory is reserved may differ more with what lies between them
        convolutions["taken_bytes_tried"] = sorted({one.taken_bytes for one in seen})
        # the most is not needed: where memory is short PyTorch turns to other engines of cuDNN
        convolutions["needed_bytes_tried"] = sorted({one.needed_bytes for one in seen[:2]})
    return uncertain


def _entry(need: Need) -> dict[str, Any]:
    return {
        key: value for key, value in dataclasses.asdict(need).items() if key not in ("devices", "uses_torch", "sleep")
    }


def _by_device(results: dict[str, Need]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, need in results.items():
        for index, device in need.devices.items():
            found.setdefault(index, {"device": index})[name] = device
    return [found[index] for index in sorted(found)]
