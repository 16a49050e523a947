"""The parameters of a recorded step, when it uses which, and how much state its optimizer keeps."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stalloc.cost.swapping.recorded_passes import RecordedPasses
from stalloc.errors import BadInputError
from stalloc.trace.operations import Role

Moment = tuple[int, ...]
"""What has to be on the device at once: parameters, or chunks."""
_LEAST_STATE = 4096  #: bytes of a state that is no counter


@dataclass(frozen=True)
class ModelData:
    """Parameters by number, in the order of their first use."""

    sizes: tuple[int, ...]  #: bytes of each
    uses: tuple[Moment, ...]  #: parameters that operations of the forward and the backward pass use, in order
    state_bytes: int  #: of the optimizer, all parameters together

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(self.sizes)

    @property
    def num_states(self) -> int:
        """How many lists of chunks the state takes: 2 for Adam in the precision of the parameters."""
        return -(-self.state_bytes // self.parameter_bytes) if self.sizes else 0


def model_data(passes: RecordedPasses) -> ModelData:
    """What a recorded step does with parameters. Raises BadInputError for one that uses none."""
    trace, operations = passes.trace, passes.operations
    is_parameter = operations.role == Role.PARAMETER
    bounds = np.searchsorted(operations.access_op, np.stack([passes.rows, passes.rows + 1]))
    number: dict[int, int] = {}
    uses: list[Iterable[int]] = []
    for low, high in bounds.T.tolist():
        used = operations.access_request[low:high]
        uses.append([number.setdefault(one, len(number)) for one in used[is_parameter[used]].tolist()])
    if not number:
        raise BadInputError(
            f"trace of device {trace.device} has a step that uses no parameters: there is no model in it."
        )
    state = trace.size[(operations.role == Role.OPTIMIZER_STATE) & (trace.start < passes.end_event)]
    return ModelData(
        tuple(int(trace.size[row]) for row in number), in_turn(uses), int(state[state >= _LEAST_STATE].sum())
    )


def in_turn(uses: Iterable[Iterable[int]]) -> tuple[Moment, ...]:
    """The moments of these uses in order: each number once in a moment, and no moment empty or as the one before."""
    moments = (tuple(sorted(set(used))) for used in uses)
    return tuple(moment for moment, _ in itertools.groupby(moment for moment in moments if moment))
