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

from stalloc.columns import Column, Rows
from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.step_seconds import operation_seconds
from stalloc.cost.swapping.layers import LayerCost
from stalloc.errors import BadInputError
from stalloc.lifespans import recorded_step
from stalloc.lifespans.operation_modules import module_of_ranges
from stalloc.lifespans.roles import within
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
    trace, operations, rows, in_backward = passes.trace, passes.operations, passes.rows, passes.in_backward
    block, count = _blocks_of(operations, rows, in_backward)
    if count < 2:
        raise BadInputError(
            f"trace of device {trace.device} shows no repeated blocks, so no layers: record a model that has some."
        )
    owner = np.full(len(operations), -1, np.int64)  # the layer of each operation
    owner[rows] = _with_ends(block, in_backward[rows], count + 1)
    seconds = np.zeros((count + 2, 2))
    np.add.at(seconds, (owner[rows], in_backward[rows].astype(np.int64)), passes.seconds)
    sizes = np.zeros((count + 2, 3), np.int64)
    for column, (chosen, users) in enumerate(_memory(operations, owner, in_backward)):
        np.add.at(sizes[:, column], users, trace.size[chosen])
    work = _highest_made(passes, owner, count + 2)
    work = np.maximum(0, work - sizes[:, [1, 0]])  # beyond what is saved, and gradients
    columns = (sizes.tolist(), seconds.tolist(), work.tolist())
    return [LayerCost(*memory, *times, *more) for memory, times, more in zip(*columns, strict=True)]


def _blocks_of(operations: Operations, rows: Rows, in_backward: Rows) -> tuple[Rows, int]:
    """The block of each operation by number, -1 in none, and how many there are."""
    block = np.full(len(operations.modules), -1, np.int64)  # of each module: the outermost block that it is in
    for module, parent in enumerate(operations.module_parent.tolist()):
        inside = block[parent] if parent >= 0 else -1
        block[module] = inside if inside >= 0 else module if operations.module_is_block[module] else -1
    of_row = np.append(block, -1)[module_of_ranges(operations)[rows]]
    forward = of_row[~in_backward[rows]]
    number = {module: place for place, module in enumerate(dict.fromkeys(forward[forward >= 0].tolist()))}
    return np.array([number.get(module, -1) for module in of_row.tolist()], np.int64), len(number)


def _with_ends(block: Rows, is_backward: Rows, head: int) -> list[int]:
    """Layers from blocks, which count from 1 here: of each pass by itself, what its blocks lie between."""
    layers: list[int] = []
    borders = np.flatnonzero(np.diff(is_backward.astype(np.int64))) + 1
    for part, back in zip(np.split(block + 1, borders), np.split(is_backward, borders), strict=True):
        before, after = (head, 0) if len(back) and back[0] else (0, head)
        filled = list(itertools.accumulate(part.tolist(), lambda last, one: one or last, initial=before))[1:]
        end = int(np.flatnonzero(part).max(initial=-1)) + 1
        layers += filled if end == 0 else filled[:end] + [after] * (len(part) - end)
    return layers


def _memory(operations: Operations, owner: Rows, in_backward: Rows) -> list[tuple[Rows, Rows]]:
    """Requests of parameters, of saved activations and of what goes on to the next layer; and whose they are."""
    used_by = owner[operations.access_op]
    counted = (used_by >= 0) & ~in_backward[operations.access_op]
    request, user = operations.access_request[counted].astype(np.int64), used_by[counted]
    is_parameter = operations.role[request] == Role.PARAMETER
    parameters, users = np.unique(np.stack([request[is_parameter], user[is_parameter]]), axis=1)
    maker = np.append(owner, -1)[operations.made_by]
    made_in_forward = (maker >= 0) & ~np.append(in_backward, False)[operations.made_by]
    saved = np.flatnonzero(made_in_forward & (operations.role == Role.SAVED_ACTIVATION))
    handed_on = np.unique(request[(maker[request] >= 0) & (user == maker[request] + 1)])
    return [(parameters, users), (saved, maker[saved]), (handed_on, maker[handed_on])]


def _highest_made(passes: RecordedPasses, owner: Rows, count: int) -> Column:
    """(layers, 2) the most bytes that the forward and the backward pass of each had at once of what they made."""
    trace, operations, in_backward = passes.trace, passes.operations, passes.in_backward
    found = np.zeros((count, 2), np.int64)
    layer, of_backward = np.append(owner, -1)[operations.made_by], np.append(in_backward, False)[operations.made_by]
    for number, of_pass in np.ndindex(count, 2):
        ran = operations.end[(owner == number) & (in_backward == of_pass)]
        made = np.flatnonzero((layer == number) & (of_backward == of_pass))
        ended = made[trace.end[made] <= ran.max(initial=-1)]
        moments = np.concatenate([trace.start[made], trace.end[ended]])
        change = np.concatenate([trace.size[made], -trace.size[ended]])
        found[number, of_pass] = np.cumsum(change[np.argsort(moments, kind="stable")]).max(initial=0)
    return found


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
