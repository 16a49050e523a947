"""Run a program under stalloc: watch its first steps, plan, go on with the plan, report.

  stalloc run train.py --epochs 3
  stalloc run --device virtual --gpu A100-80GB --compare-native train.py
  stalloc run --save-plan train.plan.npz train.py      then      stalloc run --plan train.plan.npz train.py

The program is run unchanged, in this process, on the real GPU where there is one and on a virtual GPU otherwise. Its
plan is kept in the user's cache folder (STALLOC_CACHE names another one, or is "off") and is in force from the first
allocation when the same program is run again with the same arguments; one that no longer fits is replaced.
Steps are marked by torch's optimizers or by stalloc.step(), and found from the allocations where nobody marks them.
JSON: `steps`, `requests_per_step`, `hit_rate` (from the second planned step on), `allocated_peak_bytes` and
`reserved_peak_bytes` over the planned steps, `observed_reserved_peak_bytes` over those before, `plan_peak_bytes`,
`lower_bound_bytes`, with --compare-native `native_reserved_peak_bytes` and `native_step_ms`: those of the device
that reserved most; `devices` lists all; `plan_source` is "file", "cache" or null. The exit code is 1 if the program
itself fails.
"""

import argparse
import dataclasses
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.native import compare
from stalloc.cli.output import (
    add_json_argument,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.program import (
    add_program_arguments,
    chosen_gpu,
    device_options,
    program_command,
    program_output,
    run_program,
)
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import check_writable
from stalloc.notices import say
from stalloc.printable import MAX_SENTENCE, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("--plan", metavar="FILE", help="a plan of this program, in force from the first allocation")
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan of the whole program for a later --plan")
    parser.add_argument(
        "--observe-steps",
        type=int,
        default=0,
        metavar="N",
        help="watch at least N steps before planning (default: as few as do)",
    )
    parser.add_argument(
        "--streams",
        choices=("separate", "share", "weigh"),
        default="separate",
        help="a region of the arena for each stream, or one that they share, with a wait at each planned hand-over; "
        "weigh: share where a hand-over saves --handover-bytes (default: separate, shared if that does not fit)",
    )
    parser.add_argument(
        "--handover-bytes", type=int, default=1 << 16, metavar="BYTES", help="for --streams weigh (default: 65536)"
    )
    parser.add_argument(
        "--arena",
        choices=("pages", "pool", "mapped"),
        default="pages",
        help="where memory comes from: pages, which move to where they are needed, or blocks of CuPy's pool (default: "
        "pages, where the driver maps them; mapped is an older name for it)",
    )
    parser.add_argument(
        "--compare-native", action="store_true", help="run the program under its own allocators first, to compare"
    )
    add_json_argument(parser)
    add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the program; 0, or 1 if it fails."""
    command = program_command(args)
    gpu = chosen_gpu(args)
    if args.observe_steps < 0:
        raise BadInputError(f"--observe-steps is {args.observe_steps}: give a count of steps.")
    if args.handover_bytes < 0:
        raise BadInputError(f"--handover-bytes is {args.handover_bytes}: give a number from 0.")
    if args.plan and args.save_plan:
        raise BadInputError(
            "--plan and --save-plan exclude each other: a run from a plan does not observe the program."
        )
    if args.save_plan:
        check_writable(args.save_plan)
    native = compare(device_options(args), command) if args.compare_native else None

    from stalloc import device, integrations
    from stalloc.integrations import plan_cache

    settings = integrations.Settings(
        observe_steps=args.observe_steps,
        streams=args.streams,
        handover_bytes=args.handover_bytes,
        arena="pool" if args.arena == "pool" else "pages",
    )
    cache = None
    if not args.plan and not args.save_plan and not args.observe_steps:
        device.activate(args.device, gpu)
        cache = plan_cache.of_program(command, (args.streams, args.handover_bytes))
    known = cache.load() if cache is not None else None
    runtime = integrations.install(plan=args.plan, device=args.device, gpu=gpu, settings=settings, known_plans=known)
    if known and not any(controller.status.plan is not None for controller in runtime.controllers):
        known = None
    with program_output(to_stderr=args.json == "-"):
        code = run_program(command)
    reports = [dataclasses.asdict(report) for report in runtime.reports()]
    source = "file" if args.plan else "cache" if known else None
    result = {**_result(reports, native, code), "plan_source": source}
    if cache is not None:
        cache.update(runtime)
    if wants_text(args):
        _print(result, args, kept=cache is not None and cache.kept)
    if args.save_plan:
        _save_plan(runtime, args.save_plan, args)
    write_json(args, result)
    return EXIT_DONE if code == 0 else EXIT_CHECK_FAILED


def _result(reports: list[dict[str, Any]], native: dict[str, Any] | None, code: int) -> dict[str, Any]:
    for report in reports:
        reserved = report["reserved_peak_bytes"]
        report["fragmentation"] = 1 - report["allocated_peak_bytes"] / reserved if reserved else 0.0
        if native is not None:
            peer: dict[str, Any] = next(
                (entry for entry in native["devices"] if entry["device"] == report["device"]), {}
            )
            report["native_reserved_peak_bytes"] = peer.get("reserved_peak_bytes")
            report["native_allocated_peak_bytes"] = peer.get("allocated_peak_bytes")
            report["native_step_ms"] = native["step_ms"]
            report["native_exit_code"] = native["exit_code"]
    main = max(reports, key=lambda report: report["reserved_peak_bytes"], default={})
    return {"exit_code": code, **main, "devices": reports}


def _save_plan(runtime: Any, path: str, args: argparse.Namespace) -> None:
    from stalloc.planner import plan, save_plans

    traces = [c.recording.observed_trace for c in runtime.controllers if c.recording.observed_trace is not None]
    plans = [plan(trace, streams=args.streams, handover_bytes=args.handover_bytes) for trace in traces]
    if not plans:
        raise BadInputError(f"no step of the program repeated, so there is no plan to write to {path}: run more steps.")
    save_plans(path, plans)
    say(f"wrote {path}; use it with: stalloc run --plan {path} …")


def _print(result: dict[str, Any], args: argparse.Namespace, *, kept: bool) -> None:
    from rich.table import Table

    console = table_console()
    if not result["devices"]:
        console.print("stalloc: the program allocated no GPU memory.")
        return
    for report in result["devices"]:
        table = Table(
            title=f"device {report['device']}: {printable(report['device_name'])}",
            title_justify="left",
            show_header=False,
        )
        for label, value in _rows(report):
            table.add_row(label, printable(value, MAX_SENTENCE))
        console.print(table)
    if result["plan_source"] == "cache":
        console.print("the plan was kept from the last run of this program")
    elif kept:
        console.print("next: the same command starts with this plan, which is kept")
    elif not args.plan and not args.save_plan and result.get("plans_made"):
        console.print("next: stalloc run --save-plan step.plan.npz … keeps the plan for the next run")
    elif not result.get("plans_made"):
        console.print("next: stalloc record -o run.trace.npz … and stalloc stats run.trace.npz show what repeats")


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rate, phase = report["hit_rate"], report["phase"]
    rows = [
        ("state", phase + (f" ({report['note']})" if report["note"] else "")),
        ("steps", f"{report['steps']}, {report['planned_steps']} of them whole on the plan"),
        ("requests a step", f"{report['requests_per_step']} over 512 bytes"),
        ("hit rate", "-" if rate is None else f"{100 * rate:.3f} % from the second planned step on"),
        ("allocated peak", human_bytes(report["allocated_peak_bytes"])),
        (
            "reserved peak",
            f"{human_bytes(report['reserved_peak_bytes'])}, fragmentation {100 * report['fragmentation']:.2f} %",
        ),
    ]
    if report["observed_reserved_peak_bytes"] is not None:
        rows.append(("reserved peak before the plan", human_bytes(report["observed_reserved_peak_bytes"])))
    if report["plan_peak_bytes"] is not None:
        gap = report["plan_peak_bytes"] - report["lower_bound_bytes"]
        bound = "the lower bound" if gap == 0 else f"{human_bytes(gap)} above the lower bound"
        rows.append(("plan", f"{human_bytes(report['plan_peak_bytes'])}, {bound}"))
    if report.get("native_reserved_peak_bytes") is not None:
        rows.append(("native reserved peak", human_bytes(report["native_reserved_peak_bytes"])))
    if report["step_ms"] is not None:
        rows.append(("host time a step", f"{report['step_ms']:.1f} ms"))
    if report.get("native_step_ms") is not None:
        rows.append(("native host time a step", f"{report['native_step_ms']:.1f} ms"))
    return rows
