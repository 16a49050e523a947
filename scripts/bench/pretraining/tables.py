"""The tables of `scripts/bench/paper`, in Markdown."""

from collections.abc import Iterable, Mapping
from statistics import mean

from pretraining.devices import ALLOCATORS, MIB, Need, Verdict
from pretraining.measuring import Cell, Row

ALLOWED_BYTES = 4 * MIB  #: that a row may reserve more than under expandable segments
LEAST_HITS = 0.99  #: of what repeats in the steps of a mixture; all of a dense model's


def dates(rows: Mapping[Cell, Row]) -> str:
    """When the rows of each model were measured."""
    of_model: dict[str, set[str]] = {}
    for cell, row in rows.items():
        of_model.setdefault(cell.model, set()).add(row.date)
    return "; ".join(f"{model}: {', '.join(sorted(found))}" for model, found in of_model.items())


def waste(rows: Mapping[Cell, Row]) -> str:
    lines = [
        "| model | configuration | allocated | native | expandable | GMLake | GMLake, all sizes | stalloc | "
        "less than native | hits |",
        "|---|---|" + "---:|" * 8,
    ]
    for name, ranks in _by_configuration(rows):
        allocated = [row.recorded.allocated_bytes for row in ranks]
        reserved = [
            [row.recorded.native_bytes for row in ranks],
            [row.recorded.expandable_bytes for row in ranks],
            [row.recorded.gmlake_bytes for row in ranks],
            [row.recorded.eager_gmlake_bytes for row in ranks],
            [row.stalloc_bytes for row in ranks],
        ]
        over = [[one - least for one, least in zip(of_ranks, allocated, strict=True)] for of_ranks in reserved]
        cells = [_each(f"{one / MIB:,.0f}" for one in of_ranks) for of_ranks in (allocated, *over)]
        cells += [_each(f"{100 * saved(row):.1f} %" for row in ranks), _each(_rate(row.hit_rate) for row in ranks)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_configuration(rows: Mapping[Cell, Row]) -> Iterable[tuple[str, list[Row]]]:
    """What stands in the first two columns, and the rows of the ranks."""
    found: dict[str, list[Row]] = {}
    for cell, row in rows.items():
        found.setdefault(f"{cell.model} | {cell.configuration}", []).append(row)
    return found.items()


def _each(of_ranks: Iterable[str]) -> str:
    texts = list(of_ranks)
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _rate(share: float) -> str:
    return f"{100 * share:.2f} %" if share else "no plan"


def saved(row: Row) -> float:
    """The share of native's waste that is gone."""
    native = row.recorded.native_bytes - row.recorded.allocated_bytes
    return 1 - (row.stalloc_bytes - row.recorded.allocated_bytes) / native if native else 0.0


def plans(rows: Mapping[Cell, Row]) -> str:
    lines = [
        "| model | configuration | requests | phases | load, MiB | published method | s | stalloc | s |",
        "|---|---|" + "---:|" * 7,
    ]
    for name, ranks in _by_configuration(rows):
        steps = [row.recorded for row in ranks]
        cells = [
            _each(f"{of.requests:,}" for of in steps),
            _each(f"{of.phases}" for of in steps),
            _each(f"{of.load_bytes / MIB:,.0f}" for of in steps),
            _each(f"{of.paper_bytes / of.load_bytes:.4f}" for of in steps),
            _each(f"{of.paper_seconds:.2f}" for of in steps),
            _each(f"{of.plan_bytes / of.load_bytes:.4f}" for of in steps),
            _each(f"{of.plan_seconds:.2f}" for of in steps),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
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


VERDICTS = (
    "| device, MiB | model | stalloc runs | step, ms | torch runs | step, ms | more steps "
    "| native | expandable | stalloc |\n"
    "|---:|---|---|---:|---|---:|---:|---|---|---|"
)


def verdict(one: Verdict) -> str:
    faster, other = one.case.faster, one.case.other
    theirs = f"{other.configuration} ({one.other_runs or 'not seen'}) | {1e3 * other.seconds:,.0f}"
    ended = [one.ended[setting] or "completes" for setting in ALLOCATORS]
    return (
        f"| {one.case.device_bytes / MIB:,.0f} | {faster.model} | {faster.configuration} | "
        f"{1e3 * faster.seconds:,.0f} | {theirs} | {100 * one.case.gain:.0f} % | {' | '.join(ended)} |"
    )


def findings(rows: Mapping[Cell, Row], dense: Iterable[str]) -> list[str]:
    """What the rows come to, and each that misses a target."""
    if not rows:
        return []
    of_dense = [saved(row) for cell, row in rows.items() if cell.model in dense]
    said = [f"In the mean {100 * mean(map(saved, rows.values())):.1f} % of native's waste is gone"]
    said[0] += f", {100 * mean(of_dense):.1f} % in dense models." if of_dense else "."
    for cell, row in rows.items():
        over = row.stalloc_bytes - row.recorded.expandable_bytes
        missed = [f"reserves {over / MIB:,.0f} MiB more than with expandable segments"] * (over > ALLOWED_BYTES)
        if not row.hit_rate:
            missed.append("is served without a plan")
        elif row.hit_rate < (1 if cell.model in dense else LEAST_HITS):
            missed.append(f"has hits of {_rate(row.hit_rate)}")
        if missed:
            said.append(f"missed: {cell.name} {', '.join(missed)}")
    return said
