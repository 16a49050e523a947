"""Phases by name: forward, backward and update where operations are known, else the update that torch annotates.

Contract: ranges of events [begin, end) in their order, none inside another; nothing is inferred from the load.
"""

from itertools import groupby
from typing import NamedTuple

from stalloc.columns import Rows
from stalloc.lifespans.roles import within
from stalloc.lifespans.steady_step import outermost
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Trace
from stalloc.trace.operations import Operations, RangeKind, read_operations

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
