"""Show a program's memory as one page: load, addresses over time, who holds it, what is wasted and why.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. The page is one file that a browser
opens from disk; it needs no network, and shows all devices of all files. It begins with what is wrong in words, with
the figures of `explain`, `top` and `stats`; then come what is allocated and reserved over time; the map of addresses,
as recorded, as stalloc plans it, and as each --allocator or --conf would have placed it; who holds memory at the moment
that you click, and what grew between two; and what keeps unused memory reserved. For a profile with kernels and copies,
with or without memory events, it draws what `stalloc timeline` says; so it does, with estimated times, for a recording
by `stalloc record --ops` that was made on the virtual GPU, or with --gpu.

The ending of the output's name chooses what is written: .html is the page, .md a summary in Markdown for the page of a
CI job, .png, .svg and .pdf a picture of load and map (of one device; needs matplotlib: pip install 'stalloc[report]').

JSON: `output`, `format`, `bytes` of what was written, and `file` and `device` of each of `devices` in it.
"""

import argparse
from pathlib import Path

from stalloc.cli.output import add_json_argument, file_label, wants_text, write_json
from stalloc.cli.progress import working
from stalloc.cli.trace_options import (
    add_candidate_arguments,
    add_gpu_argument,
    as_on_gpu,
    check_output,
    named_candidates,
    of_device,
)
from stalloc.figures import human_bytes
from stalloc.trace import load_devices
from stalloc.writers.reporting import FORMATS, format_of, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to show")
    parser.add_argument("-o", "--output", default=None, metavar="PAGE", help="what to write (report.html)")
    parser.add_argument("--format", choices=FORMATS, help="format of the file, if its name does not say")
    add_json_argument(parser)
    parser.add_argument("--device", type=int, metavar="N", help="this device only (default: all)")
    add_gpu_argument(parser)
    add_candidate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    path = Path(args.output or f"report.{args.format or 'html'}")
    form, allocators = format_of(path, args.format), named_candidates(args)
    check_output(path, "report.html", *args.files)
    records = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            found = of_device(file, load_devices(file, history=False), args.device)
            records += [(file, as_on_gpu(args, record)) for record in found]
    with working(f"drawing {file_label(str(path))}"):
        write_report(path, form, records, allocators)
    size, devices = path.stat().st_size, [{"file": file, "device": record.device} for file, record in records]
    write_json(args, {"output": str(path), "format": form, "bytes": size, "devices": devices})
    if wants_text(args):
        opened = ", open it in a browser" if form == "html" else ""
        print(f"{file_label(str(path))}: {human_bytes(size)}{opened}")
    return 0
