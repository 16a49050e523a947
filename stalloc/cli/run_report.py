"""What `stalloc run` says when the program has ended: each device beside what its own allocators reserved.

Contract: reserved is told over the whole run, while the program was watched, on the plan and at the end; natively the
same, over the same steps. Requests are counted in one way: those over 512 bytes, which are all that a plan places.
"""

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.cli.output import command_text, table_console
from stalloc.cli.program import program_command
from stalloc.cli.tables import print_items, print_lines, print_prose, print_table
from stalloc.device.known_gpus import shown_name
from stalloc.figures import human_bytes, plural
from stalloc.printable import MAX_SENTENCE, printable

_VIRTUAL = "a virtual GPU: kernels do nothing, so losses are 0 and times are host times"
_UNCOUNTED = "the CUDA context and NCCL's buffers come on top; no column counts them"
_NATIVE = (("native", "native"), ("native_expandable", "expandable"))


def print_run(result: dict[str, Any], args: argparse.Namespace, *, kept: bool) -> None:
    """Print what `--json` gets of a run, and what to type next; `kept`: its plan is used by the next run."""
    if not result["devices"]:
        print("stalloc: the program allocated no GPU memory.")
        return
    console = table_console()
    for report in result["devices"]:
        _print_device(console, report)
    _print_outcome(console, result)
    program = command_text(*program_command(args))
    if result["out_of_memory_errors"]:  # with call sites the error has said who holds most
        verb = "dryrun" if args.stacks else "record -o run.trace.npz"
        console.print(f"next: stalloc {verb} {program}")
    elif "budget_bytes" in result or "cap" in result:
        return
    elif result["plan_source"] == "cache":
        console.print("planned from the start, with the plan that the last run of this program left")
    elif kept:
        console.print("next: run the same command again; it starts with this plan, which was kept")
    elif not args.plan and not args.save_plan and result.get("plans_made"):
        console.print(f"next: stalloc run --save-plan step.plan.npz {program}")
    elif not result.get("plans_made"):
        console.print(f"next: stalloc record -o run.trace.npz {program}")


def _print_device(console: Console, report: dict[str, Any]) -> None:
    name = shown_name(report["device_kind"], printable(report["device_name"]))
    console.print(Text(f"device {report['device']}: {name}", "bold"))
    if report["out_of_memory_errors"]:
        count = report["out_of_memory_errors"]
        console.print(Text(f"  out of memory  {count:,} time{'s' * (count != 1)}: see the error above", "bold red"))
    print_items(console, [(label, printable(value, MAX_SENTENCE)) for label, value in _facts(report)])
    peers = [(key, title) for key, title in _NATIVE if report.get(key)]
    columns = ("", "stalloc", *(title for _, title in peers))
    print_table(console, columns, _rows(report, [report[key] for key, _ in peers]), indent="  ")
    remarks = [remark for key, title in peers for remark in _remarks(title, report[key])]
    remarks += [_UNCOUNTED] if peers else []
    remarks += [_VIRTUAL] if report["device_kind"] == "virtual" else []
    print_lines(console, remarks)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    phase, rate = report["phase"], report["hit_rate"]
    facts = [("state", phase + (f" ({report['note']})" if report["note"] else ""))]
    if report["plan_misfit"]:
        facts.append(("the plan", f"given with --plan did not fit this program: {report['plan_misfit']}"))
    facts.append(("steps", f"{report['steps']:,}, {report['planned_steps']:,} of them whole on the plan"))
    if report["requests_per_step"]:
        over = "from its second step on" if report["planned_passes"] else "over the whole run"
        served = "" if rate is None else f", {100 * rate:.3f}% served from the plan (hit rate, {over})"
        facts.append(("requests", f"{report['requests_per_step']:,} over 512 bytes per step{served}"))
    if report["dynamic_requests"] and report["planned_passes"]:
        dynamic = report["dynamic_requests"] // report["planned_passes"]
        facts.append(("dynamic", f"{dynamic:,} more per step, whose sizes differ from step to step"))
    if report["plan_peak_bytes"] is not None:
        gap = report["plan_peak_bytes"] - report["lower_bound_bytes"]
        bound = "which is the lower bound" if gap == 0 else f"{human_bytes(gap)} above the lower bound"
        facts.append(("plan", f"{human_bytes(report['plan_peak_bytes'])}, {bound}"))
    facts.append(("fragmentation", f"{100 * report['fragmentation']:.2f}% over the whole run"))
    return facts


def _rows(report: dict[str, Any], peers: list[dict[str, Any]]) -> list[list[str]]:
    watched, planned = report["observed_reserved_peak_bytes"], report["plan_peak_bytes"] is not None
    rows = [
        ("allocated peak", report["run_allocated_peak_bytes"], "allocated_peak_bytes"),
        ("reserved peak", report["run_reserved_peak_bytes"], "reserved_peak_bytes"),
        ("  while watched", watched, "watched_reserved_peak_bytes"),
        ("  on the plan", report["reserved_peak_bytes"] if planned else None, "later_reserved_peak_bytes"),
        ("reserved at the end", report["end_reserved_bytes"], "end_reserved_bytes"),
    ]
    shown = [
        [label, human_bytes(ours), *("-" if peer.get(key) is None else human_bytes(peer[key]) for peer in peers)]
        for label, ours, key in rows
        if ours is not None
    ]
    times = [report["step_ms"], *(peer["step_ms"] for peer in peers)]
    if any(time is not None for time in times):
        shown.append(["host time per step", *("-" if time is None else f"{time:.1f} ms" for time in times)])
    return shown


def _remarks(title: str, peer: dict[str, Any]) -> list[str]:
    settings = f"PYTORCH_ALLOC_CONF={peer['conf']}" if peer["conf"] else "the defaults of PyTorch"
    remarks = [f"{title}: {settings if peer['uses_torch'] else 'the pool of CuPy'}"]
    if peer["dropped"]:
        remarks.append(f"{title}: without your setting {peer['dropped']}")
    if peer["out_of_memory"]:
        remarks.append(f"{title}: ran out of memory")
    elif peer["exit_code"]:
        remarks.append(f"{title}: ended with code {peer['exit_code']}")
    return remarks


def _print_outcome(console: Console, result: dict[str, Any]) -> None:
    if "budget_bytes" in result:
        kept = "kept" if result["budget_kept"] else "not kept: see above"
        print_prose(console, f"budget {human_bytes(result['budget_bytes'])}: {kept} ({printable(result['budget_by'])})")
    if "cap" not in result:
        return
    told = result["cap"]
    size = human_bytes(told["cap_bytes"]) if told["cap_bytes"] else "of the device"
    kept = "kept" if told["kept"] else "not kept: see above" if result["out_of_memory_errors"] else "not kept"
    print_prose(console, f"cap {size}: {kept}, {human_bytes(told['held_peak_bytes'])} held at most")
    if not told["evictions"]:
        print_prose(console, "nothing had to be evicted" if told["kept"] else "nothing was evicted")
        return
    print_prose(
        console,
        f"{plural(told['evictions'], 'eviction')}: {human_bytes(told['dropped_bytes'])} dropped, "
        f"{human_bytes(told['recomputed_bytes'])} computed again, {told['recomputed_blocks']:,} blocks run twice; "
        f"{human_bytes(told['moved_bytes'])} moved to the host ({human_bytes(told['host_bytes'])} at once); "
        f"est. {told['estimated_seconds']:.3f} s in all, one after the other",
    )
