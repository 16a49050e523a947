"""List published systems that save memory, and which part of each stalloc implements.

executes: runs for real; in part: so does what is named, but not the whole system; emulates: runs with a stand-in for
hardware; replays: on a trace; reports: a figure from a formula. Append to a command a program (fit, run, dryrun), a
recording (simulate, plan), or one by `stalloc record --ops` (swap, evict, stats --order). --tests shows, instead of
what each does, the test of the source tree that checks it.

JSON: `systems`, a list of `name`, `source`, `does`, `status`, `where`, `test`.
"""

import argparse
import dataclasses

from stalloc.cli.output import add_json_argument, table_console, wants_text, write_json
from stalloc.cli.tables import print_table
from stalloc.fitting.systems import SYSTEMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tests", action="store_true", help="show the test that checks each row")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if wants_text(args):
        if args.tests:
            rows = [[one.name, one.status, one.where, f"tests/{one.test}"] for one in SYSTEMS]
            columns: tuple[str, ...] = ("name", "status", "type", "held to by")
        else:
            rows = [[one.name, one.status, one.does, one.source, one.where] for one in SYSTEMS]
            columns = ("name", "status", "does", "published by", "type")
        print_table(table_console(), columns, rows, text_columns=len(columns))
    write_json(args, {"systems": [dataclasses.asdict(one) for one in SYSTEMS]})
    return 0
