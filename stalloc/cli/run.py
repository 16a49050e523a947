"""Run a program under stalloc: watch its first steps, plan, go on with the plan, report.

  stalloc run train.py --epochs 3
  stalloc run --device virtual --gpu A100-80GB --compare-native train.py
  stalloc run --save-plan train.plan.npz train.py      then      stalloc run --plan train.plan.npz train.py
  stalloc run --budget 24GiB train.py

The program is run unchanged, in this process, on the real GPU if there is one, else on a virtual GPU. Its plan is kept
in the user's cache folder (STALLOC_CACHE names another one, or is "off") and is in force from the first allocation when
the same program is run again with the same arguments; one that no longer fits is replaced. torch's optimizers or
stalloc.step() mark steps; without marks they are found from the allocations.

--budget limits reserved memory from the first allocation, by the settings and the plan of a fit; a request beyond it is
an out-of-memory error. If the current folder has no fit, `stalloc fit` makes one first. --fit names the file of a fit.

--cap limits memory whatever the shapes: what is saved for backward is evicted when a request does not fit, and restored
before backward needs it. --host bounds the host memory for it (0: nothing is moved; default: all).

On the virtual GPU results are zeros, so existing files stay as they are whatever the program does to them; new files
are kept, and the report names both. --keep-files writes for real.

--compare-native runs the program under PyTorch's own allocator first, with its defaults and with
expandable_segments:True, keeping all other settings of PYTORCH_ALLOC_CONF.

JSON: `steps`, `requests_per_step`, `hit_rate` (from the second planned step on), `run_allocated_peak_bytes` and
`run_reserved_peak_bytes` over the whole run, `allocated_peak_bytes` and `reserved_peak_bytes` over the planned steps,
`observed_reserved_peak_bytes` over those before, `end_reserved_bytes`, `fragmentation` (1 - allocated peak / reserved
peak of the whole run), `plan_peak_bytes`, `lower_bound_bytes`, all of the device that reserved most; `devices` lists
every device; with --compare-native the same figures are under `native` and `native_expandable`. `plan_source` is
"file", "cache", "fit" or null; `order` has the findings of --check-order; `budget_bytes`, `budget_kept` and `budget_by`
are there with a budget, `cap` (its cost) with a cap, `files` (what was kept and discarded) and `sleep` (the phases of a
program that calls stalloc.sleep) on the virtual GPU. The exit code is the program's own, also after Ctrl-C (130) and
SIGTERM (143), which leave the report.
"""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.cli import program
from stalloc.cli.native import compare, native_settings
from stalloc.cli.output import (
    add_json_argument,
    command_text,
    wants_text,
    write_json,
)
from stalloc.cli.run_limits import Budget, Capping, add_limit_arguments, wanted_budget, wanted_cap
from stalloc.device import VirtualGPU, order_checker
from stalloc.device.known_gpus import COMPLETION, COMPLETIONS
from stalloc.errors import BadInputError
from stalloc.figures import fragmentation
from stalloc.files import check_writable
from stalloc.integrations.installation import installation
from stalloc.integrations.server_watch import SleepPhases
from stalloc.notices import say
from stalloc.printable import printable

