"""Show what dividing a program over many GPUs costs and saves, without a GPU: ZeRO, FSDP, HSDP and all between them.

  stalloc shard --gpu H100 --ranks 8 train.py --batch 4
  stalloc shard --ranks 64 --per-node 8 --budget 24GiB train.py
  stalloc shard --ranks 8 --way zero-3 --export fsdp2 train.py > sharded.py

The program is written for one GPU: it calls one PyTorch model, and has an optimizer. Its first three steps are recorded
on the virtual GPU, as it is and with every repeated block recomputed. From that follows, for each way to divide
parameters, gradients and optimizer state over the ranks, the most that the first rank holds and what it receives from
others. The best ways within the budget are then run: one rank alone, with PyTorch's fully_shard (FSDP2) or with DDP and
ZeroRedundancyOptimizer; bytes are measured, nothing is computed.

Each rank has batches as large as the program's. A way is a triple P/G/O: how many ranks share one copy of the
parameters (between forward and backward), of gradients, and of optimizer state. ddp is 1/1/1, zero-1 1/1/N, zero-2
1/N/N, zero-3 (FSDP) N/N/N, hpz:K (ZeRO++'s secondary copy) K/N/N, mics:K (MiCS, HSDP) K/K/K. Triples with gradients
over fewer ranks than parameters are predicted but cannot run, since fully_shard gives each rank the gradients of the
parameters that it keeps. --factors all tries every divisor of the number of ranks (AMSP) instead of 1, a node and all
(PaRO).

What is needed is what PyTorch counts as allocated: whole blocks, a little more than was requested. It reserves more
than that (`reserved_bytes` of a run). Seconds are estimates: computing, then communication, without overlap. --export
prints a way for another framework: FSDP2 code, a DeepSpeed JSON, an accelerate YAML, a torchtitan TOML. To train in
shards: torchrun --nproc-per-node N -m stalloc run --shard NAME train.py.

JSON: `gpu`, `num_ranks`, `per_node`, `budget_bytes`, `ways` (`name`, `parameters`, `gradients`, `state`, `recompute`,
`needed_bytes`, `step_bytes` and `making_bytes` (asked for in a step, and before), `step_allocated`, `making_allocated`,
`held_bytes`, `received_bytes` by kind and `between`, `seconds`, `fits`, `can_run`, `is_pareto`, `measured`), `best` (a
row, -1: none that can run fits), `num_parameters`, `largest` (of them in one unit), `formula_bytes` (16 bytes for each
parameter, over the ranks), `files`. The exit code is 0 if a way that can run fits, 1 if none does.
"""

import argparse
import dataclasses
import functools
import importlib
from collections import Counter
from typing import Any

from rich.console import Console

from stalloc.cli.output import add_json_argument, check_numbers, command_text, present
from stalloc.cli.program import add_program_arguments, program_command, program_files, run_program
from stalloc.cli.progress import lines_told
from stalloc.cli.tables import print_lines, print_prose, print_table
from stalloc.device.known_gpus import ASSUMED_BYTES, DEFAULT_GPU, PLENTY, VirtualGPU, find_gpu, memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, human_seconds
from stalloc.threads import patient_threads

EXPORTS = ("fsdp2", "deepspeed", "accelerate", "torchtitan")
_MOST_RANKS, _FORMULA_BYTES = 1 << 14, 16  # of a parameter in mixed precision with Adam (ZeRO, section 3.1)
_WARM = ("torch", "torch._dynamo", "torch.utils.checkpoint", "torch.distributed.fsdp", "stalloc.techniques.recompute",
         "torch.distributed.optim", "stalloc.fitting.observer", "stalloc.cost.call_work")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=8, metavar="N", help="GPUs in all (default: 8)")
    add("--per-node", type=int, metavar="K", help="GPUs of one machine (default: 8, or all)")
    add("--budget", metavar="SIZE", help="memory of a rank to keep within (default: the GPU's)")
    add("--factors", choices=("node", "all"), default="node", help="1, a node and all ranks (default), or all divisors")
    add("--network", metavar="SIZE", help="bytes a second of a GPU to other machines (default: 50GB)")
    add("--runs", type=int, default=3, metavar="N", help="measure the best N ways (default: 3)")
    add("--way", metavar="NAME", help="only this: ddp, zero-1, zero-2, zero-3, hpz:K, mics:K, P/G/O; append +blocks")
    add("--export", choices=EXPORTS, metavar="FORM", help="print --way for fsdp2, deepspeed, accelerate or torchtitan")
    add("--trial-seconds", type=float, default=120.0, metavar="N", help="give up runs that take longer (default: 120)")
    add_json_argument(parser)
    add_program_arguments(parser, devices=("virtual",))


