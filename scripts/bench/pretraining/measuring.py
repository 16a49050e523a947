"""All figures of one rank of one configuration: a run under stalloc and a recording.

Contract: bytes are those that the virtual driver handed out over the whole run, watched steps included.
"""

import time
from dataclasses import dataclass

from harm.running import Outcome, Setting, run

from pretraining.cells import Cell
from pretraining.recorded_step import Recorded, look_at

AMPLE_BYTES = 1 << 40


class MeasuringError(Exception):
    """The run failed with memory enough; says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank of one configuration."""

    date: str  #: on which it was measured
    steps: int
    stalloc_bytes: int  #: reserved at the peak
    hit_rate: float  #: of requests that are the same in each step, in the later half of the steps
    recorded: Recorded


def measure(cell: Cell, steps: int, options: tuple[str, ...] = ()) -> Row:
    """Run it under stalloc, then record it. Raises MeasuringError or RecordingError."""
    program = cell.program(steps, options)
    outcome = run(program, Setting.STALLOC, AMPLE_BYTES)
    if not outcome.is_complete:
        raise MeasuringError(f"{cell.name} under stalloc: {outcome.last_line}")
    return Row(
        date=time.strftime("%Y-%m-%d"),
        steps=steps,
        stalloc_bytes=outcome.peak_bytes,
        hit_rate=_hit_rate(outcome),
        recorded=look_at(program),
    )


def _hit_rate(outcome: Outcome) -> float:
    steps = outcome.seen["steps"]
    before, last = steps[len(steps) // 2 - 1], steps[-1]
    hits, misses = (last[name] - before[name] for name in ("hits", "misses"))
    return hits / (hits + misses) if last["on_plan"] and hits + misses else 0.0
