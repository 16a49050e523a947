"""The targets that the planner is held to, and rows that say how far it is.

Contract: a row's `ok` is what its value and target say; the figures of the table are rows too, without a target.
"""

from dataclasses import dataclass
from typing import Any

from .cases import A_MILLION, CAPACITY, MANY, Case
from .judging import Result, run_stalloc

#: what MiniMalloc takes for A to K given the capacity, seconds on two cores: as they are, reversed in time
MINIMALLOC_SECONDS, MINIMALLOC_REVERSED_SECONDS = 26.65, 30.5
TIMES_QUICKER = 20
#: for an instance that is not solved within the usual effort
LONG_SECONDS = 60
#: the lowest peaks known of the two instances whose load nobody reaches
KNOWN_PEAKS = {"D": 995_328, "J": 1_005_568}
#: device traces that annealing has to place at the load
ANNEALED = 20
IDEALLOC_SECONDS = {"pangu_2.6B": 1.0, "resnet50": 0.05, "iopddl_G_1": 0.05, "iopddl_S_1": 0.2, "iopddl_Y_1": 0.2}

Measured = list[tuple[Case, int, Result]]


@dataclass(frozen=True)
class Row:
    """One figure; `ok` and `target` are None where nothing is asked of it."""

    name: str
    value: Any
    target: str | None = None
    ok: bool | None = None


def at_most(name: str, value: float, limit: float, unit: str) -> Row:
    """A row whose value may not exceed the limit."""
    return Row(f"{name}, {unit}", round(value, 5), f"<= {limit:g}", value <= limit)


def at_least(name: str, value: int, limit: int) -> Row:
    """A row of a count that may not fall below the limit."""
    return Row(name, value, f">= {limit}", value >= limit)


def gap_percent(load_bytes: int, result: Result) -> float:
    """How far a peak lies above the load."""
    return 100 * (result.peak_bytes / load_bytes - 1)


def of_traces(measured: Measured) -> list[Row]:
    """Device traces: at the bound or proven, and quick."""
    if not measured:
        return []
    seconds = [result.seconds for _, _, result in measured]
    done = sum(result.proven for _, _, result in measured)
    return [
        at_least("device traces at the bound or proven", done, len(measured)),
        at_most("slowest device trace", max(seconds), 0.25, "s"),
        at_most("all device traces", sum(seconds), 2.0, "s"),
    ]


def of_method(name: str, results: list[tuple[int, Result]], least: int | None = None) -> list[Row]:
    """One method alone on device traces, with their loads in bytes: how many it has to place there, all by default."""
    at_bound = sum(result.peak_bytes == load for load, result in results)
    return [at_least(f"{name}: device traces at the load", at_bound, min(least or len(results), len(results)))]


def of_minimalloc(measured: Measured, backwards: Measured, shuffled: Measured) -> list[Row]:
    """MiniMalloc A to K, the capacity not given: the time until it is kept, and that of whole calls."""
    if not measured:
        return []
    rows = []
    for suffix, results, limit in (
        ("", measured, 1.0),
        (", reversed in time", backwards, MINIMALLOC_REVERSED_SECONDS / TIMES_QUICKER),
        (", rows permuted", shuffled, MINIMALLOC_SECONDS / TIMES_QUICKER),
    ):
        within = sum(result.peak_bytes <= CAPACITY for _, _, result in results)
        rows.append(at_least(f"MiniMalloc within {CAPACITY:,}{suffix}", within, len(results)))
        found, whole = (
            sum(times) for times in zip(*((r.within_seconds, r.seconds) for _, _, r in results), strict=True)
        )
        rows.append(at_most(f"MiniMalloc A to K{suffix}, until the capacity is kept", found, limit, "s"))
        rows.append(Row(f"MiniMalloc A to K{suffix}, whole calls, s", round(whole, 5)))
    at_bound = sum(result.peak_bytes == load for _, load, result in measured)
    rows.append(at_least("MiniMalloc at the load", at_bound, max(len(measured) - 2, 0)))
    for case, load, result in measured:
        known = KNOWN_PEAKS.get(case.name)
        if known is not None:
            ok = result.peak_bytes <= known or result.proven
            rows.append(Row(f"MiniMalloc {case.name}, bytes", result.peak_bytes, f"<= {known} or proven", ok))
            if not ok:
                longer = run_stalloc(case, load, 1, time_budget_seconds=LONG_SECONDS)
                ok = longer.peak_bytes <= known or longer.proven
                name = f"MiniMalloc {case.name}, bytes, with a time budget of {LONG_SECONDS} s"
                rows.append(Row(name, longer.peak_bytes, f"<= {known} or proven", ok))
    return rows


def of_idealloc(measured: Measured) -> list[Row]:
    """The instances published with idealloc."""
    rows = []
    for case, load, result in measured:
        rows.append(at_most(f"{case.name} above the load", gap_percent(load, result), 0.0, "%"))
        rows.append(at_most(case.name, result.seconds, IDEALLOC_SECONDS[case.name], "s"))
    return rows


def of_stages(measured: Measured) -> list[Row]:
    """Made-up stages: within a thousandth of the bound, in a time that depends on their size."""
    rows = []
    for case, load, result in measured:
        rows.append(at_most(f"{case.name} above the load", gap_percent(load, result), 0.1, "%"))
        if case.num_asked >= MANY:
            limit = 0.3 if case.num_asked < A_MILLION else 3.0 if case.num_steps > 1 else 8.0
            rows.append(at_most(case.name, result.seconds, limit, "s"))
    return rows
