"""The table as text and as JSON."""

from harm.judging import MIB, Row

HEADER = (
    f"{'program':<26}{'default':>9}{'other':>9}{'stalloc':>9}{'alloc':>8}{'least':>9}{'in':>9}{'hits':>8}"
    f"{'known':>8}{'cpu':>6}{'maps':>7}{'plans':>6}{'kinds':>9}{'exit':>5}"
)


def line(row: Row) -> str:
    """One program: MiB, shares in per cent; `in` is the memory that stalloc was tried with, ! if it did not do."""
    leasts = [least for least in (row.default_least_bytes, row.other_least_bytes) if least is not None]
    tried = _mib(row.completes_in_bytes) + ("!" if row.completes is False else "")
    ratio = "-" if row.processor_ratio is None else f"{row.processor_ratio:.2f}"
    return (
        f"{row.name:<26}{_mib(row.default_bytes):>9}{_mib(row.other_bytes):>9}{_mib(row.stalloc_bytes):>9}"
        f"{_mib(row.allocated_bytes):>8}{_mib(min(leasts, default=None)):>9}{tried:>9}{_share(row.hit_rate):>8}"
        f"{_share(row.known_hit_rate):>8}{ratio:>6}{_count(row.maps):>7}{_count(row.plans):>6}"
        f"{f'{row.kinds}/{row.steps}':>9}{_count(row.code):>5}{'  MISSED' if row.missed else ''}"
    )


def misses(rows: list[Row]) -> list[str]:
    """A line for each target that a row missed."""
    return [f"MISSED {row.name}: {what}" for row in rows for what in row.missed]


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)
