"""`stalloc dryrun --ranks N`: ranks of a distributed program, each by itself."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_find_report import ran_out_text
from stalloc.cli.dryrun_offer import Offer, offer_of
from stalloc.cli.dryrun_report import last_lines
from stalloc.cli.dryrun_runs import Runs, as_rank, chosen_ranks, contenders
from stalloc.cli.output import command_text, table_console, wants_text, write_json
from stalloc.cli.program import program_command
from stalloc.cli.tables import print_prose, print_table
from stalloc.figures import human_bytes
from stalloc.sizing.side_by_side import Asked, RunSeen
from stalloc.sizing.tries import NEEDED, Contender, Tries, Wanted


def try_ranks(args: argparse.Namespace) -> int:
    """Try the ranks; 0 if each fits with stalloc."""
    command, offer = program_command(args), offer_of(args)
    ranks = chosen_ranks(args)
    runs = Runs(args)
    runs.warm(offer.gpu)
    tried = contenders(dataclasses.replace(offer.gpu, total_bytes=offer.program_bytes), args.steps)
    of = {rank.number: rank for rank in ranks}

    def run(asked: Sequence[Asked]) -> list[RunSeen]:
        return runs(
            [as_rank(dataclasses.replace(one, command=one.command[1:]), of[int(one.command[0])]) for one in asked]
        )

    tries = Tries(list(of), lambda number: [str(number), *command], "rank {}".format, tried, offer.program_bytes, run)
    everything = range(len(ranks))
    tries.do([Wanted("observe", NEEDED, at) for at in everything])
    tries.do([Wanted("find out", one.name, at) for one in tried for at in everything])
    tries.do([Wanted("fail", one.name, at) for one in tried for at in _first_failing(tries, one)])
    most = max(everything, key=lambda at: tries.needed_bytes(at) or 0)
    result = {
        **offer.as_json(),
        "num_ranks": ranks[0].num_ranks,
        "ranks": [_entry(tries, at) for at in everything],
        "uncertain": tries.findings(dict.fromkeys(tries.contenders, most)),
        "num_runs": tries.num_runs,
        "files": runs.files.all().as_json(),
    }
    if wants_text(args):
        _print(result, tries, offer, command)
    write_json(args, result)
    fits = all(tries.fits("stalloc", at) for at in everything)
    return EXIT_DONE if fits else EXIT_CHECK_FAILED


def _first_failing(tries: Tries, one: Contender) -> list[int]:
    """The first rank that does not fit, of which it is shown where."""
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


def _print(result: dict[str, Any], tries: Tries, offer: Offer, command: list[str]) -> None:
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
    text = "no other rank is there: each is taken to hold what this one does; NCCL's own memory is part of the headroom"
    for line in [text, *last_lines(result)]:
        print_prose(console, line, indent="  ")
    words = command_text(*command)
    console.print(f"next: STALLOC=1 torchrun --nproc-per-node {min(result['num_ranks'], 8)} {words} on real GPUs")


def _cell(told: dict[str, Any]) -> str:
    if not told["fits"]:
        return "does not fit"
    return human_bytes(told["reserved_peak_bytes"]) if told["reserved_peak_bytes"] is not None else "fits"