if TYPE_CHECKING:
    from stalloc.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", metavar="FILE", help="a plan of this program, in force from the first allocation")
    add_limit_arguments(parser)
    add(
        "--shard",
        metavar="NAME",
        help="under torchrun, divide the program over ranks: zero-3 or another way of `stalloc shard`",
    )
    add("--save-plan", metavar="FILE", help="write the plan of the whole program for a later --plan")
    add(
        "--observe-steps",
        type=int,
        default=0,
        metavar="N",
        help="watch N steps or more before planning (default: the fewest)",
    )
    add(
        "--streams",
        choices=("separate", "share"),
        default="separate",
        help="one region of the arena per stream, or one that streams share, with a wait at each planned handover "
        "(default: separate, shared where that does not fit or pages would move from stream to stream in every step)",
    )
    add(
        "--arena",
        choices=("pages", "pool"),
        default="pages",
        help="where memory comes from: pages, which move to where they are needed, or blocks of CuPy's pool (default: "
        "pages, where the driver maps them)",
    )
    add("--stacks", action="store_true", help="note call sites, so that an out-of-memory error names who holds memory")
    add(
        "--report",
        metavar="PAGE",
        help="record the whole run and show it: what `stalloc report` writes; no further kinds of steps are planned",
    )
    add("--compare-native", action="store_true", help="run the program under its own allocators too, for comparison")
    add(
        "--check-order",
        action="store_true",
        help="find work of several streams that no event or wait orders, and memory that is reused too early "
        "(with --device virtual); exit code 1 if there is any",
    )
    add(
        "--completion",
        choices=COMPLETIONS,
        help="when work is done (with --device virtual): by the time anybody asks (default), on a timeline of "
        "estimated times, or not before the host waits for it",
    )
    add_json_argument(parser)
    program.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    command = program.program_command(args)
    gpu = program.chosen_gpu(args)
    if args.observe_steps < 0:
        raise BadInputError(f"--observe-steps is {args.observe_steps}: give a number of steps from 0.")
    if args.plan and args.save_plan:
        raise BadInputError(
            "--plan and --save-plan exclude each other: a run from a plan does not observe the program."
        )
    if args.save_plan:
        check_writable(args.save_plan)
    if args.report:
        from stalloc.writers.reporting import format_of

        form = format_of(Path(args.report), None)
        check_writable(args.report)
    capping = wanted_cap(args)
    if args.shard:
        _shard(args)
    limit = wanted_budget(args, command, gpu) or capping
    peers = _run_natively(args, command) if args.compare_native else []
    from stalloc import device

    for option, variable, value in (
        ("--check-order", order_checker.VARIABLE, "strict" if args.check_order else None),
        ("--completion", COMPLETION, args.completion),
    ):
        if value:
            if args.device != "virtual":
                raise BadInputError(f"{option} is for the virtual GPU: add --device virtual.")
            os.environ[variable] = value
    is_virtual = device.activate(args.device, gpu) == "virtual"
    if is_virtual:
        installation.sleep_phases = SleepPhases()
    outputs = (args.save_plan, args.report)
    inside = program.sandboxed_run(args, command, outputs) if is_virtual else None
    if (ended := program.outside_of_sandbox(args, inside)) is not None:
        return ended
    result, runtime = _run_here(args, command, gpu, limit, peers)
    if args.report:
        _report(runtime, Path(args.report), form, command_text(*program.program_command(args)))
    if inside is not None:
        inside.tell(result)
    else:
        write_json(args, result)
    return int(result["exit_code"])


def _run_here(
    args: argparse.Namespace,
    command: list[str],
    gpu: VirtualGPU | None,
    limit: Budget | Capping | None,
    peers: list[tuple[str, dict[str, Any]]],
) -> "tuple[dict[str, Any], Runtime | None]":
    """Run the program in this process, and report; no runtime if the program has not used CUDA."""
    from stalloc import integrations
    from stalloc.integrations import plan_cache
    from stalloc.integrations.installing import read_plan_file
    from stalloc.integrations.sleep_and_wake import phases_told

    settings = integrations.Settings(
        observe_steps=args.observe_steps,
        streams=args.streams,
        arena=args.arena,
        call_sites=args.stacks or bool(args.report),
        keep_recording=bool(args.report),
    )
    # what is wrong with the file is said before the program begins, which may write another one in its place
    plans = read_plan_file(args.plan) if args.plan else None
    keeps = limit is None and not args.plan and not args.save_plan and not args.observe_steps
    cache: plan_cache.PlanCache | None = None
    is_planned = False

    def start(torch: bool, cupy: bool) -> None:
        nonlocal cache, is_planned
        if keeps:
            cache = plan_cache.of_program(command, args.streams)
        known = limit.plans if limit is not None else cache.load() if cache is not None else None
        runtime = integrations.install(
            plan=plans, device=args.device, gpu=gpu, torch=torch, cupy=cupy, settings=settings, known_plans=known
        )
        if limit is not None:
            limit.put_in_force(runtime)
        is_planned = bool(known) and any(one.status.plan is not None for one in runtime.controllers)

    if limit is not None:  # its settings concern models that are made before CUDA is used
        start(torch=True, cupy=True)
    with program.program_output(to_stderr=args.json == "-"):
        code, runtime = program.run_served(command, start)
    reports = [dataclasses.asdict(report) for report in runtime.reports()] if runtime is not None else []
    source = "file" if args.plan else None if not is_planned else "cache" if limit is None else "fit"
    result = {**_result(reports, peers, code, given=bool(args.plan)), "plan_source": source}
    result["sleep"] = phases_told(runtime, failed=code != 0)
    if limit is not None:
        result |= limit.outcome(reports)
    if cache is not None and runtime is not None:
        cache.update(runtime)
    if wants_text(args):
        from stalloc.cli.run_report import print_run  # rich, which a run that prints no table does without

        print_run(result, args, kept=cache is not None and cache.kept)
    if args.check_order:
        result |= _order(args, code)
    if args.save_plan:
        _save_plan(runtime, args.save_plan, args)
    return result, runtime


