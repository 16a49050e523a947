"""The table as text and as Markdown.

Contract: a peak is shown as its ratio to the load with five decimals, so that 1.00000 with a mark means equal; a
method that was left out says so.
"""

import datetime

from .baselines import BASELINES
from .cases import Case
from .judging import Result
from .targets import Measured, Row

TITLES = {
    "trace": "Recorded traces, sizes rounded up to 512 bytes",
    "minimalloc": "MiniMalloc A to K",
    "idealloc": "Instances published with idealloc",
    "stage": "Made-up pipeline stages",
}


def _ratio(load_bytes: int, result: Result) -> str:
    return "1" if result.peak_bytes == load_bytes else f"{result.peak_bytes / load_bytes:.5f}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def print_heading() -> None:
    print("case, requests, load in bytes; then peak / load and time of each method, 1 where the peak equals the load")


def print_case(case: Case, load_bytes: int, ours: Result, others: list[Result | str]) -> None:
    """One case: stalloc's line, then one line of all baselines that ran."""
    proven = " proven" if ours.proven and ours.peak_bytes > load_bytes else ""
    print(f"{case.name}  {len(case.size):,}  {load_bytes:,}")
    print(f"    stalloc {_ratio(load_bytes, ours)}{proven} {_seconds(ours.seconds)}")
    ran = [
        f"{baseline.name} {_ratio(load_bytes, result)} {_seconds(result.seconds)}"
        for baseline, result in zip(BASELINES, others, strict=True)
        if isinstance(result, Result)
    ]
    if ran:
        print(f"    {'; '.join(ran)}", flush=True)


def print_rows(rows: list[Row]) -> None:
    print(f"\n{'target':72}{'value':>14}  wanted")
    for row in rows:
        print(f"{row.name:72}{row.value:>14}  {row.target or ''}{'   MISSED' if row.ok is False else ''}")
    print(f"{sum(row.ok is True for row in rows)} of {sum(row.ok is not None for row in rows)} targets met")


def markdown(
    command: str,
    machine: str,
    repeat: int,
    measured: dict[str, Measured],
    others: dict[str, list[Result | str]],
    unread: list[str],
    rows: list[Row],
) -> str:
    """The page: targets first, then a table a group, then what was left out and why."""
    lines = [
        "# The planner beside other methods",
        "",
        f"Made by `{command} --markdown FILE` on {datetime.date.today()}, {machine}.",
        "Each cell is the peak divided by the load (the maximum of bytes live at once,",
        "which no plan can go below) and the time; **1** means that they are equal.",
        f"stalloc's times are medians of {repeat}, the others ran once; compilation comes before the clock. Each",
        "layout was judged by the naive validator. The baselines are written from the descriptions named in",
        "`scripts/bench/planning/baselines`, and their times are of our code, not of theirs.",
        "",
        "## Targets",
        "",
        "| figure | value | target | |",
        "|---|---:|---|---|",
    ]
    said = {True: "met", False: "**missed**", None: ""}
    lines += [f"| {row.name} | {row.value:,} | {row.target or ''} | {said[row.ok]} |" for row in rows]
    for group, title in TITLES.items():
        entries = measured[group]
        if not entries:
            continue
        shown = [k for k in range(len(BASELINES)) if any(isinstance(others[c.name][k], Result) for c, _, _ in entries)]
        heads = ["case", "requests", "load, bytes", "stalloc", *(BASELINES[k].name for k in shown)]
        lines += ["", f"## {title}", "", f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
        for case, load, ours in entries:
            cells = [case.name, f"{len(case.size):,}", f"{load:,}", _cell(load, ours)]
            cells += [_cell(load, others[case.name][k]) for k in shown]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Left out", ""]
    lines += [
        f"- {baseline.name}: {baseline.missing or f'above {baseline.max_requests:,} requests'}."
        for baseline in BASELINES
    ]
    lines += [f"- Not read: {sentence}" for sentence in unread]
    return "\n".join(lines) + "\n"


def _cell(load_bytes: int, result: Result | str) -> str:
    if isinstance(result, str):
        return "-"
    ratio = _ratio(load_bytes, result)
    proven = " (proven)" if result.proven and ratio != "1" else ""
    return f"{'**1**' if ratio == '1' else ratio}{proven} {_seconds(result.seconds)}"
