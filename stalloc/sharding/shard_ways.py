"""The ways to shard a program, each with what is foreseen of it, and the choice among them.

Contract: what the program itself computes with is allocated as recorded; parameters, gradients and state take what
their parts take, and at each mark what FSDP2 (torch 2.6 and later) or DDP allocates and lets go of is added, in their
order and on their streams. Bytes asked for are exact sums; bytes allocated are those of whole blocks, as the model of
PyTorch's caching allocator (replay/torch_caching.py) chooses them from an empty device of plenty. Sources:
torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`: unshard, wait_for_unshard, reshard, post_backward;
`_fsdp_collectives.py`: foreach_all_gather, foreach_reduce), torch/nn/parallel/distributed.py (buckets),
torch/distributed/optim/zero_redundancy_optimizer.py.

What a rank receives from others is counted as it arrives: an all-gather over S ranks brings (S - 1) / S of what is
whole afterwards, a reduce-scatter as much of what was whole before, an all-reduce both. Ranks of a group are
neighbours; those that hold the same part are as far apart as a group is large. Sources: the papers of ZeRO (section 7)
and ZeRO++ (section 3), whose 3M and 0.75M between nodes are these sums for parameters of M bytes.

All valid triples of the factors are there; the cheapest is that of the fewest estimated seconds among those within the
budget, then of the fewest bytes. Sources: PaRO (Wu et al. 2023) for factors 1, a node, and all ranks; AMSP (Chen et al.
2023) for the search of the least communication under a cap on memory.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stalloc.columns import Column
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.torch_caching import TorchCaching, parse_settings
from stalloc.sharding.step_marks import Mark, Parameter, StepMarks
from stalloc.techniques.shard_settings import Layout, valid_layouts

NETWORK_BYTES_PER_SECOND = 50e9
"""Each GPU's rate to other machines: 400 Gbit/s, as in NVIDIA's DGX H100 (its user guide: a ConnectX-7 a GPU)."""
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's, once it has seen a step


@dataclass(frozen=True)
class RankPeaks:
    """The most bytes of one rank; allocated: as PyTorch counts whole blocks."""

    step_bytes: int = 0  #: asked for, in a step that makes no state
    making_bytes: int = 0  #: the same before, until the model is divided
    step_allocated: int = 0  #: allocated, in the step
    making_allocated: int = 0  #: the same before

    @property
    def needed_bytes(self) -> int:
        return max(self.step_allocated, self.making_allocated)


@dataclass(frozen=True)
class Foreseen(RankPeaks):
    held_bytes: int = 0  #: between two steps: parts of parameters and state


_Side = enum.IntEnum("_Side", "GATHERING REDUCING", start=-2)
"""Streams that are not the program's, each of which has a cache of its own."""


@dataclass
class _RankEvents:
    """Events of one rank; rows below the number of the program's requests are theirs."""

    sizes: list[int]  #: bytes of each row
    streams: list[int]
    taken: set[int] = field(default_factory=set)  #: requests that the layout frees in place of the program
    events: list[int] = field(default_factory=list)  #: the row of an allocation, -1 - row of a free

    def make(self, size: int, stream: int = 0) -> int:
        self.sizes.append(size)
        self.streams.append(stream)
        self.events.append(len(self.sizes) - 1)
        return self.events[-1]

    def free(self, *rows: int) -> None:
        self.events.extend(-1 - row for row in rows)

    def counted(self, conf: str) -> tuple[Column, Column]:
        """(m,) int64 bytes asked for and bytes allocated after each event, under settings of PyTorch's allocator."""
        events, sizes = np.array(self.events, np.int64), np.array(self.sizes, np.int64)
        is_alloc = events >= 0
        rows = np.where(is_alloc, events, -1 - events)
        streams = np.array(self.streams, np.int64)
        streams[streams < 0] += streams.max(initial=0) + 1 + len(_Side)
        asked = np.cumsum(np.where(is_alloc, 1, -1) * sizes[rows])
        fed = TorchCaching(parse_settings(conf)).feed(
            Events(
                kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED).astype(np.int8),
                request=rows,
                event=np.arange(len(rows)),
                size=sizes,
                stream=streams,
            )
        )
        return asked, fed.block_bytes


