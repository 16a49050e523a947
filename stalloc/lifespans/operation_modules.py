"""In which module of the program each operation is, and which modules repeat.

Contract: an operation of the backward pass is in the module of the operation that it belongs to, as autograd numbers
them; what is in no module has the row -1.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, Rows
from stalloc.lifespans.roles import within
from stalloc.trace.operations import ModuleName, Operations, RangeKind


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """Modules of one class that repeat, in the order in which the model holds them."""

    kind: str
    rows: Rows
    """(k,) rows of the modules."""
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
