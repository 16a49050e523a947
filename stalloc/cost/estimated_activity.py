"""A recorded step as it would run on a GPU that is not there: a table of activity with estimated times.

Contract: operations run in their recorded order, on the queues of `estimate_step`; memory is that of the record, at the
moment at which each operation begins. The table is of the last whole step, and its clock begins with it.
"""

import numpy as np

from stalloc.columns import Rows
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.queues import Queue
from stalloc.cost.step_seconds import estimate_step
from stalloc.device.known_gpus import VirtualGPU
from stalloc.errors import BadInputError
from stalloc.lifespans.roles import within
from stalloc.trace import DeviceRecord
from stalloc.trace.activity import Held, Link, MemoryKind, Work, activity_of
from stalloc.trace.operations import Operations, RangeKind, read_operations

_ALIGNMENT = 512
_LINKS = {Queue.COMPUTE: Link.COMPUTE, Queue.TO_DEVICE: Link.TO_DEVICE, Queue.TO_HOST: Link.TO_HOST}


def with_estimated_times(record: DeviceRecord, gpu: VirtualGPU, rates: GpuRates) -> DeviceRecord:
    """The record with the activity of its last step on a GPU, instead of any of its own.

    Raises BadInputError if it has no whole step with operations.
    """
    trace = record.trace
    operations = None if trace is None else read_operations(trace)
    estimated = None if trace is None else estimate_step(trace, rates)
    if trace is None or operations is None or estimated is None:
        raise BadInputError(
            f"device {record.device} has no whole step with operations, so that its times on {gpu.name} are not known: "
            "record it with stalloc record --ops."
        )
    phases = _phases(operations, estimated.operations)
    allocated = trace.live_bytes(trace.aligned_size(_ALIGNMENT))  # before each event, and at the end
    reserved = np.append(trace.reserved_start_bytes, trace.reserved_bytes())
    work, held = [], []
    made = estimated.schedule
    tasks = zip(estimated.operations.tolist(), phases, made.begin, made.end, estimated.queues, strict=True)
    for row, phase, begin, end, queue in tasks:
        start_ns, link = round(begin * 1e9), _LINKS[queue]
        size = int(operations.shape_written_bytes[operations.shape[row]]) if link.moves else 0
        work.append(Work(start_ns, round(end * 1e9), link, size, phase))
        first, last = int(operations.begin[row]), int(operations.end[row])  # the events of the operation
        held.append(Held(start_ns, MemoryKind.ALLOCATED, int(allocated[first : last + 1].max())))
        if reserved[first : last + 1].max():
            held.append(Held(start_ns, MemoryKind.RESERVED, int(reserved[first : last + 1].max())))
    return DeviceRecord(
        record.device,
        trace.replace(time_us=np.zeros_like(trace.time_us)),  # another clock
        activity_of(work, held=held),
        record.info | {"device_name": gpu.name, "total_bytes": gpu.total_bytes, "estimated": True},
    )


def _phases(operations: Operations, rows: Rows) -> list[str]:
    """The phase of each operation of a step: what comes before a backward pass is forward, what else is other."""
    backward, update = (within(operations, kind) for kind in (RangeKind.BACKWARD, RangeKind.OPTIMIZER))
    found, before = [], "other"
    for row in rows[::-1].tolist():
        if backward[row] or update[row]:
            before = "other" if update[row] else "forward"
            found.append("update" if update[row] else "backward")
        else:
            found.append(before)
    return found[::-1]
