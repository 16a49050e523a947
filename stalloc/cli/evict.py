"""Replay policies that evict while a program runs: what it costs to stay under a budget by recomputing.

FILE is a recording by `stalloc record --ops`, of which the last whole step is replayed, or a log of the DTR simulator
(one JSON object a line, plain or packed). Whenever a request does not fit, a policy chooses what is evicted; what is
needed again later is recomputed, and so is whatever that needs.

A budget is a share of the recorded peak, such as 0.5 or 50%, or a size, such as 12GiB; commas separate several. Without
--policy and --all the policies of DTR, MegTaiChi and Coop are shown: dtr counts the cost of what is evicted around a
storage, dtr-eq does so by equivalence classes, dtr-local does not; dte counts adjacent free memory; coop evicts
neighbours in memory. --all adds lru, size (largest first), msps (memory saved per second) and random. dte and coop go
by addresses, in a range of the budget's size; --places gives addresses to all policies. Nothing is moved to the host.

overhead is the time of all calls divided by that without a budget; a replay that takes twice the time is given up.
Times of a recording are measured ones, else estimates for --gpu. "apart": storages evicted although enough bytes were
free, but not next to each other; a replay that fails for this reason ends as "fragmented". docs/eviction.md says what
is a model.

JSON: `files`, each with `file`, `device`, `peak_bytes`, `seconds` (null for a log) and `rows`: `policy`, `places`,
`budget_bytes`, `ending` (complete, too long, out of memory, fragmented), `overhead` (null unless complete),
`added_seconds`, `peak_bytes`, `evictions`, `evicted_bytes`, `recomputed_calls`, `recomputed_bytes`, `moved_bytes`,
`extra_evictions`.
"""

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from stalloc.cli.output import add_json_argument, file_label, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_lines, print_prose, print_table
from stalloc.cost.gpu_rates import rates_of
from stalloc.device import find_gpu, parse_memory
from stalloc.errors import BadInputError
from stalloc.eviction.scores import POLICIES
from stalloc.figures import human_bytes, human_seconds

_MEGTAICHI = (
    "of MegTaiChi, DTE alone: a recording of one device shows no partition over devices (DTP); places for what repeats "
    "(TMA) are what stalloc plan gives"
)
_SHOWN = ("dtr", "dtr-eq", "dtr-local", "dte", "coop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="recording with operations, or log of the simulator")
    add("--budget", required=True, metavar="B[,B]", help="shares of the peak, such as 0.5,0.7, or sizes, such as 12GiB")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--policy", metavar="NAME[,NAME]", help=f"of {', '.join(POLICIES)}")
    chosen.add_argument("--all", action="store_true", help="every policy")
    add("--places", action="store_true", help="addresses for all policies, not only dte and coop")
    add("--gpu", default="H100", metavar="NAME", help="for estimated times (default: H100)")
    add("--seed", type=int, default=0, metavar="N", help="of the policy random (default: 0)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    policies = list(POLICIES) if args.all else args.policy.split(",") if args.policy else list(_SHOWN)
    for name in policies:
        if name not in POLICIES:
            raise BadInputError(f"--policy: there is no policy {name[:40]!r}: choose from {', '.join(POLICIES)}.")
    asked = [_budget(text) for text in args.budget.split(",")]
    if not 0 <= args.seed < 1 << 31:
        raise BadInputError(f"--seed is {args.seed}: give a number from 0 to {(1 << 31) - 1}.")
    rates = rates_of(find_gpu(args.gpu).name)
    from stalloc.eviction.programs import read_programs

    told = []
    for file in args.files:
        with working(f"replaying {file_label(file)}"):
            told += [_replay(args, file, program, policies, asked) for program in read_programs(file, rates)]
    present(args, {"files": told}, _print, told)
    return 0


def _budget(text: str) -> float | int:
    """A share of the peak as a float, or bytes as an integer."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return parse_memory(text)
    if not 0 < share <= 1:
        raise BadInputError(
            f"--budget: {text[:40]} is no share of the peak: give one above 0 up to 1, such as 0.5 or 50%, "
            "or a size such as 12GiB."
        )
    return share


def _replay(
    args: argparse.Namespace, file: str, program: Any, policies: list[str], asked: list[float | int]
) -> dict[str, Any]:
    from stalloc.eviction.replay import peak_of, replay

    peak = peak_of(program.copied)
    rows = []
    for budget in asked:
        num_bytes = int(budget * peak) if isinstance(budget, float) else budget
        for name in policies:
            source = program.in_place if name == "coop" else program.copied
            made = dataclasses.asdict(replay(source, name, num_bytes, places=args.places, seed=args.seed))
            made["ending"] = made["ending"].name.lower().replace("_", " ")
            rows.append(made | {"places": args.places or POLICIES[name].by_place, "moved_bytes": 0})
    ticks = program.copied.ticks_per_second
    seconds = None if ticks is None else int(program.copied.op_ticks.sum()) / ticks
    return {"file": file, "device": program.device, "peak_bytes": peak, "seconds": seconds, "rows": rows}


def _print(console: Console, files: list[dict[str, Any]]) -> None:
    columns = ("budget", "policy", "overhead", "evictions", "evicted", "calls again", "made again", "apart")
    for told in files:
        seconds = "" if told["seconds"] is None else f", est. {human_seconds(told['seconds'])} a step"
        peak = human_bytes(told["peak_bytes"])
        print_prose(console, f"{file_label(told['file'])}, device {told['device']}: {peak} at the peak{seconds}")
        print_table(console, columns, list(map(_row, told["rows"])), text_columns=2)
        if any(one["ending"] == "out of memory" for one in told["rows"]):
            print_lines(console, ["out of memory: what has to be there at once does not fit, whatever is evicted"])
        if any(one["policy"] == "dte" for one in told["rows"]):
            print_lines(console, [_MEGTAICHI])


def _row(one: dict[str, Any]) -> list[str]:
    ending = "over 2" if one["ending"] == "too long" else one["ending"]
    return [
        human_bytes(one["budget_bytes"]),
        POLICIES[one["policy"]].title,
        f"{one['overhead']:.4f}" if one["overhead"] is not None else ending,
        *(f"{one['evictions']:,}", human_bytes(one["evicted_bytes"])),
        *(f"{one['recomputed_calls']:,}", human_bytes(one["recomputed_bytes"])),
        f"{one['extra_evictions']:,}" if one["places"] else "",
    ]
