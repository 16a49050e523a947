"""Judge a plan with the naive validator, which shares no code with any planner.

PLAN is a file of `stalloc plan -o`, TRACE the trace that it was made from. A plan is valid if its rows are those of the
trace, every offset is aligned and below the stated peak, no two requests that are live together share a byte, and the
stated lower bound is the maximum load; streams share bytes only where the plan lists a handover. Exit code 1 names the
reason for the first plan that is not.
"""

import argparse
from typing import Any

from rich.console import Console

from stalloc.cli.output import add_json_argument, file_label, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.planner import load_plans, validate
from stalloc.printable import MAX_SENTENCE, printable
from stalloc.trace import load_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan file to judge")
    parser.add_argument("trace", metavar="TRACE", help="the trace it plans")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """0 if every plan of the file is valid for the trace, else 1."""
    with working(f"checking {file_label(args.plan)} against {file_label(args.trace)}"):
        devices = _checked(args)
    ok = all(entry["ok"] for entry in devices)
    present(args, {"ok": ok, "devices": devices}, _print, devices)
    return 0 if ok else 1


def _print(console: Console, devices: list[dict[str, Any]]) -> None:
    for entry in devices:
        peak, bound = human_bytes(entry["peak_bytes"]), human_bytes(entry["lower_bound_bytes"])
        text = f"valid: {entry['requests']:,} requests, peak {peak}, lower bound {bound}"
        if not entry["ok"]:
            text = f"invalid, {entry['reason']}: {entry['detail']}"
        print_prose(console, printable(f"device {entry['device']}: {text}", MAX_SENTENCE))


def _checked(args: argparse.Namespace) -> list[dict[str, Any]]:
    plans = load_plans(args.plan)
    traces = {trace.device: trace for trace in load_traces(args.trace)}
    if not plans:
        raise BadInputError(f"{args.plan} holds no plan: write one with `stalloc plan FILE -o {args.plan}`.")
    devices: list[dict[str, Any]] = []
    for plan in plans:
        ok, reason, detail = False, "trace-mismatch", f"the trace has no device {plan.device}"
        if plan.device in traces:
            verdict = validate(plan, traces[plan.device], handovers=len(plan.handover_later) > 0)
            ok, reason, detail = verdict.ok, verdict.reason, verdict.detail
        figures = {"peak_bytes": plan.peak_bytes, "lower_bound_bytes": plan.lower_bound_bytes}
        entry = {"device": plan.device, "ok": ok, "reason": reason, "detail": detail}
        devices.append(entry | figures | {"requests": plan.num_requests})
    for device in sorted(traces.keys() - {plan.device for plan in plans}):
        detail = f"the plan has nothing for device {device} of the trace"
        entry = {"device": device, "ok": False, "reason": "trace-mismatch", "detail": detail}
        figures = {"peak_bytes": 0, "lower_bound_bytes": 0}
        devices.append(entry | figures | {"requests": traces[device].num_requests})
    return devices
