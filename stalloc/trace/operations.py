"""What the program did with the requests of a trace: operations, accesses, shapes, modules.

These are tables of Trace.extra, whose columns docs/files.md describes. A request stands for the storage that lies in
it: views of one storage are one request. Files are untrusted: what is read back is checked, whole, before anything of
it is used.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column, Rows, Times
from stalloc.errors import BadInputError
from stalloc.trace.record import Trace
from stalloc.trace.table_columns import DamagedTable, Rule, Rules, packed_list, unpacked_list

ACCESS_READ, ACCESS_WRITTEN = 0, 1
MAX_NAMES, MAX_TEXT = 1 << 20, 1000


class RangeKind(enum.IntEnum):
    """What a range stands for; the numbers are part of the file format."""

    OPERATION = 0  #: an operation that has a kernel of its own, such as aten::mm
    COMPOSITE = 1  #: an operation that only calls others, such as aten::linear
    MODULE = 2  #: the forward pass of a module
    BACKWARD = 3  #: a node of autograd
    OPTIMIZER = 4  #: a step of an optimizer
    USER = 5  #: a range that the program or a library named


class Role(enum.IntEnum):
    """What a request is for; the numbers are part of the file format."""

    UNKNOWN = 0
    PARAMETER = 1  #: buffers of modules too
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    SAVED_ACTIVATION = 4  #: made in a forward pass, read in a backward pass
    TEMPORARY = 5
    WORKSPACE = 6  #: an operation asked for it and handed it to nobody
    INPUT = 7  #: came from the host, for a forward pass

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class ModuleName:
    """A module of the program: where it is, and its class."""

    name: str  #: within its model, such as `layers.3`; empty for a model itself
    kind: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Operations:
    """The tables of one trace, as the columns say; `op_` is left out of their names."""

    name: Rows
    names: tuple[str, ...]
    parent: Rows
    begin: Times
    end: Times
    thread: Column
    sequence: Column
    kind: Column
    shape: Rows
    module: Rows
    access_op: Rows
    access_request: Rows
    access_kind: Column
    made_by: Rows
    role: Column
    shapes: tuple[Any, ...]
    """For each shape, the operation's name, its overload and its arguments in a list, for stalloc.cost."""
    shape_flops: Column
    shape_read_bytes: Column
    shape_written_bytes: Column
    shape_ns: Column
    modules: tuple[ModuleName, ...]
    module_parent: Rows
    module_is_block: Column

    def __len__(self) -> int:
        return len(self.name)

    def name_of(self, row: int) -> str:
        return self.names[self.name[row]]

    def columns(self) -> dict[str, Column]:
        """What belongs into Trace.extra."""
        modules = [[module.name, module.kind] for module in self.modules]
        texts = {"op_text": self.names, "shape_text": self.shapes, "module_text": modules}
        return _COLUMNS.written(self) | {name: packed_list(listed) for name, listed in texts.items()}


_COLUMNS = Rules(
    {
        "op_name": Rule("name", np.int32, "op", 0, "names"),
        "op_parent": Rule("parent", np.int32, "op", -1, "ops"),
        "op_begin": Rule("begin", np.int64, "op", 0, "moments"),
        "op_end": Rule("end", np.int64, "op", 0, "moments"),
        "op_thread": Rule("thread", np.int16, "op", 0, 1 << 15),
        "op_sequence": Rule("sequence", np.int32, "op", -1, 1 << 31),
        "op_kind": Rule("kind", np.int8, "op", 0, len(RangeKind)),
        "op_shape": Rule("shape", np.int32, "op", -1, "shapes"),
        "op_module": Rule("module", np.int32, "op", -1, "modules"),
        "access_op": Rule("access_op", np.int32, "access", 0, "ops"),
        "access_request": Rule("access_request", np.int32, "access", 0, "requests"),
        "access_kind": Rule("access_kind", np.int8, "access", 0, 2),
        "made_by": Rule("made_by", np.int32, "request", -1, "ops"),
        "role": Rule("role", np.int8, "request", 0, len(Role)),
        "shape_flops": Rule("shape_flops", np.int64, "shape", 0, 1 << 62),
        "shape_read_bytes": Rule("shape_read_bytes", np.int64, "shape", 0, 1 << 62),
        "shape_written_bytes": Rule("shape_written_bytes", np.int64, "shape", 0, 1 << 62),
        "shape_ns": Rule("shape_ns", np.int64, "shape", 0, 1 << 62),
        "module_parent": Rule("module_parent", np.int32, "module", -1, "modules"),
        "module_is_block": Rule("module_is_block", np.int8, "module", 0, 2),
    }
)
_TEXTS = ("op_text", "shape_text", "module_text")


def has_operations(trace: Trace) -> bool:
    return any(name in trace.extra for name in (*_COLUMNS, *_TEXTS))


def read_operations(trace: Trace) -> Operations | None:
    """The operations of a trace, None if it has none. Raises BadInputError if the tables contradict each other."""
    if not has_operations(trace):
        return None
    try:
        found = _read(trace.extra)
        _check(trace, found)
    except DamagedTable as error:
        raise BadInputError(
            f"trace of device {trace.device}: its table of operations is damaged ({error}): copy or record it again."
        ) from error
    return found


def _read(extra: Mapping[str, Column]) -> Operations:
    columns = _COLUMNS.read(extra)
    names, shapes, modules = (unpacked_list(extra, name, MAX_NAMES) for name in _TEXTS)
    if not all(isinstance(name, str) for name in names):
        raise DamagedTable("op_text holds what is no name")
    if not all(isinstance(one, list) and len(one) == 3 and _is_name(one[0]) and _is_name(one[1]) for one in shapes):
        raise DamagedTable("shape_text holds what is no call")
    if not all(isinstance(one, list) and len(one) == 2 and all(map(_is_name, one)) for one in modules):
        raise DamagedTable("module_text holds what is no module")
    return Operations(
        **columns,
        names=tuple(name[:MAX_TEXT] for name in names),
        shapes=tuple(shapes),
        modules=tuple(ModuleName(name[:MAX_TEXT], kind[:MAX_TEXT]) for name, kind in modules),
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _check(trace: Trace, found: Operations) -> None:
    num_ops, num_shapes, num_modules = len(found.name), len(found.shapes), len(found.modules)
    lengths = {"op": num_ops, "access": len(found.access_op), "request": trace.num_requests, "shape": num_shapes}
    lengths["module"] = num_modules
    for table, fields in _COLUMNS.fields().items():
        if any(len(getattr(found, field)) != lengths[table] for field in fields):
            raise DamagedTable(f"its columns of the table of {table}s differ in length")
    bounds = {"names": len(found.names), "ops": num_ops, "moments": trace.num_events + 1, "shapes": num_shapes}
    _COLUMNS.check(found, bounds | {"modules": num_modules, "requests": trace.num_requests})
    if np.any(found.parent >= np.arange(num_ops)) or np.any(found.module_parent >= np.arange(num_modules)):
        raise DamagedTable("something in it lies within what comes later")
    if np.any(found.end < found.begin) or np.any(np.diff(found.access_op) < 0):
        raise DamagedTable("its rows are not in order")
    held = np.flatnonzero(found.parent >= 0)
    outer = found.parent[held]
    if np.any(found.begin[held] < found.begin[outer]) or np.any(found.end[held] > found.end[outer]):
        raise DamagedTable("a range in it reaches beyond the one that it lies in")
