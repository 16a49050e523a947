"""Plans from traces, from bare lifespans and from schedules.

Contract: a plan made here passes the naive validator. In a program's plan requests of different streams share
addresses only where the plan lists a handover, and never unless asked for; by default each stream has a region of its
own. A trace's plan takes all requests and ignores streams, since it says where they could have lived, not where they
will.
"""

import dataclasses
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stalloc import __version__
from stalloc.columns import Column, distinct
from stalloc.errors import BadInputError
from stalloc.planner.budget import Budget, Progress, check_method
from stalloc.planner.constrained import place_constrained
from stalloc.planner.constraints import Constraints, Ranges, check_places, columns, constraints, rounded_sizes
from stalloc.planner.cycle import cycle_bound, place_cycle
from stalloc.planner.intervals import Layout, place_line
from stalloc.planner.plan_record import Plan, program_plan
from stalloc.planner.problem import compressed, epochs, load_curve
from stalloc.sizes import aligned
from stalloc.trace import Trace

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule


def plan_arrays(
    start: ArrayLike,
    end: ArrayLike,
    size: ArrayLike,
    *,
    alignment: ArrayLike = 512,
    cycle: tuple[int, int] | None = None,
    fixed: Mapping[int, int] | ArrayLike | None = None,
    forbidden: Ranges = (),
    ids: NDArray[Any] | None = None,
    budget: Budget | None = None,
    ring: tuple[int, int] | None = None,
) -> Layout:
    """Place n requests with lifespans [start, end) (any integer clock) and sizes in bytes, each (n,).

    With `cycle` = (cycle_start, cycle_end), requests that start in it are live again one period later, and again, for
    ever; an end beyond cycle_end reaches into the next iteration, at most to start + period. Requests that start before
    cycle_start are live once: until an end of at most cycle_end, or for ever with end = cycle_end + period.

    `alignment` is one power of two for all, or (n,). `fixed` maps rows to the offsets where they are, or is (n,) with
    -1 for those to be placed. `forbidden` are ranges [low, high) of bytes that no request may use. `ids` are (n,) names
    for errors. Without a `budget` the usual effort is spent. `ring` is the name that `cycle` had in the last release.

    Raises BadInputError, naming the row, for input that is none of this.
    """
    if ring is not None:
        warnings.warn("plan_arrays(ring=...) is called cycle= now.", DeprecationWarning, stacklevel=2)
        cycle = ring
    begin, stop, sizes = columns(start, end, size)
    budget = budget or Budget()
    given = constraints(len(sizes), alignment, fixed, forbidden, ids)
    rounded = rounded_sizes(begin, stop, sizes, given, cycle)
    offset = np.maximum(given.fixed, 0)
    rows = np.flatnonzero((rounded > 0) & (begin < stop))
    if len(rows) == 0:
        return Layout(offset, 0, 0, "nothing to place")
    if not given.plain:
        check_places(begin, stop, sizes, given, cycle)
        layout = place_constrained(begin[rows], stop[rows], rounded[rows], given.of(rows), cycle, budget)
    elif cycle is None:
        layout = place_line(begin[rows], stop[rows], rounded[rows], budget)
    else:
        layout = place_cycle(begin[rows], stop[rows], rounded[rows], cycle, budget)
    offset[rows] = layout.offset
    return layout._replace(offset=offset)


Streams = Literal["separate", "share"]


def _place_streams(
    schedule: "Schedule", alignment: int, streams: Streams, budget: Budget | None
) -> tuple[Column, int, str]:
    """(offset, peak, method): offsets of (n,) schedule entries in bytes, -1 for those that are not planned."""
    if streams not in ("separate", "share"):
        raise BadInputError(f"streams is {streams!r}: give 'separate' or 'share'.")
    names = distinct(schedule.stream[schedule.planned]).tolist()
    offset, region, methods = np.full(len(schedule.size), -1, np.int64), 0, []
    for group in [names] if streams == "share" and names else [[name] for name in names]:
        rows = np.flatnonzero(schedule.planned & np.isin(schedule.stream, group))
        columns_of = schedule.start[rows], schedule.end[rows], schedule.size[rows]
        cycle = schedule.cycle_start, schedule.cycle_end
        layout = plan_arrays(*columns_of, alignment=alignment, cycle=cycle, budget=budget)
        offset[rows] = region + layout.offset
        region += layout.peak_bytes
        methods.append(layout.method)
    return offset, region, "; ".join(methods) or "nothing to place"


