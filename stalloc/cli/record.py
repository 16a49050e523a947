"""Record every allocation of a program in a trace file, for `stalloc stats`, `stalloc plan` and other verbs.

  stalloc record -o step.trace.npz train.py --steps 4

The program runs unchanged under stalloc's heap, with no plan; each request of PyTorch and CuPy has its call site. With
--stacks it runs under PyTorch's own allocator and memory history instead, so addresses and segments are those of
PyTorch; requests of CuPy are not recorded then. cuDNN's workspaces are marked: `stalloc info --cudnn-table FILE` shows
them. --ops does the same, but instead of call sites torch.profiler notes which operation of which module made, read and
changed each request in the first four steps, and what each request is for. The program requests the same memory in the
same order.

On the virtual GPU existing files stay as they are, and new ones are kept (--keep-files writes for real).

JSON: `output`, and for each of `devices` the number of `requests` and `events`, the step marks, and the peaks;
`files`, on the virtual GPU, what was kept and discarded. The exit code is the program's own; what was recorded before
an error, Ctrl-C or SIGTERM is written too.
"""

import argparse
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.analysis import recorded
from stalloc.cli import program
from stalloc.cli.output import add_json_argument, command_text, note_texts, table_console, wants_text, write_json
from stalloc.cli.tables import print_lines
from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import shown_name
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.files import check_writable
from stalloc.trace import Trace
from stalloc.version import known_release

if TYPE_CHECKING:
    from stalloc.integrations.convolutions import SeenConvolutions

_MAX_EVENTS = 1 << 22  #: of PyTorch's history


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the trace to write, ending .trace.npz")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stacks", action="store_true", help="record PyTorch's own allocator, by its own history")
    how.add_argument("--ops", action="store_true", help="the same with operations, modules and roles, without stacks")
    add_json_argument(parser)
    program.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    command = program.program_command(args)
    gpu = program.chosen_gpu(args)
    if not args.output.endswith(".trace.npz"):
        raise BadInputError(f"{args.output} does not end in .trace.npz: name the trace so that other verbs know it.")
    check_writable(args.output)

    from stalloc import device

    inside = (
        program.sandboxed_run(args, command, [args.output]) if device.activate(args.device, gpu) == "virtual" else None
    )
    if (ended := program.outside_of_sandbox(args, inside)) is not None:
        return ended
    from stalloc.trace import save_traces

    with program.program_output(to_stderr=args.json == "-"):
        record = _with_history if args.stacks or args.ops else _under_stalloc
        code, traces = record(args, gpu, command)
    if not traces:
        raise BadInputError(
            f"the program allocated no GPU memory, so {args.output} was not written: does it use the GPU?"
        )
    save_traces(args.output, traces)
    devices = [_entry(trace) for trace in traces]
    if wants_text(args):
        _print(args, devices, failed=code != 0)
    result = {"output": args.output, "exit_code": code, "devices": devices}
    if inside is not None:
        inside.tell(result)
    else:
        write_json(args, result)
    return code


def _under_stalloc(args: argparse.Namespace, gpu: VirtualGPU | None, command: list[str]) -> tuple[int, list[Trace]]:
    from stalloc import integrations
    from stalloc.integrations.installing import current

    settings = integrations.Settings(plan=False, keep_recording=True, call_sites=True)
    served = current()
    if served is not None and not all(one.status.settings.keep_recording for one in served.controllers):
        raise BadInputError(
            "this process runs under stalloc already, without a recording: type stalloc record in a shell, or start "
            "it with subprocess."
        )

    def start(torch: bool, cupy: bool) -> None:
        integrations.install(device=args.device, gpu=gpu, torch=torch, cupy=cupy, settings=settings)

    code, runtime = program.run_served(command, start)
    return code, runtime.recorded() if runtime is not None else []


def _with_history(args: argparse.Namespace, gpu: VirtualGPU | None, command: list[str]) -> tuple[int, list[Trace]]:
    """The exit code of the program and what it requested, by the history of PyTorch's allocator or its profiler."""
    from stalloc import device
    from stalloc.device.virtual import after_torch_import
    from stalloc.imports import after_import
    from stalloc.integrations.convolutions import SeenConvolutions
    from stalloc.integrations.leading_optimizers import StepTimes
    from stalloc.integrations.operation_recording import OperationRecording
    from stalloc.integrations.startup import at_first_use
    from stalloc.trace.sources.torch_snapshot import read_torch_snapshot

    kind = device.activate(args.device, gpu)
    operations, steps = OperationRecording() if args.ops else None, StepTimes()
    seen: list[SeenConvolutions] = []

    def begin() -> None:
        if kind == "virtual":
            after_torch_import()
        torch: Any = sys.modules["torch"]
        if operations:
            operations.start()
        else:
            seen.append(SeenConvolutions(torch))
            steps.begin()

    def begin_history() -> None:
        how: dict[str, Any] = {"context": None} if operations else {"stacks": "python"}
        sys.modules["torch"].cuda.memory._record_memory_history(max_entries=_MAX_EVENTS, **how)

    after_import("torch", begin)
    at_first_use(begin_history, cupy=False)  # not before: the environment is the program's to set
    code = program.run_program(command)
    if operations:
        operations.stop()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return code, []
    snapshot = torch.cuda.memory._snapshot()
    steps.add_to(snapshot)
    traces = read_torch_snapshot(Path(args.output), pickle.dumps(snapshot))
    if operations:
        traces = operations.add_to(traces)
    return code, [
        trace.replace(info=trace.info | known_release() | _seen_here(kind, torch, trace, seen)) for trace in traces
    ]


def _seen_here(kind: str, torch: Any, trace: Trace, seen: list["SeenConvolutions"]) -> dict[str, Any]:
    """The name and memory of the GPU, as a recording under stalloc has them, and cuDNN's workspaces if it was used."""
    from stalloc.device.cudnn import note_of

    card = torch.cuda.get_device_properties(trace.device)
    told: dict[str, Any] = {"device_name": card.name, "total_bytes": card.total_memory, "virtual": kind == "virtual"}
    found = [pair for convolutions in seen for pair in convolutions.work_spaces(trace)]
    if found:
        architecture, cudnn = 10 * card.major + card.minor, torch.backends.cudnn.version() or 0
        note = note_of(found, card=shown_name(kind, card.name), architecture=architecture, cudnn=cudnn)
        told["convolutions"] = note
    return told


def _entry(trace: Trace) -> dict[str, Any]:
    told = recorded(trace)
    return {
        "device": trace.device,
        "requests": trace.num_requests,
        "events": trace.num_events,
        "steps": int((trace.mark_kind == 0).sum()),
        "allocated_peak_bytes": told.allocated_peak_bytes,
        "reserved_peak_bytes": told.reserved_peak_bytes,
        "notes": list(trace.info.get("notes", [])),
    }


def _print(args: argparse.Namespace, devices: list[dict[str, Any]], *, failed: bool) -> None:
    console, name = table_console(), command_text(args.output)
    for device in devices:
        steps = f"{plural(device['steps'], 'step')}, " if device["steps"] or not args.stacks else ""
        console.print(
            f"device {device['device']}: {plural(device['requests'], 'request')} in {device['events']:,} events, "
            f"{steps}allocated peak {human_bytes(device['allocated_peak_bytes'])}, "
            f"reserved peak {human_bytes(device['reserved_peak_bytes'] or 0)}"
        )
        print_lines(console, note_texts(device["notes"]))
    console.print(f"wrote {name}")
    console.print(f"next: stalloc {'top' if args.stacks or failed else 'stats'} {name}")
