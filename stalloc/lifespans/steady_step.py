"""One steady step of a program as a record: its operations in order, its requests, and what goes on beyond it.

Contract: the step lies between two marks, and operations cover it; it is the last such step, so that what happens only
at the beginning is not in it.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, Rows, distinct
from stalloc.errors import BadInputError
from stalloc.lifespans.periods import TINY_BYTES, find_step_period, sequence_rows
from stalloc.lifespans.roles import within
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Trace
from stalloc.trace.operations import Operations, RangeKind, read_operations


@dataclass(frozen=True, eq=False, kw_only=True)
class SteadyStep:
    """Rows are those of the trace's tables."""

    begin_event: int
    end_event: int
    operations: Rows  #: (k,) outermost operations with kernels, in the order in which they began
    requests: Rows  #: (n,) born in the step
    beyond: Rows  #: (b,) those of them that live when the next step begins
    held: Rows  #: (h,) requests of earlier steps that live throughout
    ended: Rows  #: (e,) requests of earlier steps that end in this one
    pairs: Rows  #: (p, 2) operations of the forward pass, and the nodes of the backward pass that belong to them


def recorded_step(trace: Trace) -> tuple[Operations, SteadyStep]:
    """The operations of a trace, and the last step that they cover. Raises BadInputError where there is none."""
    operations = read_operations(trace)
    step = None if operations is None else find_steady_step(trace, operations)
    if operations is None or step is None:
        raise BadInputError(
            f"trace of device {trace.device} has no whole step with operations: record it with stalloc record --ops."
        )
    return operations, step


def find_steady_step(trace: Trace, operations: Operations) -> SteadyStep | None:
    """The last step that operations cover; None if no two marks are among them."""
    last = int(operations.end.max(initial=0))
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    marks = marks[marks <= last]
    if len(marks) < 2:
        return None
    return _between(trace, operations, int(marks[-2]), int(marks[-1]))


def last_repetition(trace: Trace, operations: Operations) -> SteadyStep | None:
    """What such a step is in a program without an optimizer, as inference: one whole repetition of its requests.

    It is the last but one, whose end is known; None if nothing repeats.
    """
    period = find_step_period(trace)
    if period is None:
        return None
    rows = sequence_rows(trace, TINY_BYTES + 1)
    last = period.first + period.length * (period.repeats - 1)
    begin, end = trace.start[rows[[last - period.length, last]]].tolist()
    found = _between(trace, operations, begin, end)
    return found if len(found.operations) else None


def _between(trace: Trace, operations: Operations, begin: int, end: int) -> SteadyStep:
    counted = outermost(operations)
    inside = (operations.begin >= begin) & (operations.end <= end)
    born = (trace.start >= begin) & (trace.start < end)
    old = (trace.start < begin) & (trace.end > begin)
    return SteadyStep(
        begin_event=begin,
        end_event=end,
        operations=np.flatnonzero(counted & inside),
        requests=np.flatnonzero(born),
        beyond=np.flatnonzero(born & (trace.end >= end)),
        held=np.flatnonzero(old & (trace.end >= end)),
        ended=np.flatnonzero(old & (trace.end < end)),
        pairs=_pairs(operations, inside),
    )


def outermost(operations: Operations) -> Column:
    """(k,) bool: operations with kernels that lie in no other."""
    is_one = operations.kind == RangeKind.OPERATION
    parent = operations.parent
    inside = np.zeros(len(operations), bool)
    for row in np.flatnonzero(parent >= 0).tolist():
        outer = parent[row]
        inside[row] = inside[outer] or is_one[outer]
    return is_one & ~inside


def _pairs(operations: Operations, inside: Column) -> Rows:
    in_backward = within(operations, RangeKind.BACKWARD)
    nodes = np.flatnonzero(inside & (operations.kind == RangeKind.BACKWARD) & (operations.sequence >= 0))
    forward = np.flatnonzero(inside & ~in_backward & (operations.sequence >= 0))
    of_sequence = dict(zip(operations.sequence[forward].tolist(), forward.tolist(), strict=True))
    found = [
        (of_sequence[sequence], node)
        for node, sequence in zip(nodes.tolist(), operations.sequence[nodes].tolist(), strict=True)
        if sequence in of_sequence
    ]
    return np.array(found, np.int64).reshape(-1, 2)


UNNAMED = "other"
_UPDATE = "Optimizer.step#"  # torch's own annotation


class NamedPhase(NamedTuple):
    """One time that a phase ran."""

    begin: int
    end: int
    name: str


def named_phases(trace: Trace) -> list[NamedPhase]:
    """The phases of a trace that have names; none if nothing in it says so."""
    operations = read_operations(trace)
    if operations is not None:
        rows = outermost(operations).nonzero()[0]
        named = zip(rows.tolist(), phases_of(operations, rows), strict=True)
        found = []
        for name, group in groupby(named, key=lambda pair: pair[1]):
            inside = [row for row, _ in group]
            found.append(NamedPhase(int(operations.begin[inside[0]]), int(operations.end[inside].max()), name))
        return [phase for phase in found if phase.name != UNNAMED]
    return _updates(trace)


def _updates(trace: Trace) -> list[NamedPhase]:
    found, begun = [], -1
    for event, kind, name in zip(trace.mark_event, trace.mark_kind, trace.mark_name, strict=True):
        if kind == MARK_STEP or not trace.names[name].startswith(_UPDATE):
            continue
        if kind == MARK_PHASE_BEGIN and begun < 0:
            begun = int(event)
        elif kind == MARK_PHASE_END and begun >= 0:
            found.append(NamedPhase(begun, int(event), "update"))
            begun = -1
    return found


def phases_of(operations: Operations, rows: Rows) -> list[str]:
    """The phase of each of some operations: what comes before a backward pass is forward, else it is UNNAMED."""
    backward, update = (within(operations, kind) for kind in (RangeKind.BACKWARD, RangeKind.OPTIMIZER))
    found, before = [], UNNAMED
    for row in rows[::-1].tolist():
        if backward[row] or update[row]:
            before = UNNAMED if update[row] else "forward"
            found.append("update" if update[row] else "backward")
        else:
            found.append(before)
    return found[::-1]
