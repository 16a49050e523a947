"""A recorded step as it would run on a GPU that is not there: a table of activity with estimated times.

Contract: operations run in their recorded order, on the queues of `estimate_step`; memory is that of the record, at the
moment at which each operation begins. The table is of the last whole step, and its clock begins with it. What runs in a
range `update/3` of the update, as stalloc's own techniques name their subgroups, is that part of it. Beside it stands
the same work with each operation as soon as what it needs is there.
"""

import numpy as np

from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.queues import Queue, schedule_as_ready
from stalloc.cost.step_seconds import estimate_step
from stalloc.device.known_gpus import VirtualGPU
from stalloc.errors import BadInputError
from stalloc.lifespans.steady_step import phases_of
from stalloc.trace import DeviceRecord
from stalloc.trace.activity import Held, Link, MemoryKind, Work, activity_of
from stalloc.trace.operations import Operations, RangeKind, read_operations

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
