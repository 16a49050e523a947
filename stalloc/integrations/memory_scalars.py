"""The memory of this process as scalars with names, for whatever keeps them step by step."""

from stalloc.figures import fragmentation
from stalloc.integrations.installing import current
from stalloc.integrations.memory_figures import device_figures, served_controllers

_NOW = ("allocated_bytes", "reserved_bytes", "hit_rate")


def memory_scalars() -> dict[str, float]:
    """Allocated and reserved bytes, hit rate and fragmentation of each device, for a tracker of experiments.

    Named `stalloc/gpu0/allocated_bytes` and so on. Allocated and reserved are of this moment, the hit rate (where
    stalloc plans) and fragmentation of the run so far. Empty if no GPU memory is used.
    """
    found: dict[str, float] = {}
    for figures in device_figures(served_controllers(current())):
        name = f"stalloc/gpu{figures['device']}"
        found |= {f"{name}/{what}": figures[what] for what in _NOW if figures[what] is not None}
        peaks = figures["allocated_peak_bytes"], figures["reserved_peak_bytes"]
        found[f"{name}/fragmentation"] = fragmentation(*peaks)
    return found
