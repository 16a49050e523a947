"""What happened on a device: the Trace record, and reading and writing it. Importing this needs numpy only."""

from stalloc.trace.load import load_traces
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, Trace
from stalloc.trace.storage import save_traces

__all__ = [
    "MARK_PHASE_BEGIN",
    "MARK_PHASE_END",
    "MARK_STEP",
    "Action",
    "Trace",
    "load_traces",
    "save_traces",
]
