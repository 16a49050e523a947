"""Reading what can be replayed: a log of the DTR simulator, or the last whole step of a recording with operations.

Contract of a log (Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, appendix on the simulator's log;
stalloc.trace.sources.dtr_log reads the same file for lifespans alone): it begins where `ANNOTATE` says `START`, and
names that were given before may be released in it. A constant stays, since something that was made from it may have to
be made again. A call that changes a tensor makes a new storage of the same size there (copy on write), or, `in_place`,
a view of the old one, as Coop has it.

Contract of a step: what lived before it is constant: nothing in it could make it again. A request is a storage; an
operation that writes into one that it did not make changes it in place, which is run again after what made it. Calls
take what was measured, else the estimate of their class. Requests that an operation frees again itself are its work
space. What lives beyond the step has to be there at its end.
"""

import itertools
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.queues import Queue
from stalloc.cost.step_seconds import copy_queues, operation_seconds
from stalloc.errors import BadInputError
from stalloc.eviction.instructions import Instructions, InstructionWriter
from stalloc.inputs import open_input, shown_name
from stalloc.lifespans.steady_step import SteadyStep, recorded_step
from stalloc.trace import Trace, load_traces
from stalloc.trace.operations import ACCESS_WRITTEN, Operations
from stalloc.trace.sources.dtr_log import WRITE_AGAIN, follow_log, looks_like_dtr_log
from stalloc.trace.sources.events import MAX_SIZE_BYTES
from stalloc.trace.sources.log_text import unpacked

_MOST_IN_ALL = 1 << 60  #: bytes of all storages, and ticks of all calls: twice as much still fits into 64 bits


def read_simulator_log(path: Path, data: bytes, *, in_place: bool = False) -> Instructions:
    """The instructions of a log. Raises BadInputError naming the line that fits none before it."""
    reader = _LogReader(in_place)
    follow_log(path, data, reader.follow)
    if reader.not_described:
        raise BadInputError(
            f"{path}: the log ends before it says how large {reader.not_described[0][:30]!r} is: {WRITE_AGAIN}."
        )
    writer = reader.done()
    if not writer.ops:
        raise BadInputError(f"{path}: the log holds no calls, so nothing can be replayed: {WRITE_AGAIN}.")
    if max(sum(writer.sizes), sum(op[0] * len(op[3]) + op[0] for op in writer.ops)) > _MOST_IN_ALL:
        raise BadInputError(f"{path}: sizes or times are larger than any program's: {WRITE_AGAIN}.")
    return writer.done()