def _foresee(step: StepMarks, layout: Layout) -> Foreseen:
    """What a rank allocates; of a layout without an executor, what FSDP2 would if it had those factors."""
    program = step.program
    rank = _RankEvents(list(program.sizes), list(program.streams))
    way: _Replicated | _Sharded = (
        _Replicated(step, layout, rank) if layout.executor == "ddp" else _Sharded(step, layout, rank)
    )
    share = _give_parts(step, way.updated, rank.sizes)
    freed = {-1 - event: moment for moment, event in enumerate(program.events) if event < 0}
    former, is_updating, starts = 0, False, []
    for mark in step.marks:
        for event in program.events[former : mark.event]:
            if event >= 0 and is_updating and freed.get(event, mark.event) < mark.event:
                rank.sizes[event] = max(1, int(rank.sizes[event] * share))
            if event >= 0 or -1 - event not in rank.taken:
                rank.events.append(event)
        way.at(mark)
        former, is_updating = mark.event, mark.kind in ("finished", "update")
        starts.append(len(rank.events))
    asked, allocated = rank.counted(program.conf)
    making, steady = slice(0, starts[0]), slice(max(0, starts[step.steady] - 1), None)
    step_bytes, making_bytes, step_allocated, making_allocated = (
        int(counted[part].max(initial=0)) for counted in (asked, allocated) for part in (steady, making)
    )
    return Foreseen(step_bytes, making_bytes, step_allocated, making_allocated, way.held_bytes)


def _give_parts(step: StepMarks, updated: list[tuple[Parameter, int]], sizes: list[int]) -> float:
    """Let requests of the optimizer's state have the bytes of this rank's parts; gives its share of all updates."""
    here = {one.name: num_items for one, num_items in updated if one.is_trained}
    for request, tensor in step.program.state.items():
        one = step.parameters[tensor.parameter]
        num_items = here.get(one.name, 0)
        if tensor.is_alike or not num_items:
            sizes[request] = sizes[request] * num_items // max(1, one.num_items)
    trained = [one for one in step.parameters if one.is_trained]
    done = sum(here.get(one.name, 0) * one.item_bytes for one in trained)
    return done / max(1, sum(one.size_bytes for one in trained))


def _owned_parameters(step: StepMarks, num_ranks: int, num_parts: int = 1) -> list[Parameter]:
    """Those whose state the first rank has under ZeroRedundancyOptimizer: largest first, to who has least. `num_parts`:
    each is in so many parts, of which the first are divided."""
    totals = [0] * num_ranks
    owned = []
    trained = [one for one in step.parameters if one.is_trained]
    for one in sorted(trained, key=lambda one: -one.part_items(num_parts)):
        rank = totals.index(min(totals))
        totals[rank] += one.part_items(num_parts)
        if rank == 0:
            owned.append(one)
    return owned


