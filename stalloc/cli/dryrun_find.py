"""`stalloc dryrun --find batch=1..512`: the largest value of a parameter with which a program fits a card."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_offer import Offer, offer_of
from stalloc.cli.dryrun_runs import Runs, contenders
from stalloc.cli.output import wants_text, write_json
from stalloc.cli.program import program_command
from stalloc.sizing.largest import Largest, find_largest
from stalloc.sizing.parameter import Parameter
from stalloc.sizing.run_work import RanOut
from stalloc.sizing.tries import Tries


def find(args: argparse.Namespace) -> int:
    """Search; 0 if stalloc has an answer."""
    command = program_command(args)
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
    result = {**_result(offer, parameter, tries, found), "files": runs.files.all().as_json()}
    if wants_text(args):
        from stalloc.cli.dryrun_find_report import print_largest

        print_largest(result, offer, parameter, tries, found, command)
    write_json(args, result)
    return EXIT_DONE if found.by_allocator["stalloc"] >= 0 else EXIT_CHECK_FAILED


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
        "notes": found.notes,
        "uncertain": tries.findings(found.by_allocator),
        "num_runs": tries.num_runs,
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