class _LogReader:
    """Follows a log. A call is written when the sizes and views of all its results are known, which come after it."""

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._start()

    def _start(self) -> None:
        self.writer = InstructionWriter()
        self._waiting: list[str] = []  #: results of the last call that were not described yet
        self._tensor: dict[str, int] = {}
        self._named: dict[str, int] = {}  #: every name that was ever given, in that order, and its last tensor
        self._constant = ""
        self._told_bytes: dict[str, int] = {}
        self._call: tuple[int, list[int], list[str]] = (0, [], [])
        self._views: dict[str, int] = {}

    @property
    def not_described(self) -> list[str]:
        """Names of what was made last, and whose size is still to be told."""
        return self._waiting or ([self._constant] if self._constant else [])

    def follow(self, entry: dict[str, Any]) -> None:
        kind = entry["INSTRUCTION"]
        if kind in ("MEMORY", "ALIAS"):
            self._describe(kind, entry)
            return
        if self.not_described:
            raise ValueError(f"nothing says how large {self.not_described[0][:30]!r} is")
        if kind == "CONSTANT":
            self._constant = str(entry["NAME"])
        elif kind == "CALL":
            results = [str(name) for name in entry["RESULT"]]
            self._call = (_ticks(entry), [self._tensor[str(name)] for name in entry["ARGS"]], results)
            self._waiting, self._views, self._told_bytes = list(results), {}, {}
            if not results:
                self._write_call()
        elif kind == "MUTATE":
            self._change(entry)
        elif kind == "COPY":
            self._name(str(entry["DST"]), self._tensor[str(entry["SRC"])])
            self.writer.hold(self._tensor[str(entry["DST"])])
        elif kind == "COPY_FROM":
            other = self._tensor[str(entry["SRC"])]
            self.writer.hold(other)
            self._release(str(entry["DST"]))
            self._name(str(entry["DST"]), other)
        elif kind == "RELEASE":
            self._release(str(entry["NAME"]))
        elif kind == "ANNOTATE":
            if entry["ANNOTATION"] == "START" and self._named:
                self._start()
        else:
            raise ValueError(f"unknown instruction {str(kind)[:30]!r}")

    def done(self) -> InstructionWriter:
        """At the end, what the program still has a name for has to be there, by the order of names."""
        held = set(self._tensor.values())
        for tensor in dict.fromkeys(self._named.values()):
            if tensor in held:
                self.writer.keep(tensor)
        return self.writer

    def _describe(self, kind: str, entry: dict[str, Any]) -> None:
        name = str(entry["NAME"])
        if kind == "MEMORY":
            num_bytes = int(entry["MEMORY"])
            if not 0 <= num_bytes <= MAX_SIZE_BYTES:
                raise ValueError(f"a storage of {num_bytes} bytes")
            if name == self._constant:
                self._constant = ""
                self._name(name, self.writer.constant(num_bytes))
            else:
                self._told_bytes[name] = num_bytes
            return
        self._waiting.remove(name)
        argument = int(entry["ALIAS"])
        self._views[name] = -1 if argument < 0 else self._call[1][argument]
        if argument < 0 and name not in self._told_bytes:
            raise ValueError(f"nothing says how large {name[:30]!r} is")
        if not self._waiting:
            self._write_call()

    def _write_call(self) -> None:
        ticks, args, results = self._call
        made = [(0 if self._views[name] >= 0 else self._told_bytes[name], self._views[name]) for name in results]
        for name, tensor in zip(results, self.writer.call(ticks, args, made), strict=True):
            self._name(name, tensor)

    def _change(self, entry: dict[str, Any]) -> None:
        names = [str(name) for name in entry["ARGS"]]
        args = [self._tensor[name] for name in names]
        changed = list(dict.fromkeys(int(number) for number in entry["MUTATE"]))
        if not all(0 <= number < len(names) for number in changed):
            raise ValueError("it changes what is no argument of it")
        made = [(0, args[one]) if self._in_place else (self.writer.size_of(args[one]), -1) for one in changed]
        for number, tensor in zip(changed, self.writer.call(_ticks(entry), args, made), strict=True):
            self.writer.let_go(self._tensor.pop(names[number]))
            self._name(names[number], tensor)

    def _release(self, name: str) -> None:
        if name in self._tensor:  # else it is of what was before the start
            self.writer.let_go(self._tensor.pop(name))

    def _name(self, name: str, tensor: int) -> None:
        if name in self._tensor:
            raise ValueError(f"tensor {name[:30]} is there already")
        self._tensor[name] = self._named[name] = tensor


def _ticks(entry: dict[str, Any]) -> int:
    ticks = int(entry["TIME"])
    if not 0 <= ticks <= _MOST_IN_ALL:
        raise ValueError(f"a call that takes {ticks}")
    return ticks


@dataclass(frozen=True, eq=False)
class Program:
    """A program with tensors changed by copies, and in place; a recording knows only changes in place."""

    device: int
    copied: Instructions  #: a change makes a new storage
    in_place: Instructions  #: a change is made where the tensor is, as Coop has it


def read_programs(file: str | os.PathLike[str], rates: GpuRates) -> list[Program]:
    """The programs of a file, one a device. Raises BadInputError for a file without operations."""
    with open_input(file, "a recording with operations, or a log of the DTR simulator") as opened:
        data = unpacked(opened)
    if looks_like_dtr_log(data[:4096].lstrip()):
        name = shown_name(file)
        return [Program(0, read_simulator_log(name, data), read_simulator_log(name, data, in_place=True))]
    found = []
    for trace in load_traces(file):
        try:
            program = _Reader(trace, *recorded_step(trace), rates).read()
        except BadInputError as error:
            raise BadInputError(f"{shown_name(file)}: {error}") from error
        found.append(Program(trace.device, program, program))
    return found


