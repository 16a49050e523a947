"""Write one page that shows a program's memory: load, addresses over time, who holds it, what is wasted and why.

FILE is a trace of any kind that stalloc reads; `stalloc stats --help` names them. The page is one file that a browser
opens from disk; it asks nothing of any network, and shows all devices of all files. It begins with what is wrong in
words, with the figures of `explain`, `top` and `stats`; then come what is allocated and reserved over time; the map of
addresses, as recorded and as stalloc plans it; who holds memory at the moment that is clicked, and what grew between
two; and what keeps memory reserved that nobody uses.
"""

import argparse
from pathlib import Path

from stalloc.cli.convert import of_device
from stalloc.cli.output import file_label
from stalloc.cli.progress import working
from stalloc.trace import load_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc report`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace to show")
    parser.add_argument("-o", "--output", default="report.html", metavar="PAGE", help="the page (report.html)")
    parser.add_argument("--device", type=int, metavar="N", help="this device only (default: all)")


def run(args: argparse.Namespace) -> int:
    """Load, write, say where."""
    from stalloc.report.page import write_page

    traces = []
    for file in args.files:
        with working(f"reading {file_label(file)}"):
            traces += [(file, trace) for trace in of_device(file, load_traces(file), args.device)]
    path = Path(args.output)
    with working(f"drawing {file_label(args.output)}"):
        write_page(path, traces)
    print(f"{file_label(args.output)}: {path.stat().st_size / (1 << 20):.1f} MiB, open it in a browser")
    return 0
