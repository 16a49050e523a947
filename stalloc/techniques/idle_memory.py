"""What a model makes without gradients and keeps, such as key and value caches, in host memory while it is idle.

Contract: the program's tensors stay the objects that they are; the memory of one is away between two operations that
read it, never during one. Every operation of the thread that called the model is seen while anything is away, in the
model and outside, and waits for what it reads; what reads tensors without torch's dispatcher (raw pointers, kernels
that take `data_ptr()`, other threads) is not seen, so this is only done where the user says that there is no such
thing. Nothing is away where a CUDA graph was captured or torch.compile has compiled, whose code is not seen either.
Source of the order: Belady (1966); layers come in turn, so of what no running block has used, what was used last is
needed last.
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.sizes import aligned
from stalloc.techniques.appearing import Call, ModuleCalls
from stalloc.techniques.block_tape import facts_of
from stalloc.techniques.evictable import EvictableMemory
from stalloc.techniques.host_store import HostCopy
from stalloc.techniques.recompute import in_transform
from stalloc.techniques.repeated_blocks import find_blocks
from stalloc.techniques.tensor_memory import tensors_of, unseen


class IdleMemory:
    """Offloads idle memory of one process's models to the host memory that is also used for saved tensors."""

    def __init__(self, memory: EvictableMemory) -> None:
        self._memory = memory
        self._known: dict[int, _Idle] = {}  # by memory
        self._num_away = 0
        self._operations = self._block_began = 0  # a clock
        self._busy: set[int] = set()  # memory of the operation that runs
        self._mode = _Mode(self)
        self._blocks: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # of each model that was called
        self._called: Any = None  # the model that runs
        self._is_captured = self._is_over = False
        self._calls = ModuleCalls(self._watched)

    def end(self) -> None:
        self._calls.remove()  # later, where somebody else watches in front of this
        self._is_over = True

    def _watched(self, call: Call) -> Call:
        def look_and_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._called is not None:
                if id(module) in self._blocks[self._called]:
                    self._block_began = self._operations
                return call(module, *args, **kwargs)
            if self._is_over or torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
                return call(module, *args, **kwargs)
            if module not in self._blocks:
                self._blocks[module] = {id(block.module) for block in find_blocks(module)}
            self._called = module
            stack = _get_current_dispatch_mode_stack()
            if all(type(mode).__module__.startswith("stalloc.device.") and mode is not self._mode for mode in stack):
                self._mode.__enter__()  # below modes of the program's, each of which ends before this
            try:
                return call(module, *args, **kwargs)
            finally:
                self._called = None
                self._finish()

        return look_and_call

    def _finish(self) -> None:
        """The model has been called: operations are watched on as long as anything is away."""
        self._forget()
        stack = _get_current_dispatch_mode_stack()
        if not self._num_away and stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)

    def _forget(self) -> None:
        for key in [key for key, one in self._known.items() if one.memory.expired()]:
            self._gone(key)

    def _gone(self, key: int) -> None:
        idle = self._known.pop(key)
        if idle.slot is not None:
            self._num_away -= 1
            self._memory.slots.give_back(idle.slot)

    def do(self, operator: Any, args: Any, kwargs: Any) -> Any:
        self._operations += 1
        busy = {one.untyped_storage()._cdata: one for one in tensors_of((args, kwargs)) if _is_plain(one)}
        before, self._busy = self._busy, self._busy | busy.keys()
        try:
            for key, tensor in busy.items():
                if (idle := self._known.get(key)) is not None:
                    self._use(idle, tensor.untyped_storage())
            results = operator(*args, **kwargs)
        finally:
            self._busy = before
        if self._called is not None and facts_of(operator).is_fresh:
            for tensor in tensors_of(results):
                if _is_plain(tensor) and tensor.device.type == self._memory.device_type and not torch.is_grad_enabled():
                    self._note(tensor)
        if not self._called and not self._num_away:
            self._finish()
        return results

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._is_captured |= tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if storage.nbytes() < LEAST_BYTES or not storage.resizable() or self._is_captured:
            return
        if storage._cdata in self._known:
            self._gone(storage._cdata)
        self._known[storage._cdata] = idle = _Idle(storage, tensor.device)
        idle.last_use = self._operations

    def _use(self, idle: "_Idle", storage: torch.UntypedStorage) -> None:
        idle.last_use = self._operations
        if idle.slot is None:
            return
        with unseen(), torch.no_grad():
            storage.resize_(idle.size_bytes)
            transfers = self._memory.transfers[idle.device]
            transfers.wait(transfers.to_device([(idle.numbers(storage), idle.place())]))
            transfers.follow()
        self._memory.slots.give_back(idle.slot)
        idle.slot = None
        self._num_away -= 1
        self._memory.note_copied(idle.size_bytes, to_device=True)

    def evict(self, device: torch.device, size_bytes: int) -> int:
        """Move at least so many bytes to the host, if as many may go; how many went."""
        is_inside = self._busy or self._mode.is_at_work  # an operation, during which torch puts the mode aside
        dynamo = sys.modules.get("torch._dynamo.utils")
        has_compiled = dynamo is not None and dynamo.counters["frames"]
        if not (is_inside or self._mode in _get_current_dispatch_mode_stack()) or self._is_captured or has_compiled:
            return 0
        self._forget()
        free = [one for key, one in self._known.items() if one.slot is None and key not in self._busy]
        idle = [one for one in free if one.device == device]
        idle.sort(key=lambda one: (one.last_use >= self._block_began, abs(one.last_use - self._block_began)))
        freed = 0
        while idle and freed < size_bytes:
            freed += self._move(idle.pop(0))
        return freed

    def _move(self, idle: "_Idle") -> int:
        storage = idle.held()
        slot = self._memory.slots.take(idle.size_bytes) if storage is not None else None
        if storage is None or slot is None:
            return 0
        idle.slot = slot
        transfers = self._memory.transfers[idle.device]
        transfers.wait(transfers.to_host([(idle.place(), idle.numbers(storage))]))
        storage.resize_(0)
        self._num_away += 1
        self._memory.note_copied(idle.size_bytes, to_device=False)
        return aligned(idle.size_bytes)


class _Mode(TorchDispatchMode):
    """Hands each operation to `IdleMemory`."""

    def __init__(self, owner: IdleMemory) -> None:
        super().__init__()
        self._owner = owner
        self.is_at_work = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.is_at_work = self.is_at_work, True
        try:
            return self._owner.do(func, args, kwargs or {})
        finally:
            self.is_at_work = before


class _Idle(HostCopy):
    """Memory that a model has made without gradients. Away while it has a slot."""

    last_use = 0  #: by the clock of operations


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
