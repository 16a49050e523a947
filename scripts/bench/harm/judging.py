"""The targets: what stalloc may need where a library's own allocator needs what it needs; and the table of the rows.

Contract: a row is judged by figures of the virtual driver and of processes only; what could not be measured is no pass.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from harm.running import Outcome, peak

MIB = 1 << 20
FEW_KINDS = 12  #: of steps: programs with more are allowed 2 % beyond the better peer
IRREGULAR = 0.5  #: kinds by steps, above which the lengths are ever new
SEEN_BEFORE = 3  #: times, after which a kind of step is to be served from the plan


@dataclass
class Row:
    """One program: bytes held at most, natively, with the other setting, under stalloc; and the rest of the table."""

    name: str
    default_bytes: int
    other_bytes: int
    stalloc_bytes: int | None = None
    allocated_bytes: int | None = None
    default_least_bytes: int | None = None
    other_least_bytes: int | None = None
    completes_in_bytes: int | None = None  #: the memory that stalloc was tried with
    completes: bool | None = None
    hit_rate: float | None = None  #: over all steps
    known_hit_rate: float | None = None  #: over steps of a kind that was seen three times before
    processor_ratio: float | None = None
    maps: int | None = None
    plans: int | None = None
    kinds: int = 0
    steps: int = 0
    code: int | None = None
    missed: list[str] = field(default_factory=list)

    @property
    def better_bytes(self) -> int:
        return min(self.default_bytes, self.other_bytes)


def judge(row: Row, ours: Outcome) -> None:
    row.code = ours.code
    if not ours.is_complete:
        row.missed.append(f"ends with {ours.code} under stalloc: {ours.last_line}")
        return
    row.stalloc_bytes, row.allocated_bytes = ours.peak_bytes, ours.allocated_peak_bytes
    row.maps, row.plans = ours.seen["statistics"]["maps"], ours.seen["plans_made"]
    row.missed += [f"planning was given up: {note}" for note in ours.seen["gave_up"]]
    steps = ours.seen["steps"]
    row.hit_rate, row.known_hit_rate = hit_rates(steps)
    held, factor = ours.peak_bytes, 1.0 if row.kinds <= FEW_KINDS else 1.02
    _at_most(row, "peak against the other setting", held, row.other_bytes + max(4 * MIB, row.other_bytes // 200))
    _at_most(row, "peak against the better", held, int(factor * row.better_bytes) + 4 * MIB)
    planned = [step for before, step in itertools.pairwise(steps) if before["planned"] and step["planned"]]
    if planned and "allocated" in planned[0]:
        held, allocated = peak(planned, "held"), peak(planned, "allocated")
        _at_most(row, "held once planned", held, int(1.01 * allocated) + 8 * MIB)
    if steps and "allocated" in steps[-1] and row.kinds > IRREGULAR * row.steps and row.steps > 10:
        _at_most(row, "held after step 10", peak(steps[10:], "held"), int(1.10 * peak(steps, "allocated")))
    if row.known_hit_rate is not None and row.known_hit_rate < 0.99:
        row.missed.append(f"hit rate {100 * row.known_hit_rate:.1f} % of steps seen three times before, not 99 %")


def judge_processor(row: Row, ratio: float) -> None:
    row.processor_ratio = ratio
    if ratio > 1.05:
        row.missed.append(f"processor time {ratio:.2f} of native's, not 1.05")


def _at_most(row: Row, what: str, value: int, limit: int) -> None:
    if value > limit:
        row.missed.append(f"{what}: {value / MIB:,.0f} MiB, not {limit / MIB:,.0f}")


def allowed_bytes(least: int) -> int:
    """The memory in which stalloc has to complete what completes in `least` natively."""
    return least + max(least // 100, 4 * MIB)


def hit_rates(steps: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The share of requests that the plan served: over all steps, and over those of a kind seen three times before.

    Reports do not count requests while no plan is in force. Such a step counts as one with as many requests as other
    steps of its kind had, or else the median step.
    """
    counted = [_counted(before, step) for before, step in itertools.pairwise([_NOTHING, *steps])]
    of_kind: dict[str, list[int]] = {}
    for step, (_, asked, _) in zip(steps, counted, strict=True):
        if asked:
            of_kind.setdefault(step["kind"], []).append(asked)
    asked_of_kind = {kind: sorted(numbers)[len(numbers) // 2] for kind, numbers in of_kind.items()}
    if not asked_of_kind:
        return (0.0 if steps else None), None if _always_new(steps) else 0.0
    usual = sorted(asked_of_kind.values())[len(asked_of_kind) // 2]
    times_seen: dict[str, int] = {}
    served, total, known_served, known_total = 0, 0, 0, 0
    for step, (hits, asked, is_all) in zip(steps, counted, strict=True):
        kind = step["kind"]
        asked = asked if is_all else max(asked, asked_of_kind.get(kind, usual))
        served, total = served + hits, total + asked
        if times_seen.get(kind, 0) >= SEEN_BEFORE:
            known_served, known_total = known_served + hits, known_total + asked
        times_seen[kind] = times_seen.get(kind, 0) + 1
    return served / total, known_served / known_total if known_total else None


_NOTHING = {"hits": 0, "misses": 0, "on_plan": False}


def _counted(before: dict[str, Any], step: dict[str, Any]) -> tuple[int, int, bool]:
    """Requests of a step that the plan served, those that were counted, and whether these are all."""
    hits = step["hits"] - before["hits"]
    return hits, hits + step["misses"] - before["misses"], before["on_plan"] and step["on_plan"]


def _always_new(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["kind"] for step in steps]
    return all(kinds.count(kind) <= SEEN_BEFORE for kind in set(kinds))


HEADER = (
    f"{'program':<26}{'default':>9}{'other':>9}{'stalloc':>9}{'alloc':>8}{'least':>9}{'in':>9}{'hits':>8}"
    f"{'known':>8}{'cpu':>6}{'maps':>7}{'plans':>6}{'kinds':>9}{'exit':>5}"
)


def line_of(row: Row) -> str:
    """One program: MiB, shares in per cent; `in` is the memory that stalloc was tried with, ! if it did not do."""
    leasts = [least for least in (row.default_least_bytes, row.other_least_bytes) if least is not None]
    tried = _mib(row.completes_in_bytes) + ("!" if row.completes is False else "")
    ratio = "-" if row.processor_ratio is None else f"{row.processor_ratio:.2f}"
    return (
        f"{row.name:<26}{_mib(row.default_bytes):>9}{_mib(row.other_bytes):>9}{_mib(row.stalloc_bytes):>9}"
        f"{_mib(row.allocated_bytes):>8}{_mib(min(leasts, default=None)):>9}{tried:>9}{_share(row.hit_rate):>8}"
        f"{_share(row.known_hit_rate):>8}{ratio:>6}{_count(row.maps):>7}{_count(row.plans):>6}"
        f"{f'{row.kinds}/{row.steps}':>9}{_count(row.code):>5}{'  MISSED' if row.missed else ''}"
    )


def misses(rows: list[Row]) -> list[str]:
    return [f"MISSED {row.name}: {what}" for row in rows for what in row.missed]


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)
