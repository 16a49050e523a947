"""A summary in Markdown, for the page of a CI job or an issue: what is wrong, the figures, who holds memory, causes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from stalloc.analysis import explain, holders, summarize
from stalloc.analysis.moments import last_oom, moment_text
from stalloc.figures import human_bytes, human_seconds
from stalloc.printable import printable
from stalloc.trace import DeviceRecord, Trace
from stalloc.writers.page.story import Drawn, drawn_study, headline, remarks
from stalloc.writers.writing import write_chunks

_ROWS = 8
_PARTS = ("", "compute_", "copy_", "overlap_", "idle_")


def write_markdown(path: Path, records: Sequence[tuple[str, DeviceRecord]]) -> None:
    """Write a section a device. Raises BadInputError for a file that cannot be written."""
    write_chunks(path, ["\n".join(_section(name, record)).encode() + b"\n" for name, record in records])


def _section(name: str, record: DeviceRecord) -> list[str]:
    lines = [f"## {_escaped(Path(name).name)}, device {record.device}", ""]
    if record.trace is not None:
        lines += [*_memory(record.trace), ""]
    drawn = drawn_study(record)
    return lines if drawn is None else lines + _study(drawn)


def _study(drawn: Drawn) -> list[str]:
    phases = [
        (phase.name, *(human_seconds(getattr(phase, f"{part}seconds")) for part in _PARTS))
        for phase in drawn.found.phases
    ]
    split = _table(("phase", "time", "computes", "copies", "both", "idle"), phases)
    return [
        *(f"- {_escaped(sentence)}" for sentence in drawn.findings),
        "",
        *(split if drawn.found.knows_computing else []),
        *(f"- {_escaped(sentence)}" for sentence in drawn.found.missing),
    ]


def _memory(trace: Trace) -> list[str]:
    told = explain(trace, "oom" if last_oom(trace) is not None else "peak", advise=False)
    held, summary = holders(trace), summarize(trace)
    first, *others = headline(told, held, summary)
    figures = {
        "allocated peak": summary.allocated_peak_bytes,
        "reserved peak": summary.reserved_peak_bytes,
        "least memory that any plan needs": summary.lower_bound_bytes,
    }
    lines = [f"**{_escaped(first)}**", ""]
    lines += [line for other in others for line in (_escaped(other), "")]
    lines += _table(("", ""), ((label, human_bytes(value)) for label, value in figures.items() if value is not None))
    shown = held.by_site[:_ROWS] if held.has_sites else held.by_class[:_ROWS]
    rows = ((entry.name, human_bytes(entry.held_bytes), f"{entry.requests:,}") for entry in shown)
    lines += [f"Who holds {human_bytes(held.allocated_bytes)} {moment_text(held.event)}:", ""]
    lines += _table(("call site" if held.has_sites else "class", "held", "requests"), rows)
    causes = sorted(((size, cause) for cause, size in told.causes.items() if size), reverse=True)
    if causes:
        lines += ["Reserved but not allocated:", ""]
        lines += _table(("cause", "bytes"), ((cause.replace("_", " "), human_bytes(size)) for size, cause in causes))
    return [*lines, *(f"- {_escaped(remark)}" for remark in remarks(trace, told))]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"

    rule = "|---|" + "---:|" * (len(heads) - 1)
    return [line(heads), rule, *map(line, rows), ""]


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: names of files and functions may hold anything."""
    marked = "".join("\\" + char if char in "\\`*_[]<>|#~$" else char for char in printable(text))
    return marked.replace("&", "&amp;")
