"""Plans from traces, from bare lifespans and from schedules.

Contract: a plan made here passes the naive validator. In a program's plan requests of different streams share
addresses only where the plan lists a handover, and never unless asked for; by default each stream has a region of its
own. A trace's plan takes all requests and ignores streams, since it says where they could have lived, not where they
will.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from stalloc import __version__
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.planner.budget import Budget, Progress
from stalloc.planner.constraints import Constraints, Ranges, constraints
from stalloc.planner.cycle import cycle_bound
from stalloc.planner.layout import columns, plan_arrays
from stalloc.planner.methods import check_method
from stalloc.planner.plan_record import Plan
from stalloc.planner.sharing import Streams, handovers, place_streams
from stalloc.sizes import aligned
from stalloc.trace import Trace

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule

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
    offset, region, method = place_streams(schedule, alignment, streams, budget)
    offset = where_live(offset, schedule.start, schedule.end, schedule.size)
    earlier, later = handovers(schedule, offset) if streams != "separate" else (None, None)
    bound = schedule_bound(schedule, alignment)
    return Plan(
        offset=offset,
        size=schedule.size,
        start=schedule.start,
        end=schedule.end,
        stream=schedule.stream,
        device=device,
        alignment=alignment,
        peak_bytes=region,
        lower_bound_bytes=bound,
        optimal=region == bound,
        method=method,
        kind="program",
        provenance={"stalloc": __version__},
        num_prologue=schedule.num_prologue,
        cycle_start=schedule.cycle_start,
        cycle_end=schedule.cycle_end,
        schedule_row=np.arange(len(schedule.size), dtype=np.int64),
        schedule_size=schedule.size,
        schedule_stream=schedule.stream,
        schedule_start=schedule.start,
        schedule_end=schedule.end,
        schedule_offset=offset,
        proven_bound_bytes=bound,
        **({} if earlier is None or later is None else {"handover_earlier": earlier, "handover_later": later}),
    )


def schedule_bound(schedule: "Schedule", alignment: int) -> int:
    """The maximum load of what a schedule plans."""
    rounded = aligned(schedule.size, alignment)
    counted = np.flatnonzero(schedule.planned & (rounded > 0) & (schedule.start < schedule.end))
    return cycle_bound(
        schedule.start[counted], schedule.end[counted], rounded[counted], schedule.cycle_start, schedule.cycle_end
    )


def _constraint_tables(given: Constraints) -> dict[str, Any]:
    """The columns of a plan that hold its constraints."""
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
