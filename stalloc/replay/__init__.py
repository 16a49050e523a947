"""What every other allocator would have done with a program: models behind one protocol."""

from stalloc.replay.events import events_of
from stalloc.replay.protocol import Allocator, BlockMap, Counters, Events, Fed, Kind

__all__ = ["Allocator", "BlockMap", "Counters", "Events", "Fed", "Kind", "events_of"]
