"""What a run was like, in numbers: for reports, for errors, and for the statistics that torch is asked for."""

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc.compiled import njit
from stalloc.device import Device
from stalloc.runtime import core, layout
from stalloc.runtime.state import DeviceState, Step
from stalloc.runtime.words import lock, unlock

if TYPE_CHECKING:
    from stalloc.runtime.controller import Controller

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Report:
    """One device's run. Bytes are rounded up to 512 a request, as torch counts them; None where there is no figure."""

    device: int
    device_name: str
    phase: str  #: what the device was at in the end
    note: str  #: why, if that is not the plan
    steps: int  #: steps seen: marks of the program, or passes over the plan where it set none
    planned_steps: int  #: whole steps served from the plan
    requests_per_step: int  #: requests over 512 bytes in a step of the plan
    hit_rate: float | None  #: share of those served from the plan, from the second planned step on
    hits: int
    misses: int
    conflicts: int  #: planned requests whose place was still taken
    allocated_peak_bytes: int  #: over the planned steps; over the whole run if there were none
    reserved_peak_bytes: int
    observed_allocated_peak_bytes: int | None  #: over the steps before the plan
    observed_reserved_peak_bytes: int | None
    plan_peak_bytes: int | None  #: the arena
    lower_bound_bytes: int | None  #: of what the arena holds
    plan_method: str | None
    plans_made: int
    step_ms: float | None  #: median host time of a planned step
    observed_step_ms: float | None  #: median host time of a step before the plan
    segment_allocs: int
    segment_frees: int
    retries: int
    out_of_memory_errors: int
    unknown_frees: int

    @property
    def fragmentation(self) -> float:
        """1 - allocated / reserved, at their peaks."""
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes if self.reserved_peak_bytes else 0.0


def _planned_steps(controller: "Controller") -> list[Step]:
    """The whole passes over the ring, the one that just ended included."""
    state, steps = controller.state, controller.state.steps()
    hits = state["HITS"] - state["HITS_BEFORE"]
    seen = hits + state["STEP_MISSES"]
    length = state["TAPE_LENGTH"] - state["RING_START"]
    if state["CURSOR"] == state["RING_START"] and seen >= length > 0:
        peaks = state["STEP_ALLOCATED_PEAK"], state["STEP_RESERVED_PEAK"]
        steps.append(Step(0, hits, state["STEP_MISSES"], *peaks))
    return steps


def _median_ms(times_ns: list[int]) -> float | None:
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(times_ns)]
    return statistics.median(gaps) if gaps else None


def report(controller: "Controller") -> Report:
    """The figures of a device so far."""
    state, plan, observed = controller.state, controller.status.plan, controller.status.observed
    steps = _planned_steps(controller) if plan is not None else []
    counted = steps[1:] or steps
    served = sum(step.hits for step in counted)
    asked = served + sum(step.misses for step in counted)
    marks, begin = controller.recording.step_times_ns, controller.status.planned_since_ns
    before = [time for time in marks if begin is None or time < begin]
    after = [time for time in marks if begin is not None and time >= begin]
    if not marks:
        after = [step.end_ns for step in steps if step.end_ns]
    per_ring = controller.status.steps_per_ring
    step_ms = _median_ms(after)
    if step_ms is not None and not marks:
        step_ms /= per_ring
    return Report(
        device=controller.device.index,
        device_name=controller.device.name,
        phase=controller.status.phase.value,
        note=controller.status.note,
        steps=len(marks) or controller.status.observed_steps + len(steps) * per_ring,
        planned_steps=len(steps) * per_ring,
        requests_per_step=(len(plan.tape_size) - plan.num_prologue) // per_ring if plan is not None else 0,
        hit_rate=served / asked if asked else None,
        hits=state["HITS"],
        misses=state["MISSES"],
        conflicts=state["CONFLICTS"],
        allocated_peak_bytes=state.span_peak("ALLOCATED"),
        reserved_peak_bytes=state.span_peak("RESERVED"),
        observed_allocated_peak_bytes=observed.allocated_peak_bytes if observed is not None else None,
        observed_reserved_peak_bytes=observed.reserved_peak_bytes if observed is not None else None,
        plan_peak_bytes=plan.peak_bytes if plan is not None else None,
        lower_bound_bytes=plan.lower_bound_bytes if plan is not None else None,
        plan_method=plan.method if plan is not None else None,
        plans_made=controller.status.num_plans,
        step_ms=step_ms,
        observed_step_ms=_median_ms(before),
        segment_allocs=state["NUM_SEGMENT_ALLOCS"],
        segment_frees=state["NUM_SEGMENT_FREES"],
        retries=state["NUM_RETRIES"],
        out_of_memory_errors=state["NUM_OOMS"],
        unknown_frees=state["NUM_UNKNOWN_FREES"],
    )


@dataclass(frozen=True)
class Block:
    """A range of a segment that is live or free."""

    address: int
    size_bytes: int
    requested_bytes: int  #: 0 if it is free
    state: int  #: BLOCK_FREE and so on of the layout


