"""The forward and the backward pass of the last recorded step, operation by operation, with estimated times."""

from dataclasses import dataclass

from stalloc.columns import Rows
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.step_seconds import operation_seconds
from stalloc.lifespans import recorded_step
from stalloc.lifespans.roles import within
from stalloc.trace import Trace
from stalloc.trace.operations import Operations, RangeKind


@dataclass(frozen=True)
class RecordedPasses:
    """What models read of a recording."""

    trace: Trace
    operations: Operations
    rows: Rows  #: (k,) the operations of both passes, in order
    in_backward: Rows  #: (operations,) whether each is one of the backward pass
    seconds: list[float]  #: of each of `rows`
    end_event: int  #: of the step


def recorded_passes(trace: Trace, rates: GpuRates) -> RecordedPasses:
    """Both passes. Raises BadInputError for a trace without a whole step with operations."""
    operations, step = recorded_step(trace)
    in_update, in_backward = (within(operations, kind) for kind in (RangeKind.OPTIMIZER, RangeKind.BACKWARD))
    rows = step.operations[~in_update[step.operations]]
    seconds = [operation_seconds(operations, row, rates)[1] for row in rows.tolist()]
    return RecordedPasses(trace, operations, rows, in_backward, seconds, step.end_event)