def _state_bytes(updated: list[tuple[Parameter, int]]) -> int:
    """Bytes of the optimizer's state of parameters of which so many items are here."""
    return sum(
        sum(size * num_items // max(1, one.num_items) for size in one.state_bytes) + one.rest_bytes
        for one, num_items in updated
    )


@dataclass
class _Sharded:
    """FSDP2: units are gathered, and their gradients scattered. Memory is named by rows of the rank's events."""

    step: StepMarks
    layout: Layout
    rank: _RankEvents
    gathered: dict[int, list[int]] = field(default_factory=dict)  # unit: its whole parameters
    buffers: dict[int, int] = field(default_factory=dict)  # of all-gathers whose result is not copied out yet
    copied: tuple[int, ...] = ()  # the buffer of the forward pass's last all-gather
    kept: dict[int, list[int]] = field(default_factory=dict)  # secondary copies
    gradients: dict[int, list[int]] = field(default_factory=dict)  # whole ones
    parts: dict[int, int] = field(default_factory=dict)  # reduced ones
    reducing: tuple[int, ...] = ()  # the input of the last reduce-scatter
    order: list[int] = field(default_factory=list)  # units as their forward passes ended

    def __post_init__(self) -> None:
        step, layout = self.step, self.layout
        self.root = len(step.units) - 1
        self.stored = layout.stored
        self.owned = [[one for one in step.parameters if one.unit == unit] for unit in range(self.root + 1)]
        self.reduced = [
            sum(one.part_items(layout.gradients) * layout.gradients * one.item_bytes for one in owned if one.is_trained)
            for owned in self.owned
        ]
        if layout.executor and layout.divides_optimizer:
            trained = _owned_parameters(step, layout.state // layout.gradients, layout.gradients)
            self.updated = [(one, one.part_items(layout.gradients)) for one in trained]
        else:
            self.updated = [(one, one.part_items(layout.state)) for one in step.parameters]
        self.held_bytes = sum(map(self._part, step.parameters)) + _state_bytes(self.updated)

    def _part(self, one: Parameter) -> int:
        return one.part_items(self.stored) * one.item_bytes

    def at(self, mark: Mark) -> None:
        """What FSDP2's hooks do."""
        if mark.kind == "called" and self.stored > 1:
            for one in (one for owned in self.owned for one in owned):
                self.rank.make(self._part(one))
            self.rank.taken.update(self.step.program.parameters)
            self.rank.free(*self.step.program.parameters)
        elif mark.kind == "gradient":
            self._gradient(self.step.parameters[mark.place], mark.request)
        elif mark.kind in ("forward", "forwarded", "backward", "backwarded"):
            getattr(self, f"_{mark.kind}")(mark.place)
        elif mark.kind == "finished":
            for unit in [self.root, *range(self.root)]:
                self._backwarded(unit)
            self.rank.free(*self.reducing, *self.buffers.values())
            self.reducing = ()
            self.buffers.clear()
            self.order.clear()
        if mark.kind in ("forward", "updated") and not mark.has_gradients:
            self.rank.free(*self.parts.values())
            self.parts.clear()

    def _gradient(self, one: Parameter, request: int) -> None:
        rows = self.gradients.setdefault(one.unit, [])
        if request >= 0 and request not in self.rank.taken:
            self.rank.taken.add(request)
            rows.append(request)
        elif not any(request in held for held in self.gradients.values()):  # added to one that is reduced by now
            rows.append(self.rank.make(one.size_bytes))

    def _gather(self, unit: int) -> None:
        """The all-gather of a unit begins, unless it has."""
        owned = self.owned[unit]
        if self.stored > 1 and owned and unit not in self.buffers and unit not in self.gathered:
            self.buffers[unit] = self.rank.make(self.stored * sum(map(self._part, owned)), _Side.GATHERING)

    def _copy_out(self, unit: int) -> tuple[int, ...]:
        """Parameters of a unit are made from what was gathered; gives the buffer, to be let go of."""
        if unit not in self.buffers:
            return ()
        self.gathered[unit] = [self.rank.make(self.stored * self._part(one)) for one in self.owned[unit]]
        self.rank.free(*self.kept.pop(unit, ()))
        return (self.buffers.pop(unit),)

    def _forward(self, unit: int) -> None:
        self._gather(unit)
        if unit in self.buffers:  # only after it the last one is let go of: a local name holds it until then
            copied = self._copy_out(unit)
            self.rank.free(*self.copied)
            self.copied = copied

    def _forwarded(self, unit: int) -> None:
        self.order.append(unit)
        held = self.layout.parameters
        if unit == self.root:
            self.rank.free(*self.copied)
            self.copied = ()
        elif held == self.stored:
            self.rank.free(*self.gathered.pop(unit, ()))
        elif held > 1 and unit in self.gathered:
            self.kept[unit] = [self.rank.make(self.stored * self._part(one) // held) for one in self.owned[unit]]
            self.rank.free(*self.gathered.pop(unit))

    def _backward(self, unit: int) -> None:
        self._gather(unit)
        self.rank.free(*self._copy_out(unit))
        if unit in self.order and (before := len(self.order) - 1 - self.order[::-1].index(unit)) > 0:
            self._gather(self.order[before - 1])
            del self.order[before:]

    def _backwarded(self, unit: int) -> None:
        self.rank.free(*self.gathered.pop(unit, ()))
        if unit not in self.gradients:
            return
        self.rank.free(*self.reducing)
        self.reducing = (self.rank.make(self.reduced[unit]),)
        self.rank.free(*self.gradients.pop(unit))
        part = self.rank.make(self.reduced[unit] // self.layout.gradients, _Side.REDUCING)
        if unit in self.parts:  # it is added to those of the last microbatch
            self.rank.free(part)
        else:
            self.parts[unit] = part


class _Replicated:
    """Under DDP, whose buckets hold the gradients for good, and perhaps a divided optimizer."""

    def __init__(self, step: StepMarks, layout: Layout, rank: _RankEvents) -> None:
        self._root, self._rank = len(step.units) - 1, rank
        self._trained = [one for one in step.parameters if one.is_trained]
        self._arrived: dict[int, Parameter] = {}  # in the order of their first gradients
        self._parameters, self._is_rebuilt = step.parameters, False
        self._buckets: list[int] = []
        self.updated = [(one, one.num_items) for one in _owned_parameters(step, layout.state)]
        whole = sum(one.size_bytes for one in step.parameters)
        self.held_bytes = whole + sum(one.size_bytes for one in self._trained) + _state_bytes(self.updated)

    def at(self, mark: Mark) -> None:
        """What DDP's hooks do."""
        if mark.kind == "called":
            self._buckets = [self._rank.make(sum(one.size_bytes for one in self._trained))]
        elif mark.kind == "gradient":  # copied into its bucket
            self._arrived.setdefault(mark.place, self._parameters[mark.place])
            if mark.request >= 0 and mark.request not in self._rank.taken:
                self._rank.taken.add(mark.request)
                self._rank.free(mark.request)
        elif mark.kind == "forward" and mark.place == self._root and self._arrived and not self._is_rebuilt:
            order = list(self._arrived.values())
            sizes, limit = [0], _FIRST_BUCKET_BYTES
            for one in [*order, *(one for one in self._trained if one not in order)]:
                if sizes[-1] >= limit:
                    limit = _BUCKET_BYTES
                    sizes.append(0)
                sizes[-1] += one.size_bytes
            self._is_rebuilt = True
            self._rank.free(*self._buckets)
            self._buckets = [self._rank.make(size) for size in sizes]


@dataclass(frozen=True)
class Traffic:
    all_gather: int
    reduce_scatter: int
    all_reduce: int
    broadcast: int
    between: int  #: of them all, from other nodes

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.broadcast

    def seconds(self, within_rate: float, between_rate: float) -> float:
        """On links of so many bytes a second, one collective after the other."""
        return (self.total - self.between) / within_rate + self.between / between_rate


@dataclass(frozen=True)
class Links:
    within: float
    between: float
    per_node: int


@dataclass(frozen=True)
class Recorded:
    """A step, whether its blocks are recomputed, and how long it is estimated to compute."""

    marks: StepMarks
    is_recomputed: bool
    seconds: float


@dataclass(frozen=True)
class Way:
    layout: Layout
    is_recomputed: bool
    foreseen: Foreseen
    traffic: Traffic
    seconds: float  #: estimated: computing and communication, one after the other

    @property
    def can_run(self) -> bool:
        """Whether PyTorch has something that does it."""
        return self.layout.executor is not None


def traffic(step: StepMarks, layout: Layout, num_ranks: int, per_node: int) -> Traffic:
    """The traffic of one step with as many forward passes as were recorded."""
    weights = sum(one.size_bytes for one in step.parameters)
    gradients = sum(one.size_bytes for one in step.parameters if one.is_trained)
    of_root = sum(one.size_bytes for one in step.parameters if one.unit == len(step.units) - 1)
    stored = layout.stored
    counted = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "broadcast"), 0.0)
    between = 0.0

    def add(kind: str, whole: float, size: int, stride: int = 1) -> None:
        nonlocal between
        near = min(size, max(1, per_node // stride))  # ranks of a node among `size` that are `stride` apart
        counted[kind] += whole * (size - 1) / size
        between += whole * (size - near) / size

    for _ in range(step.num_passes):
        add("all_gather", weights, stored)
        add("all_gather", weights - of_root, layout.parameters)  # for backward; the root stays whole
        add("reduce_scatter", gradients, layout.gradients)
        others = num_ranks // layout.gradients
        for _ in range(2):
            add("all_reduce", gradients / layout.gradients, others, layout.gradients)
    if stored < layout.state:  # once updated, parameters go to those that have other parts of the state
        kind = "broadcast" if layout.executor else "all_gather"
        add(kind, weights / stored, layout.state // stored, stored)
    return Traffic(**{kind: round(value) for kind, value in counted.items()}, between=round(between))


def all_ways(
    recorded: Sequence[Recorded], num_ranks: int, links: Links, *, every: bool = False, only: Layout | None = None
) -> list[Way]:
    """Every valid triple of 1, the ranks of a node and all ranks (`every`: of all divisors of their number), or `only`
    one, with every recorded step, the cheapest first."""
    found = []
    divisors = [one for one in range(1, num_ranks + 1) if num_ranks % one == 0]
    factors = divisors if every else [one for one in divisors if one in (1, links.per_node, num_ranks)]
    valid = list(valid_layouts(tuple(factors), num_ranks))
    for step in recorded:
        for layout in valid if only is None else [only]:
            sent = traffic(step.marks, layout, num_ranks, links.per_node)
            seconds = step.seconds + sent.seconds(links.within, links.between)
            found.append(Way(layout, step.is_recomputed, _foresee(step.marks, layout), sent, seconds))
    return sorted(found, key=_cost)


def _cost(way: Way) -> tuple[float, int, Layout]:
    return way.seconds, way.foreseen.needed_bytes, way.layout


def cheapest(ways: Sequence[Way], budget_bytes: int, *, can_run: bool = False) -> Way | None:
    """The cheapest way within the budget, with `can_run` of those that can be run; None: there is none."""
    within = [one for one in ways if one.foreseen.needed_bytes <= budget_bytes and (one.can_run or not can_run)]
    return min(within, key=_cost, default=None)


def undominated(ways: Sequence[Way]) -> list[Way]:
    """Those than which no other is as quick and needs less, or needs as little and is quicker; the cheapest first."""
    found: list[Way] = []
    for one in sorted(ways, key=_cost):
        if not found or one.foreseen.needed_bytes < found[-1].foreseen.needed_bytes:
            found.append(one)
    return found
