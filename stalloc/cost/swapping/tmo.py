"""Ranks that swap what they save for backward over one host link: all the same at once, or in turn.

Source: as in `disjoint_sets`: copies that take turns, and sets of tensors that have as little in common as can be.
Which of the two helps depends on the model, so each is tried.
Contract: a rank's device holds no more saved bytes than its budget at any moment; a rank waits where there is no room
for what it saves, or where what it needs is not back yet. A copy that has its turn has one way of the link to itself;
the next is that of the rank that asked first, or of the one that is most behind, whichever makes the step shorter.
Without turns each rank has its part of the link's rate all the time that it copies.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from stalloc.cost.disjoint_sets import DisjointSets
from stalloc.cost.swapping.layers import LinkCost
from stalloc.cost.swapping.recorded_model import SavedTensor, SavedTensors, Use

_SHARES = 256  # ratios that are tried


@dataclass(frozen=True)
class Slot:
    """One copy."""

    rank: int
    tensor: int
    to_device: bool
    begin: float
    end: float


@dataclass(frozen=True)
class RanksSwap:
    """One step of all ranks."""

    sets: tuple[tuple[int, ...], ...]  #: the tensors that each rank swaps
    swapped_bytes: int  #: by the rank that swaps least, one way
    moved_bytes: int  #: over the link by all ranks, both ways
    common_bytes: int  #: of tensors that more than one rank swaps
    most_at_once: int  #: copies one way that ask for the whole rate of the link at a moment
    waited_seconds: float  #: by the rank that waits most
    seconds: float  #: until the last rank has ended its backward pass
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class LinkSharing:
    """One step of all ranks, with their copies at once and with their copies in turn."""

    num_ranks: int
    tensors: tuple[SavedTensor, ...]  #: that each rank saves; they are known by their numbers
    computing_seconds: float
    at_once: RanksSwap
    in_turn: RanksSwap


def share_link(saved: SavedTensors, budget_bytes: int, num_ranks: int, link: LinkCost) -> LinkSharing | None:
    """What ranks swap whose devices hold so much of what they save; None where that is not possible.

    In turn is the quickest of all that is tried: sets that are alike and that are not, with either order of turns.
    """
    room_bytes = budget_bytes - saved.at_once_bytes  # for what stays
    if room_bytes < 0:
        return None
    if saved.peak_bytes() <= budget_bytes:
        room_bytes = budget_bytes  # all of it
    same, others = (_choose(saved, room_bytes, count) for count in (1, num_ranks))
    part = LinkCost(link.bytes_per_second / num_ranks)
    orders = [(sets, last_first) for sets in (others, same * num_ranks) for last_first in (False, True)]
    ways = [_simulated(_Step(saved, sets, budget_bytes, link, last_first)) for sets, last_first in orders]
    at_once = _simulated(_Step(saved, same, budget_bytes, part, last_first=False), num_alike=num_ranks)
    return LinkSharing(num_ranks, saved.tensors, saved.seconds, at_once, min(ways, key=lambda one: one.seconds))


def _choose(saved: SavedTensors, room_bytes: int, num_ranks: int) -> list[list[int]]:
    """What each rank swaps: with the smallest ratio with which what stays has room."""
    for share in range(_SHARES + 1):
        sets = DisjointSets(share / _SHARES, num_ranks)
        chosen: list[list[int]] = [[] for _ in range(num_ranks)]
        for _, kind, number in saved.events:
            if kind is Use.NEEDED:
                sets.restart()
            elif kind is Use.SAVED:
                size_bytes = saved.tensors[number].size_bytes
                for rank in sets.takers(size_bytes):
                    sets.left(rank, size_bytes)
                    chosen[rank].append(number)
        if all(saved.peak_bytes(without=one) <= room_bytes for one in chosen):
            break
    return chosen


def _simulated(step: "_Step", num_alike: int = 1) -> RanksSwap:
    """What a step comes to in which `num_alike` ranks do what each of its ranks does, at the same moments."""
    step.run()
    sets, sizes, late = step.sets, step.sizes, max(rank.late for rank in step.ranks)
    uses = Counter(number for one in sets for number in one)
    return RanksSwap(
        sets=tuple(map(tuple, sets * num_alike)),
        swapped_bytes=min(sum(sizes[number] for number in one) for one in sets),
        moved_bytes=sum(sizes[slot.tensor] for slot in step.slots) * num_alike,
        common_bytes=sum(sizes[number] for number, count in uses.items() if count * num_alike > 1),
        most_at_once=num_alike if step.slots else 0,
        waited_seconds=late,
        seconds=step.saved.seconds + late,
        slots=tuple(step.slots),
    )


@dataclass
class _Rank:
    """Where one rank is. Invariant: `held_bytes` are saved tensors on its device, or with room there for their copy."""

    swapped: frozenset[int]
    to_bring: list[int]  #: those of them that backward has not asked for, last first
    place: int = 0  #: of its next event
    late: float = 0.0  #: how far it is behind its computing
    held_bytes: int = 0
    here: set[int] = field(default_factory=set)
    in_host: set[int] = field(default_factory=set)


class _Step:
    """A step of several ranks, event by event."""

    def __init__(
        self, saved: SavedTensors, sets: list[list[int]], budget_bytes: int, link: LinkCost, last_first: bool
    ) -> None:
        self.saved, self._budget_bytes, self._link, self._last_first = saved, budget_bytes, link, last_first
        self.sets, self.sizes = sets, [one.size_bytes for one in saved.tensors]
        self._need_place = {number: at for at, (_, kind, number) in enumerate(saved.events) if kind is Use.NEEDED}
        saves = (at for at, (_, kind, _) in enumerate(saved.events) if kind is Use.SAVED)
        self._save_places = [*saves, len(saved.events)]
        needed = [*reversed(self._need_place)]
        self.ranks = [_Rank(one, [number for number in needed if number in one]) for one in map(frozenset, sets)]
        self.slots: list[Slot] = []
        self._waiting: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []  # by way: rank, tensor
        self._copying: list[Slot | None] = [None, None]  # by way

    def run(self) -> None:
        """Until every rank has ended."""
        now, events = 0.0, self.saved.events
        while True:
            for number in range(len(self.ranks)):
                self._go_on(number, now)
                for slot in self._copying:
                    if slot and slot.rank == number and slot.end <= now:
                        self._copied(slot, now)
            begins = [events[rank.place][0] + rank.late for rank in self.ranks if rank.place < len(events)]
            coming = [moment for moment in begins if moment > now] + [slot.end for slot in self._copying if slot]
            if not coming:
                break
            now = min(coming)
        assert all(rank.place == len(events) for rank in self.ranks), "a rank waits for what never comes"

    def _go_on(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        while rank.place < len(self.saved.events):
            moment, kind, tensor = self.saved.events[rank.place]
            is_full = rank.held_bytes + self.sizes[tensor] > self._budget_bytes
            if moment + rank.late > now or (kind is Use.SAVED and is_full):
                return
            if kind is not Use.SAVED:
                self._bring(number, now)
            if kind is Use.NEEDED and tensor not in rank.here:
                return
            rank.late = max(rank.late, now - moment)
            rank.place += 1
            if kind is Use.SAVED:
                rank.held_bytes += self.sizes[tensor]
                rank.here.add(tensor)
                if tensor in rank.swapped:
                    self._ask(number, tensor, 0, now)
            elif kind is Use.OVER:
                rank.here.discard(tensor)
                rank.held_bytes -= self.sizes[tensor]
            elif tensor in rank.to_bring:  # it has not left yet, and stays
                rank.to_bring.remove(tensor)
                rank.here.discard(tensor)

    def _bring(self, number: int, now: float) -> None:
        """Ask for what backward needs next, as far as there is room, and before anything else is saved."""
        rank = self.ranks[number]
        until = self._save_places[bisect_left(self._save_places, rank.place)]
        while rank.to_bring and (tensor := rank.to_bring[-1]) in rank.in_host:
            if rank.held_bytes + self.sizes[tensor] > self._budget_bytes or self._need_place[tensor] > until:
                return
            rank.to_bring.pop()
            rank.in_host.discard(tensor)
            rank.held_bytes += self.sizes[tensor]
            self._ask(number, tensor, 1, now)

    def _ask(self, rank: int, tensor: int, way: int, now: float) -> None:
        self._waiting[way].append((rank, tensor))
        self._serve(way, now)

    def _serve(self, way: int, now: float) -> None:
        waiting = self._waiting[way]
        if self._copying[way] is not None or not waiting:
            return
        at = max(range(len(waiting)), key=lambda at: self.ranks[waiting[at][0]].late) if self._last_first else 0
        rank, tensor = waiting.pop(at)
        slot = Slot(rank, tensor, way == 1, now, now + self._link.seconds(self.sizes[tensor]))
        self._copying[way] = slot
        self.slots.append(slot)

    def _copied(self, slot: Slot, now: float) -> None:
        rank = self.ranks[slot.rank]
        if slot.to_device:
            rank.here.add(slot.tensor)
        elif slot.tensor in rank.here:  # and backward has not asked for it meanwhile
            rank.here.discard(slot.tensor)
            rank.in_host.add(slot.tensor)
            rank.held_bytes -= self.sizes[slot.tensor]
        self._copying[slot.to_device] = None
        self._serve(int(slot.to_device), now)
        self._go_on(slot.rank, now)
