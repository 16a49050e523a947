"""What autograd saves for backward, evicted when a request does not fit: dropped with its block, or moved to the host.

Contract: memory that is evicted is held by nobody but autograd: what the program or a running operation holds stays, as
evicting it would give nothing back. Evicting asks for no memory of the device and runs no code of the program, so the
allocator may ask for it in the middle of a request. Memory is let go after its streams have waited for the copy, never
by record_stream. How stale memory is, is counted in uses of saved memory: steps that do the same evict the same.

A block runs again with the random numbers and the autocast of its first run, on inputs that were only moved, so it
needs no other block's second run. One that was seen to do what cannot be done twice is not dropped, and nothing is
said; nor is one whose backward pass has begun: it would run once for each tensor.
"""

import contextlib
import functools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from stalloc.cost.call_work import operator_seconds
from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates
from stalloc.errors import RecomputeError
from stalloc.eviction.scores import Candidate, Policy
from stalloc.sizes import aligned
from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import BlockTape, current_block, keeps_nothing
from stalloc.techniques.host_store import HostCopy, HostSlots, HostStore
from stalloc.techniques.module_state import ModuleState
from stalloc.techniques.recompute import Checkpoint, in_transform, wrap
from stalloc.techniques.repeated_blocks import Block, held_modules, is_compiled, is_leaf
from stalloc.techniques.tensor_memory import (
    PackedTensor,
    PackingContext,
    alias_of,
    let_go_of,
    may_be_kept_elsewhere,
    storages_of,
    unseen,
)
from stalloc.techniques.transfers import DeviceTransfers, phase

_MOST_CALLS = 10_000  # whose seconds are remembered


@dataclass
class Evicted:
    """What a cap has cost so far; seconds are estimates."""

    num_evictions: int = 0  #: times that something had to go
    dropped_bytes: int = 0
    recomputed_bytes: int = 0
    num_recomputed: int = 0  #: blocks that ran again
    moved_bytes: int = 0  #: to the host
    brought_bytes: int = 0  #: back from there
    seconds: float = 0.0  #: of recomputation and of copies, as if nothing else went on meanwhile


