"""Time the operations of a recorded program on this machine's GPU, so that its steps are measured, not estimated.

  stalloc bench ops --for step.trace.npz

TRACE is a recording by `stalloc record --ops`. Each distinct call is repeated by itself a few times, on tensors of the
same sizes, and its time is written into the trace (or, with -o, into another file), where `stalloc stats --gpu` uses it
instead of the estimate. Calls that cannot be repeated so keep their estimates. JSON: `output`, and for each of
`devices` the number of `calls` and of those `measured`.
"""

import argparse
import dataclasses

import numpy as np

from stalloc import device
from stalloc.cli.output import add_json_argument, command_text, present
from stalloc.errors import BadInputError
from stalloc.trace import load_traces, save_traces
from stalloc.trace.operations import read_operations


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="stalloc bench ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="trace", required=True, metavar="TRACE", help="the recording")
    parser.add_argument("-o", "--output", metavar="FILE", help="write this trace, ending .trace.npz, instead")
    add_json_argument(parser)
    args = parser.parse_args(words)
    output = args.output or args.trace
    if not output.endswith(".trace.npz"):
        raise BadInputError(f"{output} does not end in .trace.npz: name the trace to write with -o.")
    traces = load_traces(args.trace)
    known = [(trace, read_operations(trace)) for trace in traces]
    if not any(operations is not None for _, operations in known):
        raise BadInputError(f"{args.trace} has no operations: record it with stalloc record --ops.")
    if device.detect() != "cuda":
        raise BadInputError(
            "stalloc bench ops needs a GPU, and there is none here: run it on the machine that the program is for; "
            "without it steps are estimated."
        )
    device.activate("cuda")
    from stalloc.integrations.operation_timing import measured_nanoseconds

    made, told = [], []
    for trace, operations in known:
        if operations is not None:
            times = np.array(measured_nanoseconds(operations.shapes), np.int64)
            trace = trace.replace(extra=trace.extra | dataclasses.replace(operations, shape_ns=times).columns())
            told.append({"device": trace.device, "calls": len(times), "measured": int(np.count_nonzero(times))})
        made.append(trace)
    save_traces(output, made)
    name = command_text(output)
    lines = [f"device {one['device']}: {one['measured']:,} of {one['calls']:,} distinct calls measured" for one in told]
    lines += [f"wrote {name}", f"next: stalloc stats --gpu NAME {name}"]
    present(args, {"output": output, "devices": told}, lambda console: console.print("\n".join(lines)))
    return 0
