"""A snapshot against the model of the allocator that recorded it.

Contract: `exact` means that from the reconstructed start, every allocation of the recording got its recorded address
and the reserved bytes agreed after every event; the first event where either is not so is named otherwise.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.allocator_conf import TorchSettings
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.torch_cache import RELEASE
from stalloc.replay.torch_caching import TorchCaching, TorchFed
from stalloc.replay.torch_start import is_whole, recorded_calls, recorded_settings, starting_blocks
from stalloc.trace.record import Action, Trace

_SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


@dataclass(frozen=True, kw_only=True)
class RecordCheck:
    """Whether the model does what the recorded allocator did."""

    exact: bool
    first_difference: int | None
    """Event index; None if exact, or if the model has no such state to start from."""
    reason: str
    """What differs there, empty if exact."""
    num_segment_events: int
    """Segments and pages taken and given back."""
    num_compared: int
    """Events of the program that were compared."""


def check_record(trace: Trace, settings: TorchSettings | None = None) -> RecordCheck:
    """Replay a snapshot's calls from its reconstructed start, with the recorded settings if none are given.

    A trace with private pools is not exact. Raises BadInputError for a trace without segments.
    """
    settings = settings or recorded_settings(trace)
    events, _ = recorded_calls(trace, settings)
    cannot, blocks = "", None
    if np.any(trace.extra.get("segment_pool", 0)):
        cannot = "the trace has private pools, which the model has not"
    elif not is_whole(blocks := starting_blocks(trace, settings)):
        cannot = "its segments and blocks do not fit each other"
    if cannot:
        return RecordCheck(
            exact=False,
            first_difference=None,
            reason=cannot,
            num_segment_events=int(np.isin(trace.action, _SEGMENT_ACTIONS).sum()),
            num_compared=0,
        )
    fed = TorchCaching.from_record(trace, settings, blocks).feed(events)
    wrong_place = (events.kind == Kind.ALLOC) & (fed.address != trace.address[events.event].astype(np.int64))
    recorded = trace.reserved_bytes()[events.event]
    wrong_reserved = fed.reserved_bytes != recorded
    num_segment_events = int(np.isin(trace.action, _SEGMENT_ACTIONS).sum())
    differs = wrong_place | wrong_reserved
    if not differs.any():
        return RecordCheck(
            exact=True,
            first_difference=None,
            reason="",
            num_segment_events=num_segment_events,
            num_compared=len(events.kind),
        )
    at = int(np.argmax(differs))
    return RecordCheck(
        exact=False,
        first_difference=int(events.event[at]),
        reason=_reason(trace, events, fed, at, int(recorded[at])),
        num_segment_events=num_segment_events,
        num_compared=len(events.kind),
    )


def _reason(trace: Trace, events: Events, fed: TorchFed, at: int, recorded: int) -> str:
    event = int(events.event[at])
    what = {
        int(Kind.ALLOC): f"an allocation of {int(trace.event_size[event])} bytes",
        int(Kind.EMPTY_CACHE): "the segments given back up to here",
        RELEASE: "a segment given back",
    }.get(int(events.kind[at]), "a free")
    reserved = int(fed.reserved_bytes[at])
    if reserved != recorded:
        return f"after {what} the file has {recorded} bytes reserved, the model {reserved}"
    return f"{what} went to {int(trace.address[event]):#x} in the file, to {int(fed.address[at]):#x} in the model"
