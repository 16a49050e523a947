"""Memory of the GPU in TensorBoard: one call a step, with the program's own writer."""

from typing import Any

from stalloc.integrations.memory_figures import memory_scalars


def write_scalars(writer: Any, step: int) -> None:
    """Write the scalars of this moment; `writer` is a SummaryWriter, torch's or tensorboardX's."""
    for name, value in memory_scalars().items():
        writer.add_scalar(name, value, step)
