"""Lifespan classes: how long a request lives compared with steps and phases, and whether it does so every time.

Every request has exactly one class. Persistent: it lives across at least two step boundaries, or, where no steps are
known, from the first phase or before it to the end of the record. Transient: it dies in the phase in which it was
born. Scoped: all others.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import njit
from stalloc.lifespans.load_curves import load_curve
from stalloc.lifespans.periods import sequence_rows
from stalloc.lifespans.repeating_schedule import Schedule, expand
from stalloc.trace import MARK_PHASE_BEGIN, MARK_STEP, Trace

if TYPE_CHECKING:
    import networkx as nx

_TURN = 0.25
_BRIEF = 0.01


@dataclass(frozen=True, eq=False, kw_only=True)
class Phases:
    """Consecutive ranges of events."""

    begin: Column  #: (k,) event at which each phase begins; the first is 0
    name: tuple[str, ...]  #: (k,) what the program called it, else `rise` or `fall`; empty between phases that it named

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


class LifespanClass(enum.IntEnum):
    """How long a request lives."""

    PERSISTENT = 0
    SCOPED = 1
    TRANSIENT = 2


class Regularity(enum.IntEnum):
    """Whether a request comes and lives the same way in every step."""

    UNKNOWN = 0  #: before the steps begin to repeat, too small to be on the schedule, or no steps are known
    STATIC = 1
    DYNAMIC = 2


@dataclass(frozen=True)
class Total:
    """How many requests a class has, and their bytes."""

    requests: int
    bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Classes:
    """The classes of a trace's n requests."""

    lifespan: Column  #: (n,) int8 of LifespanClass
    regularity: Column  #: (n,) int8 of Regularity
    birth_phase: Column  #: (n,) index into `phases`; -1: before recording
    death_phase: Column  #: (n,) index into `phases`; len(phases.begin): never freed
    phases: Phases

    def totals(self, size: Column) -> dict[str, Total]:
        """Requests and bytes of each class by its lower-case name, given (n,) bytes."""
        return {
            member.name.lower(): Total(int(np.count_nonzero(column == member)), int(size[column == member].sum()))
            for column, members in ((self.lifespan, LifespanClass), (self.regularity, Regularity))
            for member in members
        }


def classify(trace: Trace, schedule: Schedule | None = None) -> Classes:
    """The classes of all requests; `schedule` is the fold of the trace, which knows its steps, if there is one."""
    boundaries = _step_boundaries(trace, schedule)
    phases = find_phases(trace, int(np.median(np.diff(boundaries))) if len(boundaries) >= 2 else None)
    num_phases = len(phases.begin)
    never_freed = trace.end >= trace.num_events
    birth = np.where(trace.start < 0, -1, phases.of(trace.start))
    death = np.where(never_freed, num_phases, phases.of(trace.end))
    if len(boundaries) >= 2:
        crossed = np.searchsorted(boundaries, trace.end, "left") - np.searchsorted(boundaries, trace.start, "right")
        persistent = (crossed >= 2) | ((trace.start < 0) & never_freed)
    else:
        persistent = never_freed & (birth < 1) & ((num_phases > 1) | (trace.start < 0))
    lifespan = np.where(
        persistent, LifespanClass.PERSISTENT, np.where(birth == death, LifespanClass.TRANSIENT, LifespanClass.SCOPED)
    )
    return Classes(
        lifespan=lifespan.astype(np.int8),
        regularity=_regularity(trace, schedule),
        birth_phase=birth,
        death_phase=death,
        phases=phases,
    )


def _step_boundaries(trace: Trace, schedule: Schedule | None) -> Column:
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    if len(marks) or schedule is None:
        return marks
    rows = sequence_rows(trace, schedule.minimum_size)
    first = int(np.searchsorted(rows, schedule.row[schedule.num_prologue]))
    return trace.start[rows[first : first + schedule.covered_requests : schedule.period_requests]]


def _regularity(trace: Trace, schedule: Schedule | None) -> Column:
    regularity = np.full(trace.num_requests, Regularity.UNKNOWN, np.int8)
    if schedule is None:
        return regularity
    rows = sequence_rows(trace, schedule.minimum_size)
    regularity[rows[rows >= schedule.row[schedule.num_prologue]]] = Regularity.DYNAMIC
    on_schedule = np.zeros(schedule.num_requests, np.int64)
    on_schedule[: schedule.num_prologue] = -1
    regularity[expand(schedule, on_schedule, trace) >= 0] = Regularity.STATIC
    return regularity


_MAX_GROUPS = 2048


