"""What the first of many ranks allocates in a step, foreseen from the marks of the program that is not sharded.

Contract: what the program itself computes with is as recorded; parameters, gradients and state take what their parts
take, and at each mark what FSDP2 (torch 2.6 and later) or DDP holds and lets go of is added, in their order. Sources:
torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`: unshard, wait_for_unshard, reshard, post_backward;
`_fsdp_collectives.py`: foreach_all_gather, foreach_reduce), torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from dataclasses import dataclass, field

from stalloc.sharding.step_marks import Mark, Parameter, StepMarks
from stalloc.techniques.shard_settings import Layout


@dataclass(frozen=True)
class Foreseen:
    """Bytes of one rank."""

    step_bytes: int  #: allocated at the most, in a step that makes no state
    making_bytes: int  #: the same before, while the program has its whole model
    held_bytes: int  #: between two steps: parts of parameters and state

    @property
    def needed_bytes(self) -> int:
        """At any time."""
        return max(self.step_bytes, self.making_bytes)


def foresee(step: StepMarks, layout: Layout) -> Foreseen:
    """What a rank allocates; of a layout without an executor, what FSDP2 would if it had those factors."""
    return _replicated(step, layout) if layout.executor == "ddp" else _Sharded(step, layout).foreseen()


def owned_parameters(step: StepMarks, num_ranks: int, num_parts: int = 1) -> list[Parameter]:
    """Those whose state the first rank has under ZeroRedundancyOptimizer: largest first, to who has least.

    `num_parts`: each is in so many parts, of which the first are divided.
    """
    totals = [0] * num_ranks
    owned = []
    trained = [one for one in step.parameters if one.is_trained]
    for one in sorted(trained, key=lambda one: -one.part_items(num_parts)):
        rank = totals.index(min(totals))
        totals[rank] += one.part_items(num_parts)
        if rank == 0:
            owned.append(one)
    return owned


def whole_bytes(step: StepMarks) -> tuple[int, int]:
    """What parameters and their state take of the program as it is."""
    parameters = sum(one.size_bytes for one in step.parameters)
    state = sum(sum(one.state_bytes) + one.rest_bytes for one in step.parameters)
    return parameters, state


def _state_bytes(one: Parameter, num_items: int) -> int:
    """Bytes of the optimizer's state of a parameter of which so many items are here."""
    return sum(size * num_items // max(1, one.num_items) for size in one.state_bytes) + one.rest_bytes


@dataclass
class _Sharded:
    """Units are gathered, and their gradients scattered."""

    step: StepMarks
    layout: Layout
    gathered: dict[int, int] = field(default_factory=dict)  # unit: bytes of its whole parameters
    buffers: dict[int, int] = field(default_factory=dict)  # of all-gathers whose result is not copied out yet
    copied: int = 0  # the buffer of the forward pass's last all-gather
    kept: dict[int, int] = field(default_factory=dict)  # secondary copies
    gradients: dict[int, int] = field(default_factory=dict)  # whole ones
    parts: dict[int, int] = field(default_factory=dict)  # reduced ones
    reducing: int = 0  # the input of the last reduce-scatter
    order: list[int] = field(default_factory=list)  # units as their forward passes ended
    most: int = 0
    base: int = 0  # what the program has beside parameters, gradients and state

    def __post_init__(self) -> None:
        step, layout = self.step, self.layout
        self.root = len(step.units) - 1
        self.stored = layout.stored
        self.owned = [[one for one in step.parameters if one.unit == unit] for unit in range(self.root + 1)]
        self.whole = [sum(map(self._padded, owned)) for owned in self.owned]
        trained = [[one for one in owned if one.is_trained] for owned in self.owned]
        self.reduced = [
            sum(one.part_items(layout.gradients) * layout.gradients * one.item_bytes for one in owned)
            for owned in trained
        ]
        self.parameters = sum(one.part_items(self.stored) * one.item_bytes for one in step.parameters)
        if layout.executor and layout.divides_optimizer:
            owned = owned_parameters(step, layout.state // layout.gradients, layout.gradients)
            self.updated = [(one, one.part_items(layout.gradients)) for one in owned]
        else:
            self.updated = [(one, one.part_items(layout.state)) for one in step.parameters]
        self.state = sum(_state_bytes(one, num_items) for one, num_items in self.updated)

    def foreseen(self) -> Foreseen:
        step = self.step
        parameters, state = whole_bytes(step)
        updated = sum(num_items * one.item_bytes for one, num_items in self.updated)
        share, updating, former = updated / max(1, parameters), True, step.marks[-1]
        for mark in step.marks:
            rise = mark.peak_bytes - former.live_bytes
            self._rise(int(rise * share) if updating else rise)
            self.base = mark.live_bytes - mark.gradient_bytes - parameters - state
            self._at(mark)
            updating = mark.kind in ("finished", "update")
            former = mark
            if mark.kind in ("forward", "updated") and not mark.gradient_bytes:
                self.parts.clear()
        making = max(step.before_peak_bytes, step.before_bytes + self.parameters * (self.stored > 1))
        return Foreseen(self.most, making, self.parameters + self.state)

    def _padded(self, one: Parameter) -> int:
        return one.part_items(self.stored) * self.stored * one.item_bytes

    @property
    def _held(self) -> int:
        by_unit = (self.gathered, self.buffers, self.kept, self.gradients, self.parts)
        return self.parameters + self.state + self.reducing + self.copied + sum(sum(one.values()) for one in by_unit)

    def _rise(self, extra: int = 0) -> None:
        self.most = max(self.most, self.base + self._held + extra)

    def _at(self, mark: Mark) -> None:
        if mark.kind == "gradient":
            one = self.step.parameters[mark.place]
            self.gradients[one.unit] = self.gradients.get(one.unit, 0) + one.size_bytes
            self._rise()
        elif mark.kind == "forward":
            self._forward(mark.place)
        elif mark.kind == "forwarded":
            self._forwarded(mark.place)
        elif mark.kind == "backward":
            self._backward(mark.place)
        elif mark.kind == "backwarded":
            self._backwarded(mark.place)
        elif mark.kind == "finished":
            for unit in [self.root, *range(self.root)]:
                self._backwarded(unit)
            self.reducing = 0
            self.buffers.clear()
            self.order.clear()

    def _gather(self, unit: int) -> None:
        """The all-gather of a unit begins, unless it has."""
        if self.stored > 1 and self.whole[unit] and unit not in self.buffers and unit not in self.gathered:
            self.buffers[unit] = self.whole[unit]
            self._rise()

    def _copy_out(self, unit: int) -> int:
        """Parameters of a unit are made from what was gathered; gives what the buffer takes until it is let go of."""
        if unit not in self.buffers:
            return 0
        self.gathered[unit] = self.whole[unit]
        self._rise()
        self.kept.pop(unit, None)
        return self.buffers.pop(unit)

    def _forward(self, unit: int) -> None:
        self._gather(unit)
        if unit in self.buffers:  # only after it the last one is let go of: a local name holds it until then
            self.copied = self._copy_out(unit)

    def _forwarded(self, unit: int) -> None:
        self.order.append(unit)
        held = self.layout.parameters
        if unit == self.root:
            self.copied = 0
        elif held == self.stored:
            self.gathered.pop(unit, None)
        elif held > 1 and unit in self.gathered:
            self.kept[unit] = self.whole[unit] // held
            self._rise()
            del self.gathered[unit]

    def _backward(self, unit: int) -> None:
        self._gather(unit)
        self._copy_out(unit)
        if unit in self.order and (before := len(self.order) - 1 - self.order[::-1].index(unit)) > 0:
            self._gather(self.order[before - 1])
            del self.order[before:]

    def _backwarded(self, unit: int) -> None:
        self.gathered.pop(unit, None)
        if unit not in self.gradients:
            return
        self.reducing = self.reduced[unit]  # the former is let go of
        self._rise()
        del self.gradients[unit]
        part = self.reduced[unit] // self.layout.gradients
        self._rise(part)
        self.parts[unit] = part


def _replicated(step: StepMarks, layout: Layout) -> Foreseen:
    """Under DDP, whose buckets hold the gradients for good, and perhaps a divided optimizer."""
    parameters, whole_state = whole_bytes(step)
    owned = owned_parameters(step, layout.state)
    state = sum(_state_bytes(one, one.num_items) for one in owned)
    buckets = sum(one.size_bytes for one in step.parameters if one.is_trained)
    share = sum(one.size_bytes for one in owned) / max(1, buckets)
    most, former, updating = 0, step.marks[-1], True
    for mark in step.marks:
        rise = mark.peak_bytes - former.live_bytes
        base = former.live_bytes - former.gradient_bytes - whole_state + state + buckets
        most = max(most, base + (int(rise * share) if updating else rise))
        updating = mark.kind in ("finished", "update")
        former = mark
    making = max(step.before_peak_bytes, step.before_bytes + buckets)
    return Foreseen(most, making, parameters + state + buckets)
