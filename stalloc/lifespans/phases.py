"""Phases: parts of a step between which memory changes direction, or which the program named itself.

A phase is a range of events. Marks of our own recorder decide where there are any. Otherwise the load curve does, of
requests that last longer than a hundredth of a step: a phase goes on until this load has turned back by a quarter of
its range, so a training step reads as a rise (forward) and a fall (backward and optimizer). That is all that is
inferred; which of them is called what is not guessed. The annotations in a snapshot are not taken for phases: they
name single functions, many of them inside one phase.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.lifespans.load_curves import load_curve
from stalloc.trace import MARK_PHASE_BEGIN, MARK_STEP, Trace

_TURN = 0.25
_BRIEF = 0.01


@dataclass(frozen=True, eq=False, kw_only=True)
class Phases:
    """Consecutive ranges of events."""

    begin: Column
    """(k,) event at which each phase begins; the first is 0."""
    name: tuple[str, ...]
    """(k,) what the program called it, else `rise` or `fall`; empty between phases that it named."""

    def of(self, events: Column) -> Column:
        """The phase of each event; -1 for events before the first."""
        return np.searchsorted(self.begin, events, side="right") - 1


def find_phases(trace: Trace, step_events: int | None = None) -> Phases:
    """The phases of a trace, at least one; `step_events` is the length of a step, else the record counts as one."""
    if trace.info.get("source") == "stalloc recorder" and np.any(trace.mark_kind != MARK_STEP):
        return _marked_phases(trace)
    start = np.maximum(trace.start, 0)
    lasting = trace.end - start > _BRIEF * (
        step_events or trace.num_events
    )  # workspaces come and go within every phase
    events, live = load_curve(start[lasting], trace.end[lasting], trace.size[lasting])
    inside = events < trace.num_events  # nothing ends at the end, the record does
    events, live = events[inside], live[inside]
    if not len(events):
        return Phases(begin=np.zeros(1, np.int64), name=("rise",))
    turns, first_rises = _turns(live, max(int((live.max() - live.min()) * _TURN), 1))
    begin = np.concatenate([[0], events[turns] + 1]).astype(np.int64)
    name = tuple("rise" if (i % 2 == 0) == first_rises else "fall" for i in range(len(begin)))
    return Phases(begin=begin, name=name)


def _marked_phases(trace: Trace) -> Phases:
    begin, name = [0], [""]
    open_names: list[str] = []
    for event, kind, index in zip(trace.mark_event, trace.mark_kind, trace.mark_name, strict=True):
        if kind == MARK_STEP:
            continue
        called = trace.names[index]
        if kind == MARK_PHASE_BEGIN:
            open_names.append(called)
        elif called in open_names:
            del open_names[len(open_names) - 1 - open_names[::-1].index(called)]
        now = open_names[-1] if open_names else ""
        if event == begin[-1]:
            name[-1] = now
        else:
            begin.append(int(event))
            name.append(now)
    return Phases(begin=np.array(begin, np.int64), name=tuple(name))


@njit()
def _turns(live, threshold):
    """Indices of the extremes from which the curve turns back by the threshold, and whether it rises before the first.

    Extremes alternate; which one comes first is only known once the curve has moved by the threshold.
    """
    turns = np.empty(len(live), np.int64)
    count, high, low, direction = 0, 0, 0, 0
    first_rises = True
    for i in range(len(live)):
        if live[i] > live[high]:
            high = i
        if live[i] < live[low]:
            low = i
        if direction <= 0 and live[i] - live[low] >= threshold:
            if direction == -1 or low > 0:
                turns[count] = low
                count += 1
                first_rises = first_rises and direction == -1
            direction, high = 1, i
        elif direction >= 0 and live[high] - live[i] >= threshold:
            if direction == 1 or high > 0:
                turns[count] = high
                count += 1
            else:
                first_rises = False
            direction, low = -1, i
    return turns[:count], first_rises
