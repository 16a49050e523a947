"""torch.profiler's own record of a run, as plain ranges, memory events and calls.

The event tree is not a public interface of torch: this is the one file that knows it. Nothing here runs while the
program does.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stalloc.trace.operations import RangeKind
from stalloc.trace.sources.profiled_operations import MemoryEvent, Profile, ProfiledModule, Range, Work

MODULE_PREFIX = "stalloc:"  # short: names of more than 15 characters cost an allocation at each call of a module
_ENGINE = "autograd::engine::"
_NO_SEQUENCE = 1 << 31
_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")  # whose schemas do not say so


class Facts(NamedTuple):
    """What an operation's schema says."""

    kind: RangeKind
    written: tuple[int, ...]  #: positions of arguments that it changes


def read_profile(
    results: Any,
    modules: Sequence[ProfiledModule],
    work_of: Callable[[list[Any]], Work],
) -> Profile:
    """Everything that a finished profiler has (`torch.profiler.profile.profiler.kineto_results`)."""
    from torch._C._profiler import _EventType

    more = {event.correlation_id(): event for event in results.events() if event.correlation_id()}
    calls: dict[str, int] = {}
    listed: list[list[Any]] = []
    nodes = sorted(_nodes(results.experimental_event_tree()), key=lambda node: (node[0].start_time_ns, node[1]))
    row_of = {id(node[0]): row for row, node in enumerate(_ranges_only(nodes, _EventType))}
    ranges: list[Range] = []
    memory: list[MemoryEvent] = []
    nesting = _Nesting(ranges)
    for event, _, parent in nodes:
        in_tree = row_of[id(parent)] if parent is not None else -1
        outer = nesting.outer(event, in_tree)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cuda":
                index = fields.device.index or 0
                memory.append(MemoryEvent(event.start_time_ns, index, fields.ptr, fields.alloc_size > 0, outer))
            continue
        if outer != in_tree:
            nesting.note_outlasting(event)
        ranges.append(_range(event, outer, more, len(modules), calls, listed))
    memory.sort(key=lambda one: one.time_ns)
    return Profile(ranges, memory, listed, [work_of(call) for call in listed], modules)


def _nodes(roots: Sequence[Any]) -> Iterator[tuple[Any, int, Any]]:
    """All events: each with its depth and the event that it lies in."""
    rest = [(root, 0, None) for root in reversed(roots)]
    while rest:
        event, depth, parent = rest.pop()
        yield event, depth, parent
        rest += [(child, depth + 1, event) for child in reversed(event.children)]


