"""The optimizer's update made in drives that compute: what crosses the link then, and from how many drives it pays.

Source: Jang et al., "Smart-Infinity: Fast Large Language Model Training using Near-Storage Processing on a Real
System", HPCA 2024 (SmartUpdate): parameters and state lie on drives, gradients go there, and only new parameters come
back; with ZeRO-Infinity, whose processor updates, gradients go there as well, all three come over the link, and
parameters and state go back. Compression of gradients (SmartComp), which changes what is computed, is left out.
Contract: an update takes as long as what is busiest in it: the cells of the drives, which both read and write alike, or
one way of the link that the drives share.
"""

from dataclasses import dataclass

from stalloc.cost.host_rates import DISK_READ_BYTES_PER_SECOND, DISK_WRITE_BYTES_PER_SECOND
from stalloc.cost.swapping.layers import LinkCost
from stalloc.cost.swapping.recorded_model import ModelData


@dataclass(frozen=True)
class NearStorage:
    """One update of all parameters, in the drives, and where the host makes it instead."""

    num_drives: int
    moved_bytes: int  #: over the link, both ways
    seconds: float  #: of the update alone
    host_moved_bytes: int  #: the same where the host makes it
    host_seconds: float
    pays_from: int  #: drives, from which on it is quicker in them


def update_near_storage(data: ModelData, num_drives: int, link: LinkCost) -> NearStorage:
    """What an update of so many drives takes; gradients are as large as their parameters."""
    gradients = parameters = data.parameter_bytes
    stored = gradients + parameters + data.state_bytes  # is written once and read once, wherever the update is made
    cells = stored / DISK_READ_BYTES_PER_SECOND + stored / DISK_WRITE_BYTES_PER_SECOND  # of one drive
    near, far = link.seconds(parameters), link.seconds(stored)  # of the busier way
    held_up_by_cells = int(cells / far) if far else 0  # the most drives with which the link does not hold the host up
    return NearStorage(
        num_drives=num_drives,
        moved_bytes=gradients + parameters,
        seconds=max(cells / num_drives, near),
        host_moved_bytes=2 * stored,
        host_seconds=max(cells / num_drives, far),
        pays_from=held_up_by_cells + 1,
    )