@dataclass(frozen=True)
class Segment:
    """Memory that the device has given, and the blocks that cover it, in the order of their addresses."""

    address: int
    size_bytes: int
    stream: int  #: the raw stream whose pool it belongs to; 0 for an arena
    kind: int  #: kind of the pool, see the layout; -1: an arena
    blocks: list[Block]


@njit()
def _copy_at_once(state, words, words_to, chunks, chunks_to, pools, pools_to, blocks, blocks_to, slots, slots_to):
    lock(state)
    words_to[:] = words
    chunks_to[:] = chunks
    pools_to[:] = pools
    blocks_to[:] = blocks
    slots_to[:] = slots
    unlock(state)


def segments(state: DeviceState) -> list[Segment]:
    """Every segment of a device with its blocks, as they were at one moment; the arena of a plan is one of them."""
    slack = 4096  # other threads may add rows until the lock is taken
    used_chunks, used_blocks = state["CHUNKS_USED"] + slack, state["BLOCKS_USED"] + slack
    tape, slots = _arena_tables(state)
    sources = [state.words, state.chunks[:used_chunks], state.pools, state.blocks[:used_blocks], slots]
    copies = [np.empty_like(source) for source in sources]
    _copy_at_once(state.address, *(array for pair in zip(sources, copies, strict=True) for array in pair))
    words, chunks, pools, blocks, slots = copies
    found, leased = [], []  # what the arena lends to the heap is shown as part of the arena
    for chunk in chunks[1:].tolist():
        base, size, row = chunk[layout.C_BASE], chunk[layout.C_SIZE], chunk[layout.C_FIRST]
        pool = pools[chunk[layout.C_POOL]]
        if base == 0:
            continue
        inside = []
        while row:
            entry = blocks[row]
            held, live = int(entry[layout.B_STATE]), entry[layout.B_STATE] != layout.BLOCK_FREE
            requested = int(entry[layout.B_REQUESTED]) if live else 0
            inside.append(Block(int(entry[layout.B_ADDRESS]), int(entry[layout.B_SIZE]), requested, held))
            row = int(entry[layout.B_NEXT])
        if chunk[layout.C_HIGH]:
            leased += inside
            continue
        stream = int(state.streams[pool[layout.P_STREAM]])
        found.append(Segment(int(base), int(size), stream, int(pool[layout.P_KIND]), inside))
    if words[layout.ARENA_BYTES]:
        base, size = int(words[layout.ARENA]), int(words[layout.ARENA_BYTES])
        found.append(Segment(base, size, 0, -1, _arena_blocks(base, size, tape, slots, leased)))
    return found


def _arena_tables(state: DeviceState) -> tuple[np.ndarray, np.ndarray]:
    """The tape and the slots of the arena; empty tables if there is none."""
    if state["ARENA_BYTES"] and state._tape:
        return state._tape[0], state._tape[2]
    return np.empty((0, layout.TAPE_ROW), np.int64), np.empty((0, layout.SLOT_ROW), np.int64)


def _arena_blocks(base: int, size_bytes: int, tape: np.ndarray, slots: np.ndarray, leased: list[Block]) -> list[Block]:
    """The live blocks of an arena, planned and leased, and the free ranges between them."""
    live = slots[slots[:, layout.S_ENTRY] >= 0]
    rounded = tape[live[:, layout.S_ENTRY], layout.T_KEY] >> layout.STREAM_BITS
    taken = [block for block in leased if block.state != layout.BLOCK_FREE]
    for (offset, _, requested, held), size in zip(live.tolist(), rounded.tolist(), strict=True):
        taken.append(Block(base + offset, size, requested, held))
    blocks, end = [], base
    for block in sorted(taken, key=lambda block: block.address):
        if block.address > end:
            blocks.append(Block(end, block.address - end, 0, layout.BLOCK_FREE))
        blocks.append(block)
        end = block.address + block.size_bytes
    if end < base + size_bytes:
        blocks.append(Block(end, base + size_bytes - end, 0, layout.BLOCK_FREE))
    return blocks


def out_of_memory_text(device: Device, state: DeviceState, size_bytes: int) -> str:
    """What an out-of-memory error says: what was asked for, what there is, what to try."""
    free, total = device.memory_info()
    blocks = [block for segment in segments(state) for block in segment.blocks]
    live = sorted((block.requested_bytes for block in blocks), reverse=True)[:5]
    largest = ", ".join(f"{size / GIB:.2f} GiB" for size in live if size)
    largest_free = max((block.size_bytes for block in blocks if block.state == layout.BLOCK_FREE), default=0)
    arena = f", {state['ARENA_BYTES'] / GIB:.2f} GiB of it the plan's arena" if state["ARENA_BYTES"] else ""
    return (
        f"stalloc: out of memory on device {device.index} "
        f"({device.name}, {total / GIB:.2f} GiB): "
        f"tried to allocate {size_bytes / GIB:.2f} GiB ({size_bytes} bytes). "
        f"Allocated {state['ALLOCATED'] / GIB:.2f} GiB, reserved {state['RESERVED'] / GIB:.2f} GiB{arena}, "
        f"free on the device {free / GIB:.2f} GiB, largest free range {largest_free / GIB:.2f} GiB"
        f"{f', largest live blocks {largest}' if largest else ''}. "
        "To see what the program needs, run it on a virtual GPU: stalloc dryrun SCRIPT."
    )