class EvictableMemory(PackingContext):
    """A context for all steps: what is saved in it may be evicted by `evict`."""

    def __init__(self, store: HostStore, rates: GpuRates, policy: Policy, device_type: str = "cuda") -> None:
        super().__init__()
        self.evicted = Evicted()
        self.more: Callable[[torch.device, int], int] | None = None  #: lets go of what is not saved for backward
        self.rates, self.store = rates, store
        self._policy, self.device_type = policy, device_type
        self._draw = random.Random(0)  # its own, so that the program's numbers stay its own
        self.transfers = DeviceTransfers()
        self.slots = HostSlots(store, self.transfers.settle, pinned=device_type == "cuda", changing=True)
        self._known: dict[tuple[int, int], ref[Saved]] = {}  # by memory and version
        self.went_from: WeakSet[Any] = WeakSet()  #: blocks of which, or of the program after which, something had to go
        self._uses = self._num_saved = 0
        self._evicting = threading.Lock()  # threads of several devices may ask at once
        self._thread = 0  # that it was entered in, to which hooks on what is saved are bound

    def __enter__(self) -> "EvictableMemory":
        self._thread = threading.get_ident()
        super().__enter__()
        return self

    def goes_from(self, block: Any) -> bool:
        """Whether a block that is about to run is to be made ready to be dropped: something of it had to go before.
        Where the host takes only so much, every block is, once anything had to go; where it takes nothing, always, as
        in threads that the program starts: what they save outside of blocks is not seen."""
        _thread.block = ref(block)
        limit_bytes = self.store.limit_bytes
        if not self._entered or limit_bytes == 0 or threading.get_ident() != self._thread:
            return bool(self._entered)
        return block in self.went_from if limit_bytes is None else self.evicted.num_evictions > 0

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """What autograd is to hold of a tensor; its `memory` is a `Saved`, or None if it stays where it is."""
        saved = self._saved(tensor) if may_be_kept_elsewhere(tensor, self.device_type) else None
        return PackedTensor(self.needed, saved, tensor, None if saved is None else saved.alias_of(tensor))

    def _saved(self, tensor: torch.Tensor) -> "Saved":
        key = tensor.untyped_storage()._cdata, tensor._version
        known = self._known.get(key)
        found = known() if known is not None else None
        if found is None:
            found = Saved(self, key, self._num_saved, tensor)
            self._num_saved += 1
            self._known[key] = ref(found)
        self._use(found)
        return found

    def _use(self, saved: "Saved") -> None:
        self._uses += 1
        saved.last_use = self._uses
        stream = saved.stream_number()
        if stream not in saved.streams:
            saved.streams.append(stream)

    def needed(self, saved: "Saved") -> torch.UntypedStorage:
        """Backward asks for it."""
        while True:
            if (storage := saved.here or saved.held()) is not None:
                saved.here = storage
                self._use(saved)
                return storage
            if saved.slot is not None:
                self._bring(saved)
            else:
                assert saved.region is not None
                saved.region.recompute()

    def _bring(self, saved: "Saved") -> None:
        room = torch.empty(saved.size_bytes, dtype=torch.uint8, device=saved.device).untyped_storage()
        transfers = self.transfers[saved.device]
        with phase("backward"):
            transfers.wait(transfers.to_device([(saved.numbers(room), saved.place())]))
            transfers.follow()  # the next copy into this place of the host comes after this one from it
        saved.streams = [saved.stream_number()]
        saved.here = room
        self.note_copied(saved.size_bytes, to_device=True)

    def evict(self, device: torch.device, size_bytes: int) -> int:
        """The allocator asks for room: let go of at least so many bytes on a device, if so many may; how many went."""
        if _thread.evicts or in_transform():
            return 0
        _thread.evicts = True
        try:
            with self._evicting, unseen(), torch.no_grad():
                freed = self._evict(device, size_bytes)
                if freed < size_bytes and self.more is not None:
                    freed += self.more(device, size_bytes - freed)
                self.evicted.num_evictions += freed > 0
                return freed
        finally:
            _thread.evicts = False

    def _evict(self, device: torch.device, size_bytes: int) -> int:
        freed = 0
        for lot in sorted(self._lots(device), key=lambda lot: (lot.score, lot.members[0].number)):
            if freed >= size_bytes:
                break
            gone = 0 if lot.is_dropped else sum(map(self._move, lot.members))
            if gone == 0 and lot.region is not None:  # the host has no room
                for saved in lot.members:
                    saved.let_go()
                    self.evicted.dropped_bytes += saved.size_bytes if saved.slot is None else 0
                    gone += aligned(saved.size_bytes)
            freed += gone
        return freed

    def _lots(self, device: torch.device) -> "Iterator[_Lot]":
        """What may go together: all that a block saved, or memory by itself."""
        lots: dict[int, tuple[Region | None, list[Saved]]] = {}
        for known in list(self._known.values()):
            saved = known()
            if saved is not None and saved.device == device and saved.is_free_to_go():
                region = saved.region if saved.region is not None and saved.region.may_be_dropped else None
                lots.setdefault(-1 - saved.number if region is None else id(region), (region, []))[1].append(saved)
        for region, members in lots.values():
            lot_bytes = sum(one.size_bytes for one in members)
            stale = 1 + self._uses - max(one.last_use for one in members)
            link = sum(self._link_seconds(one.size_bytes) * (1 + (one.slot is None)) for one in members)
            again = region.seconds_to_recompute() if region is not None else float("inf")
            one = Candidate(min(link, again), 0.0, lot_bytes, stale, draw=self._draw.random())
            yield _Lot(region, members, self._policy.score(one), again <= link)

    def _move(self, saved: "Saved") -> int:
        """Bytes that went to the host; none where it has no room."""
        transfers = self.transfers[saved.device]
        if saved.slot is None:
            saved.slot = self.slots.take(saved.size_bytes)
            if saved.slot is None:
                return 0
            saved.join_streams()
            with phase("forward"):
                assert saved.here is not None
                copied = transfers.to_host([(saved.place(), saved.numbers(saved.here))])
            for number in saved.streams:
                transfers.wait(copied, saved.stream_of(number))
            self.note_copied(saved.size_bytes, to_device=False)
        saved.let_go()
        return aligned(saved.size_bytes)

    def note_copied(self, size_bytes: int, *, to_device: bool) -> None:
        self.evicted.brought_bytes += size_bytes * to_device
        self.evicted.moved_bytes += size_bytes * (not to_device)
        self.evicted.seconds += self._link_seconds(size_bytes)

    def _link_seconds(self, size_bytes: int) -> float:
        return LINK_START + size_bytes / (LINK_SHARE * self.rates.link_bytes_per_second)

    def gone(self, saved: "Saved") -> None:
        if self._known[saved.key]() is None:  # and no other memory has taken its place
            del self._known[saved.key]
        if saved.slot is not None:
            self.slots.give_back(saved.slot)


