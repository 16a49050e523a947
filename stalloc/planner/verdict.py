"""What a validator says of a plan, and what it looks at: every stay of a request in the arena.

Contract: shares nothing with the planner but the record that it reads.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stalloc.planner.plan_record import Plan


@dataclass(frozen=True)
class Verdict:
    """What the validator says of a plan."""

    ok: bool
    reason: str = ""  #: one of REASONS; empty if the plan is valid
    detail: str = ""  #: one sentence with rows, bytes and events


#: every reason a plan can be refused for
REASONS = (
    "trace-mismatch",  # the rows are not those of the trace
    "bad-size",  # a size is negative or more than any address space holds
    "bad-lifespan",  # a request ends before it starts
    "bad-stream",  # a stream has a negative index, or one that no program reaches
    "bad-tape",  # the tape is no prologue and ring, or the rows do not follow it
    "negative-offset",  # below the arena
    "misaligned",  # an offset is no multiple of the alignment
    "bad-constraint",  # a table of constraints or hand-overs names what is not there
    "moved",  # a request that was placed beforehand is elsewhere
    "forbidden",  # a request uses bytes that it must not
    "beyond-peak",  # a request, its size rounded up, ends above the stated peak
    "overlap",  # two requests that are live together share bytes
    "shared-by-streams",  # requests of two streams share bytes in a plan that is to be followed
    "bad-handover",  # a planned hand-over joins two tape entries that cannot follow each other in one place
    "bad-handed-on",  # what one kind of step leaves to the next is not where all kinds keep a place free for it
    "wrong-lower-bound",  # the stated bound is not the maximum load
    "wrong-proven-bound",  # what is said to be proven contradicts the plan
)


class Use(NamedTuple):
    """One stay of a request in the arena: bytes [low, high) during events [start, end)."""

    start: int
    end: int
    low: int
    high: int
    row: int


def uses_of_rows(plan: Plan) -> list[Use]:
    columns = (plan.start, plan.end, plan.offset, plan.size)
    return [
        Use(start, end, offset, offset + size, row)
        for row, (start, end, offset, size) in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        if offset != -1
    ]


def uses_of_tape(plan: Plan) -> list[Use]:
    """The tape unrolled over prologue and two passes."""
    period = plan.ring_end - plan.ring_start
    horizon = plan.ring_end + period
    uses = []
    columns = (plan.tape_start, plan.tape_end, plan.tape_offset, plan.tape_size)
    for row, (start, end, offset, size) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if offset == -1:
            continue
        uses.append(Use(start, end, offset, offset + size, row))
        if row >= plan.num_prologue:
            uses.append(Use(start + period, min(end + period, horizon), offset, offset + size, row))
    return uses
