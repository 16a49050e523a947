"""What each repeated block of a recorded step weighs, moves and takes: what schedules of layers are made of.

Contract: layers are the repeated blocks in the order of their forward passes. What comes before the first belongs to
it, and what comes after the last to that one, so that the layers are the whole of the forward and the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Rows
from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates
from stalloc.cost.step_seconds import operation_seconds
from stalloc.errors import BadInputError
from stalloc.lifespans import recorded_step
from stalloc.lifespans.operation_modules import module_of_ranges
from stalloc.lifespans.roles import within
from stalloc.trace import Trace
from stalloc.trace.operations import Operations, RangeKind, Role


@dataclass(frozen=True)
class LayerCost:
    """One layer, or several in a row."""

    parameter_bytes: int
    saved_bytes: int  #: activations that its forward pass leaves for its backward pass
    boundary_bytes: int  #: what it hands to the next layer
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class LinkCost:
    """Copies over one link."""

    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """Of one copy; of none, nothing."""
        return LINK_START + num_bytes / (LINK_SHARE * self.bytes_per_second) if num_bytes else 0.0


def together(layers: Sequence[LayerCost]) -> LayerCost:
    """Several layers in a row as one."""
    return LayerCost(
        sum(one.parameter_bytes for one in layers),
        sum(one.saved_bytes for one in layers),
        layers[-1].boundary_bytes,
        sum(one.forward_seconds for one in layers),
        sum(one.backward_seconds for one in layers),
    )


def layer_costs(trace: Trace, rates: GpuRates) -> list[LayerCost]:
    """The layers of the last recorded step. Raises BadInputError for a trace that does not tell them."""
    operations, step = recorded_step(trace)
    in_update, in_backward = (within(operations, kind) for kind in (RangeKind.OPTIMIZER, RangeKind.BACKWARD))
    rows = step.operations[~in_update[step.operations]]
    layer, count = _layers_of(operations, rows, in_backward)
    if count < 2:
        raise BadInputError(f"trace of device {trace.device} shows no repeated blocks, which is what layers are.")
    seconds = np.array([operation_seconds(operations, row, rates)[1] for row in rows.tolist()])
    of_pass = in_backward[rows].astype(np.int64)
    passes = np.zeros((count, 2))
    np.add.at(passes, (layer, of_pass), seconds)
    owner = np.full(len(operations), -1, np.int64)  # the layer of each operation
    owner[rows] = layer
    sizes = np.zeros((count, 3), np.int64)
    for column, (chosen, users) in enumerate(_memory(trace, operations, owner, in_backward)):
        np.add.at(sizes[:, column], users, trace.size[chosen])
    return [
        LayerCost(parameter_bytes, saved_bytes, boundary_bytes, forward, backward)
        for (parameter_bytes, saved_bytes, boundary_bytes), (forward, backward) in zip(
            sizes.tolist(), passes.tolist(), strict=True
        )
    ]


def _layers_of(operations: Operations, rows: Rows, in_backward: Rows) -> tuple[Rows, int]:
    """The layer of each operation, by number in the order of forward passes, and how many there are."""
    block = np.full(len(operations.modules), -1, np.int64)  # of each module: the outermost block that it is in
    for module, parent in enumerate(operations.module_parent.tolist()):
        inside = block[parent] if parent >= 0 else -1
        block[module] = inside if inside >= 0 else module if operations.module_is_block[module] else -1
    of_row = np.append(block, -1)[module_of_ranges(operations)[rows]]
    forward = of_row[~in_backward[rows]]
    number = {module: place for place, module in enumerate(dict.fromkeys(forward[forward >= 0].tolist()))}
    known = np.array([number.get(module, -1) for module in of_row.tolist()], np.int64)
    last = 0
    for place, layer in enumerate(known.tolist()):  # what lies between belongs to the layer before it
        last = layer if layer >= 0 else last
        known[place] = last
    return known, len(number)


def _memory(
    trace: Trace, operations: Operations, owner: Rows, in_backward: Rows
) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Requests of parameters, of saved activations and of what goes on to the next layer; and whose they are."""
    used_by = owner[operations.access_op]
    counted = (used_by >= 0) & ~in_backward[operations.access_op]
    request, user = operations.access_request[counted].astype(np.int64), used_by[counted]
    is_parameter = operations.role[request] == Role.PARAMETER
    parameters, first = np.unique(request[is_parameter], return_index=True)
    maker = np.append(owner, -1)[operations.made_by]
    made_in_forward = (maker >= 0) & ~np.append(in_backward, False)[operations.made_by]
    saved = np.flatnonzero(made_in_forward & (operations.role == Role.SAVED_ACTIVATION))
    handed_on = np.unique(request[(maker[request] >= 0) & (user == maker[request] + 1)])
    return (parameters, user[is_parameter][first]), (saved, maker[saved]), (handed_on, maker[handed_on])
