"""Roles of requests: what each is for, from what the program's own objects held and from who made and used it.

Contract: each request of the part of a trace that operations cover has one role, and the first of these that fits:
parameter, optimizer state, gradient (those the program's objects held); workspace; saved activation; input; temporary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, Rows
from stalloc.trace import Action, Trace
from stalloc.trace.operations import ModuleName, Operations, RangeKind, Role
from stalloc.trace.sources.profiled_operations import RequestsByAddress

Look = tuple[Role, int, int, int]
"""What somebody saw: the role, the device, how many requests and frees there were by then, the address."""
_HELD = (Role.GRADIENT, Role.OPTIMIZER_STATE, Role.PARAMETER)  #: what comes later outdoes what comes before


def find_roles(trace: Trace, operations: Operations, looks: Iterable[Look], last_event: int) -> Column:
    """(n,) int8 of Role. `last_event` is the last that operations cover; what is born later has no known role."""
    role = _by_use(trace, operations)
    role[trace.start > last_event] = Role.UNKNOWN
    held = _held(trace, looks)
    for kind in _HELD:
        rows = held.get(kind, [])
        role[rows] = kind
    return role


def event_of(trace: Trace, count: int) -> int:
    """The event before which so many requests and frees were made."""
    asked = np.flatnonzero(np.isin(trace.action, (int(Action.ALLOC), int(Action.FREE_REQUESTED))))
    return int(asked[count - 1]) + 1 if 0 < count <= len(asked) else 0 if count <= 0 else trace.num_events


def _held(trace: Trace, looks: Iterable[Look]) -> dict[Role, list[int]]:
    requests = RequestsByAddress(trace)
    events: dict[int, int] = {}
    found: dict[Role, list[int]] = {}
    for role, device, count, address in looks:
        if device != trace.device:
            continue
        if count not in events:
            events[count] = event_of(trace, count)
        row = requests.at(address, events[count])
        if row >= 0 and trace.end[row] >= events[count]:
            found.setdefault(role, []).append(row)
    return found


def _by_use(trace: Trace, operations: Operations) -> Column:
    """What follows from who made a request and who used it."""
    role = np.full(trace.num_requests, Role.TEMPORARY, np.int8)
    maker = operations.made_by
    known = np.flatnonzero(maker >= 0)
    in_backward, in_module, in_optimizer = (
        within(operations, kind) for kind in (RangeKind.BACKWARD, RangeKind.MODULE, RangeKind.OPTIMIZER)
    )
    kind = operations.kind
    reads = operations.access_kind == 0
    used = np.zeros(trace.num_requests, bool)
    used[operations.access_request] = True
    read_in_backward = np.zeros(trace.num_requests, bool)
    read_in_backward[operations.access_request[reads & in_backward[operations.access_op]]] = True
    read_in_module = np.zeros(trace.num_requests, bool)
    read_in_module[operations.access_request[reads & in_module[operations.access_op]]] = True
    reads_nothing = np.ones(len(operations), bool)
    reads_nothing[operations.access_op] = False

    forward = known[~in_backward[maker[known]] & ~in_optimizer[maker[known]]]
    role[forward[read_in_backward[forward]]] = Role.SAVED_ACTIVATION
    outside = forward[~in_module[maker[forward]] & reads_nothing[maker[forward]]]
    role[outside[read_in_module[outside]]] = Role.INPUT
    inside = known[(kind[maker[known]] == RangeKind.OPERATION) & ~used[known]]
    role[inside[trace.free_requested[inside] < operations.end[maker[inside]]]] = Role.WORKSPACE
    lasting = inside[trace.free_requested[inside] == trace.num_events]
    role[lasting] = Role.WORKSPACE
    role[maker < 0] = Role.UNKNOWN
    return role


def within(operations: Operations, kind: RangeKind) -> Column:
    """(k,) bool: whether a range is of a kind, or lies in one that is."""
    found = operations.kind == kind
    for row, parent in enumerate(operations.parent.tolist()):
        if parent >= 0 and found[parent]:
            found[row] = True
    return found


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """Modules of one class that repeat, in the order in which the model holds them."""

    kind: str
    rows: Rows  #: (k,) rows of the modules
    names: tuple[str, ...]


def module_of_ranges(operations: Operations) -> Rows:
    """(k,) the row of the innermost module of each range."""
    module = np.where(operations.kind == RangeKind.MODULE, operations.module, -1).astype(np.int64)
    in_backward = within(operations, RangeKind.BACKWARD)
    of_sequence: dict[int, int] = {}
    rows = zip(operations.parent.tolist(), operations.sequence.tolist(), in_backward.tolist(), strict=True)
    for row, (parent, sequence, is_backward) in enumerate(rows):
        if module[row] < 0 and parent >= 0:
            module[row] = module[parent]
        if sequence < 0 or (module[row] >= 0 and is_backward):
            continue
        if not is_backward:
            of_sequence[sequence] = int(module[row])
        elif operations.kind[row] == RangeKind.BACKWARD:
            module[row] = of_sequence.get(sequence, -1)
    return module


def module_of_requests(operations: Operations) -> Rows:
    """(n,) the row of the module of the operation that made each request."""
    module = np.append(module_of_ranges(operations), -1)
    return module[operations.made_by]


def path_of(module: ModuleName) -> str:
    """Where a module is, the same for all that repeat: `layers.*.attention`; its class for a model itself."""
    parts = ["*" if part.isdecimal() else part for part in module.name.split(".")]
    return ".".join(parts) if module.name else module.kind


def repeated_blocks(operations: Operations) -> list[RepeatedBlocks]:
    """The repeated blocks of the program's models, by class, in the order of their first."""
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(operations.module_is_block).tolist():
        found.setdefault(operations.modules[row].kind, []).append(row)
    return [
        RepeatedBlocks(kind, np.array(rows, np.int64), tuple(operations.modules[row].name for row in rows))
        for kind, rows in found.items()
    ]


def calls_of(operations: Operations, module: int) -> Column:
    """(c,) the ranges in which a module ran, those of the backward pass that run it again included."""
    return np.flatnonzero((operations.kind == RangeKind.MODULE) & (operations.module == module))
