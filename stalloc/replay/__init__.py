"""What every other allocator would have done with a program: models behind one protocol."""

from stalloc.replay.model_events import events_of
from stalloc.replay.protocol import Allocator, BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.registry import ALLOCATORS, make

__all__ = ["ALLOCATORS", "Allocator", "BlockMap", "Counters", "Events", "Fed", "Kind", "events_of", "make"]
