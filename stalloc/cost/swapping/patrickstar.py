"""Parameters in chunks of one size, and which chunks each moment of a recorded step needs on the device.

Source: Fang et al., "PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Memory Management", 2021:
parameters lie in chunks of one size in the order in which they are used, none over a border; the state of the optimizer
lies in further lists of chunks, each a mirror of that of the parameters.
Contract: the moments are those of one whole step. A parameter larger than a chunk, such as an embedding, is in none.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.errors import BadInputError
from stalloc.lifespans import recorded_step
from stalloc.lifespans.roles import within
from stalloc.trace import Trace
from stalloc.trace.operations import RangeKind, Role

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
        """All together."""
        return sum(self.sizes)

    @property
    def num_states(self) -> int:
        """How many lists of chunks the state takes: 2 for Adam in the precision of the parameters."""
        return -(-self.state_bytes // self.parameter_bytes) if self.sizes else 0


@dataclass(frozen=True)
class Chunks:
    """Parameters that lie in chunks."""

    chunk_bytes: int
    count: int
    num_states: int  #: chunks of state for each
    moments: tuple[Moment, ...]  #: chunks that operations of the forward and the backward pass use
    outside_bytes: int  #: parameters that are larger than a chunk, and their state: they stay on the device

    @property
    def with_update(self) -> tuple[Moment, ...]:
        """The moments, and those of an update of chunk after chunk, each with those of its state."""
        update = (
            (chunk, *(chunk + state * self.count for state in range(1, self.num_states + 1)))
            for chunk in range(self.count)
        )
        return (*self.moments, *update)


def model_data(trace: Trace) -> ModelData:
    """What the last recorded step does with parameters. Raises BadInputError for a trace that does not tell."""
    operations, step = recorded_step(trace)
    in_update = within(operations, RangeKind.OPTIMIZER)
    is_parameter = operations.role == Role.PARAMETER
    bounds = np.searchsorted(operations.access_op, np.stack([step.operations, step.operations + 1]))
    number: dict[int, int] = {}
    uses: list[Moment] = []
    for row, low, high in zip(step.operations.tolist(), *bounds.tolist(), strict=True):
        used = operations.access_request[low:high]
        used = used[is_parameter[used]].tolist()
        if used and not in_update[row]:
            moment = tuple(sorted({number.setdefault(one, len(number)) for one in used}))
            if not uses or uses[-1] != moment:
                uses.append(moment)
    if not number:
        raise BadInputError(
            f"trace of device {trace.device} has a step that uses no parameters: there is no model in it."
        )
    state = trace.size[(operations.role == Role.OPTIMIZER_STATE) & (trace.start < step.end_event)]
    return ModelData(
        tuple(int(trace.size[row]) for row in number), tuple(uses), int(state[state >= _LEAST_STATE].sum())
    )


def in_chunks(data: ModelData, chunk_bytes: int) -> Chunks:
    """Parameters one behind the other; one that does not fit into what is left of a chunk begins the next."""
    chunk_of: dict[int, int] = {}
    last, used, outside = -1, chunk_bytes, 0
    for row, size in enumerate(data.sizes):
        if size > chunk_bytes:
            outside += size * (1 + data.num_states)
            continue
        if used + size > chunk_bytes:
            last, used = last + 1, 0
        chunk_of[row] = last
        used += size
    moments: list[Moment] = []
    for needed in data.uses:
        moment = tuple(sorted({chunk_of[row] for row in needed if row in chunk_of}))
        if moment and (not moments or moments[-1] != moment):
            moments.append(moment)
    return Chunks(chunk_bytes, last + 1, data.num_states, tuple(moments), outside)
