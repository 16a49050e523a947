"""Blocks that can be dropped later: what one saves is kept, until memory is short; then the block runs again.

Contract: as with torch's checkpoint the second run has the random numbers and the autocast of the first; BlockTape sees
to it that it does the same on the same numbers. Inputs and results of a block are only moved, so a second
run needs no other block's. A block that was seen to do what cannot be done twice is not dropped, and nothing is said.
One whose backward pass has begun is not dropped again: it would run once for each tensor.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from stalloc.cost.call_work import operator_seconds
from stalloc.cost.gpu_rates import GpuRates
from stalloc.errors import RecomputeError
from stalloc.techniques.block_tape import BlockTape, current_block
from stalloc.techniques.evictable import EvictableMemory, Saved
from stalloc.techniques.module_state import ModuleState
from stalloc.techniques.packed_tensors import PackedTensor
from stalloc.techniques.tensor_memory import storages_of

_MOST_CALLS = 10_000  # whose seconds are remembered


class TimedTape(BlockTape):
    """A tape of a call that may turn out to be impossible to repeat, with about how long the call takes."""

    def __init__(self, block: str, wanted: Any, inputs: Any, times: "_Times", key: Any) -> None:
        super().__init__(block, wanted, inputs)
        self.refusal = ""  #: why it cannot be made twice
        self._times, self._key = times, key
        self._is_timed = key not in times.seconds
        self.seconds = times.seconds.get(key, 0.0)
        self._state: ModuleState | None = None
        self._sizes: list[tuple[str, int]] = []

    def watch(self, state: ModuleState) -> None:
        """See `BlockTape`."""
        self._state, self._sizes = state, state.sizes()

    def finish(self, outputs: Any) -> None:
        """As in `BlockTape`; a container that has grown meanwhile would grow again."""
        if not self.refusal:
            super().finish(outputs)
            if self._state is not None and self._state.sizes() != self._sizes:
                self.refusal = f"{self.block} lets a list or a dictionary grow"
            if self._is_timed:
                self._times.note(self._key, self.seconds)
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
            self.seconds += operator_seconds(operator, args, kwargs, results, self._times.rates)
        return results


class _Times:
    """About how long calls of blocks take: as long as the first call with the same shapes."""

    def __init__(self, rates: GpuRates) -> None:
        self.rates = rates
        self.seconds: dict[Any, float] = {}  #: by block and what it was given

    def note(self, key: Any, seconds: float) -> None:
        """A call took so long."""
        if len(self.seconds) >= _MOST_CALLS:
            self.seconds.clear()
        self.seconds[key] = seconds


class LateCheckpoint:
    """The `Checkpoint` for blocks whose saved memory can be evicted."""

    def __init__(self, memory: EvictableMemory) -> None:
        self._memory = memory
        self._times = _Times(memory.rates)

    def __deepcopy__(self, _: Any) -> "LateCheckpoint":
        """A copied model is evicted with the others."""
        return self

    def is_wanted(self, block: Any) -> bool:
        """True once something of it had to be evicted; for a block that calls itself, only for the outermost call."""
        return self._memory.goes_from(block) and not current_block()

    def make_tape(self, model: int, block: str, wanted: Any, inputs: Sequence[torch.Tensor]) -> TimedTape:
        """See `MakeTape`; `model` is the number of the model that the block is of."""
        key = model, block, tuple((one.shape, one.dtype) for one in inputs)
        return TimedTape(block, wanted, inputs, self._times, key)

    def __call__(self, run: Callable[..., Any], values: list[Any], tape: BlockTape) -> Any:
        """See `Checkpoint`."""
        assert isinstance(tape, TimedTape)
        region = Region(self._memory, run, values, tape)
        with saved_tensors_hooks(region.pack, PackedTensor.unpacked), tape.recording():
            results = run(*values)
        region.finish(results)
        return results


class Region:
    """One call of a block; lives as long as the memory that it saved."""

    def __init__(self, memory: EvictableMemory, run: Callable[..., Any], values: list[Any], tape: TimedTape) -> None:
        self._memory, self._run, self._tape = memory, run, tape
        self._inputs = [_Input(memory, one) if isinstance(one, torch.Tensor) else one for one in values]
        self._surroundings = _Surroundings(values)
        self._packed: list[tuple[weakref.ref[Saved] | None, Any]] = []  # in order: memory, and `_like` of the tensor
        self._is_over = self._in_backward = False
        self._lock = threading.RLock()  # backward passes of several devices have a thread each
        self._position = 0
        self._missing: dict[int, Saved] = {}  # memory that the running second run is to make, by place in `_packed`

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The first run saves a tensor."""
        saved = self._memory.saved(tensor)
        if saved is not None and saved.region is None and self._tape.own({tensor.untyped_storage()._cdata}):
            saved.region = self
        self._packed.append((None if saved is None else weakref.ref(saved), _like(tensor)))
        return self._memory.packed(tensor, saved)

    def finish(self, results: Any) -> None:
        """The first run is over."""
        given = storages_of(tree_leaves(results))
        for saved in self._saved():
            if saved.here is not None and saved.here._cdata in given:
                saved.region = None
        self._is_over = True

    @property
    def may_be_dropped(self) -> bool:
        """Whether the memory that it saved may be dropped."""
        return self._is_over and not self._in_backward and not self._tape.refusal

    def seconds_to_recompute(self) -> float:
        """The seconds that dropping more of it costs: 0 if some of it is gone already."""
        return 0.0 if any(one.is_lost for one in self._saved()) else self._tape.seconds

    def _saved(self) -> Iterator[Saved]:
        for reference, _ in self._packed:
            saved = reference() if reference is not None else None
            if saved is not None and saved.region is self:
                yield saved

    def recompute(self) -> None:
        """Recompute everything that was dropped and is still needed."""
        with self._lock:
            self._missing = {}
            for place, (reference, _) in enumerate(self._packed):
                saved = reference() if reference is not None else None
                is_wanted = saved is not None and saved.region is self and saved.is_lost
                if saved is not None and is_wanted and saved not in self._missing.values():
                    self._missing[place] = saved
            if not self._missing:
                return
            self._in_backward = True
            evicted = self._memory.evicted
            evicted.num_recomputed += 1
            evicted.recomputed_bytes += sum(one.size_bytes for one in self._missing.values())
            evicted.seconds += self._tape.seconds
            try:
                self._run_again()
            except RecomputeError as error:
                raise RecomputeError(f"{error} Under a larger cap it is not computed again.") from None
            finally:
                lacking, self._missing, self._position = len(self._missing), {}, 0
            if lacking:
                raise RecomputeError(
                    f"{self._tape.block} does not do the same when it is recomputed: it saves less for backward. "
                    "Give a larger cap."
                )

    def _run_again(self) -> None:
        values = [one.again() if isinstance(one, _Input) else one for one in self._inputs]
        hooks = saved_tensors_hooks(self._fill, _never_unpacked)
        around = self._surroundings.as_before()
        with contextlib.suppress(_AllIsThere), around, torch.enable_grad(), hooks, self._tape.repeating():
            self._run(*values)

    def _fill(self, tensor: torch.Tensor) -> None:
        """The second run saves a tensor."""
        place, self._position = self._position, self._position + 1
        if place >= len(self._packed) or self._packed[place][1] != _like(tensor):
            raise RecomputeError(
                f"{self._tape.block} does not do the same when it is recomputed: it saves another tensor, of shape "
                f"{tuple(tensor.shape)}."
            )
        saved = self._missing.pop(place, None)
        if saved is not None:
            saved.here = tensor.untyped_storage()
            saved.streams = [saved.stream_number()]
        if not self._missing:
            raise _AllIsThere


class _AllIsThere(BaseException):
    """Ends a second run; no handler of the program's for its own errors is to take it."""


class _Input:
    """A tensor that a block was given."""

    def __init__(self, memory: EvictableMemory, tensor: torch.Tensor) -> None:
        self._packed = memory.packed(tensor, memory.saved(tensor))
        self._requires_grad = tensor.requires_grad

    def again(self) -> torch.Tensor:
        """The tensor, detached from what made it."""
        return self._packed.unpacked().detach().requires_grad_(self._requires_grad)


class _Surroundings:
    """The random state of torch and the autocast that a block runs with."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._of_processor = torch.get_rng_state()
        self._devices, self._states = get_device_states(*values)
        kinds = {"cpu", *(one.device.type for one in values if isinstance(one, torch.Tensor))}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """A context in which this random state and autocast are in force."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._of_processor)
            set_device_states(self._devices, self._states)
            for kind, dtype, is_on, caches in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=caches))
            yield


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _never_unpacked(_: Any) -> Any:
    raise RuntimeError("backward was called within the forward pass of a block that is computed again")
