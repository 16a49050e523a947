"""What autograd saves for backward, evicted when a request does not fit: dropped with its block, or moved to the host.

Contract: memory that is evicted is held by nobody but autograd: what the program or a running operation holds stays, as
evicting it would give nothing back. What was dropped is computed again by its block, what was moved is copied back,
each when backward asks for it. Evicting asks for no memory of the device and runs no code of the program, so the
allocator may ask for it in the middle of a request. Memory is let go after its streams have waited for the copy, never
by record_stream. How stale memory is, is counted in uses of saved memory: steps that do the same evict the same.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates
from stalloc.eviction.scores import Candidate, Policy
from stalloc.sizes import aligned
from stalloc.techniques.former_values import unseen
from stalloc.techniques.host_copy import HostCopy
from stalloc.techniques.host_slots import HostSlots
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.packed_tensors import PackedTensor, alias_of, let_go_of, may_be_kept_elsewhere
from stalloc.techniques.recompute import in_transform
from stalloc.techniques.transfers import Transfers, phase, settle_all


class Region(Protocol):
    """One call of a block, which can compute again what it saved."""

    @property
    def may_be_dropped(self) -> bool:
        """Whether what it saved may be let go of."""
        ...

    def seconds_to_recompute(self) -> float:
        """What dropping more of it costs."""
        ...

    def recompute(self) -> None:
        """Make what was dropped."""
        ...


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


class EvictableMemory:
    """A context for all steps: what is saved in it may be evicted by `evict`."""

    def __init__(self, store: HostStore, rates: GpuRates, policy: Policy, device_type: str = "cuda") -> None:
        self.evicted = Evicted()
        self.more: Callable[[torch.device, int], int] | None = None  #: lets go of what is not saved for backward
        self.rates, self.store = rates, store
        self._policy, self.device_type = policy, device_type
        self._draw = random.Random(0)  # its own, so that the program's numbers stay its own
        self.slots = HostSlots(store, self._settle, pinned=device_type == "cuda", changing=True)
        self._transfers: dict[torch.device, Transfers] = {}
        self._known: dict[tuple[int, int], ref[Saved]] = {}  # by memory and version
        self._blocks: WeakSet[Any] = WeakSet()  # of which something had to go
        self._uses = self._num_saved = 0
        self._entered: list[saved_tensors_hooks] = []
        self._evicting = threading.Lock()  # threads of several devices may ask at once
        self._thread = 0  # that it was entered in, to which hooks on what is saved are bound

    def __enter__(self) -> "EvictableMemory":
        self._thread = threading.get_ident()
        self._entered.append(saved_tensors_hooks(self._pack, PackedTensor.unpacked))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__()

    def goes_from(self, block: Any) -> bool:
        """Whether a block that is about to run is to be made ready to be dropped: something of it had to go before.

        Where the host takes only so much, every block is, once anything had to go; where it takes nothing, always, as
        in threads that the program starts: what they save outside of blocks is not seen.
        """
        _thread.block = ref(block)
        limit_bytes = self.store.limit_bytes
        if not self._entered or limit_bytes == 0 or threading.get_ident() != self._thread:
            return bool(self._entered)
        return block in self._blocks if limit_bytes is None else self.evicted.num_evictions > 0

    def went_from(self, block: Any) -> None:
        """Something that a block saved, or the program after it, had to go."""
        self._blocks.add(block)

    def _pack(self, tensor: torch.Tensor) -> PackedTensor:
        return self.packed(tensor, self.saved(tensor))

    def packed(self, tensor: torch.Tensor, saved: "Saved | None") -> PackedTensor:
        """What autograd is to hold of a tensor whose memory is `saved`."""
        return PackedTensor(self, saved, tensor, None if saved is None else saved.alias_of(tensor))

    def saved(self, tensor: torch.Tensor) -> "Saved | None":
        """The memory of a tensor that is being saved; None if it stays where it is."""
        if not may_be_kept_elsewhere(tensor, self.device_type) or torch._C._current_graph_task_id() != -1:
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        known = self._known.get(key)
        found = known() if known is not None else None
        if found is None:
            found = Saved(self, key, self._num_saved, storage, tensor.device)
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

    # --- backward asks for it

    def needed(self, saved: "Saved") -> torch.UntypedStorage:
        """As of `Keeper`."""
        while True:
            storage = saved.here or saved.held()
            if storage is not None:
                saved.here = storage
                self._use(saved)
                return storage
            if saved.slot is not None:
                self._bring(saved)
            else:
                assert saved.region is not None
                saved.region.recompute()

    def _bring(self, saved: "Saved") -> None:
        assert saved.slot is not None
        room = torch.empty(saved.size_bytes, dtype=torch.uint8, device=saved.device).untyped_storage()
        transfers = self.transfers_of(saved.device)
        with phase("backward"):
            transfers.wait(transfers.to_device([(saved.numbers(room), saved.place())]))
            transfers.follow()  # the next copy into this place of the host comes after this one from it
        saved.streams = [saved.stream_number()]
        saved.here = room
        self.note_brought(saved.size_bytes)

    # --- the allocator asks for room

    def evict(self, device: torch.device, size_bytes: int) -> int:
        """Let go of at least so many bytes on a device, if so many may go; how many did."""
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
            gone = self._drop(lot) if lot.is_dropped else sum(map(self._move, lot.members))
            if gone == 0 and lot.is_dropped is False and lot.region is not None:
                gone = self._drop(lot)  # the host has no room
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
            link = sum(self.link_seconds(one.size_bytes) * (1 + (one.slot is None)) for one in members)
            again = region.seconds_to_recompute() if region is not None else float("inf")
            one = Candidate(min(link, again), 0.0, lot_bytes, stale, draw=self._draw.random())
            yield _Lot(region, members, self._policy.score(one), again <= link)

    def _drop(self, lot: "_Lot") -> int:
        assert lot.region is not None
        for saved in lot.members:
            saved.let_go()
        lot_bytes = sum(aligned(one.size_bytes) for one in lot.members)
        self.evicted.dropped_bytes += sum(one.size_bytes for one in lot.members if one.slot is None)
        return lot_bytes

    def _move(self, saved: "Saved") -> int:
        """Bytes that went to the host; none where it has no room."""
        transfers = self.transfers_of(saved.device)
        if saved.slot is None:
            slot = self.slots.take(saved.size_bytes)
            if slot is None:
                return 0
            saved.slot = slot
            saved.join_streams()
            with phase("forward"):
                assert saved.here is not None
                copied = transfers.to_host([(saved.place(), saved.numbers(saved.here))])
            for number in saved.streams:
                transfers.wait(copied, saved.stream_of(number))
            self.note_moved(saved.size_bytes)
        saved.let_go()
        return aligned(saved.size_bytes)

    def note_moved(self, size_bytes: int) -> None:
        """Count bytes that went to the host."""
        self.evicted.moved_bytes += size_bytes
        self.evicted.seconds += self.link_seconds(size_bytes)

    def note_brought(self, size_bytes: int) -> None:
        """Count bytes that came back."""
        self.evicted.brought_bytes += size_bytes
        self.evicted.seconds += self.link_seconds(size_bytes)

    def link_seconds(self, size_bytes: int) -> float:
        """About how long a copy between device and host takes."""
        return LINK_START + size_bytes / (LINK_SHARE * self.rates.link_bytes_per_second)

    def gone(self, saved: "Saved") -> None:
        """Nothing that was saved needs it any more."""
        if self._known[saved.key]() is None:  # and no other memory has taken its place
            del self._known[saved.key]
        if saved.slot is not None:
            self.slots.give_back(saved.slot)

    def transfers_of(self, device: torch.device) -> Transfers:
        """The copies of a device."""
        if device not in self._transfers:
            self._transfers[device] = Transfers(device)
        return self._transfers[device]

    def _settle(self) -> None:
        settle_all(self._transfers)


class _Thread(threading.local):
    evicts = False
    block: ref[Any] | None = None  # the last one that began


_thread = _Thread()


@dataclass(frozen=True)
class _Lot:
    """What goes together. Members that are in the host already are let go of in either way."""

    region: Region | None  #: None: it cannot be dropped
    members: "list[Saved]"
    score: float
    is_dropped: bool  #: rather than moved


class Saved(HostCopy):
    """Memory that was saved, as it was then. Invariant: it is `here`, held by somebody else, in `slot`, or its region
    computes it again."""

    def __init__(
        self,
        owner: EvictableMemory,
        key: tuple[int, int],
        number: int,
        storage: torch.UntypedStorage,
        device: torch.device,
    ) -> None:
        super().__init__(storage, device)
        self.key, self.number = key, number
        self.here: torch.UntypedStorage | None = storage
        self.region: Region | None = None  #: the block that made it, if that may compute it again
        self.last_use = 0
        self._block = _thread.block
        self.streams: list[tuple[int, int, int]] = []  #: that it was used on, the one that asked for it first
        self._owner = owner
        self._aliases: list[torch.Tensor] = []  # of packed tensors, which hold it as long as it is here

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor that lies in it, which is empty once it is let go of."""
        alias = alias_of(tensor)
        self._aliases.append(alias)
        return alias

    def is_free_to_go(self) -> bool:
        """Whether it is here and only here: nobody else holds it, nor uses it now."""
        return self.here is not None and torch._C._storage_Use_Count(self.here._cdata) == 1 + len(self._aliases)

    def stream_of(self, number: tuple[int, int, int]) -> Any:
        """The stream of a number; None without a GPU."""
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
        """Whether it has to be computed again."""
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
            self._owner.went_from(block)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._owner.gone(self)