class _Nesting:
    """Which range an event lies in, also where ranges overlap.

    Where a dispatch mode is active a range that the program opens (an optimizer's step, a module's) begins within the
    call of the mode that opens it, and outlasts that: the tree of torch has it end there, and what follows outside.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._outlasting: dict[int, list[int]] = {}  # by thread: rows of such ranges that may be open

    def outer(self, event: Any, parent: int) -> int:
        """The row of the innermost range that an event lies in, given the one of the tree; -1: none."""
        ranges, begin, end = self._ranges, event.start_time_ns, max(event.start_time_ns, event.end_time_ns)
        outer = parent
        while outer >= 0 and ranges[outer].end_ns < end:
            outer = ranges[outer].parent
        is_open = self._outlasting.setdefault(event.start_tid, [])
        while is_open and ranges[is_open[-1]].end_ns <= begin:
            is_open.pop()
        if is_open and is_open[-1] > outer and ranges[is_open[-1]].end_ns >= end:
            outer = is_open[-1]
        return outer

    def note_outlasting(self, event: Any) -> None:
        """The next row is of a range that begins elsewhere than the tree says."""
        self._outlasting[event.start_tid].append(len(self._ranges))


def _ranges_only(nodes: Sequence[tuple[Any, int, Any]], kinds: Any) -> list[tuple[Any, int, Any]]:
    return [node for node in nodes if node[0].tag != kinds.Allocation]


def _range(
    event: Any, outer: int, more: dict[int, Any], num_modules: int, calls: dict[str, int], listed: list[list[Any]]
) -> Range:
    name, fields = event.name, event.extra_fields
    begin, end = event.start_time_ns, max(event.start_time_ns, event.end_time_ns)
    thread, sequence = event.start_tid, getattr(fields, "sequence_number", -1)
    if not 0 <= sequence < _NO_SEQUENCE:
        sequence = -1
    if name.startswith(MODULE_PREFIX):
        number = int(name.removeprefix(MODULE_PREFIX)) if name.removeprefix(MODULE_PREFIX).isdecimal() else -1
        if number < num_modules:
            return Range("module", RangeKind.MODULE, outer, begin, end, thread, -1, number, -1, (), ())
    inputs = getattr(fields, "inputs", ())
    told = more.get(event.correlation_id)
    overload = told.overload_name() if told is not None else ""
    facts = facts_of(name, overload) if "::" in name and not name.startswith(_ENGINE) else None
    if facts is None:
        return Range(name, _other_kind(name, fields), outer, begin, end, thread, sequence, -1, -1, (), ())
    if facts.kind != RangeKind.OPERATION:
        return Range(name, facts.kind, outer, begin, end, thread, sequence, -1, -1, (), ())
    read, written = _storages(inputs, facts.written)
    concrete = told.concrete_inputs() if told is not None else []
    text = [name, overload, [_argument(*pair) for pair in _paired(inputs, concrete)]]
    key = json.dumps(text)
    if key not in calls:
        calls[key] = len(listed)
        listed.append(text)
    return Range(name, facts.kind, outer, begin, end, thread, sequence, -1, calls[key], read, written)


def _other_kind(name: str, fields: Any) -> RangeKind:
    if name.startswith(_ENGINE) or "BACKWARD" in str(getattr(fields, "scope", "")):
        return RangeKind.BACKWARD
    return RangeKind.OPTIMIZER if name.startswith("Optimizer.step#") else RangeKind.USER


@functools.cache
def facts_of(name: str, overload: str) -> Facts | None:
    """What the schema of an operation says, None for a name that no operation has."""
    import torch

    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return None
    written = tuple(
        place for place, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    )
    is_view = not written and any(one.alias_info is not None for one in schema.returns)
    if is_view or name in _VIEWS or _only_calls_others(name, overload):
        return Facts(RangeKind.COMPOSITE, written)
    return Facts(RangeKind.OPERATION, written)


def _only_calls_others(name: str, overload: str) -> bool:
    import torch

    full = f"{name}.{overload}" if overload else name
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return bool(has(full, "CompositeImplicitAutograd") and not has(full, "CUDA"))
    except RuntimeError:  # one of TorchScript alone
        return True


def _paired(inputs: Sequence[Any], concrete: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for place, given in enumerate(inputs):
        yield given, concrete[place] if place < len(concrete) else None


def _argument(given: Any, concrete: Any) -> Any:
    """An argument of a call as JSON: of tensors the kind of number, sizes, strides; fractions are not kept."""
    if hasattr(given, "sizes"):
        return {"tensor": [str(given.dtype).removeprefix("torch."), list(given.sizes), list(given.strides)]}
    if isinstance(given, list) and any(hasattr(one, "sizes") for one in given):
        return {"list": [_argument(one, None) for one in given]}
    value = given if concrete is None else concrete
    if isinstance(value, float):
        return 0.5
    if isinstance(value, list):
        return [0.5 if isinstance(one, float) else one for one in value if isinstance(one, int | float | bool)]
    return value if value is None or isinstance(value, int | bool | str) else str(value)


def _storages(inputs: Sequence[Any], written: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The storages on GPUs that a call reads, and those that it changes."""
    found: tuple[dict[tuple[int, int], None], dict[tuple[int, int], None]] = ({}, {})
    for place, given in enumerate(inputs):
        for tensor in given if isinstance(given, list) else [given]:
            device = getattr(tensor, "device", None)
            if device is not None and device.type == "cuda" and tensor.storage_data_ptr:
                found[place in written][device.index or 0, tensor.storage_data_ptr] = None
    return tuple(found[0]), tuple(found[1])
