"""What one rank asks of PyTorch's allocator, written down event by event, and what that then counts as allocated.

Contract: a row is allocated and freed once. Bytes asked for are exact sums; bytes allocated are those of whole blocks,
as the model of PyTorch's caching allocator (replay/torch_caching.py) chooses them from an empty device of plenty.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from stalloc.columns import Column
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.torch_caching import TorchCaching, parse_settings


class Side(enum.IntEnum):
    """Streams that are not the program's, each of which has a cache of its own."""

    GATHERING = -2
    REDUCING = -1


@dataclass
class RankEvents:
    """Events of one rank; rows below the number of the program's requests are theirs."""

    sizes: list[int]  #: bytes of each row
    streams: list[int]
    taken: set[int] = field(default_factory=set)  #: requests that the program does not free by itself any more
    events: list[int] = field(default_factory=list)  #: the row of an allocation, -1 - row of a free

    def make(self, size: int, stream: int = 0) -> int:
        """Allocate so many bytes; the new row."""
        self.sizes.append(size)
        self.streams.append(stream)
        self.events.append(len(self.sizes) - 1)
        return self.events[-1]

    def take(self, *requests: int) -> None:
        """Let frees of these, which are live, be those of the layout."""
        self.taken.update(requests)

    def free(self, *rows: int) -> None:
        """Free what was allocated."""
        self.events.extend(-1 - row for row in rows)

    def counted(self, conf: str) -> tuple[Column, Column]:
        """(m,) int64 bytes asked for and bytes allocated after each event, under settings of PyTorch's allocator."""
        events, sizes = np.array(self.events, np.int64), np.array(self.sizes, np.int64)
        is_alloc = events >= 0
        rows = np.where(is_alloc, events, -1 - events)
        streams = np.array(self.streams, np.int64)
        streams[streams < 0] += streams.max(initial=0) + 1 + len(Side)
        asked = np.cumsum(np.where(is_alloc, 1, -1) * sizes[rows])
        fed = TorchCaching(parse_settings(conf)).feed(
            Events(
                kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED).astype(np.int8),
                request=rows,
                event=np.arange(len(rows)),
                size=sizes,
                stream=streams,
            )
        )
        return asked, fed.block_bytes
