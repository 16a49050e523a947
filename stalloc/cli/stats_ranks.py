"""The snapshots of many ranks in one summary, for `stalloc stats`.

Contract: a file that cannot be read is named with its reason, and the rest is summarised. Files are read one at a time
by each process, which keeps the figures and forgets the trace.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from rich.console import Console

from stalloc.analysis.rank_comparison import (
    COMPARED,
    Outlier,
    RankComparison,
    RankFigures,
    compare_ranks,
    number_ranks,
    rank_figures,
)
from stalloc.cli.output import command_text, present
from stalloc.cli.progress import working
from stalloc.cli.tables import print_items, print_prose, print_table
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace import load_traces

MOST_APART = 8  #: files up to which each is described by itself: eight ranks are the GPUs of one machine
_FILES_A_PROCESS = 16  # files whose reading is worth the second that a process takes to start
_MAX_SHOWN = 12
_Read = list[RankFigures] | str


def run_ranks(args: argparse.Namespace) -> int:
    """Summarise all files together. Raises BadInputError if none can be read."""
    with working(f"reading {plural(len(args.files), 'file')}") as tell:
        read = _read_all(args.files, args.align, tell)
    ranks = [one for found in read if not isinstance(found, str) for one in found]
    unread = {file: found for file, found in zip(args.files, read, strict=True) if isinstance(found, str)}
    if not ranks:
        raise BadInputError(f"none of {plural(len(args.files), 'file')} can be read: {next(iter(unread.values()), '')}")
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, one.file, one.device))
    compared = compare_ranks(ranks)
    present(args, {"files": list(args.files)} | _entry(compared, unread), _print, compared, unread, len(args.files))
    return 0


def _read_all(files: Sequence[str], alignment: int, tell: Callable[[str], None]) -> list[_Read]:
    """What each file says, in their order; a sentence for one that cannot be read."""
    work = list(zip(files, number_ranks(files), strict=True))
    num_processes = min(len(os.sched_getaffinity(0)), len(files) // _FILES_A_PROCESS)
    if num_processes < 2:
        return [_read(file, rank, alignment) for file, rank in work]
    found: list[_Read] = [""] * len(files)
    ignored = (signal.SIGINT, signal.SIG_IGN)  # by each process: Ctrl-C is the parent's
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=signal.signal, initargs=ignored)
    try:
        places = {pool.submit(_read, file, rank, alignment): place for place, (file, rank) in enumerate(work)}
        for done, future in enumerate(as_completed(places), 1):
            place = places[future]
            try:
                found[place] = future.result()
            except BrokenProcessPool:
                found[place] = f"{files[place]}: the process that read files was killed: give fewer files at once."
            tell(f"reading {plural(len(files), 'file')}, {done:,} read")
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _read(file: str, rank: int | None, alignment: int) -> _Read:
    try:
        traces = load_traces(file, history=False, call_sites=False)
        return [rank_figures(file, rank, trace, alignment) for trace in traces]
    except BadInputError as error:
        return str(error)


def _entry(compared: RankComparison, unread: dict[str, str]) -> dict[str, Any]:
    decides = compared.deciding
    return {
        "ranks": [asdict(one) for one in compared.ranks],
        "spreads": {
            name: {
                "least": _who(spread.least) | {"bytes": getattr(spread.least, name)},
                "median_bytes": spread.median_bytes,
                "most": _who(spread.most) | {"bytes": getattr(spread.most, name)},
                "imbalance": spread.imbalance,
            }
            for name, spread in compared.spreads.items()
        },
        "outliers": [
            _who(one.rank) | {"figure": one.figure, "bytes": one.num_bytes, "median_bytes": one.median_bytes}
            for one in compared.outliers
        ],
        "deciding": _who(decides) | {"used_share": decides.used_share} if decides else None,
        "unread": unread,
    }


def _who(one: RankFigures) -> dict[str, Any]:
    return {"file": one.file, "rank": one.rank, "device": one.device}


def _print(console: Console, compared: RankComparison, unread: dict[str, str], num_files: int) -> None:
    ranks = compared.ranks
    several = len({one.file for one in ranks}) < len(ranks)

    def label(one: RankFigures) -> str:
        return printable(f"{one.label}, device {one.device}" if several else one.label)

    read = plural(num_files - len(unread), "rank")
    more = f", {plural(len(ranks), 'device')}: some files tell of several" if several else ""
    print_prose(console, f"{read} read{f' of {num_files:,} files' if unread else ''}{more}")
    rows = []
    for name, spread in compared.spreads.items():
        least, most = (f"{human_bytes(getattr(one, name))} ({label(one)})" for one in (spread.least, spread.most))
        imbalance = f"{spread.imbalance:.2f}" if spread.imbalance is not None else "-"
        rows.append((COMPARED[name], least, human_bytes(spread.median_bytes), most, imbalance))
    console.print()
    print_table(console, ("", "least", "median", "most", "most / median"), rows)
    console.print()
    shown = list(unread.values())[:_MAX_SHOWN]
    if len(unread) > _MAX_SHOWN:
        shown.append(f"{len(unread) - _MAX_SHOWN:,} more files, which --json names")
    print_items(console, [*_findings(compared, label), *(("not read", text) for text in shown)], indent="")
    if compared.deciding is not None:
        console.print(f"\nNext: stalloc explain {command_text(compared.deciding.file)}")


def _findings(compared: RankComparison, label: Callable[[RankFigures], str]) -> Iterator[tuple[str, str]]:
    by_rank: dict[str, list[Outlier]] = {}
    for one in compared.outliers:
        by_rank.setdefault(label(one.rank), []).append(one)
    for name, outliers in list(by_rank.items())[:_MAX_SHOWN]:
        told = []
        for one in outliers:
            away = one.num_bytes - one.median_bytes
            than = f"{human_bytes(abs(away))} {'more' if away > 0 else 'less'} than the median"
            told.append(f"{COMPARED[one.figure]} {human_bytes(one.num_bytes)}, {than}")
        yield "stands out", f"{name}: {'; '.join(told)}"
    if len(by_rank) > _MAX_SHOWN:
        yield "stands out", f"{len(by_rank) - _MAX_SHOWN:,} more ranks, which --json names"
    if not by_rank:
        yield "stands out", "no rank"
    failed = [one for one in compared.ranks if one.out_of_memory_bytes is not None]
    if failed:
        names = "; ".join(label(one) for one in failed[:_MAX_SHOWN])
        more = f" and {len(failed) - _MAX_SHOWN:,} more" if len(failed) > _MAX_SHOWN else ""
        yield "out of memory", names + more
    decides = compared.deciding
    if decides is None:
        return
    peak = f"{label(decides)}, which has {human_bytes(decides.allocated_peak_bytes)} allocated at its peak"
    if decides.used_share is not None and all(one.device_bytes for one in compared.ranks):
        yield "largest batch", f"is decided by {peak}, {decides.used_share:.0%} of its device"
    else:
        yield "largest batch", f"is decided by {peak}, if all devices are of one size: the files do not tell"