def run(args: argparse.Namespace) -> int:
    """Show the ways; 0 if one that can run fits."""
    command = program_command(args)
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise BadInputError(f"--ranks is {args.ranks}: give the number of GPUs in all.")
    per_node = args.per_node or min(8, args.ranks)
    if not 1 <= per_node <= args.ranks or args.ranks % per_node:
        raise BadInputError(f"--per-node is {per_node}: give a number that {args.ranks} ranks are a multiple of.")
    if args.export and not args.way:
        raise BadInputError("--export needs --way: name the way to export.")
    check_numbers(args, 0, "runs")
    gpu = find_gpu(args.gpu) if args.gpu else DEFAULT_GPU
    if args.memory:
        gpu = dataclasses.replace(gpu, total_bytes=memory_option("--memory", args.memory))
    budget_bytes = memory_option("--budget", args.budget) if args.budget else gpu.total_bytes - ASSUMED_BYTES
    files = program_files(args, command)
    found = _Search(args, command, gpu, per_node, files)
    if args.export:
        print(found.exported(args.export), end="")
        return 0
    result = found.result(budget_bytes)
    present(args, result | {"files": files.all().as_json()}, _print, result, command)
    return 0 if result["best"] >= 0 else 1


class _Search:
    """The search for ways to shard a program: its recorded steps, and the runs that measure."""

    def __init__(
        self, args: argparse.Namespace, command: list[str], gpu: VirtualGPU, per_node: int, files: Any
    ) -> None:
        from stalloc import device
        from stalloc.cost.gpu_rates import rates_of
        from stalloc.sharding.rank_runs import RankWork, ShardRuns
        from stalloc.sharding.shard_ways import NETWORK_BYTES_PER_SECOND, Links
        from stalloc.techniques.technique_settings import parse_way

        self._args, self._per_node, self._files = args, per_node, files
        self._only = parse_way(args.way, args.ranks, must_run=False) if args.way else None
        plenty = dataclasses.replace(gpu, total_bytes=PLENTY)
        self._work = functools.partial(RankWork, plenty)
        self._name, self._tell = gpu.name, lines_told()
        rates = rates_of(gpu.name)
        between = float(memory_option("--network", args.network)) if args.network else NETWORK_BYTES_PER_SECOND
        self._links = Links(rates.peer_bytes_per_second or rates.link_bytes_per_second, between, per_node)
        self._tell("importing the libraries")
        with patient_threads():
            device.activate("virtual", plenty)
            for name in _WARM:
                importlib.import_module(name)
        self._program = lambda: run_program(list(command))
        self._runs = ShardRuns(self._program, files, args.trial_seconds)

    def exported(self, form: str) -> str:
        from stalloc.sharding.exports import exported

        marks, way, num_ranks = self._runs.marks(self._work()), self._only, self._args.ranks
        assert way is not None  # --export needs --way
        recompute, blocks = way.recomputes_blocks, marks.units[:-1]
        return exported(form, way.layout, num_ranks, blocks, recompute=recompute, kind=marks.block_kind)

    def result(self, budget_bytes: int) -> dict[str, Any]:
        from stalloc.sharding.shard_ways import all_ways, cheapest, undominated
        from stalloc.sizing.fake_ranks import Rank

        args = self._args
        recorded = self._recorded()
        every, only = args.factors == "all", self._only
        ways = all_ways(recorded, args.ranks, self._links, every=every, only=only.layout if only else None)
        if only is not None:
            ways = [one for one in ways if one.is_recomputed == only.recomputes_blocks]
        able = [one for one in ways if one.can_run]
        fitting = [one for one in undominated(able) if one.foreseen.needed_bytes <= budget_bytes]
        fitting = fitting or ([] if self._only is None else able)
        measured: dict[int, Any] = {}
        best = None
        for way in fitting[: args.runs] if args.runs else []:
            self._tell(f"a run of {way.layout.name(args.ranks)}")
            work = self._work(way.layout, Rank(number=0, num_ranks=args.ranks), is_whole_blocks=way.is_recomputed)
            measured[id(way)] = seen = self._runs.rank(work)
            if best is None and not seen.failure and seen.needed_bytes <= budget_bytes:
                best = way
        if not args.runs:
            best = cheapest(ways, budget_bytes, can_run=True)
        front = {id(one) for one in undominated(ways)}
        of_units: Counter[int] = Counter()
        for one in recorded[0].marks.parameters:
            of_units[one.unit] += one.num_items
        count = of_units.total()
        return {
            "gpu": self._name,
            "num_ranks": args.ranks,
            "per_node": self._per_node,
            "budget_bytes": budget_bytes,
            "ways": [_told(one, args.ranks, budget_bytes, id(one) in front, measured.get(id(one))) for one in ways],
            "best": next((row for row, one in enumerate(ways) if one is best), -1),
            "num_parameters": count,
            "largest": max(of_units.values()),
            "formula_bytes": _FORMULA_BYTES * count // args.ranks,
        }

    def _recorded(self) -> list[Any]:
        from stalloc.fitting.observation import ProgramSeen
        from stalloc.fitting.trials import TrialWork, run_trial
        from stalloc.sharding.shard_ways import Recorded

        self._tell("run 1: how long a step computes")
        work = TrialWork("observed", gpu_name=self._name)
        timed = run_trial(self._program, work, self._args.trial_seconds, self._files)
        seen = ProgramSeen.from_json(timed.seen) if not timed.failure else None
        seconds = seen.step_seconds if seen is not None else 0.0
        self._tell("run 2: the step as it is")
        found = [Recorded(self._runs.marks(self._work()), False, seconds)]
        if seen is None or not seen.calls:
            return found
        again = sum(sum(one.seconds for one in seen.blocks[call.block].operations) for call in seen.calls)
        self._tell("run 3: the step with its blocks recomputed")
        return [*found, Recorded(self._runs.marks(self._work(is_whole_blocks=True)), True, seconds + again)]