def _shard(args: argparse.Namespace) -> None:
    """Divide the program over the ranks of torchrun, once it has imported torch."""
    from stalloc.imports import after_import
    from stalloc.techniques.technique_settings import parse_way

    if args.budget or args.fit:
        raise BadInputError("--shard and --budget exclude each other: `stalloc shard --budget` finds a way that fits.")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise BadInputError("--shard is for ranks: torchrun --nproc-per-node 8 -m stalloc run --shard zero-3 train.py")
    way = parse_way(args.shard, int(os.environ["WORLD_SIZE"]))

    def begin() -> None:
        from stalloc.techniques.sharding import shard_program

        shard_program(way)

    after_import("torch", begin)


def _order(args: argparse.Namespace, code: int) -> dict[str, Any]:
    """Report what the checker of the order of work found; the exit code after it."""
    from stalloc.device import virtual

    checker = virtual.order_checker()
    found = checker.tell() if checker is not None else []
    if wants_text(args):
        print("order of work: " + (f"{len(found)} places, see above" if found else "nothing was found"))
    return {"order": [dataclasses.asdict(one) for one in found], "exit_code": code or int(bool(found))}


def _run_natively(args: argparse.Namespace, command: list[str]) -> list[tuple[str, dict[str, Any]]]:
    made: list[tuple[str, dict[str, Any]]] = []
    for key, conf, dropped in native_settings():
        made.append((key, compare(program.device_options(args), command, conf) | {"conf": conf, "dropped": dropped}))
        if not made[-1][1]["uses_torch"]:
            break
    return made


def _result(
    reports: list[dict[str, Any]], peers: list[tuple[str, dict[str, Any]]], code: int, *, given: bool
) -> dict[str, Any]:
    for report in reports:
        report["fragmentation"] = fragmentation(report["run_allocated_peak_bytes"], report["run_reserved_peak_bytes"])
        report["plan_misfit"] = ""  # or why a plan that was given is no longer in force
        if given and report["plans_dropped"]:
            report["plan_misfit"] = report["dropped_note"]
        elif given and report["plan_peak_bytes"] is None:
            report["plan_misfit"] = report["note"]
        for key, peer in peers:
            report[key] = _of_device(peer, report)
        if peers:
            native = report["native"]
            for name in ("reserved_peak_bytes", "allocated_peak_bytes", "step_ms", "exit_code"):
                report[f"native_{name}"] = native[name]
    main = max(reports, key=lambda report: report["run_reserved_peak_bytes"], default={})
    return {"exit_code": code, **main, "devices": reports}


def _of_device(peer: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """What one run of the native allocator did on the device of a report, over the same steps."""
    told: dict[str, Any] = next((entry for entry in peer["devices"] if entry["device"] == report["device"]), {})
    steps, watched = told.get("after_steps", []), report["watched_steps"]
    peak, during, later = told.get("reserved_peak_bytes"), None, None
    if 0 < watched <= len(steps):
        during = steps[watched - 1][0]
        # a peak that rose afterwards is one of the later steps; else what they held, which rarely falls within one
        later = peak if peak and peak > during else max(now for _, now in steps[watched - 1 :])
    return {
        "allocated_peak_bytes": told.get("allocated_peak_bytes") or None,  # CuPy keeps none
        "reserved_peak_bytes": peak,
        "end_reserved_bytes": told.get("end_reserved_bytes"),
        "watched_reserved_peak_bytes": during,
        "later_reserved_peak_bytes": later,
    } | {name: peer[name] for name in ("uses_torch", "step_ms", "exit_code", "out_of_memory", "conf", "dropped")}


def _save_plan(runtime: "Runtime | None", path: str, args: argparse.Namespace) -> None:
    from stalloc.planner import plan, save_plans

    recordings = [one.recording.observed_trace for one in runtime.controllers] if runtime is not None else []
    plans = [plan(trace, streams=args.streams) for trace in recordings if trace is not None]
    if not plans:
        raise BadInputError(f"no step of the program repeated, so there is no plan to write to {path}: run more steps.")
    save_plans(path, plans)
    say(f"wrote {path}; use it with: {command_text('stalloc', 'run', '--plan', path, *program.program_command(args))}")


def _report(runtime: "Runtime | None", path: Path, form: str, title: str) -> None:
    from stalloc.trace import record_of
    from stalloc.writers.reporting import write_report

    records = [(title, record_of(trace)) for trace in runtime.recorded()] if runtime is not None else []
    if not records:
        raise BadInputError(f"the program allocated no GPU memory, so {path} was not written: does it use the GPU?")
    write_report(path, form, records)
    say(f"wrote {printable(str(path))}")
