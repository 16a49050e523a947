"""How verbs run a program many times: what is told of it on a terminal, and the allocators that are compared."""

import argparse
import dataclasses
import time
from collections.abc import Sequence

from stalloc.allocator_conf import VARIABLES
from stalloc.cli.dryrun_report import allocator_name
from stalloc.cli.native import native_settings
from stalloc.cli.program import program_command, run_program
from stalloc.cli.program_writes import program_files
from stalloc.cli.progress import lines_told
from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import PLENTY
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.replay.simulation import Candidate
from stalloc.sizing.fake_ranks import Rank
from stalloc.sizing.run_work import RunWork
from stalloc.sizing.side_by_side import Asked, RunSeen, run_all, side_by_side, warm
from stalloc.sizing.tries import Contender, known_to_replay

_MOST_RANKS = 1 << 16


class Runs:
    """Runs of the program side by side, told on a terminal as they end."""

    def __init__(self, args: argparse.Namespace) -> None:
        for option in ("jobs", "steps"):
            if getattr(args, option) < 0:
                raise BadInputError(f"--{option} is {getattr(args, option)}: give a number from 0.")
        self._rank = _the_rank(args) if args.ranks is not None and args.find else None
        self._jobs = side_by_side(args.jobs)
        self.files = program_files(args, program_command(args))
        self._tell = lines_told()
        self._began = time.monotonic()
        self._num_told = 0

    def warm(self, gpu: VirtualGPU) -> None:
        """Be ready to run."""
        self._tell(f"importing the libraries for a virtual {gpu.name}")
        warm(dataclasses.replace(gpu, total_bytes=PLENTY))

    def __call__(self, asked: Sequence[Asked]) -> list[RunSeen]:
        """Run them."""
        if self._rank is not None:
            asked = [as_rank(one, self._rank) for one in asked]
        return run_all(asked, run_program, self._jobs, self._told, self.files)

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


def chosen_ranks(args: argparse.Namespace) -> list[Rank]:
    """The ranks that --rank names, all without it."""
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise BadInputError(f"--ranks is {args.ranks}: give the number of processes that torchrun starts in all.")
    if args.rank == "all":
        return [Rank(number=number, num_ranks=args.ranks) for number in range(args.ranks)]
    words, last = args.rank.split(","), args.ranks - 1
    if not all(word.isascii() and word.isdigit() and len(word) < 9 and int(word) <= last for word in words):
        raise BadInputError(f"--rank is {args.rank[:40]!r}: give all, or ranks from 0 to {last} with commas between.")
    return [Rank(number=number, num_ranks=args.ranks) for number in sorted({int(word) for word in words})]


def _the_rank(args: argparse.Namespace) -> Rank:
    found = chosen_ranks(args)
    if len(found) > 1:
        raise BadInputError("--find with --ranks is of one rank: name the one that needs most, for example --rank 0.")
    return found[0]


def as_rank(one: Asked, rank: Rank) -> Asked:
    """A run as one rank of several."""
    gpu = dataclasses.replace(one.work.gpu, num_devices=rank.num_local)
    variables = one.work.variables | rank.variables()
    return dataclasses.replace(one, work=dataclasses.replace(one.work, gpu=gpu, is_rank=True, variables=variables))