def _told(way: Any, num_ranks: int, budget_bytes: int, is_pareto: bool, measured: Any) -> dict[str, Any]:
    is_seen = measured is not None and not measured.failure
    needed = measured.needed_bytes if is_seen else way.foreseen.needed_bytes
    return {
        "name": way.layout.name(num_ranks),
        **dataclasses.asdict(way.layout),
        "recompute": "blocks" if way.is_recomputed else None,
        "needed_bytes": needed,
        **dataclasses.asdict(way.foreseen),
        "received_bytes": dataclasses.asdict(way.traffic),
        "seconds": way.seconds,
        "fits": needed <= budget_bytes,
        "can_run": way.can_run,
        "is_pareto": is_pareto,
        "measured": dataclasses.asdict(measured) if measured is not None else None,
    }


def _print(console: Console, result: dict[str, Any], command: list[str]) -> None:
    nodes = result["num_ranks"] // result["per_node"]
    console.print(
        f"{result['num_ranks']} x {result['gpu']} ({result['per_node']} a node, {nodes} in all), a budget of "
        f"{human_bytes(result['budget_bytes'])} for each"
    )
    rows = [
        _row("*" if row == result["best"] else "+" * told["is_pareto"], told)
        for row, told in enumerate(result["ways"])
        if told["is_pareto"] or told["can_run"]
    ]
    columns = ("", "sharding", "P/G/O", "", "a rank needs", "between steps", "receives a step", "from other nodes",
               "est. step", "checked")  # fmt: skip
    print_table(console, columns, rows, text_columns=4, indent="  ")
    lines = [
        "P/G/O: ranks that share one copy of parameters between forward and backward, of gradients, of optimizer state",
        "+: no other way is as quick with less memory; foreseen: not run, as PyTorch does "
        "not divide gradients over fewer ranks than parameters",
        f"16 bytes a parameter over all ranks would be {human_bytes(result['formula_bytes'])}",
    ]
    print_lines(console, lines)
    if result["best"] < 0:
        least = min((one for one in result["ways"] if one["can_run"]), key=lambda one: one["needed_bytes"])
        needs = f"{least['name']} needs least, {human_bytes(least['needed_bytes'])}"
        print_prose(console, f"nothing that runs fits; {needs}: give it that much, more ranks, or a smaller batch")
        return
    best = result["ways"][result["best"]]
    name = best["name"] + ("+blocks" if best["recompute"] else "")
    words = command_text(*command)
    console.print(f"next: torchrun --nproc-per-node {result['per_node']} -m stalloc run --shard {name} {words}")


def _row(sign: str, told: dict[str, Any]) -> list[str]:
    measured, received = told["measured"], told["received_bytes"]
    total = sum(value for kind, value in received.items() if kind != "between")
    checked = "foreseen" if not told["can_run"] else ""
    if measured is not None:
        checked = "run" if not measured["failure"] else f"failed: {measured['failure']}"
    return [
        sign,
        told["name"],
        f"{told['parameters']}/{told['gradients']}/{told['state']}",
        "blocks recomputed" if told["recompute"] else "",
        human_bytes(told["needed_bytes"]) + ("" if told["fits"] else " too much"),
        human_bytes(told["held_bytes"]),
        human_bytes(total),
        human_bytes(received["between"]) if received["between"] else "",
        human_seconds(told["seconds"]),
        checked,
    ]
