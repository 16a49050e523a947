"""The tables of `scripts/bench/paper`, in Markdown."""

from collections.abc import Iterable, Mapping
from statistics import mean

from harm.running import Setting

from pretraining.cells import Cell
from pretraining.devices import MIB, Need, Verdict
from pretraining.measuring import Row

ALLOWED_BYTES = 4 * MIB  #: that a dense row may reserve more than under expandable segments


def waste(rows: Mapping[Cell, Row]) -> str:
    """Reserved less allocated, MiB."""
    lines = [
        "| model | configuration | rank | allocated | native | expandable | GMLake | GMLake, all sizes | stalloc | "
        "less than native | hits |",
        "|---|---|---:|" + "---:|" * 8,
    ]
    for cell, row in rows.items():
        of = row.recorded
        allocated = of.allocated_bytes
        reserved = (of.native_bytes, of.expandable_bytes, of.gmlake_bytes, of.eager_gmlake_bytes)
        cells = [f"{(one - allocated) / MIB:,.0f}" for one in (*reserved, row.stalloc_bytes)]
        lines.append(
            f"| {cell.model} | {cell.configuration} | {cell.rank} | {allocated / MIB:,.0f} | {' | '.join(cells)} | "
            f"{100 * saved(row):.1f} % | {_rate(row.hit_rate)} |"
        )
    return "\n".join(lines)


def _rate(share: float) -> str:
    return f"{100 * share:.2f} %" if share else "no plan"


def saved(row: Row) -> float:
    """The share of native's waste that is gone."""
    native = row.recorded.native_bytes - row.recorded.allocated_bytes
    return 1 - (row.stalloc_bytes - row.recorded.allocated_bytes) / native if native else 0.0


def plans(rows: Mapping[Cell, Row]) -> str:
    """The last recorded step, planned two ways, by its load."""
    lines = [
        "| model | configuration | rank | requests | phases | load, MiB | published method | s | stalloc | s |",
        "|---|---|---:|" + "---:|" * 7,
    ]
    for cell, row in rows.items():
        of = row.recorded
        lines.append(
            f"| {cell.model} | {cell.configuration} | {cell.rank} | {of.requests:,} | {of.phases} | "
            f"{of.load_bytes / MIB:,.0f} | {of.paper_bytes / of.load_bytes:.5f} | {of.paper_seconds:.3f} | "
            f"{of.plan_bytes / of.load_bytes:.5f} | {of.plan_seconds:.3f} |"
        )
    return "\n".join(lines)


def devices(needs: Iterable[Need]) -> str:
    """What each configuration needs of a device, and how long its step is; the fastest first."""
    lines = [
        "| model | configuration | step, ms | native | expandable | stalloc | stalloc alone |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for need in needs:
        alone = need.stalloc_bytes < need.torch_bytes
        between = f"{need.stalloc_bytes / MIB:,.0f} to {need.torch_bytes / MIB - 2:,.0f}" if alone else "-"
        held = (need.native_bytes, need.expandable_bytes, need.stalloc_bytes)
        lines.append(
            f"| {need.model} | {need.configuration} | {1e3 * need.seconds:,.0f} | "
            f"{' | '.join(f'{one / MIB:,.0f}' for one in held)} | {between} |"
        )
    return "\n".join(lines)


def verdicts(found: Iterable[Verdict]) -> str:
    """The cases that were run."""
    lines = [
        "| device, MiB | model | stalloc runs | step, ms | torch runs | step, ms | more steps | native | expandable | "
        "stalloc |",
        "|---:|---|---|---:|---|---:|---:|---|---|---|",
    ]
    for one in found:
        faster, other = one.case.faster, one.case.other
        theirs = (
            f"{other.configuration} ({one.other_runs or 'not seen'}) | {1e3 * other.seconds:,.0f}"
            if other
            else "none | -"
        )
        gain = f"{100 * one.case.gain:.0f} %" if other else "-"
        ended = [one.ended[setting] or "completes" for setting in Setting if setting in one.ended]
        lines.append(
            f"| {one.case.device_bytes / MIB:,.0f} | {faster.model} | {faster.configuration} | "
            f"{1e3 * faster.seconds:,.0f} | {theirs} | {gain} | {' | '.join(ended)} |"
        )
    return "\n".join(lines)


def findings(rows: Mapping[Cell, Row], dense: Iterable[str]) -> list[str]:
    """What the rows come to, and each that misses a target."""
    if not rows:
        return []
    said = [f"In the mean {100 * mean(map(saved, rows.values())):.1f} % of native's waste is gone."]
    for cell, row in rows.items():
        over = row.stalloc_bytes - row.recorded.expandable_bytes
        if over > ALLOWED_BYTES:
            said.append(f"missed: {cell.name} reserves {over / MIB:,.0f} MiB more than with expandable segments")
        if cell.model in dense and row.hit_rate < 1:
            said.append(f"missed: {cell.name} has hits of {_rate(row.hit_rate)}")
    return said