class _Thread(threading.local):
    evicts = False
    block: ref[Any] | None = None  # the last one that began


_thread = _Thread()


@dataclass(frozen=True)
class _Lot:
    """What goes together. Members that are in the host already are let go of in either way."""

    region: "Region | None"  #: None: it cannot be dropped
    members: "list[Saved]"
    score: float
    is_dropped: bool  #: rather than moved


class Saved(HostCopy):
    """Memory that was saved, as it was then. Invariant: it is `here`, held by somebody else, in `slot`, or its region
    computes it again."""

    def __init__(self, owner: EvictableMemory, key: tuple[int, int], number: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        super().__init__(storage, tensor.device)
        self.key, self.number = key, number
        self.here: torch.UntypedStorage | None = storage
        self.region: Region | None = None  #: the block that made it, if that may compute it again
        self.last_use = 0
        self._block = _thread.block
        self.streams: list[tuple[int, int, int]] = []  #: that it was used on, the one that asked for it first
        self._owner = owner
        self._aliases: list[torch.Tensor] = []  # of packed tensors, which hold it as long as it is here

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = alias_of(tensor)
        self._aliases.append(alias)
        return alias

    def is_free_to_go(self) -> bool:
        """Whether it is here and only here: nobody else holds it, nor uses it now."""
        return self.here is not None and torch._C._storage_Use_Count(self.here._cdata) == 1 + len(self._aliases)

    def stream_of(self, number: tuple[int, int, int]) -> Any:
        stream_id, index, kind = number
        if self.device.type != "cuda":
            return None
        return torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)

    def join_streams(self) -> None:
        """Let the current stream, and the one whose memory it is, wait for all that use it."""
        here, number = self.current_stream(), self.stream_number()
        for one in self.streams:
            if one != number:
                here.wait_stream(self.stream_of(one))
        if self.streams and self.streams[0] != number:
            self.stream_of(self.streams[0]).wait_stream(here)

    @property
    def is_lost(self) -> bool:
        return self.here is None and self.slot is None and self.held() is None

    def let_go(self) -> None:
        """It is not held here any more."""
        if len(self.streams) > 1 or self.streams[:1] != [self.stream_number()]:
            self.join_streams()
        for alias in self._aliases:
            let_go_of(alias)
        self._aliases.clear()
        self.here = None
        block = self._block() if self._block is not None else None
        if block is not None:
            self._owner.went_from.add(block)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._owner.gone(self)


