"""What autograd saves for backward, in host memory until backward needs it.

Contract: memory, not tensors, goes to the host: once for all tensors that share it, unless it was changed in place in
between. Parameters and their views, what outlives a backward pass (buffers), small, sparse and odd kinds of tensors,
and what is saved while backward is at work, stay where they are. Memory that somebody else still holds is not brought a
second time. What was changed in place after it was saved is an error, as it is without hooks, for which autograd does
not look itself. Memory is let go at fixed points of the program, after its stream has waited for the copy. Hooks that a
program has inside come first: what they take is theirs.
"""

import functools
import sys
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stalloc.techniques.host_store import HostCopy, HostSlots, HostStore
from stalloc.techniques.link_turns import LinkTurns, SharedLink
from stalloc.techniques.offload_order import OffloadOrder
from stalloc.techniques.technique_settings import ActivationSettings
from stalloc.techniques.tensor_memory import PackedTensor, PackingContext, may_be_kept_elsewhere
from stalloc.techniques.transfers import DeviceTransfers, Transfers, is_copying, phase

_MOST_LASTING = 4096


class Watcher(Protocol):
    """What is told of the fate of each activation, by its number."""

    def saved(self, number: int, storage: torch.UntypedStorage) -> None:
        """An activation that may go to the host is saved."""

    def needed(self, number: int, storage: torch.UntypedStorage) -> None:
        """Backward asks for an activation; `storage` is its memory on the device."""

    def gone(self, number: int) -> None:
        """Nothing needs it any more."""


class SavedActivations(PackingContext):
    """A context, which may be entered often: a share of what autograd saves in it goes to the host."""

    def __init__(
        self,
        settings: ActivationSettings,
        store: HostStore,
        device_type: str = "cuda",
        watcher: Watcher | None = None,
        link: SharedLink | None = None,
    ) -> None:
        """With `link`, copies take turns with other processes' copies. Raises BadInputError if they cannot."""
        super().__init__()
        self.store = store
        self.turns = None if link is None else LinkTurns(link)
        self.left_bytes = 0  #: that went to the host in all
        ranks = (link.rank, link.num_ranks) if link else ()
        self._order = OffloadOrder(settings.ratio, settings.window_bytes, *ranks)
        self._device_type, self._watcher = device_type, watcher
        self._transfers = DeviceTransfers(self.turns)
        self._slots = HostSlots(store, self._transfers.settle, pinned=device_type == "cuda")
        self._known: WeakValueDictionary[tuple[int, int], _Activation] = WeakValueDictionary()  # by memory and version
        self._live: WeakValueDictionary[int, _Activation] = WeakValueDictionary()  # by number
        self._over: deque[int] = deque()  # numbers that are over and not told to the order yet: any thread may end one
        self._late: deque[_Activation] = deque()  # found to be over by a thread that cannot wait for copies
        self._lock = RLock()  # backward passes of several devices have a thread each
        self._lasting: dict[int, StorageWeakRef] = {}  # memory that has outlived what was saved of it
        self._num_saved = 0

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        stays = not may_be_kept_elsewhere(tensor, self._device_type)
        stays = stays or tensor.untyped_storage()._cdata in self._lasting
        return PackedTensor(self.needed, None if stays else self._activation_of(tensor), tensor)

    def _activation_of(self, tensor: torch.Tensor) -> "_Activation":
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        with self._lock:
            if (found := self._known.get(key)) is None:
                found = _Activation(self, self._num_saved, tensor)
                self._num_saved += 1
                self._known[key] = self._live[found.number] = found
                if self._watcher is not None:
                    self._watcher.saved(found.number, storage)
                self._forget()
                if self._order.is_wanted(found.size_bytes):
                    self._leave(found)
        return found

    def _leave(self, activation: "_Activation") -> None:
        activation.slot = self._slots.take(activation.size_bytes)
        if activation.slot is None:
            return
        self.left_bytes += activation.size_bytes
        with phase("forward"):
            activation.copy_out(self._transfers[activation.device])
        for number in self._order.leaves(activation.number, activation.size_bytes):
            if (leaving := self._live.get(number)) is not None:
                leaving.let_go()

    def needed(self, activation: "_Activation") -> torch.UntypedStorage:
        """Backward is about to use it: bring it, and begin to bring those that will be needed next."""
        stream = activation.current_stream()
        with self._lock, phase("backward"):
            self._forget()
            for number in self._order.needed(activation.number):
                other = self._live.get(number)
                if other is not None and (other is activation or other.stream == stream):
                    other.bring(self._transfers[other.device])
            storage = activation.arrive(self._transfers[activation.device])
        if self._watcher is not None:
            self._watcher.needed(activation.number, storage)
        return storage

    def _forget(self) -> None:
        while self._late:
            self.gone(self._late.popleft())
        while self._over:
            self._order.gone(self._over.popleft())

    def gone(self, activation: "_Activation") -> None:
        if is_copying():
            self._late.append(activation)
            return
        self._over.append(activation.number)
        activation.let_go()
        if activation.slot is not None:
            self._slots.give_back(activation.slot)
        if not activation.memory.expired():
            if len(self._lasting) >= _MOST_LASTING:
                self._lasting = {key: one for key, one in list(self._lasting.items()) if not one.expired()}
            self._lasting[activation.memory.cdata] = activation.memory
        if self._watcher is not None:
            self._watcher.gone(activation.number)


class _Activation(HostCopy):
    """Memory that was saved, as it was at that moment. Invariant: unless `here` holds it, it is whole in `slot`."""

    def __init__(self, owner: SavedActivations, number: int, tensor: torch.Tensor) -> None:
        super().__init__(tensor.untyped_storage(), tensor.device)
        self.number = number
        self.here: torch.UntypedStorage | None = tensor.untyped_storage()
        self.stream = self.current_stream()  # on which its memory was used
        self._wait: Callable[[], None] | None = None  # for the copy that uses `here`
        self._brought_on: Any = None  # the stream whose memory `here` is, if it was brought
        self._owner = owner

    def copy_out(self, transfers: Transfers) -> None:
        assert self.here is not None
        left = transfers.to_host([(self.place(), self.numbers(self.here))])
        self._wait = functools.partial(transfers.wait, left, self.stream)

    def let_go(self) -> None:
        self._land()
        self.here = None

    def _land(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def bring(self, transfers: Transfers) -> None:
        """Begin to bring it back, unless it is on the device, or somebody else has held it there all the time."""
        if self.here is None:
            self.here = self.held()
        if self.here is None:
            self._brought_on = self.current_stream()
            self.here, arrived = self._copied_back(transfers)
            self._wait = functools.partial(transfers.wait, arrived, self._brought_on)

    def arrive(self, transfers: Transfers) -> torch.UntypedStorage:
        assert self.here is not None
        if self._brought_on is None:
            return self.here
        stream = self.current_stream()
        if stream != self._brought_on:  # its memory would be given away without asking this stream
            storage, arrived = self._copied_back(transfers)
            transfers.wait(arrived, stream)
            return storage
        self._land()
        return self.here

    def _copied_back(self, transfers: Transfers) -> tuple[torch.UntypedStorage, Any]:
        if self.current_stream() != self.stream:  # which has waited for the copy to the host
            self.current_stream().wait_stream(self.stream)
        room = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        return room, transfers.to_device([(self.numbers(room), self.place())])

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._owner.gone(self)
