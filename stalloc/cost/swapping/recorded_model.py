"""What the models read of a recording: both passes of its last step, its parameters, its layers, what backward needs.

Contract: layers are the repeated blocks in the order of their forward passes; what comes before the first and after the
last are layers of their own, what lies between two belongs to the one before it, so layers are the whole of both
passes. A parameter that two layers use, as an embedding and the head tied to it, is one of each. Moments are estimated
seconds of computing since the begin of the forward pass, as if nothing was waited for.
"""

import enum
import functools
import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Rows
from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.step_seconds import operation_seconds
from stalloc.cost.swapping.layers import LayerCost
from stalloc.errors import BadInputError
from stalloc.lifespans import recorded_step
from stalloc.lifespans.roles import module_of_ranges, within
from stalloc.trace import Trace
from stalloc.trace.operations import Operations, RangeKind, Role

Moment = tuple[int, ...]
"""What has to be on the device at once: parameters, or chunks."""
_LEAST_STATE = 4096  #: bytes of a state that is no counter


@dataclass(frozen=True)
class RecordedPasses:
    """The forward and the backward pass of the last recorded step."""

    trace: Trace
    operations: Operations
    rows: Rows  #: (k,) the operations of both passes, in order
    in_backward: Rows  #: (operations,) whether each is one of the backward pass
    seconds: list[float]  #: of each of `rows`, estimated
    end_event: int  #: of the step


def recorded_passes(trace: Trace, rates: GpuRates) -> RecordedPasses:
    """Both passes. Raises BadInputError for a trace without a whole step with operations."""
    operations, step = recorded_step(trace)
    in_update, in_backward = (within(operations, kind) for kind in (RangeKind.OPTIMIZER, RangeKind.BACKWARD))
    rows = step.operations[~in_update[step.operations]]
    seconds = [operation_seconds(operations, row, rates)[1] for row in rows.tolist()]
    return RecordedPasses(trace, operations, rows, in_backward, seconds, step.end_event)


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
    return ModelData(tuple(trace.size[[*number]].tolist()), in_turn(uses), int(state[state >= _LEAST_STATE].sum()))


def in_turn(uses: Iterable[Iterable[int]]) -> tuple[Moment, ...]:
    """The moments of these uses in order: each number once in a moment, and no moment empty or as the one before."""
    moments = (tuple(sorted(set(used))) for used in uses)
    return tuple(moment for moment, _ in itertools.groupby(moment for moment in moments if moment))


def layer_costs(passes: RecordedPasses) -> list[LayerCost]:
    """The layers of a step. Raises BadInputError for a trace that does not tell them."""
    trace, operations, in_backward = passes.trace, passes.operations, passes.in_backward
    owner, count = _layer_of_operations(passes)
    seconds = np.zeros((count, 2))
    np.add.at(seconds, (owner[passes.rows], in_backward[passes.rows].astype(np.int64)), passes.seconds)
    maker, in_forward = np.append(owner, -1)[operations.made_by], ~np.append(in_backward, False)[operations.made_by]
    user = np.where(in_backward, -1, owner)[operations.access_op]
    used = [np.unique(operations.access_request[user == layer]).astype(np.int64) for layer in range(count + 1)]
    found = []
    for layer in range(count):
        parameters = used[layer][operations.role[used[layer]] == Role.PARAMETER]
        saved = (maker == layer) & in_forward & (operations.role == Role.SAVED_ACTIVATION)
        handed_on = used[layer + 1][maker[used[layer + 1]] == layer]
        sizes = [int(trace.size[chosen].sum()) for chosen in (parameters, saved, handed_on)]
        work = []  # beyond what is saved, and beyond gradients
        for is_of_pass, made_in_pass, known in ((~in_backward, in_forward, 1), (in_backward, ~in_forward, 0)):
            last = operations.end[(owner == layer) & is_of_pass].max(initial=-1)
            made = np.flatnonzero((maker == layer) & made_in_pass)
            work.append(max(0, _most_at_once(trace, made, last) - sizes[known]))
        found.append(LayerCost(*sizes, *seconds[layer].tolist(), *work))
    return found


def _most_at_once(trace: Trace, made: Rows, last: int) -> int:
    """The most bytes that some requests hold at once, of which those that end after an event stay."""
    ended = made[trace.end[made] <= last]
    change = np.concatenate([trace.size[made], -trace.size[ended]])
    moments = np.concatenate([trace.start[made], trace.end[ended]])
    return int(np.cumsum(change[np.argsort(moments, kind="stable")]).max(initial=0))


