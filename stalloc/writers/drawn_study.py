"""A study of copies and phases with all that is drawn and said of it."""

from dataclasses import dataclass

from stalloc.analysis.offload_study import Series, study, study_series
from stalloc.analysis.study_findings import findings
from stalloc.analysis.study_record import Study
from stalloc.trace import DeviceRecord


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
