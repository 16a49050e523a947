"""`stalloc dryrun --find`: the largest batch that fits a card, or the smallest card that fits a program."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stalloc.allocator_conf import VARIABLES
from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_offer import Offer, offer_of
from stalloc.cli.dryrun_report import allocator_name
from stalloc.cli.native import native_settings
from stalloc.cli.output import wants_text, write_json
from stalloc.cli.program import program_command, run_program
from stalloc.cli.progress import lines_told
from stalloc.device import VirtualGPU
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.replay.simulation import Candidate
from stalloc.sizing.largest import Largest, find_largest
from stalloc.sizing.parameter import Parameter
from stalloc.sizing.run_work import RanOut, RunWork
from stalloc.sizing.side_by_side import Asked, RunSeen, run_all, side_by_side, warm
from stalloc.sizing.tries import PLENTY, Contender, Tries, known_to_replay

GPU = "gpu"  #: what --find says for the smallest card


def find(args: argparse.Namespace) -> int:
    """Search; 0 if stalloc has an answer."""
    command = program_command(args)
    if args.jobs < 0 or args.steps < 0:
        raise BadInputError("--jobs and --steps are numbers from 0: give 0 for as many as there are.")
    if args.find == GPU:
        from stalloc.cli.dryrun_cards import find_card

        return find_card(args, command)
    parameter = Parameter.parse(args.find)
    parameter.check_in(command)
    offer = offer_of(args)
    runs = Runs(args)
    runs.warm(offer.gpu)
    tries = Tries(
        list(parameter.values),
        lambda value: parameter.filled(command, value),
        parameter.label,
        contenders(dataclasses.replace(offer.gpu, total_bytes=offer.program_bytes), args.steps),
        offer.program_bytes,
        runs,
    )
    found = find_largest(tries)
    result = _result(offer, parameter, tries, found)
    if wants_text(args):
        from stalloc.cli.dryrun_find_report import print_largest

        print_largest(result, offer, parameter, tries, found, command)
    write_json(args, result)
    return EXIT_DONE if found.by_allocator["stalloc"] >= 0 else EXIT_CHECK_FAILED


class Runs:
    """Runs of the program side by side, told on a terminal as they end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._jobs = side_by_side(args.jobs)
        self._tell = lines_told()
        self._began = time.monotonic()
        self._num_told = 0

    def warm(self, gpu: VirtualGPU) -> None:
        """Be ready to run."""
        self._tell(f"importing the libraries for a virtual {gpu.name}")
        warm(dataclasses.replace(gpu, total_bytes=PLENTY))

    def __call__(self, asked: Sequence[Asked]) -> list[RunSeen]:
        """Run them."""
        return run_all(asked, run_program, self._jobs, self._told)

    def _told(self, asked: Asked, seen: RunSeen) -> None:
        self._num_told += 1
        reserved = max((device["reserved_peak_bytes"] for device in seen.devices), default=0)
        how = f"takes {human_bytes(reserved)}" if seen.completes else "runs out of memory"
        self._tell(f"run {self._num_told}, {time.monotonic() - self._began:.0f} s: {asked.name}: {how}")


def contenders(gpu: VirtualGPU, num_steps: int) -> list[Contender]:
    """The allocators that a dry run compares, each on a card with what is offered."""
    made = []
    for name, (_, conf, _) in zip(("native", "expandable"), native_settings(), strict=False):
        variables = dict.fromkeys(VARIABLES, "") | {"PYTORCH_CUDA_ALLOC_CONF": conf}
        candidate = Candidate("torch", conf)
        exact = known_to_replay(candidate)
        made.append(
            Contender(
                name=name,
                shown=allocator_name(name),
                candidate=candidate if exact else None,
                is_exact=exact,
                work=RunWork(gpu=gpu, num_steps=num_steps, variables=variables),
            )
        )
    work = RunWork(gpu=gpu, under="stalloc", num_steps=num_steps)
    ours = Candidate("stalloc")
    return [*made, Contender(name="stalloc", shown="stalloc", candidate=ours, is_exact=False, work=work)]


def _result(offer: Offer, parameter: Parameter, tries: Tries, found: Largest) -> dict[str, Any]:
    values = parameter.values
    needed = found.needed
    return {
        **offer.as_json(),
        "parameter": parameter.name,
        "first": values[0],
        "last": values[-1],
        "step": values.step,
        "needed": None if needed is None else dataclasses.asdict(needed_figures(tries, needed)),
        **{name: dataclasses.asdict(answer(tries, name, index)) for name, index in found.by_allocator.items()},
        "num_runs": tries.num_runs,
        "notes": found.notes,
        "uncertain": tries.findings(),
    }


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The largest value of which what is live at a time fits."""

    largest: int | None
    needed_bytes: int | None
    next: int | None
    next_needed_bytes: int | None


def needed_figures(tries: Tries, index: int) -> Needed:
    """What is needed at an index and at the next."""
    has_next = index + 1 < len(tries.values)
    return Needed(
        largest=tries.values[index] if index >= 0 else None,
        needed_bytes=tries.needed_bytes(index),
        next=tries.values[index + 1] if has_next else None,
        next_needed_bytes=tries.needed_bytes(index + 1),
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found for one allocator; bytes are those of the device with most."""

    largest: int | None
    """None: not even the first value fits."""
    is_last: bool
    """Whether it is the end of the range, so that a larger one may fit."""
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    fails: int | None
    """The next value, with which memory runs out."""
    ran_out: RanOut | None


def answer(tries: Tries, name: str, index: int) -> Answer:
    """What is known of an answer and of the value after it."""
    seen = tries.limited.get((name, index))
    failed = tries.failed.get((name, index + 1))

    def peak(key: str) -> int | None:
        return max((device[key] for device in seen.devices), default=0) if seen is not None else None

    return Answer(
        largest=tries.values[index] if index >= 0 else None,
        is_last=index + 1 == len(tries.values),
        allocated_peak_bytes=peak("allocated_peak_bytes"),
        reserved_peak_bytes=peak("reserved_peak_bytes"),
        fails=tries.values[index + 1] if index + 1 < len(tries.values) else None,
        ran_out=failed.ran_out if failed is not None else None,
    )
