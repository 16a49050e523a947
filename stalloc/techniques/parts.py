"""The parts that the parameters of an optimizer are updated in, where, and the room that tensors take in the host.

Contract: what is executed and what foresees it ask here, so they agree. This module loads no torch.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from stalloc.sizes import aligned

PAGE_BYTES = 4096  #: of files; places and lengths are multiples of it
DISK_THREADS, DISK_CHUNK_BYTES = 4, 16 << 20
_PROCESSOR_BYTES, _PROCESSOR_PARTS = 32 << 20, 8  # most bytes of parameters in a part; least number of parts


class Place(Enum):
    """Where a part's state lies between steps, and where it is used."""

    DEVICE = "device"  #: always on the device
    PAGED = "paged"  #: elsewhere, and on the device for its update
    PROCESSOR = "processor"  #: in host memory, where the processor makes the update


@dataclass(frozen=True)
class Shares:
    """The shares of an optimizer's parameters, by bytes, that are not paged: on the device, or on the processor."""

    device: float = 0.0
    processor: float = 0.0


@dataclass(frozen=True)
class Part:
    """Parameters that are updated together, by their numbers in the order of the optimizer's groups."""

    members: tuple[int, ...]
    place: Place


def _arranged(sizes: Sequence[int], layers: Sequence[int], window_bytes: int, shares: Shares) -> list[Part]:
    """The parts of parameters with these sizes in bytes, in the order of their updates. `layers` numbers the streamed
    layer of each, -1: none; a layer is a part of its own, after the others. What stays on the device comes first, as it
    waits for nothing; the processor's parts lie evenly between the paged ones, so that both go on at once (the
    interleaving of Maurya et al., Deep Optimizer States, 2024)."""
    together: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer >= 0:
            together.setdefault(layer, []).append(number)
    alone = [number for number, layer in enumerate(layers) if layer < 0]
    units = [[number] for number in alone] + list(together.values())
    places = _places([sum(sizes[number] for number in unit) for unit in units], shares)
    parts: dict[Place, list[Part]] = {place: [] for place in Place}
    for place in Place:
        mine = [number for number, at in zip(alone, places, strict=False) if at is place]
        most_bytes = max(window_bytes // 6, 1)  # with two tensors of state each, some three parts fill the window
        if place is Place.PROCESSOR:
            most_bytes = min(_PROCESSOR_BYTES, sum(sizes[number] for number in mine) // _PROCESSOR_PARTS)
        found = [[mine[at] for at in part] for part in divided([sizes[number] for number in mine], most_bytes)]
        found += [unit for unit, at in zip(units[len(alone) :], places[len(alone) :], strict=True) if at is place]
        parts[place] = [Part(tuple(members), place) for members in found]
    both = [parts[Place.PAGED], parts[Place.PROCESSOR]]
    mixed = [((number + 0.5) / len(those), part) for those in both for number, part in enumerate(those)]
    return parts[Place.DEVICE] + [part for _, part in sorted(mixed, key=lambda one: one[0])]


def divided(sizes: list[int], most_bytes: int) -> list[list[int]]:
    """The places of consecutive sizes, in parts whose sum is at most `most_bytes`; a larger size is its own part."""
    parts: list[list[int]] = []
    sum_bytes = 0
    for place, size_bytes in enumerate(sizes):
        if not parts or sum_bytes + aligned(size_bytes) > most_bytes:
            parts.append([])
            sum_bytes = 0
        parts[-1].append(place)
        sum_bytes += aligned(size_bytes)
    return parts


def arranged_with_copies(
    sizes: Sequence[int],
    layers: Sequence[int],
    on_disk: Set[int],
    window_bytes: int,
    shares: Shares,
    *,
    reads_for_processor: bool,
    gradients: Set[int] = frozenset(),
) -> tuple[list[Part], int]:
    """The parts of parameters in the order of their updates, and the host memory that the processor needs for copies of
    two of them. `on_disk` has the layers on disk: the processor updates them if they are read for it, else the device
    does. `gradients` has the parameters whose gradients are in the host already."""
    parts = _arranged(sizes, layers, window_bytes, shares)
    if not reads_for_processor:
        parts = [replace(one, place=Place.PAGED) if layers[one.members[0]] in on_disk else one for one in parts]
    copied = [  # gradients and parameters that do not lie in the host, of each part
        sum(
            aligned(sizes[number]) * ((number not in gradients) + (layers[number] < 0 or layers[number] in on_disk))
            for number in part.members
        )
        for part in parts
        if part.place is Place.PROCESSOR
    ]
    return parts, 2 * max(copied, default=0)


def disk_chunk_bytes(host_bytes: int | None) -> int:
    """Bytes of each thread's buffer for files, given the host memory allowed, of which buffers take half at most."""
    most = DISK_CHUNK_BYTES if host_bytes is None else min(DISK_CHUNK_BYTES, host_bytes // (2 * DISK_THREADS))
    return most // PAGE_BYTES * PAGE_BYTES


def disk_buffers_bytes(chunk_bytes: int) -> int:
    """What the buffers of all threads take in host memory, begun at a page."""
    return DISK_THREADS * chunk_bytes + PAGE_BYTES


def in_pages(size_bytes: int) -> int:
    """The bytes that `size_bytes` take in a file, rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _places(sizes: list[int], shares: Shares) -> list[Place]:
    """Where each unit goes, such that the units up to any of them have about the wanted shares."""
    total, placed = 0, {Place.DEVICE: 0, Place.PROCESSOR: 0}
    wanted = {Place.DEVICE: shares.device, Place.PROCESSOR: shares.processor}
    found = []
    for size_bytes in sizes:
        total += size_bytes
        lacking = {place: share * total - placed[place] for place, share in wanted.items()}
        place = max(lacking, key=lambda one: lacking[one])
        if 2 * lacking[place] >= size_bytes and wanted[place]:
            placed[place] += size_bytes
        else:
            place = Place.PAGED
        found.append(place)
    return found
