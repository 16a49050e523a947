"""One step of a program that is not sharded, as sharding it needs to know it: moments, and memory between them.

Contract: memory between two marks is that of the program as it is, exact to the byte; which marks there are does not
depend on the number of ranks. All of it is plain data, for another process. Bytes are what was asked for, or as
PyTorch's `allocated_bytes` has them, with up to 1 MiB more for each block that it does not split.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from stalloc.replay.rounding import GRANULE, SMALL_BYTES, round_up

_LARGE_BYTES, _ALIGNMENT = 10 * SMALL_BYTES, 512


def block_bytes(size_bytes: int) -> int:
    """What torch counts as allocated for a tensor that has a new segment to itself, or shares one of 2 or 20 MiB.

    Source: `should_split` and `get_allocation_size` of c10's CUDACachingAllocator.
    """
    size_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    segment = round_up(size_bytes, GRANULE)
    return segment if size_bytes >= _LARGE_BYTES and segment - size_bytes <= SMALL_BYTES else size_bytes


MarkKind = Literal["forward", "forwarded", "backward", "gradient", "backwarded", "finished", "update", "updated"]
"""A unit's forward pass begins, has ended; backward reaches it; a parameter has its gradient; those of a unit's inputs
are there; the whole backward pass is over; the optimizer begins, has ended."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model."""

    name: str
    unit: int  #: row of the units: what is gathered together
    shape: tuple[int, ...]
    item_bytes: int
    is_trained: bool
    state_bytes: tuple[int, ...]  #: of each tensor of the optimizer's on the device that has its shape
    rest_bytes: int  #: of its other tensors there

    @property
    def num_items(self) -> int:
        """Of all ranks."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def size_bytes(self) -> int:
        """Of all ranks."""
        return self.num_items * self.item_bytes

    def part_items(self, num_ranks: int) -> int:
        """What the first rank has if rows are divided, as FSDP2 pads them."""
        if not self.shape or not self.shape[0]:
            return self.num_items
        return -(-self.shape[0] // num_ranks) * (self.num_items // self.shape[0])


class Memory(NamedTuple):
    """What the program has at a moment."""

    live_bytes: int
    peak_bytes: int  #: since the moment before
    gradient_bytes: int = 0  #: of gradients that parameters hold


@dataclass(frozen=True)
class Mark:
    """A moment of the step."""

    kind: MarkKind
    place: int  #: row of the units, of the parameters for "gradient", -1 for the rest
    requested: Memory
    allocated: Memory  #: as PyTorch counts


@dataclass(frozen=True)
class StepMarks:
    """The step."""

    units: tuple[str, ...]  #: names: repeated blocks, and last what lies in none
    parameters: tuple[Parameter, ...]
    marks: tuple[Mark, ...]
    before: Memory  #: requested when the model was called first
    block_kind: str = ""  #: the class of the first unit that is a block

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "StepMarks":
        """What `as_json` gave."""
        parameters = (
            Parameter(**{**one, "shape": tuple(one["shape"]), "state_bytes": tuple(one["state_bytes"])})
            for one in told["parameters"]
        )
        return cls(
            units=tuple(told["units"]),
            parameters=tuple(parameters),
            marks=tuple(
                Mark(one["kind"], one["place"], Memory(*one["requested"]), Memory(*one["allocated"]))
                for one in told["marks"]
            ),
            before=Memory(*told["before"]),
            block_kind=told["block_kind"],
        )
