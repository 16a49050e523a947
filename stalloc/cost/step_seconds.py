"""What a step of a recorded program takes on a GPU: its operations on queues, each measured or estimated.

Contract: an operation counts with the time that was measured for its shape where there is one, else with the estimate
of its class; how much of the step was measured is said, and the error is that of the rest.

A table of activity with estimated times has operations in their recorded order, on the queues of `estimate_step`, of
the last whole step, with which its clock begins; memory is that of the record, at the moment at which each operation
begins. What runs in a range `update/3` of the update, as stalloc's own techniques name their subgroups, is that part of
it. Beside it stands the same work with each operation as soon as what it needs is there.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Rows
from stalloc.cost.class_seconds import TOTAL_ERROR, estimate_call
from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates, rates_of
from stalloc.cost.operation_classes import class_of_call, shapes_of
from stalloc.cost.queues import Queue, Schedule, Task, schedule, schedule_as_ready
from stalloc.device.known_gpus import VirtualGPU
from stalloc.errors import BadInputError
from stalloc.lifespans import find_steady_step, operation_graph
from stalloc.lifespans.operation_order import random_draws
from stalloc.lifespans.steady_step import phases_of
from stalloc.trace import DeviceRecord, Trace
from stalloc.trace.activity import Held, Link, MemoryKind, Work, activity_of
from stalloc.trace.operations import ACCESS_READ, ACCESS_WRITTEN, Operations, RangeKind, read_operations

_COPIES = ("aten::_to_copy", "aten::copy_")
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class StepEstimate:
    """A steady step on a GPU."""

    seconds: float
    error: float  #: relative
    measured: float  #: share of the time that was measured on a GPU
    by_class: dict[str, float]  #: seconds, most first
    schedule: Schedule
    operations: Rows
    """(k,) the row of each task of the schedule."""
    by_data: tuple[Task, ...]
    """(k,) the same tasks without the order in which they were asked for: only after what they need of one another."""


def estimate_step(trace: Trace, rates: GpuRates) -> StepEstimate | None:
    """The last recorded step of a program; None where the trace does not know operations, or no whole step."""
    operations = read_operations(trace)
    step = None if operations is None else find_steady_step(trace, operations)
    if operations is None or step is None:
        return None
    graph = operation_graph(trace, operations, step.operations)
    queue_of = copy_queues(operations, step.operations)
    draws = random_draws(operations, step.operations)
    drawn_before = dict(zip(draws[1:], draws, strict=False))
    place = {row: number for number, row in enumerate(step.operations.tolist())}
    tasks: list[Task] = []
    by_data: list[Task] = []
    by_class: dict[str, float] = {}
    measured, computed = 0.0, -1  # the last task of the device's own
    for row in step.operations.tolist():
        after = tuple(sorted(place[one] for one in graph.predecessors(row)))
        queue = queue_of.get(row, Queue.COMPUTE)
        kind, seconds, was_measured = operation_seconds(operations, row, rates, queue)
        needs = {*graph.predecessors(row), drawn_before.get(row, row)} - {row}
        by_data.append(Task(operations.name_of(row), queue, seconds, tuple(sorted(place[one] for one in needs))))
        if queue != Queue.COMPUTE and computed >= 0:
            after += (computed,)  # a copy waits for what was asked for before it, on whichever stream it is
        elif queue == Queue.COMPUTE:
            computed = len(tasks)
        tasks.append(Task(operations.name_of(row), queue, seconds, after))
        by_class[kind] = by_class.get(kind, 0.0) + seconds
        measured += seconds * was_measured
    total = sum(by_class.values())
    share = measured / total if total else 0.0
    made = schedule(tasks)
    most = dict(sorted(by_class.items(), key=lambda item: -item[1]))
    return StepEstimate(made.seconds, TOTAL_ERROR * (1 - share), share, most, made, step.operations, tuple(by_data))


def copy_queues(operations: Operations, rows: Rows) -> dict[int, Queue]:
    """Which link each of some operations works on that copy between device and host.

    One that reads nothing on the device copies from the host; one that only reads there, and makes nothing, to it.
    """
    of_kind: dict[int, set[int]] = {ACCESS_READ: set(), ACCESS_WRITTEN: set(operations.made_by.tolist())}
    for row, kind in zip(operations.access_op.tolist(), operations.access_kind.tolist(), strict=True):
        of_kind[kind].add(row)
    found = {}
    for row in rows.tolist():
        if operations.name_of(row) in _COPIES:
            if row not in of_kind[ACCESS_READ]:
                found[row] = Queue.TO_DEVICE
            elif row not in of_kind[ACCESS_WRITTEN]:
                found[row] = Queue.TO_HOST
    return found


def operation_seconds(
    operations: Operations, row: int, rates: GpuRates, queue: Queue = Queue.COMPUTE
) -> tuple[str, float, bool]:
    """The class of an operation, its seconds, and whether they were measured."""
    shape = int(operations.shape[row])
    if shape < 0:
        return "unknown", 0.0, False
    written = int(operations.shape_written_bytes[shape])
    if queue != Queue.COMPUTE:
        kind = "copy from the host" if queue == Queue.TO_DEVICE else "copy to the host"
        return kind, LINK_START + written / (LINK_SHARE * rates.link_bytes_per_second), False
    call = operations.shapes[shape]
    if operations.shape_ns[shape]:
        return class_of_call(call), 1e-9 * int(operations.shape_ns[shape]), True
    moved = int(operations.shape_read_bytes[shape]) + written
    half = first_number(call[2]) in _HALF
    flops = int(operations.shape_flops[shape])
    kind, estimated = estimate_call(call[0], list(shapes_of(call[2])), flops, moved, rates, half=half)
    return kind, estimated.seconds, False


def first_number(arguments: object) -> str:
    """What the first tensor of a call holds; empty without tensors."""
    for given in arguments if isinstance(arguments, list) else ():
        if isinstance(given, dict):
            return str(given["tensor"][0]) if "tensor" in given else first_number(given.get("list"))
    return ""


_ALIGNMENT = 512
_LINKS = {Queue.COMPUTE: Link.COMPUTE, Queue.TO_DEVICE: Link.TO_DEVICE, Queue.TO_HOST: Link.TO_HOST}


def as_it_would_run(record: DeviceRecord) -> DeviceRecord:
    """A recording of the virtual GPU with the times of the GPU that it stands for, where its operations are known.

    The times of the virtual GPU itself are nobody's. Other records are handed back as they are.
    """
    name, total_bytes = record.info.get("device_name"), record.info.get("total_bytes")
    if record.info.get("virtual") is not True or not isinstance(name, str) or not isinstance(total_bytes, int):
        return record
    try:
        return with_estimated_times(record, VirtualGPU(name=name, total_bytes=total_bytes))
    except BadInputError:  # no whole step, or no operations
        return record


def with_estimated_times(record: DeviceRecord, gpu: VirtualGPU) -> DeviceRecord:
    """The record with the activity of its last step on a GPU, instead of any of its own.

    Raises BadInputError if it has no whole step with operations.
    """
    trace = record.trace
    operations = None if trace is None else read_operations(trace)
    estimated = None if trace is None else estimate_step(trace, rates_of(gpu.name))
    if trace is None or operations is None or estimated is None:
        raise BadInputError(
            f"device {record.device} has no whole step with operations, so that its times on {gpu.name} are not known: "
            "record it with stalloc record --ops."
        )
    phases = [
        _part(operations, row, phase)
        for row, phase in zip(estimated.operations.tolist(), phases_of(operations, estimated.operations), strict=True)
    ]
    allocated = trace.live_bytes(trace.aligned_size(_ALIGNMENT))  # before each event, and at the end
    reserved = np.append(trace.reserved_start_bytes, trace.reserved_bytes())
    work, ready, held, host_bytes = [], [], [], record.info.get("host_bytes")
    if isinstance(host_bytes, int):
        held.append(Held(0, MemoryKind.HOST, host_bytes))
    made, soonest = estimated.schedule, schedule_as_ready(estimated.by_data)
    queues = [task.queue for task in estimated.by_data]
    tasks = zip(estimated.operations.tolist(), phases, made.begin, made.end, queues, strict=True)
    for place, (row, phase, begin, end, queue) in enumerate(tasks):
        start_ns, link = round(begin * 1e9), _LINKS[queue]
        size = int(operations.shape_written_bytes[operations.shape[row]]) if link.moves else 0
        work.append(Work(start_ns, round(end * 1e9), link, size, phase))
        ready.append(Work(round(soonest.begin[place] * 1e9), round(soonest.end[place] * 1e9), link, size, phase))
        first, last = int(operations.begin[row]), int(operations.end[row])  # the events of the operation
        held.append(Held(start_ns, MemoryKind.ALLOCATED, int(allocated[first : last + 1].max())))
        if reserved[first : last + 1].max():
            held.append(Held(start_ns, MemoryKind.RESERVED, int(reserved[first : last + 1].max())))
    return DeviceRecord(
        record.device,
        trace.replace(time_us=np.zeros_like(trace.time_us)),  # another clock
        activity_of(work, held=held),
        record.info | {"device_name": gpu.name, "total_bytes": gpu.total_bytes, "estimated": True},
        activity_of(ready),
    )


def _part(operations: Operations, row: int, phase: str) -> str:
    """The part of the phase that the innermost range around an operation is named after; else the phase."""
    while row >= 0:
        name = operations.name_of(row)
        if operations.kind[row] == RangeKind.USER and name.startswith(f"{phase}/"):
            return name
        row = int(operations.parent[row])
    return phase
