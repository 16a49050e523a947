"""A device whose memory has been given back while every address stays what it is: a job that sleeps.

Contract: nothing is unmapped before all that is to be kept has been copied, so whatever fails on the way to sleep
leaves the job awake, and whatever fails on the way back leaves it asleep. What no live block has is not copied. A page
sleeps with all that lives in it, at each of its addresses, and is back before any of that is said to be awake. Where
only what is tagged sleeps, the pools that have any of its pages serve nobody meanwhile, and the plan goes on elsewhere.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stalloc.core.constants import BLOCK_FREE, GRANULE, PRIVATE_KINDS
from stalloc.core.snapshot import segments
from stalloc.device.mapped_pages import page_runs
from stalloc.errors import SetupError
from stalloc.figures import human_bytes
from stalloc.runtime.controller import Controller
from stalloc.sleeping.kept_bytes import Keeper, Nowhere

Run = tuple[int, int]
"""Address and bytes of memory in a row."""
Tags = frozenset[str | None]
"""What the blocks of a page are called; None: one of them has no name."""
UNTAGGED: Tags = frozenset([None])


@dataclass
class Sleep:
    """Pages of one device that sleep, and wake together."""

    controller: Controller
    keeper: Keeper
    tags: Tags = UNTAGGED
    refuses: bool = True  #: nobody gets memory until it is awake
    held_bytes: int = 0  #: that were given back
    kept: list[Run] = field(default_factory=list)  #: what is copied, in the order of the keeper's bytes
    mapped: list[tuple[Any, list[int]]] = field(default_factory=list)  #: ranges, and the pages that they had
    shared: list[tuple[Any, int, Any, int]] = field(default_factory=list)  #: range, page, and whose page it is

    def add(self, owner: Any, page: int) -> None:
        """Note a page that a range had."""
        if not self.mapped or self.mapped[-1][0] is not owner:
            self.mapped.append((owner, []))
        self.mapped[-1][1].append(page)
        self.held_bytes += GRANULE

    def addresses(self) -> list[int]:
        """Where its pages were mapped, each of which may be in several places."""
        return [page for _, pages in self.mapped for page in pages] + [page for _, page, _, _ in self.shared]

    def open_ranges(self) -> set[int]:
        """By `id`, the ranges that are still open; in others nothing lives any more."""
        return {id(one) for one in self.controller.memory.source.ranges}

    def to_map(self) -> list[tuple[Any, list[int]]]:
        """What waking maps: the pages of open ranges."""
        still_open = self.open_ranges()
        return [(owner, pages) for owner, pages in self.mapped if id(owner) in still_open]

    @property
    def kept_bytes(self) -> int:
        """What was copied."""
        return sum(size for _, size in self.kept)

    @property
    def live_bytes(self) -> int:
        """What is allocated in its pages."""
        asleep = set(self.addresses())
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
    found = _find_pages(controller, Nowhere, _living(controller, tags), (), wanted)
    return sum(one.held_bytes for one in found)


def fall_asleep(
    controller: Controller,
    keeper: Callable[[], Keeper],
    without: Collection[int],
    tags: Mapping[int, Tags],
    wanted: Collection[str] | None,
) -> list[Sleep]:
    """Give pages of a device back: all, or those in which nothing lives but what has one of the `wanted` tags.

    In the latter case others can have memory again once this returns, until `wake_up` and, at last, `wake_pools`.
    `without`: addresses of blocks whose bytes need not be kept; `tags`: those of blocks that have any, by address.
    Raises SetupError if there is no room for the bytes, or the plan is in the way: the job is awake then.
    """
    memory = controller.memory
    with controller.lock:
        memory.wait_for_deferred()
        memory.release_unused()
        found = _find_pages(controller, keeper, _living(controller, tags), without, wanted)
        arena = controller.arenas.arena
        if wanted is not None and any(owner is arena for sleep in found for owner, _ in sleep.mapped):
            if not controller.arenas.move():
                raise SetupError(
                    f"what is tagged lies where device {controller.device.index} has its plan, which cannot move now: "
                    "call it again after a step."
                )
            found = _find_pages(controller, keeper, _living(controller, tags), without, wanted)
        with memory.source.at_device(capturing=False):
            memory.source.wait()
            for sleep in found:
                sleep.keeper.keep(sleep.kept)
            if wanted is not None:
                controller.state.heap.let_pools_sleep([page for sleep in found for page in sleep.addresses()])
            for sleep in found:
                for owner, pages in sleep.mapped:
                    _unmap(owner, pages)
                for owner, page, _, _ in sleep.shared:
                    owner.unmap(page, GRANULE)
                memory.asleep_bytes += sleep.held_bytes
        memory.source.collect()
    return found


def wake_up(sleep: Sleep) -> None:
    """Map pages again, and bring the bytes back. Raises SetupError if the device has no room: the job sleeps on."""
    memory = sleep.controller.memory
    with sleep.controller.lock, memory.source.at_device(capturing=False):
        mapped, open_ranges = sleep.to_map(), sleep.open_ranges()
        needed = GRANULE * sum(len(pages) for _, pages in mapped)
        runs = ((owner, run) for owner, pages in mapped for run in page_runs(pages))
        if not memory.paging.make_room(needed) or not all(owner.map(*run) for owner, run in runs):
            for owner, pages in mapped:
                _unmap(owner, pages)
            memory.source.collect()
            free = memory.source.free_bytes()
            raise SetupError(
                f"waking needs {human_bytes(needed)} of device {sleep.controller.device.index}, which has "
                f"{human_bytes(free)}, {human_bytes(needed - free)} too few: free what was allocated meanwhile, or let "
                "another job sleep first."
            )
        for owner, page, other, other_page in sleep.shared:
            if id(owner) in open_ranges and id(other) in open_ranges:
                owner.share(page, other, other_page)
        sleep.keeper.bring_back([run for run in sleep.kept if _is_there(run, mapped)])
        memory.source.wait()
        memory.asleep_bytes -= sleep.held_bytes
        memory.paging.match()  # what was freed meanwhile


def _living(controller: Controller, tags: Mapping[int, Tags]) -> dict[int, dict[int, Tags]]:
    """What lives in each page, by the page's address: the address of each block, and what it is called."""
    found: dict[int, dict[int, Tags]] = {}
    for segment in segments(controller.state):
        for block in segment.blocks:
            if block.state == BLOCK_FREE and segment.kind < PRIVATE_KINDS:
                continue
            for page in range(block.address // GRANULE * GRANULE, block.address + block.size_bytes, GRANULE):
                named = tags.get(block.address) if segment.kind < PRIVATE_KINDS else None
                found.setdefault(page, {})[block.address] = named or UNTAGGED
    return found


def _find_pages(
    controller: Controller,
    keeper: Callable[[], Keeper],
    living: Mapping[int, Mapping[int, Tags]],
    without: Collection[int],
    wanted: Collection[str] | None,
) -> list[Sleep]:
    """The pages that are mapped, by what lives in them; those at two addresses once, and by whom they are shared.

    All, or those in which nothing lives but what has one of the `wanted` tags.
    """
    places: dict[int, list[tuple[Any, int]]] = {}  # of each page of memory: where it is mapped
    for owner in controller.memory.source.ranges:
        for page in owner.mapped():
            places.setdefault(owner.page_identity(page), []).append((owner, page))
    found: dict[Tags, Sleep] = {}
    kept: set[int] = set()
    for (owner, page), *others in places.values():
        blocks = {address: named for _, at in ((owner, page), *others) for address, named in living.get(at, {}).items()}
        tags: Tags = frozenset().union(*blocks.values()) or UNTAGGED
        if wanted is not None and not tags.issubset(wanted):
            continue
        sleep = found.get(tags) or found.setdefault(tags, Sleep(controller, keeper(), tags, refuses=wanted is None))
        sleep.add(owner, page)
        sleep.shared += [(other, at, owner, page) for other, at in others]
        if any(address not in without for address in blocks):
            kept.add(page)
    for sleep in found.values():
        if not sleep.keeper.drops:
            chosen = ([page for page in pages if page in kept] for _, pages in sleep.mapped)
            sleep.kept = [run for pages in chosen for run in page_runs(pages)]
    return list(found.values())


def _is_there(run: Run, mapped: list[tuple[Any, list[int]]]) -> bool:
    return any(owner.ptr <= run[0] < owner.ptr + owner.size_bytes for owner, _ in mapped)


def _unmap(owner: Any, pages: list[int]) -> None:
    for begin, size in page_runs(pages):
        owner.unmap(begin, size)