def _handovers(schedule: "Schedule", offset: Column) -> tuple[Column, Column]:
    """(earlier, later) schedule entries, ascending: of other streams, and the later one takes bytes of the earlier."""
    period = schedule.cycle_end - schedule.cycle_start
    uses = []
    for row in np.flatnonzero((offset >= 0) & (schedule.size > 0) & (schedule.start < schedule.end)).tolist():
        begin, low, high = int(schedule.start[row]), int(offset[row]), int(offset[row] + schedule.size[row])
        uses.append((begin, row, low, high))
        if row >= schedule.num_prologue:
            uses.append((begin + period, row, low, high))
    uses.sort()
    edges, owners = [0], [-1]  # owners[i] used the bytes [edges[i], edges[i + 1]) last
    pairs: set[tuple[int, int]] = set()
    for _, row, low, high in uses:
        for edge in (low, high):
            at = bisect_right(edges, edge)
            if edges[at - 1] != edge:
                edges.insert(at, edge)
                owners.insert(at, owners[at - 1])
        first, last = bisect_right(edges, low) - 1, bisect_right(edges, high) - 1
        pairs |= {
            (owner, row)
            for owner in owners[first:last]
            if owner >= 0 and schedule.stream[owner] != schedule.stream[row]
        }
        edges[first:last], owners[first:last] = [low], [row]
    columns = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()


#: one request each: start, end (event indices) and size (bytes)
Arrays = tuple[ArrayLike, ArrayLike, ArrayLike]


def plan(
    source: Trace | Arrays,
    *,
    alignment: ArrayLike = 512,
    fold: Literal["auto", "never"] = "auto",
    method: str = "auto",
    time_budget_seconds: float | None = None,
    seed: int = 0,
    fixed: Mapping[int, int] | ArrayLike | None = None,
    forbidden: Ranges = (),
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    aim_bytes: int = 0,
    streams: Streams = "separate",
) -> Plan:
    """The plan of one device's trace, or of bare lifespans given as (start, end, size), three arrays of (n,).

    fold="auto": a recording of our own that repeats becomes a "program" plan, to be followed for ever; everything
    else, and everything with fold="never", a "trace" plan of the whole recording. Constraints are of rows of the
    recording, so that they turn folding off.

    `alignment` is a power of two, or one for each row. `fixed` keeps rows where they are: offsets by row, or (n,) with
    -1 for rows to be placed. `forbidden` are ranges [low, high) of bytes that no row may use. `method` is one of
    `stalloc.planner.METHODS`: "auto" tries all that helps, "greedy" leaves the search out, "colouring" goes by
    the lifespan graph alone, "annealing" moves requests at random, other names are single orders.

    With `time_budget_seconds` the search goes on until the peak is proven optimal or the time is up, without it until
    a fixed effort is spent. The best plan so far is returned when the time is up or `stop` is set from another thread
    or a signal handler; it is then marked in `provenance["interrupted"]` and `method`. `progress` is called with each
    better packing of a part. A peak of at most `aim_bytes` will do. Equal arguments give an equal plan, unless a clock
    or `stop` ends the search.

    `streams` is for programs: see `plan_schedule`.

    Raises BadInputError, naming the row, for input that cannot be planned.
    """
    if fold not in ("auto", "never"):
        raise BadInputError(f"fold is {fold!r}: give 'auto' or 'never'.")
    check_method(method)
    if time_budget_seconds is not None and not time_budget_seconds >= 0:
        raise BadInputError(f"the time budget is {time_budget_seconds} seconds: give a number from 0.")
    budget = Budget(time_budget_seconds, stop or threading.Event(), progress, seed, method, aim_bytes, graph=True)
    if isinstance(source, Trace):
        start, end, size, stream, device = source.start, source.end, source.size, source.stream, source.device
    else:
        start, end, size = columns(*source)
        stream, device = np.zeros(len(size), np.int64), 0
    given = constraints(len(size), alignment, fixed, forbidden)
    provenance = _provenance(source, given, fold, method, time_budget_seconds, seed)
    if fold == "auto" and given.plain and isinstance(source, Trace):
        program = _program(source, given.granule, provenance, streams, budget)
        if program is not None:
            return _marked(program, budget)
    ids = source.extra.get("id") if isinstance(source, Trace) else None
    layout = plan_arrays(
        start, end, size, alignment=alignment, fixed=given.fixed, forbidden=forbidden, ids=ids, budget=budget
    )
    rounded = aligned(size, given.granule)
    fixed_end = np.where(given.fixed >= 0, given.fixed + rounded, 0).max(initial=0)  # of requests of no time as well
    peak = max(layout.peak_bytes, int(fixed_end))
    made = Plan(
        offset=np.where(given.fixed >= 0, given.fixed, where_live(layout.offset, start, end, size)),
        size=size,
        start=start,
        end=end,
        stream=stream,
        device=device,
        alignment=given.granule if len(size) else int(np.max(np.asarray(alignment), initial=1)),
        peak_bytes=peak,
        lower_bound_bytes=layout.lower_bound_bytes,
        optimal=peak == layout.bound_bytes,
        method=layout.method,
        kind="trace",
        provenance=provenance,
        proven_bound_bytes=layout.bound_bytes,
        **_constraint_tables(given),
    )
    return _marked(made, budget)


