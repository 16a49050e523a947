"""What state, parameters and gradients that come and go add to a step, estimated.

Contract: both directions of the link, the disk and the processor work at once where there is a window for it, else one
after the other; what the optimizer saves on the device is not counted.
"""

from typing import TYPE_CHECKING

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START
from stalloc.cost.host_rates import (
    ADAM_PARAMETERS_PER_SECOND,
    DISK_READ_BYTES_PER_SECOND,
    DISK_WRITE_BYTES_PER_SECOND,
)
from stalloc.fitting.observation import ProgramSeen
from stalloc.techniques.technique_settings import TierSettings

if TYPE_CHECKING:
    from stalloc.fitting.trials import Measured

_FLOAT_BYTES = 4


def tier_seconds(tiers: TierSettings, trial: "Measured", step: ProgramSeen, link_bytes_per_second: float) -> float:
    """Seconds of each step, by what a trial under these settings has seen.

    State on disk is read and written once a step. Layers come for each pass, while the one before computes where there
    is a window, and for their update on the device, from which they go back; those on disk come through the host, as
    quickly as the slower of both is. Of what the processor updates gradients go to the host, and parameters that are
    not streamed both ways. Gradients that leave in backward come back for an update on the device. What is copied, or
    updated, beside backward is not taken to be hidden there.
    """
    rate = LINK_SHARE * link_bytes_per_second
    disk = trial.disk_state_bytes * (1 / DISK_READ_BYTES_PER_SECOND + 1 / DISK_WRITE_BYTES_PER_SECOND)
    resident_bytes = trial.processor_bytes - trial.processor_streamed_bytes
    to_host = (trial.paged_bytes + trial.processor_bytes + resident_bytes) / rate
    to_device = (trial.paged_bytes + resident_bytes) / rate
    processor = trial.processor_bytes / _FLOAT_BYTES / ADAM_PARAMETERS_PER_SECOND
    if tiers.paged_window_bytes > 1 or not trial.paged_bytes:  # the processor has a window of its own
        seconds = max(to_host, to_device, disk, processor) + LINK_START
    else:
        seconds = to_host + to_device + disk + processor + 2 * LINK_START
    if trial.streamed_bytes:
        num_passes = 2 * max(1, len(step.calls) // max(1, len({call.block for call in step.calls})))
        from_disk = trial.disk_streamed_bytes / min(rate, DISK_READ_BYTES_PER_SECOND)
        passes = num_passes * ((trial.streamed_bytes - trial.disk_streamed_bytes) / rate + from_disk)
        seconds += passes if tiers.streamed_window == 1 else max(0.0, passes - step.step_seconds)
        on_device_bytes = trial.streamed_bytes - trial.processor_streamed_bytes
        seconds += on_device_bytes * (1 + tiers.sends_gradients) / rate
        seconds += from_disk + trial.disk_streamed_bytes / DISK_WRITE_BYTES_PER_SECOND
    return seconds
