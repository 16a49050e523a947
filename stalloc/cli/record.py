"""Record every allocation of a program in a trace file, for stats, plan and whatever else reads traces.

  stalloc record -o step.trace.npz train.py --steps 4

The program runs unchanged under stalloc's heap, with no plan. JSON: `output`, and for each of `devices` the number
of `requests` and `events`, the step marks, and the peaks. The exit code is 1 if the program itself fails; what was
recorded until then is written all the same.
"""

import argparse

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.output import (
    add_json_argument,
    command_text,
    note_texts,
    table_console,
    wants_text,
    write_json,
)
from stalloc.cli.program import add_program_arguments, chosen_gpu, program_command, program_output, run_program
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the trace to write, ending .trace.npz")
    add_json_argument(parser)
    add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Record the program; 0, or 1 if it fails."""
    command = program_command(args)
    gpu = chosen_gpu(args)
    if not args.output.endswith(".trace.npz"):
        raise BadInputError(f"{args.output} does not end in .trace.npz: name the trace so that other verbs know it.")
    check_writable(args.output)

    from stalloc import integrations
    from stalloc.trace import save_traces

    settings = integrations.Settings(plan=False, keep_recording=True)
    runtime = integrations.install(device=args.device, gpu=gpu, settings=settings)
    with program_output(to_stderr=args.json == "-"):
        code = run_program(command)
    used = [controller for controller in runtime.controllers if controller.state.record.total.num_allocs]
    traces = [controller.recording.trace() for controller in used]
    if not traces:
        raise BadInputError(
            f"the program allocated no GPU memory, so {args.output} was not written: does it use the GPU?"
        )
    save_traces(args.output, traces)
    devices = [
        {
            "device": trace.device,
            "requests": trace.num_requests,
            "events": trace.num_events,
            "steps": int((trace.mark_kind == 0).sum()),
            "allocated_peak_bytes": controller.state.record.total.allocated_peak,
            "reserved_peak_bytes": controller.state.record.reserved_peak.total,
            "notes": trace.info["notes"],
        }
        for controller, trace in zip(used, traces, strict=True)
    ]
    if wants_text(args):
        console = table_console()
        for device in devices:
            console.print(
                f"device {device['device']}: {device['requests']} requests, {device['steps']} steps, "
                f"allocated peak {human_bytes(device['allocated_peak_bytes'])}"
            )
            for note in note_texts(device["notes"]):
                console.print(f"  {note}")
        name = command_text(args.output)
        console.print(f"wrote {name}; next: stalloc stats {name}, or stalloc plan {name} -o step.plan.npz")
    write_json(args, {"output": args.output, "exit_code": code, "devices": devices})
    return EXIT_DONE if code == 0 else EXIT_CHECK_FAILED
