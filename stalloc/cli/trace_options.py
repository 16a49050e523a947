"""What several verbs that read traces have in common: which device, which allocators, on which GPU."""

import argparse
from pathlib import Path
from typing import TypeVar

from stalloc.cli.output import is_one_of
from stalloc.device import find_gpu
from stalloc.errors import BadInputError
from stalloc.replay.registry import ALLOCATORS, make
from stalloc.replay.simulation import Candidate
from stalloc.trace import DeviceRecord, Trace

T = TypeVar("T", Trace, DeviceRecord)


def of_device(file: str, traces: list[T], device: int | None) -> list[T]:
    """The traces of one device, or all without a number; BadInputError if the file does not have it."""
    chosen = [trace for trace in traces if device is None or trace.device == device]
    if not chosen:
        numbers = ", ".join(str(trace.device) for trace in traces)
        raise BadInputError(f"{file} has no device {device}, it has {numbers}: choose one of them with --device.")
    return chosen


def check_output(output: Path, example: str, *inputs: str | None) -> None:
    """Raise BadInputError where no file can be written, or it is one of the inputs; `example` is a name for one."""
    if output.is_dir():
        raise BadInputError(f"{output} is a folder: name the file to write, such as {output / example}.")
    if not output.parent.is_dir():
        raise BadInputError(f"the folder {output.parent} of {output} does not exist: make it first.")
    if is_one_of(output, inputs):
        raise BadInputError(f"{output} is the input: name another file to write to.")


def add_candidate_arguments(parser: argparse.ArgumentParser) -> None:
    for option, metavar, told in (
        ("--allocator", "NAME[:SETTINGS]", f"a model, can be repeated: {', '.join(ALLOCATORS)}"),
        ("--conf", "SETTINGS", "settings of torch's allocator; can be repeated"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=told)


def named_candidates(args: argparse.Namespace, capacity_bytes: int = 0) -> list[Candidate]:
    """What was named. Raises BadInputError for a name or a setting that does not exist, before any long work."""
    chosen = [*map(Candidate.named, args.allocator), *(Candidate("torch", conf) for conf in args.conf)]
    for candidate in chosen:
        make(candidate.allocator, candidate.settings, capacity_bytes)
    return list(dict.fromkeys(chosen))


def add_gpu_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="schedule the operations of a recording by record --ops on this GPU, with estimated times (default: the "
        "one that the virtual GPU presented)",
    )


def as_on_gpu(args: argparse.Namespace, record: DeviceRecord) -> DeviceRecord:
    """A recording as its last step would run on `--gpu`, or else on the GPU that the virtual one stands for."""
    from stalloc.cost.step_seconds import as_it_would_run, with_estimated_times

    return with_estimated_times(record, find_gpu(args.gpu)) if args.gpu else as_it_would_run(record)
