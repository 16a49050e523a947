"""What an out-of-memory error says where memory was not what was lacking.

Contract: the text names the table of the runtime that is full, how much it holds, and what makes room in it.
"""

from typing import TYPE_CHECKING

from stalloc.core import constants

if TYPE_CHECKING:
    from stalloc.core.state import DeviceState

FULL_TABLES = {constants.FULL_STREAMS: "streams", constants.FULL_POOLS: "pools", constants.FULL_LIVE: "live blocks"}

_ADVICE = {
    "streams": "it holds {most:,}, which all have memory: free what was allocated on streams that are done with",
    "pools": (
        "it holds {most:,}, some for each stream and some for each pool of CUDA graphs: "
        "use the same streams again, and let graphs share a pool"
    ),
    "live blocks": "{live:,} blocks are live: free some, or allocate fewer and larger ones",
    "blocks": (
        "it holds {most:,}, with {live:,} blocks that are live and the free ones between them: "
        "free some, or allocate fewer and larger ones"
    ),
    "segments": "it holds {most:,}: free what is no longer used, so that segments go back to the device",
}


def full_table_text(state: "DeviceState", name: str, size_bytes: int) -> str:
    """The sentence for a request of `size_bytes` that the table called `name` has no row for."""
    most = {
        "streams": constants.MAX_STREAMS,
        "pools": state.record.pools_used,
        "blocks": state.record.blocks_capacity,
        "segments": state.record.segments_capacity,
    }.get(name, 0)
    return (
        f"stalloc: a request of {size_bytes} bytes on device {state.device} was not served, since stalloc's table of "
        f"{name} is full, not the device: {_ADVICE[name].format(most=most, live=state.record.live_count)}."
    )
