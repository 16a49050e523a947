"""Recording the operations of a program with torch.profiler, beside the allocator's history of the same run.

Contract: the program asks for what it would, in the same order: no dispatch mode, no hook on tensors, nothing kept. The
profiler notes the first steps and is then stopped; what a step is, is told by the optimizer that made the first one.

The profiler's event tree is not a public interface of torch: `read_profile` makes plain ranges, memory events and calls
of it, and runs when the program is over.
"""

import dataclasses
import functools
import itertools
import json
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stalloc.figures import human_bytes, plural
from stalloc.lifespans.roles import event_of, find_roles
from stalloc.techniques.appearing import Call, ModuleCalls
from stalloc.techniques.repeated_blocks import find_blocks
from stalloc.trace import MARK_STEP, Trace
from stalloc.trace.operations import ModuleName, RangeKind, Role
from stalloc.trace.record import mark_columns
from stalloc.trace.sources.profiled_operations import MemoryEvent, Profile, ProfiledModule, Range, Work, place

RECORDED_STEPS = 4


class OperationRecording:
    """To be started before the program uses a GPU; torch is imported by now."""

    def __init__(self) -> None:
        self.modules: list[ProfiledModule] = []
        #: what the program's own objects hold: what it is, device, requests and frees until then, address
        self.looks: list[tuple[Role, int, int, int]] = []
        self.steps: list[dict[int, int]] = []  #: requests and frees of each device until the end of each step
        self.host_bytes = 0  #: that techniques held after the last step
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # modules by id: number, name of their ranges
        self._open: list[None] = []  # one entry for each call of a module that has not returned, of any thread
        self._first: weakref.ref[Any] | None = None  # the optimizer whose steps count
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizers: entries of state
        self._profiler: Any = None
        self._stopped = False

    def start(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

        self._calls = ModuleCalls(self._in_ranges)
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._about_to_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))  # steps are counted on
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that events of earlier cycles are gone: there are none
            self._profiler = profile(
                activities=[ProfilerActivity.CPU],
                profile_memory=True,
                record_shapes=True,
                experimental_config=_ExperimentalConfig(capture_overload_names=True, disable_external_correlation=True),
            )
            self._profiler.start()

    def stop(self) -> None:
        """End recording; steps are counted on. Nothing happens the second time."""
        if not self._stopped and self._profiler is not None:
            self._stopped = True
            self._calls.remove()
            self._hook.remove()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self._profiler.stop()
                except RuntimeError:  # the program has stopped it
                    self._profiler = None

    def add_to(self, traces: Sequence[Trace]) -> list[Trace]:
        """The traces of the allocator's history, with what was recorded, step marks and roles."""
        self.stop()
        if self._profiler is None:
            lost = "no operations: the program used torch.profiler itself, which records one thing at a time"
            notes = [[*trace.info.get("notes", []), lost] for trace in traces]
            return [trace.replace(info=trace.info | {"notes": its}) for trace, its in zip(traces, notes, strict=True)]
        results = self._profiler.profiler.kineto_results
        from stalloc.cost.call_work import work_or_nothing  # imports torch

        profile = read_profile(results, self.modules, work_or_nothing)
        return [self._add(trace, profile) for trace in traces]

    def _add(self, trace: Trace, profile: Profile) -> Trace:
        placed = place(trace, profile)
        role = find_roles(trace, placed.operations, self.looks, placed.last_event)
        operations = dataclasses.replace(placed.operations, role=role)
        marks = [(event_of(trace, step.get(trace.device, 0)), MARK_STEP, "step") for step in self.steps]
        names, columns = mark_columns(marks)
        notes = list(trace.info.get("notes", []))
        if len(self.steps) > RECORDED_STEPS:
            notes.append(f"operations are those of the first {RECORDED_STEPS} of {len(self.steps)} steps")
        rows = np.flatnonzero((operations.made_by < 0) & (trace.start >= 0) & (trace.start <= placed.last_event))
        if len(rows):
            what = f"{plural(len(rows), 'request')} ({human_bytes(int(trace.size[rows].sum()))})"
            notes.append(f"{what} have no operation: threads of the program's own made them")
        if placed.unmatched or placed.unresolved:
            what = f"{placed.unmatched} memory events and {placed.unresolved} accesses"
            notes.append(f"{what} of the profiler fit no request")
        told = {"notes": notes} | ({"host_bytes": self.host_bytes} if self.host_bytes else {})
        return trace.replace(names=names, **columns, extra=trace.extra | operations.columns(), info=trace.info | told)

    def _in_ranges(self, call: Call) -> Call:
        """What takes the place of a module's call: the same in a range of the profiler's."""
        from torch._C._profiler import _RecordFunctionFast as OpenRange
        from torch.compiler import is_compiling

        known, is_open, steps = self._known, self._open, self.steps

        def call_in_range(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stopped or is_compiling():
                return call(module, *args, **kwargs)
            if len(steps) >= RECORDED_STEPS and not is_open:
                self.stop()
                return call(module, *args, **kwargs)
            found = known.get(id(module))
            if found is None or found[0]() is not module:
                self._name(module)
                found = known[id(module)]
            is_open.append(None)
            try:
                with OpenRange(found[2]):
                    return call(module, *args, **kwargs)
            finally:
                is_open.pop()

        return call_in_range

    def _name(self, model: Any) -> None:
        """Number a module and all that it holds; it is a model, as nothing that is known holds it."""
        held = (*model.parameters(), *model.buffers())
        # those that the first forward pass makes have no memory before; an optimizer shows them later
        self._look_at(Role.PARAMETER, [one for one in held if not _torch().nn.parameter.is_lazy(one)])
        numbers: dict[str, int] = {}
        blocks = {block.name for block in find_blocks(model)}
        for name, module in model.named_modules(remove_duplicate=True):
            parent = numbers.get(name.rpartition(".")[0], -1) if name else -1
            known = self._known.get(id(module))
            if known is None or known[0]() is not module:
                number = len(self.modules)
                known = self._known[id(module)] = weakref.ref(module), number, f"{_MODULE_PREFIX}{number}"
                self.modules.append(ProfiledModule(ModuleName(name, type(module).__name__), parent, name in blocks))
            numbers[name] = known[1]

    def _about_to_step(self, optimizer: Any) -> None:
        if self._stopped:
            return
        from stalloc.techniques.parameters import own_gradient  # imports torch: the script does first

        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._seen.get(optimizer) is None:
            self._look_at(Role.PARAMETER, parameters)
        self._look_at(Role.GRADIENT, [one for one in map(own_gradient, parameters) if one is not None])

    def _stepped(self, optimizer: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if not self._stopped and self._seen.get(optimizer) != len(optimizer.state):  # it lasts once it is made
            self._seen[optimizer] = len(optimizer.state)
            self._look_at(Role.OPTIMIZER_STATE, _tensors(list(optimizer.state.values())))
        if optimizer is self._first():
            self.steps.append(positions())
            store = sys.modules.get("stalloc.techniques.host_store")  # unless no technique needs it
            self.host_bytes = store.held_bytes() if store is not None else 0

    def _look_at(self, role: Role, tensors: Any) -> None:
        now, strided, looks = positions(), _torch().strided, self.looks
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.is_cuda and local.layout == strided:
                index, address = local.get_device(), local.data_ptr()  # quicker than to make a storage of Python's
                if offset := local.storage_offset():
                    address -= offset * local.element_size()
                looks.append((role, index, now.get(index, 0), address))


def positions() -> dict[int, int]:
    """For each device, how many allocations and frees it has served so far."""
    cuda = _torch().cuda
    if not cuda.is_initialized():
        return {}
    told = {index: cuda.memory_stats_as_nested_dict(index)["allocation"]["all"] for index in range(cuda.device_count())}
    return {index: one["allocated"] + one["freed"] for index, one in told.items()}


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, _torch().Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _torch() -> Any:
    return sys.modules["torch"]


_MODULE_PREFIX = "stalloc:"  # short: names of more than 15 characters cost an allocation at each call of a module
_ENGINE = "autograd::engine::"
_NO_SEQUENCE = 1 << 31
_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")  # whose schemas do not say so


class Facts(NamedTuple):
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
    in_rows = (event for event, _, _ in nodes if event.tag != _EventType.Allocation)
    row_of = {id(event): row for row, event in enumerate(in_rows)}
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
        if outer != in_tree:  # the next row is of a range that begins elsewhere than the tree says
            nesting.outlasting[event.start_tid].append(len(ranges))
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
        self.outlasting: dict[int, list[int]] = defaultdict(list)  #: by thread: rows of such ranges that may be open

    def outer(self, event: Any, parent: int) -> int:
        """The row of the innermost range that an event lies in, given the one of the tree; -1: none."""
        ranges, begin, end = self._ranges, event.start_time_ns, max(event.start_time_ns, event.end_time_ns)
        outer = parent
        while outer >= 0 and ranges[outer].end_ns < end:
            outer = ranges[outer].parent
        is_open = self.outlasting[event.start_tid]
        while is_open and ranges[is_open[-1]].end_ns <= begin:
            is_open.pop()
        if is_open and is_open[-1] > outer and ranges[is_open[-1]].end_ns >= end:
            outer = is_open[-1]
        return outer


def _range(
    event: Any, outer: int, more: dict[int, Any], num_modules: int, calls: dict[str, int], listed: list[list[Any]]
) -> Range:
    name, fields = event.name, event.extra_fields
    begin, end = event.start_time_ns, max(event.start_time_ns, event.end_time_ns)
    sequence = getattr(fields, "sequence_number", -1)
    where = outer, begin, end, event.start_tid
    sequence = sequence if 0 <= sequence < _NO_SEQUENCE else -1
    if name.startswith(_MODULE_PREFIX):
        number = int(name.removeprefix(_MODULE_PREFIX)) if name.removeprefix(_MODULE_PREFIX).isdecimal() else -1
        if number < num_modules:
            return Range("module", RangeKind.MODULE, *where, -1, number, -1, (), ())
    inputs = getattr(fields, "inputs", ())
    told = more.get(event.correlation_id)
    overload = told.overload_name() if told is not None else ""
    facts = facts_of(name, overload) if "::" in name and not name.startswith(_ENGINE) else None
    if facts is None or facts.kind != RangeKind.OPERATION:
        kind = _other_kind(name, fields) if facts is None else facts.kind
        return Range(name, kind, *where, sequence, -1, -1, (), ())
    read, written = _storages(inputs, facts.written)
    concrete = told.concrete_inputs() if told is not None else []
    arguments = itertools.zip_longest(inputs, concrete[: len(inputs)])
    text = [name, overload, [_argument(*pair) for pair in arguments]]
    key = json.dumps(text)
    if key not in calls:
        calls[key] = len(listed)
        listed.append(text)
    return Range(name, facts.kind, *where, sequence, -1, calls[key], read, written)


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
        number for number, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    )
    is_view = not written and any(one.alias_info is not None for one in schema.returns)
    full, has = f"{name}.{overload}" if overload else name, torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        only_calls_others = has(full, "CompositeImplicitAutograd") and not has(full, "CUDA")
    except RuntimeError:  # one of TorchScript alone
        only_calls_others = True
    is_composite = is_view or name in _VIEWS or only_calls_others
    return Facts(RangeKind.COMPOSITE if is_composite else RangeKind.OPERATION, written)


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
    for number, given in enumerate(inputs):
        for tensor in given if isinstance(given, list) else [given]:
            device = getattr(tensor, "device", None)
            if device is not None and device.type == "cuda" and tensor.storage_data_ptr:
                found[number in written][device.index or 0, tensor.storage_data_ptr] = None
    return tuple(found[0]), tuple(found[1])
