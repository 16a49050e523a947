"""Segments of the heap in pages: where memory is mapped, what moves to save some, and what is left over in pages."""

import math

import pytest
from programs.core_machine import MIB, Intervals

from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import Controller
from stalloc.runtime.runtime_settings import Settings


def _heap(capacity_bytes: int) -> Controller:
    settings = Settings(plan=False, planning_share=math.inf, arena="pages")
    return make_controller(capacity_bytes, settings)


def test_what_the_device_had_before_is_not_taken_for_what_it_has() -> None:
    state = _heap(200 * MIB).state
    large, small = (int(state.malloc(size * MIB)) for size in (100, 20))
    state.free(large)
    assert state.malloc(150 * MIB)
    state.free(small)
    assert state.malloc(36 * MIB)


def test_memory_is_mapped_in_the_smallest_gap_that_is_large_enough() -> None:
    controller = _heap(0)
    state = controller.state
    wide, _, narrow, _ = (int(state.malloc(size * MIB)) for size in (60, 2, 20, 2))
    for address in (wide, narrow):
        state.free(address)
    controller.memory.release_unused()
    assert state.record.statistics.reserved_bytes == 4 * MIB
    assert state.malloc(14 * MIB) == narrow


def test_small_requests_use_what_large_ones_leave_over_of_their_pages_before_more_is_mapped() -> None:
    state = _heap(0).state
    assert state.malloc(3 * MIB)
    assert state.malloc(MIB // 2)
    assert state.record.statistics.reserved_bytes == 4 * MIB
    assert state.malloc(MIB)  # more than is left
    assert state.record.statistics.reserved_bytes == 6 * MIB


def test_a_gap_that_has_memory_in_parts_is_filled_up() -> None:
    controller = _heap(200 * MIB)
    state = controller.state
    blocks = [int(state.malloc(size * MIB)) for size in (50, 50, 50, 40)]
    for address in blocks[:3]:
        state.free(address)
    controller.memory.release_unused()
    parts = [int(state.malloc(size * MIB + 512)) for size in (20, 20, 20)]  # side by side, each ends in a page
    state.free(parts[1])
    controller.memory.release_unused()
    state.free(parts[0])
    assert state.malloc(40 * MIB) == blocks[0]
    assert state.record.statistics.num_ooms == 0


@pytest.mark.parametrize(
    ("capacity_bytes", "freed_bytes", "moves"),
    [
        (180 * MIB, 10 * MIB, False),  # nine tenths of it are needed
        (600 * MIB, 140 * MIB, True),
        (600 * MIB, 2 * MIB, False),
    ],
)
def test_pages_move_where_more_than_4_mib_would_be_held_beyond_the_peak_unless_it_fills_the_device(
    capacity_bytes: int, freed_bytes: int, moves: bool
) -> None:
    state = _heap(capacity_bytes).state
    freed, _ = (int(state.malloc(size)) for size in (freed_bytes, freed_bytes + 140 * MIB))
    state.free(freed)
    assert state.malloc(freed_bytes + 2 * MIB)
    assert (state.record.statistics.num_segment_frees > 0) == moves


def test_what_pages_have_left_over_serves_what_would_be_refused() -> None:
    controller = _heap(14 * MIB)
    state, live = controller.state, Intervals()
    blocks = [int(state.malloc(size * MIB)) for size in (3, 2, 3, 2, 3)]
    for address in (blocks[1], blocks[3]):
        state.free(address)
    for address, size in zip(blocks[::2], (3, 3, 3), strict=True):
        live.add(address, size * MIB)
    joined = int(state.malloc(4 * MIB))  # one page is free, and a part of each of three others
    live.add(joined, 4 * MIB)
    assert state.record.statistics.num_ooms == 0
    assert state.record.statistics.reserved_bytes == controller.memory.source.taken == 14 * MIB
    state.free(joined)
    controller.memory.release_unused()
    assert state.record.statistics.reserved_bytes == controller.memory.source.taken == 12 * MIB
    for address in blocks[::2]:
        state.free(address)
    controller.memory.release_unused()
    assert state.record.statistics.reserved_bytes == controller.memory.source.taken == 0