def _layer_of_operations(passes: RecordedPasses) -> tuple[Rows, int]:
    """The layer of each operation, -1 for none, and how many layers there are."""
    operations, in_backward = passes.operations, passes.in_backward[passes.rows].tolist()
    block = np.full(len(operations.modules) + 1, -1, np.int64)  # of each module: the outermost block that it is in
    for module, parent in enumerate(operations.module_parent.tolist()):
        own = module if operations.module_is_block[module] else -1
        block[module] = block[parent] if block[parent] >= 0 else own
    of_row = block[module_of_ranges(operations)[passes.rows]].tolist()
    forward = dict.fromkeys(one for one, is_back in zip(of_row, in_backward, strict=True) if one >= 0 and not is_back)
    if len(forward) < 2:
        raise BadInputError(
            f"trace of device {passes.trace.device} shows no repeated blocks, so no layers: record a model that has "
            "some."
        )
    number, head = {one: place for place, one in enumerate(forward, 1)}, len(forward) + 1
    layers: list[int] = []
    for is_back, run in itertools.groupby(zip(in_backward, of_row, strict=True), key=lambda pair: pair[0]):
        part = [number.get(one, 0) for _, one in run]
        before, after = (head, 0) if is_back else (0, head)  # what the blocks of the pass lie between
        filled = list(itertools.accumulate(part, lambda last, one: one or last, initial=before))[1:]
        end = max((place for place, one in enumerate(part, 1) if one), default=len(part))
        layers += [*filled[:end], *[after] * (len(part) - end)]
    owner = np.full(len(operations), -1, np.int64)
    owner[passes.rows] = layers
    return owner, head + 1


class Use(enum.IntEnum):
    """What happens to a saved tensor; at the same moment in this order."""

    OVER = 0
    SAVED = 1
    NEEDED = 2


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a step saves for its backward pass."""

    size_bytes: int
    saved: float  #: after the last operation of the forward pass that uses it
    needed: float  #: before the first operation of the backward pass that does
    over: float  #: after the last one, which is later


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that one step saves for its backward pass, in the order in which they are saved."""

    tensors: tuple[SavedTensor, ...]
    seconds: float  #: of computing, both passes

    def peak_bytes(self, without: Collection[int] = ()) -> int:
        """What is there at once, at the most, of all of them but some."""
        sign, left_out = {Use.OVER: -1, Use.SAVED: 1, Use.NEEDED: 0}, frozenset(without)
        changes = (
            sign[kind] * self.tensors[number].size_bytes for _, kind, number in self.events if number not in left_out
        )
        return max(itertools.accumulate(changes, initial=0))

    @property
    def at_once_bytes(self) -> int:
        """What the backward pass uses at the same moment, and what is saved then, at the most."""
        most = used = 0
        for _, kind, number in self.events:
            size_bytes = self.tensors[number].size_bytes
            most = max(most, used + size_bytes * (kind is not Use.OVER))
            used += {Use.SAVED: 0, Use.NEEDED: size_bytes, Use.OVER: -size_bytes}[kind]
        return most

    @functools.cached_property
    def events(self) -> list[tuple[float, Use, int]]:
        """When what happens to which tensor, in order."""
        found = []
        for number, one in enumerate(self.tensors):
            found += [(one.saved, Use.SAVED, number), (one.needed, Use.NEEDED, number), (one.over, Use.OVER, number)]
        return sorted(found)


def saved_tensors(passes: RecordedPasses) -> SavedTensors:
    """The tensors of LEAST_BYTES or more that a recorded step saves for its backward pass."""
    trace, operations, in_backward = passes.trace, passes.operations, passes.in_backward
    ends = list(itertools.accumulate(passes.seconds, initial=0.0))
    times = dict(zip(passes.rows.tolist(), itertools.pairwise(ends), strict=True))  # begin and end of each operation
    uses: dict[int, tuple[list[int], list[int]]] = {}  # of each request: operations of the forward, and the other pass
    for operation, request in zip(operations.access_op.tolist(), operations.access_request.tolist(), strict=True):
        if operation in times and operations.role[request] == Role.SAVED_ACTIVATION:
            uses.setdefault(request, ([], []))[int(in_backward[operation])].append(operation)
    found = []
    for request, (forward, backward) in uses.items():
        maker = int(operations.made_by[request])
        if maker in times and not in_backward[maker]:
            forward.append(maker)
        if not backward or not forward or trace.size[request] < LEAST_BYTES:
            continue
        saved = max(times[row][1] for row in forward)
        needed = max(saved, min(times[row][0] for row in backward))
        over = max(*(times[row][1] for row in backward), math.nextafter(needed, math.inf))  # some take no time
        found.append(SavedTensor(int(trace.size[request]), saved, needed, over))
    return SavedTensors(tuple(sorted(found, key=lambda one: (one.saved, one.needed))), ends[-1])
