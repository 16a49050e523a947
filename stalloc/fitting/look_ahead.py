"""Looking at more steps of the program than a trial has, so that those which need other memory are tried too.

Contract: the program runs once, unchanged, under PyTorch's allocator, up to a number of steps or requests, so what is
seen does not depend on other work of the machine. Steps are of one kind if they make as many requests and have the same
peak of requested bytes (what PyTorch's allocator hands out depends on which blocks are free); requests after the last
step count as a step too. Trials have as many steps as it takes to see every kind once after every kind that it follows,
as long as these are few: a step finds the memory that the one before left. The run within the budget, which decides,
has all steps that were seen to differ. What is left out is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stalloc.figures import human_bytes
from stalloc.fitting.trial_work import TrialWork
from stalloc.fitting.trials import Measured

LOOK_STEPS, LOOK_REQUESTS = 256, 100_000  #: limits of looking ahead: 2 to 10 s of processor time
LATER = "a later one that is larger, or unlike them, can run out of memory within the budget"
LOOK_PROCESSOR_SECONDS = 20.0  #: limit of looking ahead for programs that compute or read much on the processor
MOST_STEPS, MOST_REQUESTS = 64, 50_000  #: of one trial; a fit makes about eight trials

_Kind = tuple[int, int]
"""Requests of a step, and bytes that were asked for at its peak."""


@dataclass(frozen=True)
class Ahead:
    """How many steps a trial needs, how many a run within the budget needs, and a note about later steps."""

    num_steps: int
    num_within: int
    note: str


def look_ahead(trial: Callable[[TrialWork], Measured], least: int) -> Ahead:
    """Run the program as it is for many steps."""
    seen = trial(
        TrialWork(
            "native",
            num_steps=LOOK_STEPS,
            most_requests=LOOK_REQUESTS,
            most_processor_seconds=LOOK_PROCESSOR_SECONDS,
        )
    )
    if seen.failure:
        return Ahead(least, steps_within(least), f"each run has {least} steps, and {LATER}")
    until = [0, *(count for count, _ in seen.requests)]
    kinds = [(now - before, peak) for (before, now), (_, peak) in zip(pairwise(until), seen.requests, strict=True)]
    return steps_to_try(kinds, least, is_whole=seen.is_whole, has_rest=seen.has_rest)


def steps_within(num_steps: int) -> int:
    """How many steps a run within the budget has: what is short of memory may fail later than a plan repeats."""
    return 2 * num_steps + 3


def steps_to_try(kinds: Sequence[_Kind], least: int, *, is_whole: bool, has_rest: bool = False) -> Ahead:
    """How many steps a trial and a run within the budget are to have, given those that were seen; `least` or more.

    `is_whole`: the program has no more. `has_rest`: the last one is what came after the last step.
    """
    first: dict[tuple[_Kind, _Kind], int] = {}
    for number, pair in enumerate(pairwise(kinds), start=1):
        first.setdefault(pair, number)
    new = [number for (_, (requests, _)), number in first.items() if number >= least and requests]
    short = sum(made <= MOST_REQUESTS for made in accumulate(requests for requests, _ in kinds))
    most = max(least, min(MOST_STEPS, short))
    num_steps = max([least, *(min(number + 2, len(kinds)) for number in new if number < most)])
    num_within = max([steps_within(num_steps), *(number + 2 for number in new)])
    num_seen = len(kinds) - has_rest
    looked = f"{'all' if is_whole else 'the first'} {num_seen} steps{' and what follows' * has_rest} were looked at"
    later = "" if is_whole else f"; {LATER}"
    left = [number for number in new if number >= num_steps]
    if not left:
        unlike = (
            f"; {len(new)} of them unlike the first {least}, or after others, so each run has {num_steps}"
            if new
            else ""
        )
        return Ahead(num_steps, num_within, f"{looked}{unlike}{later}")
    largest = max(left, key=lambda number: kinds[number][1])
    which = f"step {largest + 1}, which" if largest < num_seen else "what follows them, which"
    told = f"{which} allocates {human_bytes(kinds[largest][1])}, is unlike those that were tried"
    return Ahead(
        num_steps,
        num_within,
        f"{looked}, and {told}, or after another: only the run within the budget has it; --trial-steps {max(left) + 1} "
        f"has all runs try it{later}",
    )
