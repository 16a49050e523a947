"""`--gpu NAME`: a recording by `stalloc record --ops` as its last step would run on a GPU, with estimated times."""

import argparse

from stalloc.device import find_gpu
from stalloc.trace import DeviceRecord


def add_gpu_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="estimate when operations of a recording by record --ops run on this GPU"
    )


def as_on_gpu(args: argparse.Namespace, record: DeviceRecord) -> DeviceRecord:
    """The record as `--gpu` asks for it, or as it is. Raises BadInputError if it has no whole step with operations."""
    if not args.gpu:
        return record
    from stalloc.cost.estimated_activity import with_estimated_times
    from stalloc.cost.gpu_rates import rates_of

    gpu = find_gpu(args.gpu)
    return with_estimated_times(record, gpu, rates_of(gpu.name))
