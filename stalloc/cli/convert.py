"""Write a trace in another format: for PyTorch's memory_viz, Perfetto, planners, or stalloc itself.

IN is a trace of any kind that stalloc reads; `stalloc stats --help` names them. The name of OUT says the format, unless
--to does:

  .trace.npz       trace     everything that stalloc knows
  .pickle, .pkl    snapshot  as torch.cuda.memory._dump_snapshot writes it, for memory_viz
  .json            perfetto  Chrome trace: allocated and reserved, a slice for each request, steps and phases; stalloc
                             and readers of torch.profiler's traces read its [memory] events back
  .csv             csv       planning CSV id,lower,upper,size of one device, as minimalloc reads it

The last three may end in .gz as well. A snapshot that becomes a snapshot again has the same events, blocks and call
sites. What a format needs and the source lacks (addresses, segments) is made up by a plan; the file and the printed
notes say so.

JSON: `input`, `output`, `format`, `bytes`, for each of `devices` its `device`, `source`, `requests` and `events`, and
`notes`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.analysis import count_events
from stalloc.cli.output import add_json_argument, command_text, file_label, note_texts, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose
from stalloc.cli.trace_options import check_output, of_device
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace import Trace, load_traces, save_traces

_SUFFIXES = {".npz": "trace", ".pickle": "snapshot", ".pkl": "snapshot", ".json": "perfetto", ".csv": "csv"}
_FORMATS = ("trace", "snapshot", "perfetto", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="trace to read")
    parser.add_argument("output", metavar="OUT", help="file to write")
    parser.add_argument("--device", type=int, metavar="N", help="write this device only (default: all)")
    parser.add_argument("--to", choices=_FORMATS, metavar="FORMAT", help=f"one of {', '.join(_FORMATS)}")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    output = Path(args.output)
    check_output(output, "step.trace.npz", args.input)
    if output.exists() and not args.force:
        raise BadInputError(f"{output} exists: name another file, or replace it with --force.")
    target = args.to or _format_of(output)
    with working(f"converting {file_label(args.input)}"):
        traces = of_device(args.input, load_traces(args.input), args.device)
        if target == "csv" and len(traces) > 1:
            numbers = ", ".join(str(trace.device) for trace in traces)
            raise BadInputError(
                f"{args.input} has the devices {numbers}, but a CSV holds only one: choose it with --device."
            )
        made_up = _write(target, output, traces)
    told = dict.fromkeys(str(note) for trace in traces for note in trace.info.get("notes", []))
    result = {"input": args.input, "output": args.output, "format": target, "bytes": output.stat().st_size}
    result["devices"] = [
        {"device": trace.device, "source": trace.info.get("source", "")}
        | {"requests": trace.num_requests, "events": count_events(trace)}
        for trace in traces
    ]
    result["notes"] = [*told, *(note for note in made_up if note not in told)]
    present(args, result, _print, result)
    return 0


def _format_of(output: Path) -> str:
    name = output.name.removesuffix(".gz")
    found = _SUFFIXES.get(Path(name).suffix)
    if found is None or (found == "trace" and not output.name.endswith(".trace.npz")):
        raise BadInputError(
            f"the name {output} does not tell the format: end it in .trace.npz, .pickle, .json or .csv, or give --to."
        )
    return found


def _write(target: str, path: Path, traces: Sequence[Trace]) -> list[str]:
    """Write the traces in a format; notes on what had to be made up for it."""
    if target == "snapshot":
        from stalloc.writers.snapshot_writer import write_snapshot

        return write_snapshot(path, traces)
    if target == "perfetto":
        from stalloc.writers.perfetto import write_perfetto

        return write_perfetto(path, traces)
    if target == "csv":
        from stalloc.writers.lifespans_csv import write_lifespans_csv

        return write_lifespans_csv(path, traces[0])
    save_traces(path, traces)
    return []


def _print(console: Console, result: dict[str, Any]) -> None:
    size = human_bytes(result["bytes"])
    console.print(Text.assemble((printable(result["output"]), "bold"), f", {result['format']}, {size}"))
    for entry in result["devices"]:
        counts = f"{plural(entry['requests'], 'request')}, {entry['events']:,} events"
        told = f"{counts}, from {printable(str(entry['source']))}"
        print_prose(console, told, indent="  ", lead=Text(f"device {entry['device']}  ", "dim"))
    for note in note_texts(result["notes"]):
        print_prose(console, note, indent="  ", lead=Text("note  ", "dim"))
    console.print(f"Next: stalloc stats {command_text(result['output'])}")
