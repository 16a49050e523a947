"""`--gpu NAME`: a recording by `stalloc record --ops` as its last step would run on a GPU, with estimated times.

Without it a recording of the virtual GPU gets the times of the GPU that it stands for.
"""

import argparse

from stalloc.device import find_gpu
from stalloc.trace import DeviceRecord


def add_gpu_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="schedule the operations of a recording by record --ops on this GPU, with estimated times (default: the "
        "one that the virtual GPU presented)",
    )


def as_on_gpu(args: argparse.Namespace, record: DeviceRecord) -> DeviceRecord:
    """The record with times estimated for `--gpu`. Raises BadInputError if it has no whole step with operations."""
    from stalloc.cost.step_seconds import as_it_would_run, with_estimated_times

    return with_estimated_times(record, find_gpu(args.gpu)) if args.gpu else as_it_would_run(record)
