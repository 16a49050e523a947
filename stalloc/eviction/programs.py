"""Reading what can be replayed: a log of the DTR simulator, or the last whole step of a recording with operations.

Contract of a step: what lived before it is constant: nothing in it could make it again. A request is a storage; an
operation that writes into one that it did not make changes it in place, which is run again after what made it. Calls
take what was measured, else the estimate of their class. Requests that an operation frees again itself are its work
space. What lives beyond the step has to be there at its end.
"""

import itertools
import os
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.queues import Queue
from stalloc.cost.step_seconds import copy_queues, operation_seconds
from stalloc.errors import BadInputError
from stalloc.eviction.instructions import Instructions, InstructionWriter
from stalloc.eviction.simulator_log import read_simulator_log
from stalloc.inputs import open_input, shown_name
from stalloc.lifespans.steady_step import SteadyStep, recorded_step
from stalloc.trace import Trace, load_traces
from stalloc.trace.operations import ACCESS_WRITTEN, Operations
from stalloc.trace.sources.dtr_log import looks_like_dtr_log
from stalloc.trace.sources.log_text import unpacked


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
