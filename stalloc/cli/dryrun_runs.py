"""Runs of a program side by side in forks: what they are offered, the allocators, and `stalloc dryrun --ranks`.

A rank is run by itself, without the others.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from stalloc.allocator_conf import only_this
from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_report import Offer, allocator_name, last_lines
from stalloc.cli.native import native_settings
from stalloc.cli.node_report import print_node
from stalloc.cli.output import command_text, table_console, wants_text, write_json
from stalloc.cli.program import chosen_gpu, program_command, run_program
from stalloc.cli.program_writes import program_files
from stalloc.cli.progress import lines_told
from stalloc.cli.tables import print_prose, print_table
from stalloc.device import DEFAULT_GPU, VirtualGPU
from stalloc.device.known_gpus import PLENTY, memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.replay.simulation import Candidate
from stalloc.sizing.fake_ranks import Rank
from stalloc.sizing.node import node_memory
from stalloc.sizing.side_by_side import Asked, RunSeen, RunWork, run_all, side_by_side, warm
from stalloc.sizing.tries import NEEDED, Contender, Tries, Wanted, known_to_replay
from stalloc.trace.sites import UNKNOWN

_MOST_HOLDERS = 3
_MOST_RANKS = 1 << 16


def headroom_of(args: argparse.Namespace) -> int:
    """Bytes of --headroom, which may be none."""
    return memory_option("--headroom", args.headroom) if args.headroom != "0" else 0


def offer_of(args: argparse.Namespace) -> Offer:
    """What the options say. Raises BadInputError where nothing is left for the program."""
    made = Offer(chosen_gpu(args) or DEFAULT_GPU, headroom_of(args))
    if made.program_bytes <= 0:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of {made.gpu.name}: give less.")
    return made


class Runs:
    """Runs of the program side by side, told on a terminal as they end."""

    def __init__(self, args: argparse.Namespace) -> None:
        for option in ("jobs", "steps"):
            if getattr(args, option) < 0:
                raise BadInputError(f"--{option} is {getattr(args, option)}: give a number from 0.")
        self._rank = _the_rank(args) if args.ranks is not None and args.find else None
        self._jobs = side_by_side(args.jobs)
        self._command = program_command(args)
        self.files = program_files(args, self._command)
        self._tell = lines_told()
        self._began = time.monotonic()
        self._num_told = 0

    def warm(self, gpu: VirtualGPU) -> None:
        """Be ready to run."""
        self._tell("importing the libraries")
        warm(dataclasses.replace(gpu, total_bytes=PLENTY), self._command)

    def __call__(self, asked: Sequence[Asked]) -> list[RunSeen]:
        """Make these runs, side by side."""
        if self._rank is not None:
            asked = [_as_rank(one, self._rank) for one in asked]
        return run_all(asked, run_program, self._jobs, self._told, self.files)

    def _told(self, asked: Asked, seen: RunSeen) -> None:
        self._num_told += 1
        reserved = max((device["reserved_peak_bytes"] for device in seen.devices), default=0)
        how = f"takes {human_bytes(reserved)}" if seen.completes else "runs out of memory"
        self._tell(f"run {self._num_told}, {time.monotonic() - self._began:.0f} s: {asked.name}: {how}")


def ran_out_text(told: dict[str, Any]) -> str:
    """Where memory ran out and who held it, in a sentence; `told` is a `RanOut` as JSON."""
    holders = ", ".join(f"{human_bytes(size)} by {_holder(name)}" for name, size in told["holders"][:_MOST_HOLDERS])
    return (
        f"{printable(told['place'])} asks for {human_bytes(told['wanted_bytes'])} when "
        f"{human_bytes(told['allocated_bytes'])} are allocated and {human_bytes(told['reserved_bytes'])} reserved"
        f"{f'; most is held: {holders}' if holders else ''}"
    )


def _holder(name: str) -> str:
    return printable(name) if name != UNKNOWN else "backward or others without a line"


def contenders(gpu: VirtualGPU, num_steps: int) -> list[Contender]:
    """The allocators that a dry run compares, each on a card with what is offered."""
    made = []
    for name, (_, conf, _) in zip(("native", "expandable"), native_settings(), strict=False):
        candidate = Candidate("torch", conf)
        exact = known_to_replay(candidate)
        made.append(
            Contender(
                name=name,
                shown=allocator_name(name),
                candidate=candidate if exact else None,
                is_exact=exact,
                work=RunWork(gpu=gpu, num_steps=num_steps, variables=only_this(conf)),
            )
        )
    work = RunWork(gpu=gpu, under="stalloc", num_steps=num_steps)
    ours = Candidate("stalloc")
    return [*made, Contender(name="stalloc", shown="stalloc", candidate=ours, is_exact=False, work=work)]


def _chosen_ranks(args: argparse.Namespace) -> list[Rank]:
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
    found = _chosen_ranks(args)
    if len(found) > 1:
        raise BadInputError("--find with --ranks tries one rank: name the one that needs most, for example --rank 0.")
    return found[0]


def _as_rank(one: Asked, rank: Rank) -> Asked:
    """A run as one rank of several."""
    gpu = dataclasses.replace(one.work.gpu, num_devices=rank.num_local)
    variables = one.work.variables | rank.variables()
    return dataclasses.replace(one, work=dataclasses.replace(one.work, gpu=gpu, is_rank=True, variables=variables))


def try_ranks(args: argparse.Namespace) -> int:
    """Try the ranks; 0 if each fits with stalloc."""
    command, offer = program_command(args), offer_of(args)
    ranks = _chosen_ranks(args)
    runs = Runs(args)
    runs.warm(offer.gpu)
    tried = contenders(dataclasses.replace(offer.gpu, total_bytes=offer.program_bytes), args.steps)
    of = {rank.number: rank for rank in ranks}

    def run(asked: Sequence[Asked]) -> list[RunSeen]:
        return runs(
            [_as_rank(dataclasses.replace(one, command=one.command[1:]), of[int(one.command[0])]) for one in asked]
        )

    tries = Tries(list(of), lambda number: [str(number), *command], "rank {}".format, tried, offer.program_bytes, run)
    everything = range(len(ranks))
    tries.do([Wanted("observe", NEEDED, at) for at in everything])
    tries.do([Wanted("find out", one.name, at) for one in tried for at in everything])
    tries.do([Wanted("fail", one.name, at) for one in tried for at in _first_failing(tries, one)])
    most = max(everything, key=lambda at: tries.needed_bytes(at) or 0)
    node = node_memory(
        offer.gpu,
        {tries.values[at]: (seen.devices, seen.process) for at, seen in sorted(tries.observed.items())},
        num_local=ranks[0].num_local,
        files_bytes=runs.files.all().written_bytes,
    )
    result = {
        **offer.as_json(),
        "num_ranks": ranks[0].num_ranks,
        "ranks": [_entry(tries, at) for at in everything],
        "uncertain": tries.findings(dict.fromkeys(tries.contenders, most)),
        "num_runs": tries.num_runs,
        "files": runs.files.all().as_json(),
        "node": node.as_json(),
    }
    if wants_text(args):
        rest = functools.partial(print_node, node=node, headroom_bytes=offer.headroom_bytes, whole=args.node)
        _print(result, tries, offer, command, rest)
    write_json(args, result)
    fits = all(tries.fits("stalloc", at) for at in everything)
    return EXIT_DONE if fits else EXIT_CHECK_FAILED


def _first_failing(tries: Tries, one: Contender) -> list[int]:
    """The first rank that does not fit, for which it is shown where memory runs out."""
    return [at for at in range(len(tries.values)) if tries.fits(one.name, at) is False][:1]


def _entry(tries: Tries, at: int) -> dict[str, Any]:
    """What is known of one rank."""
    return {
        "rank": tries.values[at],
        "needed_bytes": tries.needed_bytes(at),
        **{name: _under(tries, name, at) for name in tries.contenders},
    }


def _under(tries: Tries, name: str, at: int) -> dict[str, Any]:
    seen = tries.limited.get((name, at))
    reserved = [device["reserved_peak_bytes"] for device in seen.devices] if seen is not None else []
    failed = tries.failed.get((name, at))
    told = failed.ran_out if failed is not None else None
    return {
        "fits": tries.fits(name, at),
        "reserved_peak_bytes": max(reserved, default=None) if reserved else tries.reserved_bytes(name, at),
        "ran_out": dataclasses.asdict(told) if told is not None else None,
    }


def _print(
    result: dict[str, Any], tries: Tries, offer: Offer, command: list[str], print_rest: Callable[[Console], None]
) -> None:
    console = table_console()
    console.print(offer.title())
    rows = []
    for told in result["ranks"]:
        live = told["needed_bytes"]
        cells = [_cell(told[name]) for name in tries.contenders]
        rows.append([f"rank {told['rank']}", "" if live is None else human_bytes(live), *cells])
    columns = (f"of {result['num_ranks']}", "live at a time", *(one.shown for one in tries.contenders.values()))
    print_table(console, columns, rows, indent="  ")
    print_prose(console, "under each allocator: what is reserved, or that it does not fit", indent="  ")
    for told in result["ranks"]:
        for name, one in tries.contenders.items():
            if told[name]["ran_out"] is not None:
                text = f"rank {told['rank']}, {one.shown}: {ran_out_text(told[name]['ran_out'])}"
                print_prose(console, text, indent="  ")
    print_rest(console)
    text = "no other rank is there: each is taken to hold what this one does; NCCL's own memory is part of the headroom"
    for line in [text, *last_lines(result)]:
        print_prose(console, line, indent="  ")
    words = command_text(*command)
    console.print(f"next: STALLOC=1 torchrun --nproc-per-node {min(result['num_ranks'], 8)} {words} on real GPUs")


def _cell(told: dict[str, Any]) -> str:
    if not told["fits"]:
        return "does not fit"
    return human_bytes(told["reserved_peak_bytes"]) if told["reserved_peak_bytes"] is not None else "fits"
