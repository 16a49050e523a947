"""Allocators as they are named on the command line, for the verbs that replay them."""

import argparse

from stalloc.replay.registry import ALLOCATORS, make
from stalloc.replay.simulation import Candidate


def add_candidate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --allocator and --conf."""
    parser.add_argument(
        "--allocator",
        action="append",
        default=[],
        metavar="NAME[:SETTINGS]",
        help=f"a model, can be repeated: {', '.join(ALLOCATORS)}",
    )
    parser.add_argument(
        "--conf", action="append", default=[], metavar="SETTINGS", help="settings of torch's allocator; can be repeated"
    )


def named_candidates(args: argparse.Namespace, capacity_bytes: int = 0) -> list[Candidate]:
    """What was named. Raises BadInputError for a name or a setting that does not exist, before any long work."""
    chosen = [*map(Candidate.named, args.allocator), *(Candidate("torch", conf) for conf in args.conf)]
    for candidate in chosen:
        make(candidate.allocator, candidate.settings, capacity_bytes)
    return list(dict.fromkeys(chosen))