def where_live(offset: Column, start: Column, end: Column, size: Column) -> Column:
    """The offsets, -1 for a request that lives for no time: it needs no place, and may be larger than the arena."""
    return np.where((start < end) | (size == 0), offset, -1)


def _program(trace: Trace, alignment: int, provenance: dict[str, Any], streams: Streams, budget: Budget) -> Plan | None:
    """The "program" plan of a recording of our own that repeats, its rows those of the trace."""
    if trace.info.get("source") != "stalloc recorder":
        return None
    from stalloc.lifespans import repeating_schedule  # only a recording of our own needs it

    schedule = repeating_schedule.fold(trace)
    if schedule is None:
        return None
    program = plan_schedule(schedule, alignment, device=trace.device, streams=streams, budget=budget)
    return dataclasses.replace(
        program,
        offset=repeating_schedule.expand(schedule, program.schedule_offset, trace),
        size=trace.size,
        start=trace.start,
        end=trace.end,
        stream=trace.stream,
        schedule_row=schedule.row,
        provenance=provenance,
    )


def plan_schedule(
    schedule: "Schedule",
    alignment: int = 512,
    *,
    device: int = 0,
    streams: Streams = "separate",
    budget: Budget | None = None,
) -> Plan:
    """The "program" plan of a schedule; its rows are the schedule's entries, those not `planned` with offset -1.

    `streams`: "separate" gives every stream a region of its own; "share" plans all streams together and lists in
    `handover_earlier` and `handover_later` which entry takes over bytes of another stream's, which the runtime has to
    secure with an event and a wait.
    """
    offset, region, method = _place_streams(schedule, alignment, streams, budget)
    offset = where_live(offset, schedule.start, schedule.end, schedule.size)
    bound = _schedule_bound(schedule, alignment)
    columns_of = {name: getattr(schedule, name) for name in ("size", "start", "end", "stream")}
    if streams != "separate":
        columns_of["handover_earlier"], columns_of["handover_later"] = _handovers(schedule, offset)
    return program_plan(
        offset=offset,
        **columns_of,
        device=device,
        alignment=alignment,
        peak_bytes=region,
        lower_bound_bytes=bound,
        optimal=region == bound,
        method=method,
        provenance={"stalloc": __version__},
        num_prologue=schedule.num_prologue,
        cycle_start=schedule.cycle_start,
        cycle_end=schedule.cycle_end,
        proven_bound_bytes=bound,
    )


def _schedule_bound(schedule: "Schedule", alignment: int) -> int:
    """The maximum load of what a schedule plans."""
    rounded = aligned(schedule.size, alignment)
    counted = np.flatnonzero(schedule.planned & (rounded > 0) & (schedule.start < schedule.end))
    return cycle_bound(
        schedule.start[counted], schedule.end[counted], rounded[counted], schedule.cycle_start, schedule.cycle_end
    )


def _constraint_tables(given: Constraints) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    if len(given.alignment) and (given.alignment != given.granule).any():
        tables["row_alignment"] = given.alignment
    rows = np.flatnonzero(given.fixed >= 0)
    if len(rows):
        tables |= {"fixed_row": rows, "fixed_offset": given.fixed[rows]}
    if len(given.forbidden):
        tables |= {"forbidden_low": given.forbidden[:, 0].copy(), "forbidden_high": given.forbidden[:, 1].copy()}
    return tables


def _marked(made: Plan, budget: Budget) -> Plan:
    """The plan, marked if planning was cut short while a better one was still possible."""
    if made.optimal or not budget.interrupted:
        return made
    return dataclasses.replace(
        made,
        method=f"{made.method} (best so far: {budget.interrupted})",
        provenance={**made.provenance, "interrupted": budget.interrupted},
    )