_TICKS = 1e12  #: a second


class _Reader:
    def __init__(self, trace: Trace, operations: Operations, step: SteadyStep, rates: GpuRates) -> None:
        self._trace, self._operations, self._step, self._rates = trace, operations, step, rates
        self._writer = InstructionWriter()
        self._tensor: dict[int, int] = {}  # of each request: what was put there last
        self._made: dict[int, list[int]] = defaultdict(list)
        inside = set(step.operations.tolist())
        self._found: list[int] = []  # born in the step, but of no operation, by their start
        for request in step.requests.tolist():
            maker = int(operations.made_by[request])
            if maker in inside:
                self._made[maker].append(request)
            else:
                self._found.append(request)

    def read(self) -> Instructions:
        trace, operations, step = self._trace, self._operations, self._step
        queue_of = copy_queues(operations, step.operations)
        for request in (*step.held.tolist(), *step.ended.tolist()):
            self._tensor[request] = self._writer.constant(int(trace.size[request]))
        beyond = set(step.beyond.tolist()) | set(step.held.tolist())
        ending = [one for one in (*step.ended.tolist(), *step.requests.tolist()) if one not in beyond]
        ending.sort(key=lambda one: -int(trace.end[one]))
        found = sorted(self._found, key=lambda one: -int(trace.start[one]))
        bounds = np.searchsorted(operations.access_op, np.stack([step.operations, step.operations + 1]))
        for row, low, high in zip(step.operations.tolist(), *bounds.tolist(), strict=True):
            self._go_to(int(operations.begin[row]), found, ending)
            self._call(row, low, high, queue_of.get(row, Queue.COMPUTE))
        self._go_to(step.end_event, found, ending)
        for tensor in self._tensor.values():
            self._writer.keep(tensor)
        return self._writer.done(_TICKS, constants_stay=False)

    def _go_to(self, event: int, found: list[int], ending: list[int]) -> None:
        """What begins and ends before an event, outside of operations; what is listed has the earliest last."""
        trace = self._trace
        while found and trace.start[found[-1]] < event:
            request = found.pop()
            self._tensor[request] = self._writer.constant(int(trace.size[request]))
        while ending and trace.end[ending[-1]] <= event:
            tensor = self._tensor.pop(ending.pop(), None)
            if tensor is not None:
                self._writer.let_go(tensor)

    def _call(self, row: int, low: int, high: int, queue: Queue) -> None:
        operations, trace = self._operations, self._trace
        used: dict[int, bool] = {}  # of each request: whether it is written
        requests, kinds = operations.access_request[low:high].tolist(), operations.access_kind[low:high].tolist()
        for request, kind in zip(requests, kinds, strict=True):
            used[request] = used.get(request, False) or kind == ACCESS_WRITTEN
        end = int(operations.end[row])
        made = [one for one in self._made.get(row, ()) if trace.end[one] > end]
        spaces = [one for one in self._made.get(row, ()) if trace.end[one] <= end]
        args = [self._tensor[one] for one in used if one in self._tensor]
        changed = [one for one, is_written in used.items() if is_written and one in self._tensor]
        told = [(int(trace.size[one]), -1) for one in made] + [(0, self._tensor[one]) for one in changed]
        _, seconds, _ = operation_seconds(operations, row, self._rates, queue)
        outs = self._writer.call(round(_TICKS * seconds), args, told, _most_at_once(trace, spaces))
        for request, tensor in zip(made + changed, outs, strict=True):
            if request in self._tensor:
                self._writer.let_go(self._tensor[request])
            self._tensor[request] = tensor


def _most_at_once(trace: Trace, requests: list[int]) -> int:
    events = [(int(trace.start[one]), int(trace.size[one])) for one in requests]
    events += [(int(trace.end[one]), -int(trace.size[one])) for one in requests]
    return max(itertools.accumulate((num_bytes for _, num_bytes in sorted(events)), initial=0))
