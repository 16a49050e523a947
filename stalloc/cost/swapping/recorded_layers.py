"""The layers of a recorded step: the repeated blocks in the order of their forward passes, and what is around them.

Contract: what comes before the first block and what comes after the last are layers of their own, what lies between two
belongs to the one before it; so the layers are the whole of both passes. A parameter that two layers use, as an
embedding and the head tied to it, is one of each.
"""

import numpy as np

from stalloc.columns import Column, Rows
from stalloc.cost.layer_costs import LayerCost
from stalloc.cost.swapping.recorded_passes import RecordedPasses
from stalloc.errors import BadInputError
from stalloc.lifespans.roles import module_of_ranges
from stalloc.trace.operations import Operations, Role


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


def _with_ends(block: Rows, is_backward: Rows, head: int) -> Rows:
    """Layers from blocks, which count from 1 here: of each pass by itself, what its blocks lie between."""
    layers = []
    borders = np.flatnonzero(np.diff(is_backward.astype(np.int64))) + 1
    for part, back in zip(np.split(block + 1, borders), np.split(is_backward, borders), strict=True):
        inside = np.flatnonzero(part)
        before, after = (head, 0) if len(back) and back[0] else (0, head)
        filled = part[np.maximum.accumulate(np.where(part > 0, np.arange(len(part)), 0))]
        filled[: inside[0] if len(inside) else len(part)] = before
        filled[inside[-1] + 1 if len(inside) else len(part) :] = after
        layers.append(filled)
    return np.concatenate(layers)


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
