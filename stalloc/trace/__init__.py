"""What happened on a device: the Trace record, and reading and writing it. Importing this needs numpy only."""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, Trace

if TYPE_CHECKING:
    from stalloc.trace.load import DeviceRecord, load_devices, load_traces, record_of
    from stalloc.trace.storage import save_traces

__all__ = [
    "MARK_PHASE_BEGIN",
    "MARK_PHASE_END",
    "MARK_STEP",
    "Action",
    "DeviceRecord",
    "Trace",
    "load_devices",
    "load_traces",
    "record_of",
    "save_traces",
]

# a program that runs on its plan reads no file, of a dozen formats
_MODULES = {
    "DeviceRecord": ".load",
    "load_devices": ".load",
    "load_traces": ".load",
    "record_of": ".load",
    "save_traces": ".storage",
}

__getattr__ = loaded_on_use(__name__, _MODULES)