@njit()
def _copy_words(state, words, words_to):
    lock(state)
    words_to[:] = words
    unlock(state)


_POOLS = ("all", "large_pool", "small_pool")


def torch_statistics(controller: "Controller") -> dict[str, Any]:
    """torch.cuda.memory_stats' nested counters, as torch._C._cuda_memoryStats gives them.

    Peaks of what lies free beside live blocks are not kept: those stand for what is free now.
    """
    state = controller.state
    words = np.empty_like(state.words)
    _copy_words(state.address, state.words, words)

    def word(name: str) -> int:
        return int(words[getattr(layout, name)])

    def split(current: list[int], peak: list[int], ever: list[int]) -> dict[str, dict[str, int]]:
        """From figures for both pools and the small one, peaks for both, the large and the small one."""
        (both, small), (both_ever, small_ever) = current, ever
        rows = zip((both, both - small, small), peak, (both_ever, both_ever - small_ever, small_ever), strict=True)
        return {
            pool: {"current": now, "peak": max(now, most), "allocated": total, "freed": total - now}
            for pool, (now, most, total) in zip(_POOLS, rows, strict=True)
        }

    def peaks(all_of: str, row: int, first: str = "LARGE_PEAKS", second: str = "SMALL_PEAKS") -> list[int]:
        return [word(all_of), *(int(words[getattr(layout, name) + row]) for name in (first, second))]

    def active(name: str, small: str, row: int, allocated_peaks: list[int]) -> tuple[list[int], list[int]]:
        deferred = word("BYTES_DEFERRED" if row == 0 else "NUM_DEFERRED")
        small_deferred = word("SMALL_BYTES_DEFERRED" if row == 0 else "SMALL_DEFERRED")
        kept = words[layout.ACTIVE_PEAKS + row : layout.ACTIVE_PEAKS + row + 3].tolist()
        most = [max(pair) for pair in zip(allocated_peaks, kept, strict=True)]
        return [word(name) + deferred, word(small) + small_deferred], most

    def nothing(current: int = 0) -> dict[str, int]:
        return {"current": current, "peak": current, "allocated": 0, "freed": 0}

    def ever(large: str, small: str) -> list[int]:
        return [word(large) + word(small), word(small)]

    bytes_ever = ever("LARGE_BYTES_EVER", "SMALL_BYTES_EVER")
    blocks_ever = [word("NUM_ALLOCS"), word("SMALL_ALLOCS")]
    byte_peaks, block_peaks = peaks("ALLOCATED_PEAK", 0), peaks("LIVE_PEAK", 2)
    idle, num_idle, small_idle, num_small_idle = core.count_inactive(state.address)
    segment_peaks = words[layout.SEGMENT_PEAKS : layout.SEGMENT_PEAKS + 4].tolist()
    return {
        "allocated_bytes": split([word("ALLOCATED"), word("SMALL_ALLOCATED")], byte_peaks, bytes_ever),
        "active_bytes": split(*active("ALLOCATED", "SMALL_ALLOCATED", 0, byte_peaks), bytes_ever),
        "reserved_bytes": split(
            [word("RESERVED"), word("SMALL_RESERVED")],
            [word("RESERVED_PEAK"), *segment_peaks[:2]],
            [word("RESERVED_EVER"), word("SMALL_RESERVED_EVER")],
        ),
        "requested_bytes": split(
            [word("REQUESTED"), word("SMALL_REQUESTED")],
            peaks("REQUESTED_PEAK", 1),
            ever("LARGE_REQUESTED_EVER", "SMALL_REQUESTED_EVER"),
        ),
        "allocation": split([word("NUM_LIVE"), word("SMALL_LIVE")], block_peaks, blocks_ever),
        "active": split(*active("NUM_LIVE", "SMALL_LIVE", 3, block_peaks), blocks_ever),
        "segment": split(
            [word("SEGMENTS"), word("SMALL_SEGMENTS")],
            [word("SEGMENTS_PEAK"), *segment_peaks[2:]],
            [word("SEGMENTS_EVER"), word("SMALL_SEGMENTS_EVER")],
        ),
        "inactive_split_bytes": {
            pool: nothing(now) for pool, now in zip(_POOLS, (idle, idle - small_idle, small_idle), strict=True)
        },
        "inactive_split": {
            pool: nothing(now)
            for pool, now in zip(_POOLS, (num_idle, num_idle - num_small_idle, num_small_idle), strict=True)
        },
        "oversize_allocations": nothing(),
        "oversize_segments": nothing(),
        "num_alloc_retries": word("NUM_RETRIES"),
        "num_ooms": word("NUM_OOMS"),
        "max_split_size": -1,
        "num_sync_all_streams": 0,
        "num_device_alloc": word("SEGMENTS_EVER"),
        "num_device_free": word("SEGMENTS_EVER") - word("SEGMENTS"),
    }
