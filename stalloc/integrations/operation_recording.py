"""Recording the operations of a program with torch.profiler, beside the allocator's history of the same run.

Contract: the program asks for what it would, in the same order: no dispatch mode, no hook on tensors, nothing kept. The
profiler notes the first steps and is then stopped; what a step is, is told by the optimizer that made the first one.
"""

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stalloc.figures import human_bytes, plural
from stalloc.integrations.profiled_program import MODULE_PREFIX, read_profile
from stalloc.lifespans.roles import event_of, find_roles
from stalloc.techniques.appearing import Call, ModuleCalls
from stalloc.techniques.repeated_blocks import find_blocks
from stalloc.trace import MARK_STEP, Trace
from stalloc.trace.operations import ModuleName, Role
from stalloc.trace.record import mark_columns
from stalloc.trace.sources.profiled_operations import Profile, ProfiledModule, place

RECORDED_STEPS = 4


class OperationRecording:
    """To be started before the program uses a GPU; torch is imported by now."""

    def __init__(self) -> None:
        self.modules: list[ProfiledModule] = []
        self.looks: list[tuple[Role, int, int, int]] = []
        """What the program's own objects hold: what it is, device, requests and frees until then, address."""
        self.steps: list[dict[int, int]] = []
        """Requests and frees of each device until the end of each step."""
        self.host_bytes = 0  #: that techniques held after the last step
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # modules by id: number, name of their ranges
        self._open: list[None] = []  # one entry for each call of a module that has not returned, of any thread
        self._first: weakref.ref[Any] | None = None  # the optimizer whose steps count
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizers: entries of state
        self._profiler: Any = None
        self._stopped = False

    def start(self) -> None:
        """Begin."""
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
            return [_with_note(trace, lost) for trace in traces]
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
            size = human_bytes(int(trace.size[rows].sum()))
            notes.append(
                f"{plural(len(rows), 'request')} ({size}) have no operation: threads of the program's own made them"
            )
        if placed.unmatched or placed.unresolved:
            notes.append(
                f"{placed.unmatched} memory events and {placed.unresolved} accesses of the profiler fit no request"
            )
        told = {"notes": notes} | ({"host_bytes": self.host_bytes} if self.host_bytes else {})
        return trace.replace(names=names, **columns, extra=trace.extra | operations.columns(), info=trace.info | told)

    def _in_ranges(self, call: Call) -> Call:
        """What takes the place of a module's call: the same in a range of the profiler's."""
        from torch._C._profiler import _RecordFunctionFast as Range
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
                with Range(found[2]):
                    return call(module, *args, **kwargs)
            finally:
                is_open.pop()

        return call_in_range

    def _name(self, model: Any) -> None:
        """Number a module and all that it holds; it is a model, as nothing that is known holds it."""
        self._look_at(Role.PARAMETER, (*model.parameters(), *model.buffers()))
        numbers: dict[str, int] = {}
        blocks = {block.name for block in find_blocks(model)}
        for name, module in model.named_modules(remove_duplicate=True):
            parent = numbers.get(name.rpartition(".")[0], -1) if name else -1
            known = self._known.get(id(module))
            if known is None or known[0]() is not module:
                number = len(self.modules)
                known = self._known[id(module)] = weakref.ref(module), number, f"{MODULE_PREFIX}{number}"
                self.modules.append(ProfiledModule(ModuleName(name, type(module).__name__), parent, name in blocks))
            numbers[name] = known[1]

    def _about_to_step(self, optimizer: Any) -> None:
        if self._stopped:
            return
        from stalloc.techniques.parameters import own_gradient  # imports torch: the script does first

        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._seen.get(optimizer) is None:
            self._look_at(Role.PARAMETER, parameters)
        found = map(own_gradient, parameters)
        self._look_at(Role.GRADIENT, [one for one in found if one is not None])

    def _stepped(self, optimizer: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if not self._stopped and self._seen.get(optimizer) != len(optimizer.state):  # it lasts once it is made
            self._seen[optimizer] = len(optimizer.state)
            held = [one for state in optimizer.state.values() for one in _tensors(state)]
            self._look_at(Role.OPTIMIZER_STATE, held)
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


def _with_note(trace: Trace, note: str) -> Trace:
    return trace.replace(info=trace.info | {"notes": [*trace.info.get("notes", []), note]})


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
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _torch() -> Any:
    return sys.modules["torch"]
