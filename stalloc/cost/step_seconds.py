"""What a step of a recorded program takes on a GPU: its operations on queues, each measured or estimated.

Contract: an operation counts with the time that was measured for its shape where there is one, else with the estimate
of its class; how much of the step was measured is said, and the error is that of the rest.
"""

from dataclasses import dataclass

from stalloc.columns import Rows
from stalloc.cost.class_seconds import TOTAL_ERROR, estimate_call
from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates
from stalloc.cost.operation_classes import class_of_call, shapes_of
from stalloc.cost.queues import Queue, Schedule, Task, schedule
from stalloc.lifespans import find_steady_step, operation_graph
from stalloc.lifespans.operation_order import random_draws
from stalloc.trace import Trace
from stalloc.trace.operations import ACCESS_READ, ACCESS_WRITTEN, Operations, read_operations

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