def _provenance(
    source: Trace | Arrays, given: Constraints, fold: str, method: str, seconds: float | None, seed: int
) -> dict[str, Any]:
    """What the plan was made from: the origin that the trace names, the options, the version."""
    info = source.info if isinstance(source, Trace) else {"source": "arrays"}
    options: dict[str, Any] = {"alignment": given.granule, "fold": fold}
    options |= {"method": method} if method != "auto" else {}
    options |= {"time_budget_seconds": seconds} if seconds is not None else {}
    options |= {"seed": seed} if seed else {}
    return {
        "source": str(info.get("source", "")),
        "file": PurePath(str(info.get("file", ""))).name,
        **({"torch": str(info["torch"])} if "torch" in info else {}),
        "options": options,
        "stalloc": __version__,
    }


def leave_room(plan: Plan, wider: "Schedule") -> Plan:
    """A plan of a cycle that leaves room for what else comes in it; the plan itself if that would raise its peak.

    `wider` is the plan's cycle on a finer clock, with such requests among its own: `row` is the entry of the cycle, -1
    for these. Of them, the largest first, those are taken that fit below the cycle's own load. Streams are kept apart.
    """
    kept = _that_fit(wider, plan.alignment)
    columns = ("size", "stream", "start", "end", "planned", "row")
    taken = dataclasses.replace(wider, **{name: getattr(wider, name)[kept] for name in columns})
    made = plan_schedule(taken, plan.alignment, device=plan.device)
    own = np.flatnonzero(taken.row >= 0)
    offset = np.full(len(plan.schedule_size), -1, np.int64)
    offset[taken.row[own]] = made.schedule_offset[own]
    rounded = aligned(plan.schedule_size, plan.alignment)
    if ((offset >= 0) & (offset + rounded > plan.peak_bytes)).any() or (
        (offset < 0) & (plan.schedule_offset >= 0)
    ).any():
        return plan
    return dataclasses.replace(plan, offset=offset, schedule_offset=offset, method=made.method)


def _that_fit(wider: "Schedule", alignment: int) -> Column:
    """The rows of the cycle, and of what else comes in it those that do not raise its load, in order."""
    size, period = aligned(wider.size, alignment), wider.cycle_end - wider.cycle_start
    wraps = np.flatnonzero(wider.end > wider.cycle_end)
    begin, end, num_epochs = epochs(
        np.concatenate([wider.start, np.full(len(wraps), wider.cycle_start)]),
        np.concatenate([np.minimum(wider.end, wider.cycle_end), wider.end[wraps] - period]),
    )
    row = np.concatenate([np.arange(len(size)), wraps])
    own = np.flatnonzero((wider.row >= 0) & wider.planned)
    counted = np.isin(row, own)
    load = load_curve(begin[counted], end[counted], size[row[counted]], num_epochs)
    most, kept = int(load.max(initial=0)), wider.row >= 0
    others = np.flatnonzero(wider.row < 0)  # none of which lives on from one iteration to the next
    for other in others[np.argsort(-size[others], kind="stable")].tolist():
        lives = load[begin[other] : end[other]]
        if lives.max(initial=0) + size[other] <= most:
            lives += size[other]
            kept[other] = True
    return np.flatnonzero(kept)


def plan_joint(sources: "Sequence[Trace | Schedule | Arrays]", *, alignment: int = 512) -> list[Plan]:
    """One plan for each of `sources`: traces, schedules, or (start, end, size). All have the same `peak_bytes`.

    The one that needs most is planned first; the others need not be better than that. Raises BadInputError for input
    that cannot be planned.
    """
    bounds = [_bound(source, alignment) for source in sources]
    plans: dict[int, Plan] = {}
    peak = 0
    for index in np.argsort([-bound for bound in bounds], kind="stable").tolist():
        source = sources[index]
        if isinstance(source, Trace | tuple):
            plans[index] = plan(source, alignment=alignment, aim_bytes=peak)
        else:
            plans[index] = plan_schedule(source, alignment)
        peak = max(peak, plans[index].peak_bytes)
    proven = max((made.proven_bound_bytes for made in plans.values()), default=0)
    return [
        dataclasses.replace(
            plans[index],
            peak_bytes=peak,
            proven_bound_bytes=proven,
            optimal=peak == proven,
            provenance={**plans[index].provenance, "joint": {"index": index, "plans": len(plans)}},
        )
        for index in range(len(plans))
    ]


def _bound(source: "Trace | Schedule | Arrays", alignment: int) -> int:
    """The maximum load of one source, sizes rounded up."""
    if not isinstance(source, Trace | tuple):
        return _schedule_bound(source, alignment)
    given = (source.start, source.end, source.size) if isinstance(source, Trace) else source
    start, end, size = columns(*given)
    rows = start < end
    return compressed(start[rows], end[rows], aligned(size[rows], alignment)).bound
