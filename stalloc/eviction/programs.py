"""Reading what can be replayed: a log of the DTR simulator, or a recording with operations."""

import os
from dataclasses import dataclass

from stalloc.cost.gpu_rates import GpuRates
from stalloc.errors import BadInputError
from stalloc.eviction.instructions import Instructions
from stalloc.eviction.recorded_step import step_instructions
from stalloc.eviction.simulator_log import read_simulator_log
from stalloc.inputs import open_input, shown_name
from stalloc.trace import load_traces
from stalloc.trace.sources.dtr_log import looks_like_dtr_log
from stalloc.trace.sources.log_text import unpacked


@dataclass(frozen=True, eq=False)
class Program:
    """A program with tensors changed by copies, and in place; a recording knows only changes in place."""

    device: int
    copied: Instructions  #: a change makes a new storage
    in_place: Instructions  #: a change is made where the tensor is, as Coop has it


def read_programs(file: str | os.PathLike[str], rates: GpuRates) -> list[Program]:
    """The programs of a file, one a device. Raises BadInputError for a file without operations."""
    with open_input(file, "a recording with operations, or a log of the DTR simulator") as opened:
        data = unpacked(opened)
    if looks_like_dtr_log(data[:4096].lstrip()):
        name = shown_name(file)
        return [Program(0, read_simulator_log(name, data), read_simulator_log(name, data, in_place=True))]
    found = []
    for trace in load_traces(file):
        try:
            program = step_instructions(trace, rates)
        except BadInputError as error:
            raise BadInputError(f"{shown_name(file)}: {error}") from error
        found.append(Program(trace.device, program, program))
    return found
