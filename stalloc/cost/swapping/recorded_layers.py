"""The layers of a recorded step, and what the passes of some in a row need at once.

Contract: layers are the repeated blocks in the order of their forward passes. What comes before the first belongs to
it, and what comes after the last to that one, or both are layers of their own; so the layers are the whole of the
forward and the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, Rows
from stalloc.cost.layer_costs import LayerCost
from stalloc.cost.swapping.recorded_passes import RecordedPasses
from stalloc.errors import BadInputError
from stalloc.lifespans.operation_modules import module_of_ranges
from stalloc.trace import Trace
from stalloc.trace.operations import Operations, Role


def together(layers: Sequence[LayerCost]) -> LayerCost:
    """Several layers in a row as one."""
    return LayerCost(
        sum(one.parameter_bytes for one in layers),
        sum(one.saved_bytes for one in layers),
        layers[-1].boundary_bytes,
        sum(one.forward_seconds for one in layers),
        sum(one.backward_seconds for one in layers),
        max(one.forward_work_bytes for one in layers),
        max(one.backward_work_bytes for one in layers),
    )


def forward_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """What the forward pass of layers [begin, end) needs, one computing at a time and nothing kept for backward."""
    chosen = range(begin, end)
    widest = max(_handed(layers, row) + layers[row].saved_bytes + layers[row].forward_work_bytes for row in chosen)
    return sum(layers[row].parameter_bytes for row in chosen) + widest


def backward_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """What the backward pass of layers [begin, end) needs, which computes forward again from what they were handed."""
    one = together(layers[begin:end])
    gradients = one.parameter_bytes
    work = max(one.forward_work_bytes, gradients + one.backward_work_bytes)
    return one.parameter_bytes + _handed(layers, begin) + one.saved_bytes + work


@dataclass(frozen=True)
class LeastBudget:
    """What any schedule of whole layers needs that computes backward from what layers were handed."""

    num_bytes: int
    layer: int  #: that needs it, counted from 0
    is_backward: bool


def least_budget(layers: Sequence[LayerCost]) -> LeastBudget:
    """What the layer that needs most needs: from there on packs and stages of one layer each fit."""
    needs = [
        LeastBudget(need(layers, row, row + 1), row, is_backward)
        for row in range(len(layers))
        for need, is_backward in ((forward_bytes, False), (backward_bytes, True))
    ]
    return max(needs, key=lambda one: one.num_bytes)


def _handed(layers: Sequence[LayerCost], row: int) -> int:
    return layers[row - 1].boundary_bytes if row else 0


def layer_costs(passes: RecordedPasses, *, ends_apart: bool = False) -> list[LayerCost]:
    """The layers of a step. Raises BadInputError for a trace that does not tell them.

    With `ends_apart` what comes before the first block and after the last are layers of their own, and a parameter that
    two layers use, as an embedding and the head tied to it, is one of each.
    """
    trace, operations, rows, in_backward = passes.trace, passes.operations, passes.rows, passes.in_backward
    layer, count = _layers_of(operations, rows, in_backward)
    if count < 2:
        raise BadInputError(f"trace of device {trace.device} shows no repeated blocks, which is what layers are.")
    if ends_apart:
        layer, count = _with_ends(operations, rows, in_backward), count + 2
    seconds = np.zeros((count, 2))
    np.add.at(seconds, (layer, in_backward[rows].astype(np.int64)), passes.seconds)
    owner = np.full(len(operations), -1, np.int64)  # the layer of each operation
    owner[rows] = layer
    sizes = np.zeros((count, 3), np.int64)
    for column, (chosen, users) in enumerate(_memory(trace, operations, owner, in_backward, of_each=ends_apart)):
        np.add.at(sizes[:, column], users, trace.size[chosen])
    work = _highest_made(trace, operations, owner, in_backward, count)
    return [
        LayerCost(
            parameter_bytes,
            saved_bytes,
            boundary_bytes,
            forward,
            backward,
            max(0, forward_work - saved_bytes),
            max(0, backward_work - parameter_bytes),
        )
        for (parameter_bytes, saved_bytes, boundary_bytes), (forward, backward), (forward_work, backward_work) in zip(
            sizes.tolist(), seconds.tolist(), work.tolist(), strict=True
        )
    ]


def _layers_of(operations: Operations, rows: Rows, in_backward: Rows) -> tuple[Rows, int]:
    """The layer of each operation, by number in the order of forward passes, and how many there are."""
    known, count = _blocks_of(operations, rows, in_backward)
    last = 0
    for place, layer in enumerate(known.tolist()):  # what lies between belongs to the layer before it
        last = layer if layer >= 0 else last
        known[place] = last
    return known, count


def _with_ends(operations: Operations, rows: Rows, in_backward: Rows) -> Rows:
    """As `_layers_of`, with what comes before the first block as layer 0, and after the last as one layer more."""
    known, count = _blocks_of(operations, rows, in_backward)
    back, first, head = in_backward[rows].tolist(), 0, count + 1
    leads_back = [False] * len(rows)  # whether the next operation of a block is one of backward
    for place in range(len(rows) - 2, -1, -1):
        leads_back[place] = back[place + 1] if known[place + 1] >= 0 else leads_back[place + 1]
    block, was_back = first, True
    for place, layer in enumerate(known.tolist()):
        if layer >= 0:
            known[place] = block = layer + 1
            was_back = back[place]
        elif back[place]:
            known[place] = head if not was_back else block if leads_back[place] else first
        else:
            known[place] = first if was_back else head if block == count else block
    return known


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


def _memory(
    trace: Trace, operations: Operations, owner: Rows, in_backward: Rows, *, of_each: bool
) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Requests of parameters, of saved activations and of what goes on to the next layer; and whose they are.

    A parameter is that of the first layer that uses it, or of each.
    """
    used_by = owner[operations.access_op]
    counted = (used_by >= 0) & ~in_backward[operations.access_op]
    request, user = operations.access_request[counted].astype(np.int64), used_by[counted]
    is_parameter = operations.role[request] == Role.PARAMETER
    parameters, users = np.unique(np.stack([request[is_parameter], user[is_parameter]]), axis=1)
    if not of_each:
        parameters, first = np.unique(request[is_parameter], return_index=True)
        users = user[is_parameter][first]
    maker = np.append(owner, -1)[operations.made_by]
    made_in_forward = (maker >= 0) & ~np.append(in_backward, False)[operations.made_by]
    saved = np.flatnonzero(made_in_forward & (operations.role == Role.SAVED_ACTIVATION))
    handed_on = np.unique(request[(maker[request] >= 0) & (user == maker[request] + 1)])
    return (parameters, users), (saved, maker[saved]), (handed_on, maker[handed_on])


def _highest_made(trace: Trace, operations: Operations, owner: Rows, in_backward: Rows, count: int) -> Column:
    """(layers, 2) the most bytes that the forward and the backward pass of each had at once of what they made."""
    found = np.zeros((count, 2), np.int64)
    maker = operations.made_by
    layer = np.append(owner, -1)[maker]
    passes = np.append(in_backward, False)[maker].astype(np.int64)
    known = np.flatnonzero(owner >= 0)
    until = np.full((count, 2), -1, np.int64)  # the last event of each pass
    np.maximum.at(until, (owner[known], in_backward[known].astype(np.int64)), operations.end[known])
    for number, of_pass in np.ndindex(count, 2):
        made = np.flatnonzero((layer == number) & (passes == of_pass))
        ended = made[trace.end[made] <= until[number, of_pass]]
        moments = np.concatenate([trace.start[made], trace.end[ended]])
        change = np.concatenate([trace.size[made], -trace.size[ended]])
        found[number, of_pass] = np.cumsum(change[np.argsort(moments, kind="stable")]).max(initial=0)
    return found