def lifespan_graph(trace: Trace, classes: Classes) -> "nx.Graph":
    """The groups of a trace and their overlaps.

    Nodes are (birth phase, death phase, size in bytes, whether dynamic), of which there are at most 2048, with the
    attributes and edges that `group_graph` gives them.
    """
    dynamic = classes.regularity == Regularity.DYNAMIC
    keys = few_keys(classes.birth_phase, classes.death_phase, trace.size, dynamic, _MAX_GROUPS)
    return group_graph(trace.start, trace.end, trace.size, keys)


def few_keys(birth: Column, death: Column, size: Column, dynamic: Column, most: int) -> Column:
    """(n, 4) keys of n requests: birth phase, death phase, size and whether dynamic, of which at most `most` differ.

    If there are more, sizes are rounded up to powers of two, then neighbouring phases are taken together in pairs until
    there are few enough.
    """
    keys = np.stack([birth, death, size, dynamic], axis=1).astype(np.int64)
    if len(_numbered(keys)[0]) > most:
        keys[:, 2] = 1 << np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
    while len(_numbered(keys)[0]) > most and (keys[:, :2] >> 1 != keys[:, :2]).any():
        keys[:, :2] >>= 1
    return keys


def group_graph(start: Column, end: Column, size: Column, keys: Column) -> "nx.Graph":
    """The groups of n requests with equal `keys` (n, k) and their overlaps; lifespans [start, end), sizes in bytes.

    Nodes are the keys, ascending, with attributes `requests`, `bytes` (the sum), `peak_requests` and `peak_bytes` (live
    at a time) and `rows`. Edges have no attributes; a group has no edge to itself.
    """
    import networkx as nx  # takes long, and whoever only asks for lifespans does without

    graph = nx.Graph()
    if not len(keys):
        return graph
    distinct_keys, group = _numbered(keys)
    num_groups = len(distinct_keys)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=num_groups))[:-1])
    nodes = [tuple(key) for key in distinct_keys.tolist()]
    for node, rows in zip(nodes, members, strict=True):
        once = np.ones(len(rows), np.int64)
        graph.add_node(
            node,
            requests=len(rows),
            bytes=int(size[rows].sum()),
            peak_requests=int(load_curve(start[rows], end[rows], once)[1].max()),
            peak_bytes=int(load_curve(start[rows], end[rows], size[rows])[1].max()),
            rows=rows,
        )
    # at one event, what ends goes first: intervals are half open
    changes = np.argsort(np.concatenate([end, start]), kind="stable")
    together = np.zeros((num_groups, num_groups), bool)
    _live_together(changes, group, together)
    graph.add_edges_from((nodes[i], nodes[j]) for i, j in np.argwhere(np.triu(together, 1)).tolist())
    return graph


def cut_events(trace: Trace, classes: Classes, most_live: float = 0.02) -> Column:
    """Events before which next to nothing but persistent requests is live: there the trace can be split.

    (k,) events, at most one in each stretch in which at most `most_live` of the peak is live; the least of it.
    """
    passing = classes.lifespan != LifespanClass.PERSISTENT
    start = np.maximum(trace.start, 0)[passing]
    events, live = load_curve(start, trace.end[passing], trace.size[passing])
    inside = events < trace.num_events
    events, live = events[inside], live[inside]
    if not len(events):
        return np.empty(0, np.int64)
    quiet = live <= most_live * live.max()
    stretch = np.cumsum(np.concatenate([[True], quiet[1:] != quiet[:-1]]))
    cuts = []
    for number in distinct(stretch[quiet]):
        at = np.flatnonzero(stretch == number)
        cuts.append(events[at[np.argmin(live[at])]] + 1)
    return np.array(cuts, np.int64)


def _numbered(keys: Column) -> tuple[Column, Column]:
    """The (g, k) different rows of (n, k) keys, ascending, and the (n,) number of each row."""
    order = np.lexsort(keys.T[::-1])
    differs = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    group = np.empty(len(keys), np.int64)
    group[order] = np.concatenate([[0], np.cumsum(differs)])[: len(keys)]
    return keys[order[np.concatenate([[True], differs])[: len(keys)]]], group


@njit()
def _live_together(changes, group, together):
    """Write (g, g) which groups are ever live together; `changes`: i ends if below n, else i - n begins.

    A group is compared with the others only when it becomes live.
    """
    num_requests = len(group)
    live = np.zeros(len(together), np.int64)
    for change in changes:
        if change < num_requests:
            live[group[change]] -= 1
            continue
        mine = group[change - num_requests]
        if live[mine] == 0:
            for other in range(len(live)):
                if live[other] > 0:
                    together[mine, other] = together[other, mine] = True
        live[mine] += 1