class _TimedTape(BlockTape):
    """A tape of a call that may turn out to be impossible to repeat, with about how long the call takes. That is as
    long as the first call with the same key, of the block and the shapes that it was given."""

    def __init__(self, block: str, wanted: Any, inputs: Any, checkpoint: "LateCheckpoint", key: Any) -> None:
        super().__init__(block, wanted, inputs)
        self.refusal = ""  #: why it cannot be made twice
        self._times, self._key, self._rates = checkpoint.seconds, key, checkpoint.memory.rates
        self._is_timed = key not in self._times
        self.seconds = self._times.get(key, 0.0)
        self._state: ModuleState | None = None
        self._sizes: list[dict[Any, int]] = []

    def watch(self, state: ModuleState) -> None:
        self._state, self._sizes = state, state.sizes()

    def finish(self, outputs: Any) -> None:
        if not self.refusal:
            super().finish(outputs)
            if self._state is not None and self._state.sizes() != self._sizes:  # what has grown would grow again
                self.refusal = f"{self.block} lets a list or a dictionary grow"
            if self._is_timed:
                if len(self._times) >= _MOST_CALLS:
                    self._times.clear()
                self._times[self._key] = self.seconds
        self._state = None

    def record(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As in `BlockTape`, but an operation that cannot be computed twice is done all the same."""
        if self.refusal:
            return operator(*args, **kwargs)
        made: list[Any] = []

        def do(*args: Any, **kwargs: Any) -> Any:
            made.append(operator(*args, **kwargs))
            return made[0]

        try:
            results = self._record(operator, do, args, kwargs)
        except RecomputeError as error:
            self.refusal = str(error)
            return made[0] if made else operator(*args, **kwargs)
        if self._is_timed:
            self.seconds += operator_seconds(operator, args, kwargs, results, self._rates)
        return results


class LateCheckpoint(Checkpoint):
    """That for blocks whose saved memory can be evicted."""

    def __init__(self, memory: EvictableMemory) -> None:
        self.memory = memory
        self.seconds: dict[Any, float] = {}  #: of calls

    def __deepcopy__(self, _: Any) -> "LateCheckpoint":
        """A copied model is evicted with the others."""
        return self

    def is_wanted(self, block: Any) -> bool:
        """True once something of it had to be evicted; for a block that calls itself, only for the outermost call."""
        return self.memory.goes_from(block) and not current_block()

    def make_tape(self, model: int, block: str, wanted: Any, inputs: Sequence[torch.Tensor]) -> BlockTape:
        key = model, block, tuple((one.shape, one.dtype) for one in inputs)
        return _TimedTape(block, wanted, inputs, self, key)

    def __call__(self, run: Callable[..., Any], values: list[Any], tape: BlockTape) -> Any:
        assert isinstance(tape, _TimedTape)
        region = Region(self.memory, run, values, tape)
        with saved_tensors_hooks(region.pack, PackedTensor.unpacked), tape.recording():
            results = run(*values)
        region.finish(results)
        return results


class Region:
    """One call of a block; lives as long as the memory that it saved."""

    def __init__(self, memory: EvictableMemory, run: Callable[..., Any], values: list[Any], tape: _TimedTape) -> None:
        self._memory, self._run, self._tape = memory, run, tape
        self._inputs = [_again(memory, one) for one in values]
        self._surroundings = _surroundings(values)
        self._packed: list[tuple[ref[Saved] | None, Any]] = []  # in order: memory, and `_like` of the tensor
        self._is_over = self._in_backward = False
        self._lock = threading.RLock()  # backward passes of several devices have a thread each
        self._position = 0
        self._missing: dict[int, Saved] = {}  # memory that the running second run is to make, by place in `_packed`

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        packed = self._memory.pack(tensor)
        saved: Saved | None = packed.memory
        if saved is not None and saved.region is None and tensor.untyped_storage()._cdata in self._tape.own:
            saved.region = self
        self._packed.append((None if saved is None else ref(saved), _like(tensor)))
        return packed

    def finish(self, results: Any) -> None:
        given = storages_of(tree_leaves(results))
        for _, saved in self._saved():
            if saved.here is not None and saved.here._cdata in given:
                saved.region = None
        self._is_over = True

    @property
    def may_be_dropped(self) -> bool:
        return self._is_over and not self._in_backward and not self._tape.refusal

    def seconds_to_recompute(self) -> float:
        """The seconds that dropping more of it costs: 0 if some of it is gone already."""
        return 0.0 if any(one.is_lost for _, one in self._saved()) else self._tape.seconds

    def _saved(self) -> Iterator[tuple[int, Saved]]:
        """The memory that it saved and can compute again, by the place in `_packed`."""
        for place, (reference, _) in enumerate(self._packed):
            saved = reference() if reference is not None else None
            if saved is not None and saved.region is self:
                yield place, saved

    def recompute(self) -> None:
        with self._lock:
            self._missing = {}
            for place, saved in self._saved():
                if saved.is_lost and saved not in self._missing.values():
                    self._missing[place] = saved
            if not self._missing:
                return
            self._in_backward = True
            evicted = self._memory.evicted
            evicted.num_recomputed += 1
            evicted.recomputed_bytes += sum(one.size_bytes for one in self._missing.values())
            evicted.seconds += self._tape.seconds
            hooks, around = saved_tensors_hooks(self._fill, _never_unpacked), self._surroundings()
            try:
                values = [again() for again in self._inputs]
                with contextlib.suppress(_AllIsThere), around, torch.enable_grad(), hooks, self._tape.repeating():
                    self._run(*values)
            except RecomputeError as error:
                raise RecomputeError(f"{error} Under a larger cap it is not computed again.") from None
            finally:
                lacking, self._missing, self._position = len(self._missing), {}, 0
            if lacking:
                raise RecomputeError(
                    f"{self._tape.block} does not do the same when it is recomputed: it saves less for backward. "
                    "Give a larger cap."
                )

    def _fill(self, tensor: torch.Tensor) -> None:
        place, self._position = self._position, self._position + 1
        if place >= len(self._packed) or self._packed[place][1] != _like(tensor):
            raise RecomputeError(
                f"{self._tape.block} does not do the same when it is recomputed: it saves another tensor, of shape "
                f"{tuple(tensor.shape)}."
            )
        if (saved := self._missing.pop(place, None)) is not None:
            saved.here = tensor.untyped_storage()
            saved.streams = [saved.stream_number()]
        if not self._missing:
            raise _AllIsThere


class _AllIsThere(BaseException):
    """Ends a second run; no handler of the program's for its own errors is to take it."""


def _again(memory: EvictableMemory, value: Any) -> Callable[[], Any]:
    """What gives what a block was given once more: a tensor detached from what made it."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    packed, requires_grad = memory.pack(value), value.requires_grad
    return lambda: packed.unpacked().detach().requires_grad_(requires_grad)


def _surroundings(values: Sequence[Any]) -> Callable[[], AbstractContextManager[None]]:
    """What makes a context with the random state of torch and the autocast that are in force now."""
    of_processor, (devices, states) = torch.get_rng_state(), get_device_states(*values)
    kinds = {"cpu", *(one.device.type for one in values if isinstance(one, torch.Tensor))}
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]

    @contextlib.contextmanager
    def as_before() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(of_processor)
            set_device_states(devices, states)
            for kind, dtype, is_on, caches in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=caches))
            yield

    return as_before


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _never_unpacked(_: Any) -> Any:
    raise RuntimeError("backward was called within the forward pass of a block that is computed again")


def drop_blocks_of_models(checkpoint: LateCheckpoint) -> None:
    """Make repeated blocks of the models of this program droppable, as they appear, and modules beside them. Blocks do
    not lie within each other. A module that is called several times in a step, such as the cell of a recurrent network
    or of a tree, is one block a call."""

    def appeared(number: int, blocks: list[Block], model: Any) -> None:
        if is_compiled(model):
            name = type(getattr(model, "_orig_mod", model)).__name__
            warnings.warn(
                f"stalloc: {name} is compiled as a whole, so nothing that it saves can be evicted before its forward "
                "pass is over. Where the cap cannot be kept, compile its blocks one by one (block.compile()).",
                stacklevel=2,
            )
        chosen = blocks + _beside(model, blocks)
        wrap(chosen, [keeps_nothing] * len(chosen), functools.partial(checkpoint.make_tape, number), checkpoint)

    when_models_appear(appeared)


def _beside(model: Any, blocks: list[Block]) -> list[Block]:
    """The outermost modules with layers that hold no block, lie in none and are not the model itself."""
    taken = {id(one) for block in blocks for one in held_modules(block.module)}
    found: list[Block] = []
    for name, module in model.named_modules():
        if is_compiled(module):
            taken.update(map(id, held_modules(module)))
        is_called = type(module).forward is not torch.nn.Module.forward  # as a list of modules is not
        if module is model or is_leaf(module) or id(module) in taken or not is_called:
            continue
        below = held_modules(module)
        if not any(id(one) in taken for one in below):
            taken.update(map(id, below))
            found.append(Block(name, module))
    return found
