"""Parameters in pages of one size, as small as a link is quick with: how they lie, and what a step moves of them.

Source: Nie et al., "Angel-PTM: A Scalable and Economical Large-scale Pre-training System in Tencent", VLDB 2023 (the
Page abstraction): a page holds parts of two tensors at the most, so that giving one back concerns one other; a tensor
takes as many as it needs, wherever there is one, so that nothing is lost between pages.
Contract: tensors lie in the order of their use, and no layout in that order takes fewer pages. What goes is what is
needed latest, by Belady. State stays in the host, where it is updated; gradients go there page by page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.swapping.elixir import replayed
from stalloc.cost.swapping.patrickstar import Chunks, least_capacity
from stalloc.cost.swapping.recorded_model import ModelData, in_turn

PAGE_BYTES = 4 << 20  #: the paper's
_MOST_TENSORS = 2  #: in a page


@dataclass(frozen=True)
class PageReplay:
    """What pages make of a step."""

    page_bytes: int
    count: int  #: of parameters
    capacity: int  #: pages that have room on the device
    empty_bytes: int  #: of all pages, which nothing lies in
    moved_bytes: int  #: by a step, both ways: pages that come, and their gradients


def lay_out(sizes: Sequence[int], page_bytes: int) -> list[range]:
    """The pages of each tensor, one behind the other; the last may have the begin of one more."""
    found: list[range] = []
    last, free, tensors = -1, 0, 0  # of the last page: its number, what is empty, and how many lie in it
    for size in sizes:
        if free == 0 or tensors == _MOST_TENSORS:
            last, free, tensors = last + 1, page_bytes, 0
        more = max(0, -(-(size - free) // page_bytes))
        found.append(range(last, last + more + 1))
        last, free, tensors = last + more, free + more * page_bytes - size, 1 if more else tensors + 1
    return found


def replay_pages(data: ModelData, budget_bytes: int) -> PageReplay | None:
    """What a step moves within so much memory of the device; None if what is needed at once has no room."""
    pages, capacity = lay_out(data.sizes, PAGE_BYTES), budget_bytes // PAGE_BYTES
    count = pages[-1].stop if pages else 0
    moments = in_turn((page for row in needed for page in pages[row]) for needed in data.uses)
    if capacity < least_capacity(moments):
        return None
    moved = replayed(Chunks(PAGE_BYTES, count, 0, moments, 0), 0, capacity).moved_bytes
    return PageReplay(PAGE_BYTES, count, capacity, count * PAGE_BYTES - data.parameter_bytes, moved)
