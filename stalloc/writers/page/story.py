"""What every report says of a device: first sentences, with the numbers of `explain`, `top`, `stats`; its study."""

from dataclasses import dataclass

from stalloc.analysis import Explanation, Holders
from stalloc.analysis.explanation import CAUSES
from stalloc.analysis.offload_study import Series, study, study_series
from stalloc.analysis.study_findings import findings
from stalloc.analysis.study_record import Study
from stalloc.analysis.summary import Summary
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.trace import DeviceRecord, Trace


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What charts and summaries show."""

    found: Study
    series: Series | None  #: none where times say nothing
    findings: list[str]


def drawn_study(record: DeviceRecord) -> Drawn | None:
    """The study of a record that has kernels or copies; None of one that has not."""
    if record.activity is None or not len(record.activity):
        return None
    found = study(record)
    return Drawn(found=found, series=study_series(record) if found.has_times else None, findings=findings(found))


_MUCH = 0.05  # of what is reserved, below which a gap is not worth a headline


def headline(told: Explanation, held: Holders, summary: Summary) -> list[str]:
    """What a reader has to know first, the most important sentence at the top; plain text."""
    found = []
    error = told.out_of_memory
    if error is not None:
        found.append(
            f"Out of memory by {error.verdict}: {printable(error.asked_by)} requested "
            f"{human_bytes(error.wanted_bytes)}, {human_bytes(error.device_free_bytes)} was free on the device and "
            f"{human_bytes(error.partly_used_bytes + error.whole_segments_bytes)} in the allocator."
            if error.device_free_bytes is not None
            else f"Out of memory: {printable(error.asked_by)} requested {human_bytes(error.wanted_bytes)}; the file "
            "does not say what was free on the device."
        )
    grown = ((human_bytes(growth.bytes_per_step), printable(growth.name)) for growth in held.growth[:2])
    found += [f"Memory grows {size} a step at {name}." for size, name in grown]
    gap = told.reserved_bytes - told.allocated_bytes
    if gap > _MUCH * max(told.reserved_bytes, 1):
        cause = max(told.causes, key=lambda name: told.causes[name])
        found.append(
            f"Reserved is {gap / max(told.allocated_bytes, 1):.0%} above allocated, "
            f"{human_bytes(told.reserved_bytes)} against {human_bytes(told.allocated_bytes)}: "
            f"{human_bytes(told.causes[cause])} of it is {cause.replace('_', ' ')} ({CAUSES[cause]})."
        )
    if not found:
        found.append(
            f"Nothing stands out: {human_bytes(summary.allocated_peak_bytes)} allocated at the peak"
            + (f", {human_bytes(summary.reserved_peak_bytes)} reserved." if summary.reserved_peak_bytes else ".")
        )
    return found


def remarks(trace: Trace, told: Explanation) -> list[str]:
    """What limits these figures."""
    notes = [printable(str(note)) for note in trace.info.get("notes", [])]
    if told.source_text:
        notes.append(printable(told.source_text, 300))
    if told.record_unseen_bytes:
        notes.append(f"{human_bytes(told.record_unseen_bytes)} live throughout, told only as a total")
    counts = f"{plural(trace.num_requests, 'request')} in {plural(trace.num_events, 'event')}"
    return [counts, *notes]
