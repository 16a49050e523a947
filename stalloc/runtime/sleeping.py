"""A device whose memory has been given back while every address stays what it is: a job that sleeps.

Contract: nothing is unmapped before all that is to be kept has been copied, so whatever fails on the way to sleep
leaves the job awake, and whatever fails on the way back leaves it asleep. What no live block has is not copied.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from stalloc.core.constants import BLOCK_FREE, GRANULE, PRIVATE_KINDS
from stalloc.core.snapshot import segments
from stalloc.device.mapped_pages import page_runs
from stalloc.errors import SetupError
from stalloc.figures import human_bytes
from stalloc.runtime.controller import Controller
from stalloc.runtime.kept_bytes import Keeper

Run = tuple[int, int]
"""Address and bytes of memory in a row."""


@dataclass
class Sleep:
    """One device that sleeps."""

    controller: Controller
    keeper: Keeper
    held_bytes: int = 0  #: that were given back
    kept: list[Run] = field(default_factory=list)  #: what is copied, in the order of the keeper's bytes
    mapped: list[tuple[Any, list[int]]] = field(default_factory=list)  #: ranges, and the pages that they had
    shared: list[tuple[Any, int, Any, int]] = field(default_factory=list)  #: range, page, and whose page it is

    @property
    def kept_bytes(self) -> int:
        """What was copied."""
        return sum(size for _, size in self.kept)


def check_can_sleep(controller: Controller) -> None:
    """Raise SetupError, before anything is done, where memory cannot be given back."""
    memory = controller.memory
    if not memory.source.paged:
        raise SetupError(
            f"the memory of device {controller.device.index} comes in blocks, which have addresses only while they are "
            "held: a job can sleep where the driver maps pages (--arena pages)."
        )
    if memory.state.record.private_kind:
        raise SetupError("a CUDA graph is being captured: let the job sleep when that is over.")
    if memory.poison is not None:
        raise SetupError(
            "STALLOC_POISON writes to free memory, which a job that sleeps does not have: unset one of them."
        )


def fall_asleep(controller: Controller, keeper: Keeper, without: Collection[int]) -> Sleep:
    """Give the pages of a device back; `without`: addresses of blocks whose bytes need not be kept.

    Raises SetupError if there is no room for the bytes: the job is awake then.
    """
    memory = controller.memory
    with controller.lock:
        memory.find_deferred()
        memory.deferred.wait()
        memory.release_unused()
        sleep = Sleep(controller, keeper)
        _find_pages(sleep)
        sleep.kept = _to_keep(sleep, without)
        with memory.source.at_device(capturing=False):
            memory.source.wait()
            keeper.keep(sleep.kept)
            for owner, pages in sleep.mapped:
                _unmap(owner, pages)
            for owner, page, _, _ in sleep.shared:
                owner.unmap(page, GRANULE)
        memory.source.collect()
    return sleep


def wake_up(sleep: Sleep) -> None:
    """Map pages again, and bring the bytes back. Raises SetupError if the device has no room: the job sleeps on."""
    memory = sleep.controller.memory
    with sleep.controller.lock, memory.source.at_device(capturing=False):
        open_ranges = {id(one) for one in memory.source.ranges}
        done: list[tuple[Any, list[int]]] = []
        for owner, pages in sleep.mapped:
            if id(owner) not in open_ranges:  # closed meanwhile, as nothing lived there any more
                continue
            done.append((owner, pages))
            if not all(owner.map(begin, size) for begin, size in page_runs(pages)):
                for one, its_pages in done:
                    _unmap(one, its_pages)
                memory.source.collect()
                needed, free = human_bytes(sleep.held_bytes), human_bytes(memory.source.free_bytes())
                raise SetupError(
                    f"waking needs {needed} of device {sleep.controller.device.index}, which has {free}: let another "
                    "job sleep first."
                )
        for owner, page, other, other_page in sleep.shared:
            if id(owner) in open_ranges and id(other) in open_ranges:
                owner.share(page, other, other_page)
        sleep.keeper.bring_back([run for run in sleep.kept if _is_there(run, done)])
        memory.source.wait()
        memory.paging.match()  # what was freed meanwhile


def _find_pages(sleep: Sleep) -> None:
    """Note which pages are mapped where; those at two addresses once, and by whom they are shared."""
    first: dict[int, tuple[Any, int]] = {}
    for owner in sleep.controller.memory.source.ranges:
        own: list[int] = []
        for page in owner.mapped():
            identity = owner.page_identity(page)
            if identity in first:
                sleep.shared.append((owner, page, *first[identity]))
            else:
                first[identity] = owner, page
                own.append(page)
        if own:
            sleep.mapped.append((owner, own))
            sleep.held_bytes += len(own) * GRANULE


def _to_keep(sleep: Sleep, without: Collection[int]) -> list[Run]:
    """The pages in which something lives whose bytes are to be kept."""
    if sleep.keeper.drops:
        return []
    living: set[int] = set()
    for segment in segments(sleep.controller.state):
        for block in segment.blocks:
            is_free = block.state == BLOCK_FREE and segment.kind < PRIVATE_KINDS
            if not is_free and block.address not in without:
                begin, end = block.address // GRANULE, -(-(block.address + block.size_bytes) // GRANULE)
                living.update(range(begin, end))
    return [
        run for _, pages in sleep.mapped for run in page_runs([page for page in pages if page // GRANULE in living])
    ]


def _is_there(run: Run, mapped: list[tuple[Any, list[int]]]) -> bool:
    return any(owner.ptr <= run[0] < owner.ptr + owner.size_bytes for owner, _ in mapped)


def _unmap(owner: Any, pages: list[int]) -> None:
    for begin, size in page_runs(pages):
        owner.unmap(begin, size)
