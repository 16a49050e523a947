"""Memory of the GPU as lines of Python's logging: one call a step."""

import logging

from stalloc.figures import human_bytes
from stalloc.integrations.memory_figures import memory_scalars

_LOGGER = logging.getLogger("stalloc.memory")


def log_step(step: int, logger: logging.Logger = _LOGGER, level: int = logging.INFO) -> None:
    """Log a line for each device, whose record has the scalars as `stalloc`, for handlers that write figures."""
    if not logger.isEnabledFor(level):
        return
    devices: dict[str, dict[str, float]] = {}
    for name, value in memory_scalars().items():
        _, device, what = name.split("/")
        devices.setdefault(device, {})[what] = value
    for device, figures in devices.items():
        shown = [
            f"allocated {human_bytes(int(figures['allocated_bytes']))}",
            f"reserved {human_bytes(int(figures['reserved_bytes']))}",
            *([f"hit rate {figures['hit_rate']:.1%}"] if "hit_rate" in figures else []),
            f"fragmentation {figures['fragmentation']:.1%}",
        ]
        logger.log(level, "step %d, %s: %s", step, device, ", ".join(shown), extra={"stalloc": figures})
