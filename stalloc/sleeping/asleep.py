"""A device whose memory has been given back while every address stays what it is: a job that sleeps.

Contract: nothing is unmapped before all that is to be kept has been copied, so whatever fails on the way to sleep
leaves the job awake, and whatever fails on the way back leaves it asleep. What no live block has is not copied. A page
sleeps with all that lives in it, at each of its addresses, and is back before any of that is said to be awake. Where
only what is tagged sleeps, the pools that have any of its pages serve nobody meanwhile, and the plan goes on elsewhere.

The bytes are in the host, in a file, or nowhere. A file has no name any more once it is open, so that nobody reads it
and nothing of it is left.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.core.constants import BLOCK_FREE, GRANULE, PRIVATE_KINDS
from stalloc.core.snapshot import segments
from stalloc.device.mapped_pages import page_runs
from stalloc.device.pinned_memory import pinned_memory
from stalloc.errors import SetupError
from stalloc.figures import human_bytes
from stalloc.runtime.controller import Controller

Run = tuple[int, int]
"""Address and bytes of memory in a row."""
Tags = frozenset[str | None]
"""What the blocks of a page are called; None: one of them has no name."""
UNTAGGED: Tags = frozenset([None])
_CHUNK_BYTES = 64 << 20  # that go through pinned memory at once, to a file and back


class Keeper:
    """Somewhere to keep bytes; this one keeps nothing, so that what comes back has no values. The device is current."""

    drops = True  #: whether nothing is kept

    def keep(self, runs: Sequence[Run]) -> None:
        """Copy all of them, or raise SetupError if there is no room, of which none is taken then."""

    def bring_back(self, runs: Sequence[Run]) -> None:
        """Copy some of them back to where they were."""


class InHost(Keeper):
    drops = False

    def keep(self, runs: Sequence[Run]) -> None:
        self._memory, self._places = _pinned(sum(size for _, size in runs)), _placed(runs)
        for address, size in runs:
            _copy(self._memory.ptr + self._places[address], address, size, to_host=True)

    def bring_back(self, runs: Sequence[Run]) -> None:
        for address, size in runs:
            _copy(address, self._memory.ptr + self._places[address], size, to_host=False)


class InFile(Keeper):
    drops = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def keep(self, runs: Sequence[Run]) -> None:
        total = sum(size for _, size in runs)
        self._places = _placed(runs)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (as long as the sleep)
            if total:
                os.posix_fallocate(self._file.fileno(), 0, total)
            for address, at, view, pinned in self._chunks(runs):
                _copy(pinned, address, len(view), to_host=True)
                self._file.seek(at)
                self._file.write(view)
            self._file.flush()
        except OSError as error:
            self._file = None
            raise SetupError(
                f"{human_bytes(total)} cannot be kept in {self._folder} ({error.strerror}): name a folder with room."
            ) from error

    def bring_back(self, runs: Sequence[Run]) -> None:
        for address, at, view, pinned in self._chunks(runs):
            self._file.seek(at)
            if self._file.readinto(view) != len(view):
                raise SetupError(f"the file of a job that sleeps in {self._folder} was cut: its memory is lost.")
            _copy(address, pinned, len(view), to_host=False)

    def _chunks(self, runs: Sequence[Run]) -> Iterator[tuple[int, int, memoryview, int]]:
        """Addresses, where their bytes are in the file, and the pinned memory through which they go: view, address."""
        staging = _pinned(min(sum(size for _, size in runs), _CHUNK_BYTES))
        for address, size in runs:
            for begin in range(0, size, _CHUNK_BYTES):
                view = np.frombuffer(staging, np.uint8, min(_CHUNK_BYTES, size - begin)).data
                yield address + begin, self._places[address] + begin, view, staging.ptr


def _placed(runs: Sequence[Run]) -> dict[int, int]:
    """Where the bytes of each address go, one run behind the other."""
    return dict(zip((address for address, _ in runs), accumulate((size for _, size in runs), initial=0), strict=False))


def _pinned(size_bytes: int) -> Any:
    """Raises SetupError where the host has no more."""
    try:
        return pinned_memory(max(size_bytes, 1))
    except MemoryError as error:
        raise SetupError(
            f"the host has no {human_bytes(size_bytes)} of memory to be pinned: sleep with to='disk', or 'drop'."
        ) from error


def _copy(target: int, source: int, size_bytes: int, *, to_host: bool) -> None:
    from cupy.cuda import runtime

    kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
    runtime.memcpy(target, source, size_bytes, kind)


@dataclass
class Sleep:
    """Pages of one device that sleep, and wake together."""

    controller: Controller
    keeper: Keeper
    tags: Tags
    refuses: bool  #: nobody gets memory until it is awake
    mapped: dict[Any, list[int]] = field(default_factory=dict)  #: the pages that each range had
    shared: list[tuple[Any, int, Any, int]] = field(default_factory=list)  #: range, page, and whose page it is
    kept: list[Run] = field(default_factory=list)  #: what is copied, in the order of the keeper's bytes

    @property
    def held_bytes(self) -> int:
        return GRANULE * sum(map(len, self.mapped.values()))

    def addresses(self) -> set[int]:
        """Where its pages were mapped, each of which may be in several places."""
        return {page for pages in self.mapped.values() for page in pages} | {page for _, page, _, _ in self.shared}

    def to_map(self) -> list[tuple[Any, list[int]]]:
        """What waking maps: the pages of ranges that are still open; in others nothing lives any more."""
        still_open = set(self.controller.memory.source.ranges)
        return [(owner, pages) for owner, pages in self.mapped.items() if owner in still_open]

    @property
    def kept_bytes(self) -> int:
        return sum(size for _, size in self.kept)

    @property
    def live_bytes(self) -> int:
        """What is allocated in its pages."""
        asleep = self.addresses()
        blocks = (block for segment in segments(self.controller.state) for block in segment.blocks)
        ends = [(block.address, block.address + block.size_bytes) for block in blocks if block.requested_bytes]
        return sum(
            min(end, page + GRANULE) - max(begin, page)
            for begin, end in ends
            for page in range(begin // GRANULE * GRANULE, end, GRANULE)
            if page in asleep
        )


def check_can_sleep(controller: Controller) -> None:
    """Raise SetupError, before anything is done, where memory cannot be given back."""
    memory = controller.memory
    if not memory.source.paged or memory.source.refusal:
        raise SetupError(
            f"the memory of device {controller.device.index} comes in blocks, which have addresses only while they are "
            "held: a job can sleep where the driver maps pages (--arena pages)."
        )
    if memory.is_captured_now():
        raise SetupError("a CUDA graph is being captured: let the job sleep when that is over.")
    if memory.poison is not None:
        raise SetupError(
            "STALLOC_POISON writes to free memory, which a job that sleeps does not have: unset one of them."
        )


def could_give_back(controller: Controller, tags: Mapping[int, Tags], wanted: Collection[str]) -> int:
    """The bytes that would go back if what has one of the `wanted` tags went to sleep, beside what sleeps already."""
    found = _find_pages(controller, Keeper, tags, (), wanted)
    return sum(one.held_bytes for one in found)


def fall_asleep(
    controller: Controller,
    keeper: Callable[[], Keeper],
    without: Collection[int],
    tags: Mapping[int, Tags],
    wanted: Collection[str] | None,
) -> list[Sleep]:
    """Give pages of a device back: all, or those in which nothing lives but what has one of the `wanted` tags. In the
    latter case others can have memory again once this returns, until `wake_up` and, at last, `wake_pools`. `without`:
    addresses of blocks whose bytes need not be kept; `tags`: those of blocks that have any, by address. Raises
    SetupError if there is no room for the bytes, or the plan is in the way: the job is awake then."""
    memory = controller.memory
    with controller.lock:
        memory.wait_for_deferred()
        memory.release_unused()
        found = _find_pages(controller, keeper, tags, without, wanted)
        arena = controller.arenas.arena
        if wanted is not None and any(arena in sleep.mapped for sleep in found):
            if not controller.arenas.move():
                raise SetupError(
                    f"what is tagged lies where device {controller.device.index} has its plan, which cannot move now: "
                    "call it again after a step."
                )
            found = _find_pages(controller, keeper, tags, without, wanted)
        with memory.source.at_device(capturing=False):
            memory.source.wait()
            for sleep in found:
                sleep.keeper.keep(sleep.kept)
            if wanted is not None:
                controller.state.heap.let_pools_sleep([page for sleep in found for page in sleep.addresses()])
            for sleep in found:
                _unmap(sleep.mapped.items())
                for owner, page, _, _ in sleep.shared:
                    owner.unmap(page, GRANULE)
                memory.asleep_bytes += sleep.held_bytes
        memory.source.collect()
    return found


def wake_up(sleep: Sleep) -> None:
    """Map pages again, and bring the bytes back. Raises SetupError if the device has no room: the job sleeps on."""
    memory = sleep.controller.memory
    with sleep.controller.lock, memory.source.at_device(capturing=False):
        mapped = sleep.to_map()
        needed = GRANULE * sum(len(pages) for _, pages in mapped)
        runs = ((owner, run) for owner, pages in mapped for run in page_runs(pages))
        if not memory.paging.make_room(needed) or not all(owner.map(*run) for owner, run in runs):
            _unmap(mapped)
            memory.source.collect()
            free = memory.source.free_bytes()
            raise SetupError(
                f"waking needs {human_bytes(needed)} of device {sleep.controller.device.index}, which has "
                f"{human_bytes(free)}, {human_bytes(needed - free)} too few: free what was allocated meanwhile, or let "
                "another job sleep first."
            )
        for owner, page, other, other_page in sleep.shared:
            if {owner, other} <= set(memory.source.ranges):
                owner.share(page, other, other_page)
        places = [(owner.ptr, owner.ptr + owner.size_bytes) for owner, _ in mapped]
        sleep.keeper.bring_back([run for run in sleep.kept if any(begin <= run[0] < end for begin, end in places)])
        memory.source.wait()
        memory.asleep_bytes -= sleep.held_bytes
        memory.paging.match()  # what was freed meanwhile


def _find_pages(
    controller: Controller,
    keeper: Callable[[], Keeper],
    tags: Mapping[int, Tags],
    without: Collection[int],
    wanted: Collection[str] | None,
) -> list[Sleep]:
    """The pages that are mapped, by what lives in them; those at two addresses once, and by whom they are shared. All,
    or those in which nothing lives but what has one of the `wanted` tags."""
    places: dict[int, list[tuple[Any, int]]] = {}  # of each page of memory: where it is mapped
    for owner in controller.memory.source.ranges:
        for page in owner.mapped():
            places.setdefault(owner.page_identity(page), []).append((owner, page))
    living: dict[int, dict[int, Tags]] = {}  # in each page: the address of each block, and what it is called
    for segment in segments(controller.state):
        for block in segment.blocks:
            if block.state == BLOCK_FREE and segment.kind < PRIVATE_KINDS:
                continue
            for page in range(block.address // GRANULE * GRANULE, block.address + block.size_bytes, GRANULE):
                its = tags.get(block.address) if segment.kind < PRIVATE_KINDS else None
                living.setdefault(page, {})[block.address] = its or UNTAGGED
    found: dict[Tags, Sleep] = {}
    kept: set[int] = set()
    for (owner, page), *others in places.values():
        blocks = {address: its for _, at in ((owner, page), *others) for address, its in living.get(at, {}).items()}
        named: Tags = frozenset().union(*blocks.values()) or UNTAGGED
        if wanted is not None and not named.issubset(wanted):
            continue
        sleep = found.get(named) or found.setdefault(named, Sleep(controller, keeper(), named, refuses=wanted is None))
        sleep.mapped.setdefault(owner, []).append(page)
        sleep.shared += [(other, at, owner, page) for other, at in others]
        if any(address not in without for address in blocks):
            kept.add(page)
    for sleep in found.values():
        if not sleep.keeper.drops:
            chosen = ([page for page in pages if page in kept] for pages in sleep.mapped.values())
            sleep.kept = [run for pages in chosen for run in page_runs(pages)]
    return list(found.values())


def _unmap(mapped: Iterable[tuple[Any, list[int]]]) -> None:
    for owner, pages in mapped:
        for begin, size in page_runs(pages):
            owner.unmap(begin, size)
