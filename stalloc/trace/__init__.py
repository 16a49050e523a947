"""What happened on a device: the Trace record, and reading and writing it. Importing this needs numpy only."""

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    # a program that runs on its plan reads no file, of a dozen formats
    if name in ("load_traces", "load_devices", "record_of", "DeviceRecord"):
        from stalloc.trace import load

        return getattr(load, name)
    if name == "save_traces":
        from stalloc.trace.storage import save_traces

        return save_traces
    raise AttributeError(f"module 'stalloc.trace' has no attribute {name!r}")
